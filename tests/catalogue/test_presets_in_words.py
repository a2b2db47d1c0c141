"""Every preset has a few words for the first lines of a report, and no other name has."""

import json
from importlib.resources import files

from lightning_app.blocks.presets.registry import PRESETS


def test_every_preset_has_its_words() -> None:
    words = json.loads(files("lightning_app.catalogue").joinpath("presets.json").read_text("utf-8"))
    assert set(words) == set(PRESETS)
    assert len(set(words.values())) == len(words)
    assert max(map(len, words.values())) < 80
