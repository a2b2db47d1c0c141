"""A run that is interrupted and continued has the weights and curves of an undisturbed one."""

import csv
import json
import os
import random
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from lightning_app.config.config import data_module, resolve
from lightning_app.runs.folder import RunFolder
from lightning_app.runs.parent import read_checkpoint
from lightning_app.training.checkpoint import checkpoint_of_cell
from tests import warm

STEPS = 60
TIMEOUT = 300.0


STREAMS = {"order": "streams", "window": 16, "tokens_per_batch": 64}
"""Of an epoch that is longer than the run: every checkpoint is in the middle of it."""


def config(folder: Path, cache: str, *, memory: int = 0, dropout: float = 0.3, **trainer: Any):
    """The demo's model with dropout, a validation and with it a checkpoint every 15 steps.

    With `memory` a language model that reads streams.
    """
    base = "synthetic_lm.yaml" if memory else "synthetic.yaml"
    tree = yaml.safe_load(Path("ablations/base", base).read_text())
    if memory:
        tree["model"]["block"]["memory"] = {"length": memory}
        tree["model"]["architecture"]["positions"] = "relative"
        tree["model"]["schedule"] |= {"warmup_steps": 20, "reference_steps": 20}
        tree["data"] |= STREAMS
        trainer["limit_val_batches"] = 100  # so long that a kill between two steps comes in time
    tree["model"]["schedule"]["warmup_steps"] = 20
    tree["trainer"] |= {"max_steps": STEPS, "val_check_interval": 15, "log_every_n_steps": 1}
    tree["trainer"] |= {"enable_progress_bar": False, "default_root_dir": str(folder), **trainer}
    tree["model"]["architecture"] |= {"dropout": dropout, "model_dim": 16, "ff_dim": 32}
    tree["data"]["cache"] = cache
    tree = resolve(tree, "test")
    folder.mkdir()
    (folder / "config.yaml").write_text(yaml.safe_dump(tree))
    return tree


def cell(folder: Path, attempt: int) -> warm.Process:
    (folder / "attempts" / str(attempt)).mkdir(parents=True)
    code = "import sys; from pathlib import Path; from lightning_app.training.run import run_cell"
    code += "; run_cell(Path(sys.argv[1]), int(sys.argv[2]))"
    return warm.start(["-c", code, str(folder), str(attempt)])


def fit(folder: Path, *more: str) -> warm.Process:
    words = ["-m", "lightning_app", "fit", "--config", str(folder / "config.yaml"), *more]
    return warm.start(words)


def finish(process: warm.Process) -> None:
    _, errors = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 0, errors[-3000:]


def interrupt(process: warm.Process, folder: Path, step: int, how: int, wait: float) -> int:
    """Send the signal `wait` seconds after a run has come to `step`; return its exit code."""
    until = time.monotonic() + TIMEOUT
    seen = 0
    while seen < step and time.monotonic() < until:
        for path in (folder / "attempts").glob("*/progress.json"):
            seen = max(seen, json.loads(path.read_text())["step"])
        assert process.poll() is None, process.communicate()[1][-3000:]
        time.sleep(0.02)
    time.sleep(wait)  # progress is written once a second only: anywhere between two of these
    os.killpg(process.pid, how)
    try:
        process.communicate(timeout=240)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    assert not (folder / "result.json").exists()
    return process.wait()


def assert_same(whole: Path, broken: Path) -> None:
    """Weights to the last bit, the same curve at every step, the same scores."""
    ours, theirs = (last(run) for run in (whole, broken))
    assert ours["global_step"] == theirs["global_step"] == STEPS
    for name, value in ours["state_dict"].items():
        assert torch.equal(value, theirs["state_dict"][name]), name
    results = [json.loads((run / "result.json").read_text()) for run in (whole, broken)]
    for result in results:
        del result["metrics"]["train/tokens_per_second"]
    for field in ("id", "status", "metrics", "tokens", "steps"):
        assert results[0][field] == results[1][field], field
    curves = [curve(run) for run in (whole, broken)]
    for row in (*curves[0], *curves[1]):
        for name in ("tokens_per_second", "data_wait_share", "seconds"):
            del row[f"train/{name}"]
    assert len(curves[0]) == STEPS
    assert curves[0] == curves[1]


