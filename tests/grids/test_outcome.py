"""What a run leaves about how it ended."""

import json
import os
from math import log
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.fabric.plugins.environments.mpi import MPIEnvironment

from lightning_app.api.runs import RunResult
from lightning_app.cli import main
from lightning_app.commands.recorded import described_run, read_run
from lightning_app.config.config import resolve
from lightning_app.core.errors import UserError
from lightning_app.runs.folder import RunFolder
from lightning_app.runs.provenance import FOREIGN
from lightning_app.runs.run import Run
from lightning_app.training.run import TrainingRun
from tests.small import tiny_config
from tests.told import told


def run(folder: Path, cache: str, trainer: Any = None, warmup: int = 0, **optimizer: Any):
    """A run of twelve steps and a tiny model, not yet trained."""
    limits = {"max_steps": 12, "val_check_interval": 100, "limit_val_batches": 2}
    limits |= {"enable_progress_bar": False, "enable_model_summary": False, **(trainer or {})}
    tree = tiny_config(limits, data__cache=cache, data__tokens_per_batch=256)
    tree["model"]["schedule"]["warmup_steps"] = warmup
    tree["model"]["optimizer"] |= optimizer
    return TrainingRun(resolve(tree, "test"), folder=folder)


@pytest.mark.parametrize(
    ("given", "status", "outcome", "words"),
    [
        ({}, "ok", "not_yet_learned", "still falls"),
        ({"lr": 1e-9}, "diverged", "stalled", "less than 0.1"),
        ({"kind": "sgd", "lr": 1e30}, "diverged", "non_finite", "not finite"),
    ],
)
def test_the_result_tells_how_a_run_ended(tmp_path, cache, capsys, given, status, outcome, words):
    run(tmp_path / "run", cache, **given).fit()
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert (result["status"], result.get("outcome")) == (status, outcome)
    assert words in result["outcome_rule"]
    if status == "ok":
        assert result["diverged"] is None
        assert result["metrics"]["val/nll"] > result["unigram_entropy"]
    else:
        assert result["diverged"]["rule"] == result["outcome_rule"]
    assert f": {outcome.replace('_', ' ')}, " in capsys.readouterr().out


def test_a_run_that_mpi_did_not_start_leaves_mpi_alone(tmp_path, cache: str, monkeypatch) -> None:
    """To start MPI ends the process where mpi4py is installed and its MPI is broken."""
    asked: list[int] = []

    def detect() -> bool:
        asked.append(1)
        return False

    monkeypatch.setattr(MPIEnvironment, "detect", detect)
    for name in [name for name in os.environ if name.startswith(FOREIGN)]:
        monkeypatch.delenv(name)
    run(tmp_path / "alone", cache, {"max_steps": 1}).fit()
    assert not asked
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "1")
    run(tmp_path / "launched", cache, {"max_steps": 1}).fit()
    assert asked


class Early(pl.Callback):
    """Ends the training after its fifth step, in one of the ways that Lightning offers."""

    def __init__(self, way: str) -> None:
        self.way = way

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
        if trainer.global_step < 5:
            return
        match self.way:
            case "should_stop":
                trainer.should_stop = True
            case "max_steps":
                trainer.fit_loop.epoch_loop.max_steps = 5
            case "interrupt":
                raise KeyboardInterrupt
            case "exit":
                raise SystemExit(0)


