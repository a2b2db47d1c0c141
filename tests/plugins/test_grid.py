"""Parts of a plug-in in a grid of ranks that is killed: it goes on, and every command finds them.

The norm, the rule of scores, the residual rule, the corpus and the task with its own score all come
from one file, which the project's file names.
"""

import csv
import hashlib
import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from lightning_app.core.code import joint_digest, syntax_digest
from tests import warm
from tests.plugins.conftest import PARTS

STEPS, BETWEEN = 300, 20  # of a run, and between its checkpoints: a kill must find it under way
SECONDS = 1500.0  # a loaded machine may take long
METRIC = "val/certainty"

BASE: dict[str, Any] = {
    "trainer": {
        **{"max_steps": STEPS, "val_check_interval": BETWEEN, "log_every_n_steps": 10},
        **{"devices": 2, "accelerator": "cpu", "strategy": "ddp"},
    },
    "model": {
        "block": {"residual_rule": "leaky"},
        "architecture": {
            **{"kind": "decoder", "decoder_depth": 2, "model_dim": 16, "ff_dim": 16},
            **{"num_heads": 2, "dropout": 0.1, "positions": "falling"},
        },
        "objective": {"kind": "next_word", "evaluate_test": False},
        "optimizer": {"lr": 1.0e-2},
        "schedule": {"warmup_steps": 4, "reference_steps": 4},
    },
    "data": {
        **{"name": "counting", "tokenizer": "word", "vocab_size": None},
        **{"tokens_per_batch": 64, "window": 16},
    },
}
AXES = {"model.block.preset": ["pre_ln", "max_post"], "seed_everything": [1, 2]}
CELLS = 4
RUN = ["run", "grid.yaml", "--workers", "2", "--devices-per-cell", "2"]

Snapshot = dict[str, tuple[int, str]]


class Project:
    """A folder with a plug-in, a grid, and the project's file that names the plug-in."""

    def __init__(self, folder: Path, cache: str) -> None:
        folder.mkdir()
        self.folder, self.cache, self.plugin = folder, cache, folder / "own.py"
        self.plugin.write_text(PARTS, encoding="utf-8")
        self.digest = joint_digest([("own.py", syntax_digest("own.py", self.plugin.read_bytes()))])
        self.base = {**BASE, "data": {**BASE["data"], "cache": cache}}
        self.file = folder / "ablate.yaml"
        self.file.write_text("plugins: [own.py]\n")

    def write_grid(self, axes: dict[str, Any]) -> Path:
        """Write the grid file, and return the folder of its runs."""
        tree = {"name": "grid", "base_config": self.base, "axes": axes}
        (self.folder / "grid.yaml").write_text(yaml.safe_dump(tree))
        return self.folder / "experiments" / "grid" / "runs"

    def ablate(self, *words: str) -> "subprocess.CompletedProcess[str]":
        words = ("-m", "lightning_app", *words)
        return warm.run(words, folder=self.folder, timeout=SECONDS)

    def succeeds(self, *words: str) -> str:
        done = self.ablate(*words)
        assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
        return done.stdout

    def refused(self, *words: str) -> str:
        """Return the one line of a command that refuses."""
        done = self.ablate(*words)
        assert done.returncode == 2, f"{words}: {done.stdout}{done.stderr}"
        assert done.stderr.count("\n") == 1, done.stderr
        return done.stderr


@pytest.fixture
def project(tmp_path: Path, cache: str) -> Project:
    return Project(tmp_path / "project", cache)


def ended(runs: Path) -> list[Path]:
    return [path.parent for path in sorted(runs.glob("*/result.json"))]


def under_way(runs: Path, before: int) -> list[Path]:
    """Return the runs that have a checkpoint, and have logged no step from `before` on."""
    begun = [path.parents[1] for path in sorted(runs.glob("*/checkpoints/last.ckpt"))]
    return [run for run in begun if all(n < before for steps in attempts(run) for n in steps)]


def contents(run: Path) -> Snapshot:
    """Return the time and the digest of every file of a run.

    Less what the grid writes there for TensorBoard, after the run has ended.
    """
    beside = (".run", ".grid")
    files = [path for path in run.rglob("*") if path.is_file() and path.suffix not in beside]
    return {
        path.relative_to(run).as_posix(): (
            path.stat().st_mtime_ns,
            hashlib.sha256(path.read_bytes()).hexdigest(),
        )
        for path in files
    }


def attempts(run: Path) -> list[list[int]]:
    logs = [f"{run}/attempts/{k + 1}/metrics.csv" for k in range(len([*run.glob("attempts/*")]))]
    texts = [Path(log).read_text() if Path(log).is_file() else "" for log in logs]
    rows = [csv.DictReader(text.splitlines()) for text in texts]
    return [[int(row["step"]) for row in each if row.get("train/loss")] for each in rows]


