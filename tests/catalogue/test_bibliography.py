"""What is cited: every preset has its papers, and they are the ones that it names itself."""

import re
from collections import defaultdict
from importlib import resources
from typing import Any

from lightning_app.blocks.presets import PRESETS
from lightning_app.models.heads import ArchitectureConfig
from lightning_app.models.optim import OPTIMIZERS, SCHEDULES
from lightning_app.report.bibliography import bibliography, cited
from tests.noted import noted

ENTRIES = bibliography()
NUMBER = re.compile(r"\d{4}\.\d{4,5}")


def test_every_topic_is_something_that_there_is_and_a_preset_has_its_papers() -> None:
    topics = defaultdict[str, set[Any]](set)
    for topic in [topic for entry in ENTRIES.values() for topic in entry.topics]:
        kind, value = topic.split("/")
        topics[kind].add(value)
    assert topics["preset"] == set(PRESETS)
    assert topics["optimizer"] == set(OPTIMIZERS) - {"sgd"}
    assert topics["schedule"] <= set(SCHEDULES)
    for kind in ("activation", "positions"):
        for value in topics[kind]:
            ArchitectureConfig(**{kind: value})
    assert cited(["preset/no_such", "data/text"]) == []
    for name, preset in PRESETS.items():
        with noted(name):
            entries = [ENTRIES[key] for key in cited([f"preset/{name}"])]
            assert entries
            numbers = {entry.fields["eprint"] for entry in entries if "eprint" in entry.fields}
            assert numbers == set(NUMBER.findall(preset.paper))
            for entry in entries:
                if name != "keel":  # named there by its method alone
                    first = re.sub(r"\\.|[{}]", "", entry.fields["author"].split(",")[0])
                    assert first in preset.paper
                    assert entry.fields["year"] in preset.paper


def test_every_entry_of_the_file_is_read_whole_and_well_formed() -> None:
    for entry in ENTRIES.values():
        assert {"title", "author", "year"} <= set(entry.fields), entry.key
        for value in entry.fields.values():
            assert value.count("{") == value.count("}"), entry.key
        if "eprint" in entry.fields:  # the number starts with year and month
            assert NUMBER.fullmatch(entry.fields["eprint"])
            years = int(entry.fields["year"]) - 2000 - int(entry.fields["eprint"][:2])
            assert years in (0, 1), entry.key
    numbers = [e.fields["eprint"] for e in ENTRIES.values() if "eprint" in e.fields]
    assert len(numbers) == len(set(numbers))
    assert len({entry.fields["title"] for entry in ENTRIES.values()}) == len(ENTRIES)
    text = (resources.files("lightning_app.catalogue") / "bibliography.bib").read_text("utf-8")
    assert re.findall(r"^@\w+\{(.*),$", text, re.MULTILINE) == list(ENTRIES)
    fields = sum(len(entry.fields) + 1 for entry in ENTRIES.values())  # topics are taken out
    assert len(re.findall(r"^ +\w+ *=", text, re.MULTILINE)) == fields
