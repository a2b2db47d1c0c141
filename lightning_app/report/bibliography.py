"""The papers about the methods that a grid used, as BibTeX."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from lightning_app.config.tree import BLOCK, PRESET
from lightning_app.report.results import GridResults


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One entry of the bibliography; `topics` lists the methods for which it is cited."""

    kind: str
    key: str
    fields: Mapping[str, str]
    topics: frozenset[str]

    @property
    def bibtex(self) -> str:
        fields = dict(self.fields)
        if "eprint" in fields:
            fields["archiveprefix"] = "arXiv"
        lines = (f"  {name} = {{{value}}},\n" for name, value in fields.items())
        return f"@{self.kind}{{{self.key},\n{''.join(lines)}}}\n"


@cache
def bibliography() -> Mapping[str, Entry]:
    """Every entry, by its key."""
    file = resources.files("lightning_app.catalogue") / "bibliography.bib"
    entries = {}
    for kind, key, body in _ENTRY.findall(file.read_text(encoding="utf-8")):
        fields = dict(_FIELD.findall(body))
        topics = frozenset(fields.pop("topics").split(", "))
        entries[key] = Entry(kind=kind, key=key, fields=fields, topics=topics)
    return entries


_ENTRY = re.compile(r"^@(\w+)\{([^,\s]+),\n(.*?)^\}$", re.MULTILINE | re.DOTALL)
_FIELD = re.compile(r"^  (\w+) = \{(.*)\},$", re.MULTILINE)


def cited(topics: Iterable[str]) -> list[str]:
    """The keys of the entries for some topics, in the order of the topics."""
    entries = bibliography().values()
    keys = (entry.key for topic in topics for entry in entries if topic in entry.topics)
    return list(dict.fromkeys(keys))


def references(grid: GridResults) -> str:
    """`references.bib`: papers about the methods used."""
    entries = bibliography()
    return "\n".join(entries[key].bibtex for key in cited(topics_of(grid)))


def topics_of(grid: GridResults) -> list[str]:
    """The methods that a grid used, as `kind/value`."""
    used = ["method/transformer", *(f"preset/{name}" for name in values_of(grid, PRESET))]
    for kind, key in _SETTINGS.items():
        used += [f"{kind}/{value}" for value in values_of(grid, key)]
    if any(values_of(grid, "model.objective.label_smoothing")):
        used.append("method/label_smoothing")
    if any(any(values_of(grid, f"model.objective.{name}_weight")) for name in AUXILIARY):
        used.append("method/auxiliary_losses")
    moments = values_of(grid, "model.optimizer.second_moment_start")
    used += ["method/gi_adam"] * ("gradient" in moments)
    used += ["method/adamd"] * ("second" in values_of(grid, "model.optimizer.bias_correction"))
    used.append("method/layer_norm")
    metrics = {name for cell in grid.finished for name in cell.metrics}
    used += ["metric/bleu"] * any("bleu" in name for name in metrics)
    if grid.pruner is None:
        used += [f"statistic/{name}" for name in ("t", "wilson", "holm")]
        if len(grid.rates) > 1:
            used.append("statistic/chosen")
        used += ["score/rate_sensitivity"] * (len(grid.rates) > 1)
    versions = (cell.record.get("versions") or {} for cell in grid.finished)
    return [*used, *dict.fromkeys(f"library/{name}" for each in versions for name in each)]


AUXILIARY = ("intermediate", "second_target")
"""The auxiliary losses, by the first words of their weights."""

_SETTINGS = {
    "norm": f"{BLOCK}norm",
    "positions": "model.architecture.positions",
    "activation": "model.architecture.activation",
    "objective": "model.objective.kind",
    "optimizer": "model.optimizer.kind",
    "schedule": "model.schedule.kind",
    "coupling": "model.schedule.coupling",
    "data": "data.name",
    "tokenizer": "data.tokenizer",
}


def values_of(grid: GridResults, key: str) -> list[Any]:
    return [value for value in grid.tried(key) if value is not None]
