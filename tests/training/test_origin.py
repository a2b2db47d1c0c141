"""A run knows what made it, also where several versions trained it one after the other."""

import json
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest

from lightning_app.training.callbacks.safety import Origin
from lightning_app.training.hardware import hardware
from tests.runs import data, module, trainer

pytestmark = pytest.mark.filterwarnings("ignore:Checkpoint directory")


class Look(pl.Callback):
    """What the file of an attempt says before its first step."""

    def __init__(self, path: Path) -> None:
        self.path, self.seen = path, {}

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.seen = self.seen or json.loads(self.path.read_text())


def fit(folder: Path, cache: str, steps: int, code: str | None, *, resumed: bool = False) -> Any:
    """Train on to `steps` with that version of the code, or with one that kept no record."""
    path, last = folder / str(steps) / "provenance.json", folder / "last.ckpt"
    software = {"code": code, "plugins": {}, "libraries": {"torch": "2"}, "command": ["ablate"]}
    software |= {"classes": {}, "plugins_used": {}}
    origin = Origin(path, software, resumed, {"id": "a", "seed": 1, "parent": None})
    look = Look(path)
    datamodule = data(cache)
    fitter = trainer(folder, max_steps=steps, callbacks=[origin, look] if code else [])
    how: Any = {"datamodule": datamodule, "ckpt_path": last if resumed else None}
    fitter.fit(module(), **how, weights_only=True)
    fitter.save_checkpoint(last)
    if code is None:
        return {}
    assert origin.record == look.seen
    assert origin.record["data"] == datamodule.description["digest"]
    for key, value in hardware(fitter.strategy.root_device).items():
        assert origin.record[key] == value
    return origin.record


def test_a_run_that_goes_on_says_what_else_trained_it(tmp_path: Path, cache: str) -> None:
    first = fit(tmp_path, cache, 2, "a")
    assert first["resumed_from"] == []
    assert fit(tmp_path, cache, 3, "a", resumed=True)["resumed_from"] == []
    second = fit(tmp_path, cache, 4, "b", resumed=True)
    assert [each["code"] for each in second["resumed_from"]] == ["a"]
    third = fit(tmp_path, cache, 5, "c", resumed=True)
    assert [each["code"] for each in third["resumed_from"]] == ["a", "b"]
    assert third["resumed_from"][0]["cpu"] == first["cpu"]


def test_a_checkpoint_without_a_record_is_of_an_unknown_version(tmp_path: Path, cache: str) -> None:
    fit(tmp_path, cache, 2, None)
    found = fit(tmp_path, cache, 3, "b", resumed=True)
    assert [each["code"] for each in found["resumed_from"]] == [None]
    assert fit(tmp_path, cache, 4, "b", resumed=True)["resumed_from"] == found["resumed_from"]