def result(run: Path) -> dict[str, Any]:
    return json.loads((run / "result.json").read_text())


def kill_under_way(project: Project, runs: Path) -> tuple[dict[Path, Snapshot], list[Path]]:
    """Kill the supervisor when a cell has ended and another has a checkpoint; return both."""
    until = time.monotonic() + SECONDS
    process = warm.start(["-m", "lightning_app", *RUN], folder=project.folder)
    try:
        # Two cells run at a time, so that the second may be at its end when the first has ended.
        while not (ended(runs) and under_way(runs, STEPS // 2)):
            assert process.poll() is None, process.printed(errors=True)
            assert time.monotonic() < until
            time.sleep(0.02)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    finished = {run: contents(run) for run in ended(runs)}
    assert 0 < len(finished) < CELLS
    return finished, under_way(runs, STEPS)


@pytest.mark.slow
def test_parts_of_a_plugin_survive_a_kill(project: Project) -> None:
    runs = project.write_grid(AXES)
    finished, broken = kill_under_way(project, runs)
    assert broken, "the kill came too late"
    project.succeeds(*RUN)

    assert len(ended(runs)) == len(list(runs.iterdir())) == CELLS
    for run, before in finished.items():
        assert contents(run) == before
    for run in ended(runs):
        made = attempts(run)
        assert sum(STEPS in steps for steps in made) == 1  # one attempt came to the end
        assert len(made) == (1 if run in finished else result(run)["attempt"])
        check_record(run, project)
    for run in broken:
        first, *_, last = attempts(run)
        assert first[0] == 1
        assert last[0] > BETWEEN  # it went on from a checkpoint
        assert last[-1] == STEPS
    check_reading(project, runs)
    check_without_plugin(project, ended(runs)[0])


def check_record(run: Path, project: Project) -> None:
    found = result(run)
    assert (found["devices"], found["steps"]) == (2, STEPS)
    assert 0.0 < found["metrics"][METRIC] < 1.0
    assert found["provenance"]["plugins_used"] == {"own": project.digest}
    identity = json.loads((run / "identity.json").read_text())
    assert identity["config"]["plugins.own"] == project.digest
    assert (run / "plugins" / "own.py").read_bytes() == project.plugin.read_bytes()
    block = json.loads((run / "block.json").read_text())["decoder"]["blocks"][0]
    assert block["around_self"]["rule"] == "leaky"
    state = torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
    learned = [value for name, value in state.items() if name.endswith("around_ff.rule.a")]
    assert len(learned) == 2
    assert all(float(value) != 0.5 for value in learned)


def check_reading(project: Project, runs: Path) -> None:
    tree = json.loads(project.succeeds("report", "grid.yaml", "--json"))
    (judged,) = tree["metrics"]
    assert (judged["metric"], judged["mode"]) == (METRIC, "max")
    means = [arm["mean"] for arm in judged["arms"]]
    assert means == sorted(means, reverse=True)
    assert [arm["runs"] for arm in judged["arms"]] == [2, 2]
    values = {run.name: result(run)["metrics"][METRIC] for run in ended(runs)}
    assert sum(means) / 2 == pytest.approx(sum(values.values()) / CELLS)
    with (runs.parent / "results.csv").open() as file:
        rows = {row["name"]: float(row[METRIC]) for row in csv.DictReader(file)}
    assert rows == pytest.approx(values)
    assert METRIC in (runs.parent / "report.html").read_text()
    before = {run: contents(run) for run in ended(runs)}
    shown = project.succeeds("validate", "--run", str(ended(runs)[0]))
    assert METRIC in shown
    project.succeeds(*RUN)
    assert {run: contents(run) for run in ended(runs)} == before


def check_without_plugin(project: Project, run: Path) -> None:
    commands = (["report", "grid.yaml"], ["validate", "--run", str(run)])
    project.plugin.unlink()
    said = project.refused("report", "grid.yaml")
    assert f"{project.plugin}: the plug-in cannot be read: No such file" in said
    project.file.unlink()
    for words in commands:
        said = project.refused(*words)
        assert f"needs the plug-in own.py (sha256 {project.digest}): pass --plugin FILE" in said
        assert f"{Path('plugins', 'own.py')} if you trust it" in said
    said = project.refused("run", "grid.yaml")
    assert "needs the plug-in own.py" in said
    for words in commands:
        project.succeeds("--plugin", str(run / "plugins" / "own.py"), *words)
