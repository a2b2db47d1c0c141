"""The commands with the real program: two cells of two steps on the built-in corpus."""

import json
import math
import os
import re
import subprocess
from pathlib import Path

import pytest

from lightning_app.core.errors import UserError
from lightning_app.grids.display import document
from lightning_app.grids.slots import parse_time
from lightning_app.runs.folder import STORE
from tests import warm

ROOT = Path(__file__).parents[2]
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


def files(folder: Path) -> dict[Path, int]:
    """When each file of a folder was written last."""
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


def test_plan_run_and_run_again(tmp_path: Path, cache: str) -> None:
    """Takes over 5 s: two cells are trained, and their report is written."""
    (tmp_path / "grid.yaml").write_text(GRID)
    environment = {**os.environ, "LIGHTNING_APP_CACHE": cache, "PYTHONPATH": str(ROOT)}

    def ablate(*words: str) -> subprocess.CompletedProcess[str]:
        words = ("-m", "lightning_app", *words)
        return warm.run(words, folder=tmp_path, environment=environment)

    planned = ablate("plan", "grid.yaml")
    assert (planned.returncode, planned.stderr) == (0, "")
    assert "two_steps: 2 cells, 0 excluded, 0 done, 0 failed, 2" in planned.stdout
    assert "time: unknown, use --probe" in planned.stdout
    assert "tokens: 2,048 in all" in planned.stdout
    first = ablate("run", "grid.yaml", "--json")
    assert first.returncode == 0, first.stderr
    assert "[2/2]" in first.stderr
    told = json.loads(first.stdout)
    states = {"ok": 0, "diverged": 2, "pruned": 0, "failed": 0, "missing": 0, "waiting": 0}
    assert told["states"] == states
    assert (told["schema"], told["command"], told["exit_code"]) == (1, "run", 0)
    section = (ROOT / "docs" / "json.md").read_text().split("\n## run\n")[1].split("\n## ")[0]
    heads = re.findall(r"^- ([^:]+):", section, re.M)
    assert set(told) == {"schema", "command", *re.findall(r"`(\w+)`", " ".join(heads))}
    folder = tmp_path / "experiments" / "two_steps"
    assert tmp_path / told["report"] == folder / "report.html"
    assert (folder / "report.html").is_file()
    assert len(list(folder.glob("runs/*/result.json"))) == 2
    before = files(folder.parent / STORE)
    assert before
    again = ablate("run", "grid.yaml")
    assert (again.returncode, again.stderr) == (0, "")
    assert files(folder.parent / STORE) == before  # nothing was trained
    lines = again.stdout.splitlines()
    assert lines[1] == "two_steps: 2 cells: 2 stalled"  # after a warning
    assert any(re.fullmatch(r"pre_ln +\d\.\d{3} n = 1", line) for line in lines)
    assert lines[-2:] == [
        "report: experiments/two_steps/report.html",
        "curves: tensorboard --logdir experiments/two_steps",
    ]
    assert again.stdout.isascii()


def test_a_document_has_null_for_what_is_no_number(capsys: pytest.CaptureFixture[str]) -> None:
    with document("plan", as_json=True) as tree:
        print("a word to the reader")
        tree["values"] = [math.nan, math.inf, 1.5, None, True, Path("a/b"), {"x": -math.inf}]
    out, error = capsys.readouterr()
    assert error == "a word to the reader\n"
    assert json.loads(out) == {
        "schema": 1,
        "command": "plan",
        "values": [None, None, 1.5, None, True, "a/b", {"x": None}],
    }
    with pytest.raises(UserError), document("plan", as_json=True):
        raise UserError("no")
    assert capsys.readouterr().out == ""


def test_times_are_hours_minutes_and_perhaps_seconds() -> None:
    assert parse_time("--max-time", "01:30") == 5400.0
    assert parse_time("--max-time", "100:00") == 360000.0
    assert parse_time("--hang-limit", "0:00:08") == 8.0
    for wrong in ("90", "1:5", "1:60", "-1:00", "", "1:00:60", "0:00"):
        with pytest.raises(UserError, match="--hang-limit: expected HH:MM"):
            parse_time("--hang-limit", wrong)
