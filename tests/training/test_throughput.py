"""Throughput counts the tokens that were predicted; progress tells how far a run is."""

import csv
import json
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.loggers import CSVLogger

from lightning_app.tasks.translation import TranslationBatch
from lightning_app.training.callbacks.loggers import Progress, Throughput, WallClock
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


class Waiting(pl.Callback):
    """Takes a second clock along: each step waits as long as it works, a validation longer."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        self.logged: list[tuple[int, float]] = []
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)

    def on_train_batch_start(self, *_: Any, **__: Any) -> None:
        self.now += 3.0  # in the step, as this callback comes after the one that is tested

    def on_train_batch_end(self, *_: Any, **__: Any) -> None:
        self.now += 1.0  # after the step: until the next begins

    def on_validation_batch_end(self, *_: Any, **__: Any) -> None:
        self.now += 100.0


def test_the_share_that_waits_leaves_validation_out(tmp_path, cache: str, monkeypatch) -> None:
    fitter = trainer(
        tmp_path,
        max_steps=4,
        callbacks=[Throughput(), Waiting(monkeypatch)],
        log_every_n_steps=2,
        limit_val_batches=1,
        val_check_interval=3,
        logger=CSVLogger(tmp_path, name="", version=""),
    )
    fitter.fit(module(), datamodule=data(cache))
    rows = list(csv.DictReader((tmp_path / "metrics.csv").read_text().splitlines()))
    column = "train/data_wait_share"
    shares = {int(row["step"]): float(row[column]) for row in rows if row.get(column)}
    # What passes between the step before and a validation is neither.
    assert shares == pytest.approx({1: 0.0, 2: 1 / 4, 4: 1 / 8})
    # A step takes 3 seconds; the second that follows it counts unless a validation starts in it.
    seconds = {int(row["step"]): float(row["train/seconds"]) for row in rows if row.get(column)}
    assert seconds == pytest.approx({1: 3.0, 2: 7.0, 4: 15.0})
    assert all(float(row["train/tokens_per_second"]) > 0 for row in rows if row.get(column))


def test_the_sums_are_logged_and_outlive_a_restart(tmp_path: Path, cache: str) -> None:
    settings: dict[str, Any] = {"limit_val_batches": 0, "log_every_n_steps": 1}
    sums, kept = [], Throughput().state_dict()
    for attempt in ("first", "second"):
        throughput, folder = Throughput(), tmp_path / attempt
        throughput.load_state_dict(kept)
        settings |= {"logger": CSVLogger(folder, name="", version=""), "callbacks": [throughput]}
        trainer(folder, max_steps=2, **settings).fit(module(), datamodule=data(cache))
        kept = throughput.state_dict()
        rows = csv.DictReader((folder / "metrics.csv").read_text().splitlines())
        logged = [row for row in rows if row.get("train/tokens")]
        sums += [(float(row["train/tokens"]), float(row["train/seconds"])) for row in logged]
    tokens, seconds = zip(*sums, strict=True)
    counted = [first for first, _ in sums[:2]]
    # The second run takes the same batches once more, on top of what was counted before.
    assert tokens == (*counted, counted[1] + counted[0], counted[1] + counted[1])
    assert list(seconds) == sorted(seconds)
    assert seconds[0] > 0


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
    written = json.loads(path.read_text())
    assert written["stage"] == "validate"
    assert set(written) == {"step", "max_steps", "rate", "loss", "time", "stage"}
    fitter.test(module(), datamodule=data(cache), verbose=False)
    assert json.loads(path.read_text())["stage"] == "test"


def test_the_seconds_of_a_run_are_those_of_all_attempts(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    first = WallClock()
    now[0] += 7.0
    saved = first.state_dict()
    now[0] += 50.0  # lost: the attempt was killed after its checkpoint
    second = WallClock()
    second.load_state_dict(saved)
    now[0] += 2.5
    assert second.seconds == pytest.approx(9.5)
