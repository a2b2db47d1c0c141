"""A run that is interrupted and continued has the weights and curves of an undisturbed one."""

import csv
import json
import os
import random
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from lightning_app.ablation.checkpoint import checkpoint_of_cell
from lightning_app.config import resolve
from lightning_app.parser import data_module
from lightning_app.run_folder import RunFolder
from tests import warm

STEPS = 60
TIMEOUT = 300.0


def config(folder: Path, cache: str, **trainer: Any) -> dict[str, Any]:
    """The demo's model with dropout, a validation and with it a checkpoint every 15 steps."""
    tree = yaml.safe_load(Path("ablations/base/synthetic.yaml").read_text())
    tree["trainer"] |= {"max_steps": STEPS, "val_check_interval": 15, "log_every_n_steps": 1}
    tree["trainer"] |= {"enable_progress_bar": False, "default_root_dir": str(folder), **trainer}
    tree["model"]["architecture"] |= {"dropout": 0.3}
    tree["data"]["cache"] = cache
    tree = resolve(tree, "test")
    folder.mkdir()
    (folder / "config.yaml").write_text(yaml.safe_dump(tree))
    return tree


def cell(folder: Path, attempt: int) -> warm.Process:
    (folder / "attempts" / str(attempt)).mkdir(parents=True)
    code = (
        "import sys; from pathlib import Path; from lightning_app.ablation.run_cell import run_cell"
    )
    code += "; run_cell(Path(sys.argv[1]), int(sys.argv[2]))"
    return warm.start(["-c", code, str(folder), str(attempt)])


def finish(process: warm.Process) -> None:
    _, errors = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 0, errors[-3000:]


def interrupt(process: warm.Process, folder: Path, step: int, how: int, wait: float) -> int:
    """Send the signal `wait` seconds after a run has come to `step`; return where it was seen."""
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
        process.communicate(timeout=60)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    assert not (folder / "result.json").exists()
    return seen


def assert_same(whole: Path, broken: Path) -> None:
    """Weights to the last bit, the same curve at every step, the same scores."""
    ours, theirs = (
        torch.load(run / "checkpoints" / "last.ckpt", weights_only=True) for run in (whole, broken)
    )
    assert ours["global_step"] == theirs["global_step"] == STEPS
    for name, value in ours["state_dict"].items():
        assert torch.equal(value, theirs["state_dict"][name]), name
    results = [json.loads((run / "result.json").read_text()) for run in (whole, broken)]
    for result in results:
        del result["metrics"]["train/tokens_per_second"]
    for field in ("id", "status", "metrics", "tokens", "steps"):
        assert results[0][field] == results[1][field], field
    curves = []
    for run in (whole, broken):
        with (run / "metrics.csv").open() as file:
            rows = list(csv.DictReader(file))
        for row in rows:
            for name in ("tokens_per_second", "data_wait_share", "seconds"):
                del row[f"train/{name}"]
        curves.append(rows)
    assert len(curves[0]) == STEPS
    assert curves[0] == curves[1]


def test_a_killed_cell_goes_on_from_its_last_checkpoint(tmp_path: Path, cache: str) -> None:
    """Killed twice without warning, at any step."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    config(whole, cache)
    config(broken, cache)
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
def test_a_terminated_run_goes_on_at_the_step_where_it_stopped(
    tmp_path: Path, cache: str, devices: int
) -> None:
    """SIGTERM at five random steps of an epoch, one process and two."""
    strategy = {"devices": devices, "accelerator": "cpu"}
    strategy |= {"strategy": "ddp"} if devices > 1 else {}
    whole = tmp_path / "whole"
    config(whole, cache, **strategy)
    fit = ["-m", "lightning_app", "fit", "--config"]
    finish(warm.start([*fit, str(whole / "config.yaml")]))
    chance = random.Random(devices)
    for number, step in enumerate(chance.sample(range(2, STEPS - 30), 5)):
        broken = tmp_path / f"broken{number}"
        config(broken, cache, **strategy)
        command = [*fit, str(broken / "config.yaml")]
        process = warm.start(command)
        interrupt(process, broken, step, signal.SIGTERM, chance.random() / 2)
        finish(warm.start([*command, "--ckpt_path", "last"]))
        assert_same(whole, broken)


def test_a_damaged_checkpoint_is_put_aside(tmp_path: Path, cache: str, capsys) -> None:
    tree = config(tmp_path / "run", cache)
    folder, data = tmp_path / "run" / "checkpoints", data_module(tree["data"])
    assert checkpoint_of_cell(RunFolder(folder.parent), tree["model"], data) is None
    folder.mkdir()
    for names in (["last.damaged"], ["last.damaged", "last.damaged.2"]):
        (folder / "last.ckpt").write_bytes(b"half a file")
        assert checkpoint_of_cell(RunFolder(folder.parent), tree["model"], data) is None
        said = f"renamed to {names[-1]}, the cell starts at step 0"
        assert said in capsys.readouterr().err
        assert sorted(path.name for path in folder.iterdir()) == names
