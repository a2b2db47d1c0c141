"""The commands with the real program: small grids, edited corpora, two versions of the code."""

import json
import math
import os
import re
import signal
import subprocess
from pathlib import Path

import pytest
import yaml
from conftest import wait_for  # pyright: ignore[reportMissingImports]

from lightning_app.commands.grid import plan_command, report_command
from lightning_app.core.errors import UserError
from lightning_app.grids.display import document
from lightning_app.grids.slots import parse_time
from lightning_app.runs.folder import STORE
from tests import warm
from tests.records import reseal
from tests.report.test_report_command import documented
from tests.small import tiny_config
from tests.told import told

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
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


def test_plan_run_and_run_again(tmp_path: Path, cache: str) -> None:
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
    assert set(told) == documented("run")
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
    values = [None, None, 1.5, None, True, "a/b", {"x": None}]
    assert json.loads(out) == {"schema": 1, "command": "plan", "values": values}
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


WORDS = ("haus", "baum", "hund", "berg", "tal", "see", "wald", "stadt")


def write_corpus(folder: Path, shift: int = 0) -> None:
    folder.mkdir(exist_ok=True)
    for split, lines in (("train", 200), ("valid", 20), ("test", 20)):
        for side in ("de", "en"):
            rows = (
                " ".join(side + WORDS[(n * k + shift) % len(WORDS)] for k in range(1, 5))
                for n in range(lines)
            )
            (folder / f"{split}.{side}").write_text("".join(f"{row}\n" for row in rows))


def write_grid(root: Path, corpus: Path, steps: int, seeds: list[int]) -> None:
    trainer = {"max_steps": steps, "val_check_interval": min(steps, 20)}
    data = {"data__name": "text", "data__root": str(corpus), "data__tokens_per_batch": 128}
    tree = {"name": "edited", "base_config": tiny_config(trainer, **data)}
    tree["axes"] = {"seed_everything": seeds}
    (root / "edited.yaml").write_text(yaml.safe_dump(tree))


def environment(root: Path) -> dict[str, str]:
    return {**os.environ, "LIGHTNING_APP_CACHE": str(root / "cache"), "PYTHONPATH": str(ROOT)}


def start(root: Path, *words: str) -> warm.Process:
    return warm.start(["-m", "lightning_app", *words], folder=root, environment=environment(root))


def ablate(root: Path, *words: str) -> tuple[int, str, str]:
    process = start(root, *words)
    out, error = process.communicate(timeout=300)
    return process.wait(), out, error


def results(root: Path, name: str = "edited") -> dict[str, dict]:
    paths = (root / "experiments" / name / "runs").glob("*/result.json")
    return {path.parent.name: json.loads(path.read_text()) for path in paths}


# Over 5 s: three calls of the program, of which two train and two report.
def test_a_corpus_that_is_edited_in_mid_cell_or_moved(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus"
    write_corpus(corpus)
    write_grid(tmp_path, corpus, steps=60, seeds=[1])
    running = start(tmp_path, "run", "edited.yaml", "--workers", "1")
    runs = tmp_path / "experiments" / "edited" / "runs"
    saved = "*/checkpoints/last.ckpt"
    wait_for(lambda: list(runs.glob(saved)), lambda: running.poll() is None)
    os.kill(running.pid, signal.SIGTERM)
    assert running.communicate(timeout=120)[1] == ""
    assert running.returncode == 130
    [begun] = [path.name for path in runs.iterdir()]
    assert results(tmp_path) == {}

    write_corpus(corpus, shift=1)
    write_grid(tmp_path, corpus, steps=60, seeds=[1])
    code, out, error = ablate(tmp_path, "run", "edited.yaml", "--workers", "1")
    assert (code, error) == (0, ""), out
    [(name, result)] = results(tmp_path).items()
    assert name != begun
    assert result["attempt"] == 1

    moved = corpus.rename(tmp_path / "elsewhere")
    write_grid(tmp_path, moved, steps=60, seeds=[1])
    stamp = (runs / name / "result.json").stat().st_mtime_ns
    code, out, error = ablate(tmp_path, "run", "edited.yaml", "--workers", "1")
    assert (code, error) == (0, "")
    assert "to run" not in out
    assert (runs / name / "result.json").stat().st_mtime_ns == stamp


@pytest.mark.slow
def test_every_command_names_both_versions_of_the_code(tmp_path, capsys, monkeypatch) -> None:
    base = tiny_config({"max_steps": 2, "val_check_interval": 2, "limit_val_batches": 1})
    tree = {"name": "two", "base_config": base, "axes": {"seed_everything": [1, 2]}}
    (tmp_path / "two.yaml").write_text(yaml.safe_dump(tree))
    assert ablate(tmp_path, "run", "two.yaml", "--workers", "1")[0] == 0
    grid, experiments = tmp_path / "two.yaml", tmp_path / "experiments"
    first, second = results(tmp_path, "two")
    path = experiments / "two" / "runs" / second / "result.json"
    made = json.loads(path.read_text())["provenance"]
    assert str(tmp_path) not in json.dumps(made)
    ours, theirs = made["code"], "f" * len(made["code"])
    reseal(path, provenance={**made, "code": theirs})

    monkeypatch.setenv("LIGHTNING_APP_CACHE", str(tmp_path / "cache"))
    assert plan_command(grid, experiments) == 0
    said = capsys.readouterr().out
    assert told(f"1 … ({theirs}").search(said)
    assert second in said
    assert plan_command(grid, experiments, as_json=True) == 0
    assert json.loads(capsys.readouterr().out)["stale"] == {"code": {theirs: [second]}}

    assert report_command(grid, experiments, as_json=True) == 0
    out = capsys.readouterr()
    assert json.loads(out.out)["mixtures"]["code"] == {ours: [first], theirs: [second]}
    assert told("Mixed: … 2").search(out.err)
    page = (experiments / "two" / "report.html").read_text(encoding="utf-8")
    assert page.count(ours)
    assert page.count(theirs)
