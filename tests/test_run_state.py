"""What a run's folder says: its state, what it reports, which checkpoints it keeps."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from lightning_app.config.grid import GridSpec
from lightning_app.core.errors import UserError
from lightning_app.grids.display import describe
from lightning_app.grids.plan import Grid
from lightning_app.runs.folder import PRUNED, RESULT, GridFolder, RunFolder
from lightning_app.runs.records import Cell, Plan, sealed
from lightning_app.runs.run import DamagedRun, Run, read_progress
from tests.records import pruned, result

CELL = Cell(id="a1", name="post_ln-a1", axes={})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "runs" / CELL.name
    (folder / "attempts" / "1").mkdir(parents=True)
    return folder


def grid_in(folder: Path) -> Grid:
    texts: Any = {"name": "tiny", "metric": "val/nll", "mode": "min"}
    plan = Plan(**texts, hash="", made_from="", axes={}, excluded=0, data=(), cells=(CELL,))
    empty: Any = {"source": "", "question": "", "base_config": {}, "axes": {}, "sensitivity": {}}
    spec = GridSpec(**texts, **empty, exclude=(), pruner="median")
    return Grid(spec, GridFolder(folder), plan)


def leave(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content))


def test_a_pruned_run_is_over_but_has_no_result(folder: Path) -> None:
    there = RunFolder(folder)
    assert Run(there, CELL.id).state.state == "missing"
    there.attempt(1).error.write_text("ValueError: bad\n")
    assert Run(there, CELL.id).state.state == "failed"
    leave(there.pruned, pruned(CELL.id, step=4))
    run = Run(there, CELL.id).state
    assert (run.state, run.word, run.result) == ("pruned", "pruned", None)
    assert run.pruned is not None
    assert run.pruned["step"] == 4
    assert Run(there, CELL.id, pruner=None).state.state == "failed"
    assert there.is_over("any", None)  # as earlier versions name no grid
    assert not there.is_over(None, None)
    leave(there.pruned, pruned(CELL.id, step=4, grid="mine"))
    states = {by: Run(there, CELL.id, pruner=by).state.state for by in ("mine", "other", "")}
    assert states == {"mine": "pruned", "other": "failed", "": "pruned"}
    assert [there.is_over(by, None) for by in ("mine", "other", "")] == [True, False, True]
    # A pruner of another metric has not ended it.
    leave(there.pruned, {**pruned(CELL.id, step=4, grid="mine"), "metric": "val/nll"})
    for asked, state in (("val/nll", "pruned"), ("val/accuracy", "failed")):
        assert Run(there, CELL.id, asked, pruner="mine").state.state == state
        assert there.is_over("mine", asked) is (state == "pruned")
    leave(there.result, result(CELL.id, "diverged"))
    run = Run(there, CELL.id).state
    assert (run.state, run.pruned) == ("done", None)
    assert there.is_over(None, None)


def test_a_pruned_run_that_goes_on_elsewhere_is_no_damage(folder: Path) -> None:
    """A grid without a pruner continues it, and rewrites the files that its seal covers."""
    there = RunFolder(folder)
    there.config.write_text("seed_everything: 1\n")
    leave(there.pruned, sealed({**pruned(CELL.id, step=4), "attempt": 1}, folder))
    there.config.write_text("seed_everything: 1\ntrainer: {log_every_n_steps: 5}\n")
    with pytest.raises(DamagedRun, match=r"config\.yaml"):
        _ = Run(there, CELL.id).state
    there.attempt(2).path.mkdir(parents=True)
    assert Run(there, CELL.id).state.state == "pruned"


@pytest.mark.parametrize("name", [RESULT, PRUNED])
@pytest.mark.parametrize(
    ("content", "said"),
    [
        *(("{", "not valid JSON"), ("[]", "JSON"), (json.dumps(result("b")), "'b'.*a1")),
        (json.dumps({**result(CELL.id), "schema": 99}), "schema 99:"),  # of a newer version
    ],
)
def test_what_is_not_the_cells_is_refused(tmp_path, folder, name, content: str, said: str) -> None:
    (folder / name).write_text(content)
    with pytest.raises(UserError, match=f"{name}: .*({said})") as caught:
        grid_in(tmp_path).state(CELL)
    assert ("moves the run" in str(caught.value)) == ("99" not in said)


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (result(CELL.id), "ok"),
        (result(CELL.id, nll=9.0, outcome="not_yet_learned"), "not yet learned"),
        (result(CELL.id, "diverged"), "stalled"),
        (result(CELL.id, "diverged", None), "non-finite"),
    ],
)
def test_how_a_run_ended_in_words(folder: Path, content: dict, word: str) -> None:
    leave(folder / RESULT, content)
    assert Run(RunFolder(folder), CELL.id).state.word == word


@pytest.mark.parametrize("content", ["[]", "\xff", "{", ""])
def test_progress_that_cannot_be_read_is_none(folder: Path, content: str) -> None:
    (folder / "attempts" / "1" / "progress.json").write_bytes(content.encode("latin-1"))
    assert read_progress(RunFolder(folder), 1) is None


def test_states_are_counted_in_a_fixed_order() -> None:
    states = Counter({"waiting": 2, "stalled": 3, "ok": 1, "failed": 1, "not yet learned": 4})
    assert describe(states) == "1 ok, 4 not yet learned, 3 stalled, 1 failed, 2 waiting"


FAILED = {"status": "diverged", "outcome": "non_finite"}


@pytest.mark.parametrize(
    ("record", "trainer", "short"),
    [
        ({"steps_asked": 9}, "{max_steps: 4}", True),  # what the run recorded decides
        ({"steps_asked": 4}, "{max_steps: 9}", False),
        ({"status": "cut_short", "outcome": "cut_short", "steps_asked": 9}, "{max_steps: 9}", True),
        ({**FAILED, "steps_asked": 9}, "{max_steps: 9}", False),
    ],
)
def test_a_result_of_fewer_steps_than_its_config_is_cut_short(
    folder: Path, record: dict[str, Any], trainer: str, short: bool
) -> None:
    (folder / "config.yaml").write_text(f"trainer: {trainer}\n")
    leave(folder / RESULT, result(CELL.id, **record))
    state = Run(RunFolder(folder), CELL.id).state
    assert (state.state, state.result is None) == (("failed", True) if short else ("done", False))
    assert "4 of 9 steps" in (state.error or "") if short else not state.error


def test_attempts_count_by_their_numbers_and_the_place_names_the_grid(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert folder.last_attempt() == 0
    for name in ("2", "10", "9", "notes"):
        (folder.attempts / name).mkdir(parents=True)
    assert folder.last_attempt() == 10
    assert RunFolder(tmp_path / "mine" / "runs" / "one").grid == "mine"
    assert RunFolder(tmp_path / "mine" / "other" / "one").grid is None


@pytest.mark.parametrize(
    ("text", "line"),
    [(None, None), ("a\nb  \n\n", "b"), ("", "no message"), ("x\u2028y\n", "x\u2028y")],
)
def test_an_attempts_error_is_one_line(tmp_path: Path, text: str | None, line: str | None) -> None:
    attempt = RunFolder(tmp_path).attempt(1)
    attempt.path.mkdir(parents=True)
    if text is not None:
        attempt.error.write_text(text)
    assert attempt.error_line() == line