@pytest.mark.dear("four processes train, of which two are killed")
@pytest.mark.parametrize("memory", [0, pytest.param(24, marks=pytest.mark.slow)])
def test_a_killed_cell_goes_on_from_its_last_checkpoint(tmp_path, cache: str, memory: int) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    config(whole, cache, memory=memory)
    config(broken, cache, memory=memory)
    finish(cell(whole, 1))
    chance = random.Random(1)
    interrupt(cell(broken, 1), broken, 18, signal.SIGKILL, chance.random() / 2)
    interrupt(cell(broken, 2), broken, 35, signal.SIGKILL, chance.random() / 2)
    finish(cell(broken, 3))
    log = (broken / "attempts" / "3" / "metrics.csv").read_text().splitlines()
    assert int(log[1].split(",")[0]) > 15  # it did not begin at step 0
    assert_same(whole, broken)


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2])
def test_streams_go_on_in_another_number_of_processes(tmp_path, cache: str, devices: int) -> None:
    """Without dropout, which each rank draws alone; another order of sums changes last digits."""
    two = {"devices": 2, "accelerator": "cpu", "strategy": "ddp"}
    one = {"devices": 1, "accelerator": "cpu", "strategy": "auto"}
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    config(killed, cache, memory=24, dropout=0.0, **two)
    interrupt(fit(killed), killed, 18, signal.SIGKILL, 0.0)
    stopped = last(killed)
    assert sorted(stopped["streams"]) == [0, 1, 2, 3]
    read = stopped["global_step"] * STREAMS["window"]
    assert {place for place, _ in stopped["streams"].values()} == {read}
    copies = [tmp_path / "copy1", tmp_path / "copy2"]
    for copy in copies:
        config(copy, cache, memory=24, dropout=0.0, **(two if devices == 2 else one))
        shutil.copytree(killed / "checkpoints", copy / "checkpoints")
        finish(fit(copy, "--ckpt_path", "last"))
    states = [last(copy)["state_dict"] for copy in copies]
    config(whole, cache, memory=24, dropout=0.0, **one)
    finish(fit(whole))
    for name, value in states[0].items():
        assert torch.equal(value, states[1][name]), name
    first = stopped["global_step"]
    ours, theirs = ([float(row["train/loss"]) for row in curve(run)] for run in (copies[0], whole))
    assert ours[:8] == pytest.approx(theirs[first : first + 8], abs=1e-4)


def curve(run: Path) -> list[dict[str, str]]:
    with (run / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


def last(run: Path) -> dict[str, Any]:
    return torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2])
def test_a_stopped_run_goes_on_at_the_step_where_it_stopped(tmp_path, cache, devices: int) -> None:
    strategy = {"devices": devices, "accelerator": "cpu"}
    strategy |= {"strategy": "ddp"} if devices > 1 else {}
    whole = tmp_path / "whole"
    config(whole, cache, **strategy)
    finish(fit(whole))
    chance = random.Random(devices)
    for number, step in enumerate(chance.sample(range(2, STEPS - 30), 5)):
        broken = tmp_path / f"broken{number}"
        config(broken, cache, **strategy)
        how = (signal.SIGINT, signal.SIGTERM)[number % 2]
        assert interrupt(fit(broken), broken, step, how, chance.random() / 2) == 130
        assert (broken / "checkpoints" / "last.ckpt").exists()
        finish(fit(broken, "--ckpt_path", "last"))
        assert_same(whole, broken)


# Over 5 s: the demo's model is trained.
def test_the_checkpoint_of_another_cell_is_put_aside(tmp_path: Path, cache: str, capsys) -> None:
    """It fits in everything but its seed."""
    tree = config(tmp_path / "run", cache, max_steps=24, val_check_interval=24, limit_val_batches=1)
    folder, data = RunFolder(tmp_path / "run"), data_module(tree["data"])
    finish(fit(folder.path))
    mine = read_checkpoint(folder.checkpoint("last"))["run"]
    assert mine["seed"] == tree["seed_everything"]
    found: Any = checkpoint_of_cell(folder, mine["id"], tree["model"], data)
    assert found.run == mine
    capsys.readouterr()
    assert checkpoint_of_cell(folder, "b" * 16, tree["model"], data) is None
    assert "is of another" in capsys.readouterr().err
    assert [*folder.checkpoints.glob("last.other-run")]


def test_a_damaged_checkpoint_is_put_aside(tmp_path: Path, cache: str, capsys) -> None:
    tree = config(tmp_path / "run", cache)
    folder, data = tmp_path / "run" / "checkpoints", data_module(tree["data"])
    assert checkpoint_of_cell(RunFolder(folder.parent), "a", tree["model"], data) is None
    folder.mkdir()
    for names in (["last.damaged"], ["last.damaged", "last.damaged.2"]):
        (folder / "last.ckpt").write_bytes(b"half a file")
        assert checkpoint_of_cell(RunFolder(folder.parent), "a", tree["model"], data) is None
        said = f"renamed to {names[-1]}, the cell starts at step 0"
        assert said in capsys.readouterr().err
        assert sorted(path.name for path in folder.iterdir()) == names
