"""A plug-in with its own norm, score rule and task, in a grid of ranks that is killed."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.plugins.conftest import PARTS, Write

STEPS = 40
SECONDS = 1500.0  # a loaded machine may take long

BASE: dict[str, Any] = {
    "trainer": {
        **{"max_steps": STEPS, "val_check_interval": 10, "limit_val_batches": 1, "devices": 2},
        **{"accelerator": "cpu", "strategy": "ddp"},
    },
    "model": {
        "architecture": {
            **{"kind": "decoder", "decoder_depth": 2, "model_dim": 16, "ff_dim": 16},
            **{"num_heads": 2, "dropout": 0.1, "positions": "falling"},
        },
        "objective": {"kind": "next_word", "evaluate_test": False},
        "schedule": {"warmup_steps": 4, "reference_steps": 4},
    },
    "data": {
        **{"name": "synthetic", "tokenizer": "word", "vocab_size": None},
        **{"tokens_per_batch": 512, "window": 32},
    },
}
AXES = {"model.block.preset": ["pre_ln", "max_post"], "seed_everything": [1]}


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "lightning_app", *words]


def ablate(folder: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        command(*words), cwd=folder, capture_output=True, text=True, timeout=SECONDS
    )


def under_way(runs: Path) -> bool:
    """Whether a cell has a checkpoint, and no cell has ended."""
    ended = any(runs.glob("*/result.json"))
    return not ended and any(runs.glob("*/checkpoints/last.ckpt"))


@pytest.mark.slow
def test_an_own_norm_score_rule_and_task_survive_a_kill(
    tmp_path: Path, write: Write, cache: str
) -> None:
    path = write(PARTS, "own")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    BASE["data"]["cache"] = cache
    tree = {"name": "own", "base_config": BASE, "axes": AXES}
    (tmp_path / "grid.yaml").write_text(yaml.safe_dump(tree))
    folder, given = tmp_path / "experiments" / "own", ["--plugin", "own.py"]
    words = [*given, "run", "grid.yaml", "--workers", "2", "--devices-per-cell", "2"]
    first = subprocess.Popen(command(*words), cwd=tmp_path, start_new_session=True)
    try:
        deadline = time.monotonic() + SECONDS
        while not under_way(folder / "runs"):
            assert first.poll() is None, "the grid ended before it could be killed"
            assert time.monotonic() < deadline
            time.sleep(0.05)
        os.kill(first.pid, signal.SIGKILL)
    finally:
        first.kill()
        first.wait()
    again = ablate(tmp_path, *words)
    assert again.returncode == 0, again.stdout + again.stderr

    results = [json.loads(each.read_text()) for each in folder.glob("runs/*/result.json")]
    assert len(results) == 2
    assert any(each["attempt"] > 1 for each in results)
    for each in results:
        assert each["devices"] == 2
        assert each["steps"] == STEPS
        assert each["metrics"]["val/words_seen"] > 0
        assert each["provenance"]["plugins"] == {"own": digest}
        run = folder / "runs" / each["name"]
        identity = json.loads((run / "identity.json").read_text())
        assert identity["config"]["plugins.own"] == digest
        assert (run / "plugins" / "own.py").read_bytes() == path.read_bytes()

    run = folder / "runs" / results[0]["name"]
    needs = f"needs the plug-in own.py (sha256 {digest}): pass --plugin FILE"
    checkpoint = ["--ckpt_path", str(run / "checkpoints" / "best.ckpt")]
    validate = ["validate", "--config", str(run / "config.yaml"), *checkpoint]
    for refused in (["report", "grid.yaml"], ["doctor", "grid.yaml"], validate):
        done = ablate(tmp_path, *refused)
        assert done.returncode == 2, done.stdout
        assert needs in done.stderr
        assert done.stderr.count("\n") == 1
    assert ablate(tmp_path, "run", "grid.yaml").returncode == 2
    (tmp_path / "ablate.yaml").write_text("plugins: [own.py]\n")
    for taken in (["report", "grid.yaml"], ["doctor", "grid.yaml"], validate):
        done = ablate(tmp_path, *taken)
        assert done.returncode == 0, done.stderr
    nothing_left = ablate(tmp_path, "run", "grid.yaml")
    assert nothing_left.returncode == 0, nothing_left.stderr
    assert len(list(folder.glob("runs/*"))) == 2
