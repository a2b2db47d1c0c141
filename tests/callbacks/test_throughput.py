"""Throughput counts the tokens that were predicted; progress tells how far a run is."""

import json
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl

from lightning_app.callbacks.throughput import Progress, Throughput
from lightning_app.data.batching import TranslationBatch
from tests.runs import data, module, trainer


def test_the_tokens_are_those_of_the_batches(tmp_path: Path, cache: str) -> None:
    throughput, source = Throughput(), data(cache)
    fitter = trainer(tmp_path, max_steps=5, callbacks=[throughput], log_every_n_steps=3)
    fitter.fit(module(), datamodule=source)
    expected = 0
    for _, batch in zip(range(5), source.train_dataloader(), strict=False):
        assert isinstance(batch, TranslationBatch)
        expected += int((batch.target[:, 1:] != 0).sum())
    assert throughput.tokens == expected
    assert throughput.rate == throughput.tokens / throughput.seconds


def test_progress_is_a_whole_file(tmp_path: Path, cache: str) -> None:
    path = tmp_path / "progress.json"
    fitter = trainer(tmp_path, max_steps=3, callbacks=[Progress(path)], limit_val_batches=1)
    fitter.fit(module(), datamodule=data(cache))
    fitter.validate(module(), datamodule=data(cache), verbose=False)
    written = json.loads(path.read_text())
    assert written["max_steps"] == 3
    assert written["stage"] == "validate"
    assert set(written) == {"step", "max_steps", "rate", "loss", "time", "stage"}


class Slow(pl.Callback):
    """Takes the file away in the middle of an evaluation, whose next batch takes a second."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_validation_batch_start(self, *_: Any, **__: Any) -> None:
        self.path.unlink()
        time.sleep(1.01)

    def on_test_batch_start(self, *_: Any, **__: Any) -> None:
        self.on_validation_batch_start()


def test_progress_moves_in_long_evaluations(tmp_path: Path, cache: str) -> None:
    path = tmp_path / "progress.json"
    callbacks = [Progress(path), Slow(path)]
    fitter = trainer(tmp_path, callbacks=callbacks, limit_val_batches=2, limit_test_batches=2)
    fitter.validate(module(), datamodule=data(cache), verbose=False)
    assert json.loads(path.read_text())["stage"] == "validate"
    fitter.test(module(), datamodule=data(cache), verbose=False)
    assert json.loads(path.read_text())["stage"] == "test"