class Changes(pl.Callback):
    """Sets a field of the Trainer before the third batch, or before the first step."""

    def __init__(self, field: str, value: Any) -> None:
        self.field, self.value = field, value

    def on_train_start(self, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
        if self.field == "should_stop":
            trainer.should_stop = self.value

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
        if trainer.fit_loop.total_batch_idx + 1 >= 3:
            setattr(trainer, self.field, self.value)


@pytest.mark.parametrize(
    ("callback", "said"),
    [
        *((Early(way), "5 of 12 steps") for way in ("should_stop", "max_steps")),
        *((Early(way), "5 of 12 steps") for way in ("interrupt", "exit")),
        (Changes("accumulate_grad_batches", 4), "accumulate_grad_batches: 4; must be 1"),
        (
            Changes("should_stop", True),
            r"^trainer: no step was trained \(max_steps 12\); a result needs at least 1$",
        ),
    ],
)
def test_a_cell_that_a_callback_ends_or_changes_has_failed(tmp_path, cache, callback, said) -> None:
    ended = run(tmp_path / "run", cache)
    ended.trainer.callbacks.insert(0, callback)  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(UserError, match=said):
        ended.fit()
    assert not (tmp_path / "run" / "result.json").exists()


def test_a_fit_that_ends_early_is_cut_short(tmp_path: Path, cache: str, capsys) -> None:
    ended = run(tmp_path / "run", cache)
    ended.command = "fit"
    ended.trainer.callbacks.insert(0, Early("should_stop"))  # pyright: ignore[reportAttributeAccessIssue]
    ended.fit()
    folder = RunFolder(tmp_path / "run")
    result = json.loads(folder.result.read_text())
    assert (result["status"], result["outcome"]) == ("cut_short", "cut_short")
    assert (result["steps"], result["steps_asked"]) == (5, 12)
    assert result["metrics"]["val/nll"] > 0
    assert "5 of 12 steps" in capsys.readouterr().out
    state = Run(folder, result["id"]).state
    assert (state.state, state.result) == ("failed", None)
    assert described_run(read_run(str(folder)))["state"] == "cut short"
    assert RunResult(folder.path).outcome == "cut_short"


@pytest.mark.parametrize(
    ("limits", "asked"),
    [
        ({"max_epochs": 2, "limit_train_batches": 3}, 6),
        ({"max_steps": -1, "max_epochs": 1, "limit_train_batches": 4}, 4),
        ({"max_epochs": 3, "limit_train_batches": 40, "min_steps": 2}, 12),
    ],
)
def test_a_run_that_does_what_its_limits_ask_is_whole(tmp_path, cache, limits, asked: int) -> None:
    run(tmp_path / "run", cache, trainer=limits).fit()
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert (result["steps"], result["steps_asked"]) == (asked, asked)
    assert result["status"] != "cut_short"


def test_a_run_does_not_go_on_with_fewer_steps_than_it_has(tmp_path, cache: str, capsys) -> None:
    folder = RunFolder(tmp_path / "run")
    run(folder.path, cache).fit()
    before = folder.result.read_bytes()
    words = ["fit", "--config", str(folder.config), "--ckpt_path", "last"]
    words += ["--trainer.default_root_dir", str(folder), "--trainer.max_steps", "5"]
    assert main(words) == 2
    assert told("12, … trainer.max_steps 5").search(capsys.readouterr().err)
    assert folder.result.read_bytes() == before


def test_epochs_that_end_early_or_are_shorter_than_the_warmup_have_no_result(tmp_path, cache):
    limits = {"max_steps": -1, "max_epochs": 2, "limit_train_batches": 4}
    ended = run(tmp_path / "run", cache, trainer=limits)
    start = ended.model.on_train_batch_start

    def skip_the_rest(batch: Any, batch_idx: int) -> int | None:
        start(batch, batch_idx)
        return -1 if ended.trainer.global_step >= 5 else None

    ended.model.on_train_batch_start = skip_the_rest
    with pytest.raises(UserError, match="5 of 8 steps"):
        ended.fit()
    with pytest.raises(UserError, match=r"warmup_steps: 4, .* 4 steps"):
        run(tmp_path / "short", cache, trainer=limits | {"max_epochs": 1}, warmup=4)
    assert not (tmp_path / "short").exists()


def test_the_entropy_of_the_training_targets(tmp_path: Path, cache: str) -> None:
    source = run(tmp_path / "run", cache).datamodule
    source.setup("fit")
    counts: dict[int, int] = {}
    for token in source.corpus.ids("train", "target").tolist():
        counts[token] = counts.get(token, 0) + 1
    total = sum(counts.values())
    expected = -sum(n / total * log(n / total) for n in counts.values())
    assert source.training_floor() == pytest.approx(expected)
