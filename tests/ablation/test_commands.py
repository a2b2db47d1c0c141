"""The commands with the real program: two cells of two steps on the built-in corpus."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lightning_app.ablation.supervision.options import parse_time
from lightning_app.errors import UserError

GRID = """\
# Does it run?
name: two_steps
base_config:
  trainer: {max_steps: 2, accelerator: cpu}
  model:
    architecture: {encoder_depth: 1, decoder_depth: 1, model_dim: 16, ff_dim: 16, num_heads: 2}
    objective: {beam: 1}
  data: {name: synthetic, tokenizer: word, vocab_size: null, tokens_per_batch: 512}
axes:
  model.block.preset: [post_ln, pre_ln]
  model.schedule.warmup_steps: [0]
"""


def ablate(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    (folder / "grid.yaml").write_text(GRID)
    return subprocess.run(
        [sys.executable, "-m", "lightning_app", *words],
        cwd=folder,
        env={
            **os.environ,
            "LIGHTNING_APP_CACHE": str(folder / "cache"),
            "PYTHONPATH": str(Path(__file__).parents[2]),
        },
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_plan_run_and_run_again(tmp_path: Path) -> None:
    planned = ablate(tmp_path, "plan", "grid.yaml")
    assert (planned.returncode, planned.stderr) == (0, "")
    assert "two_steps: 2 cells, 0 excluded, 0 done, 0 failed, 2 to run" in planned.stdout
    assert "time: unknown, use --probe" in planned.stdout
    assert "tokens: 2,048 in all" in planned.stdout
    first = ablate(tmp_path, "run", "grid.yaml")
    assert first.returncode == 0, first.stderr
    assert "[2/2]" in first.stdout
    folder = tmp_path / "experiments" / "two_steps"
    assert (folder / "report.html").is_file()
    assert len(list(folder.glob("runs/*/result.json"))) == 2
    start = time.monotonic()
    again = ablate(tmp_path, "run", "grid.yaml")
    assert (again.returncode, again.stderr) == (0, "")
    assert time.monotonic() - start < 20.0
    assert again.stdout.splitlines() == [
        "two_steps: 2 cells: 2 diverged",
        "report: experiments/two_steps/report.html",
        "curves: tensorboard --logdir experiments/two_steps",
    ]


def test_times_are_hours_minutes_and_perhaps_seconds() -> None:
    assert parse_time("--max-time", "01:30") == 5400.0
    assert parse_time("--max-time", "100:00") == 360000.0
    assert parse_time("--hang-limit", "0:00:08") == 8.0
    for wrong in ("90", "1:5", "1:60", "-1:00", "", "1:00:60", "0:00"):
        with pytest.raises(UserError, match="--hang-limit: expected HH:MM"):
            parse_time("--hang-limit", wrong)
