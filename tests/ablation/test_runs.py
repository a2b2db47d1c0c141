"""What a run's folder says: its state, what it reports, which checkpoints it keeps."""

import json
from collections import Counter
from pathlib import Path

import pytest

from lightning_app.ablation.plan import Cell
from lightning_app.ablation.runs import (
    PRUNED,
    REPORTS,
    RESULT,
    ReportReader,
    describe,
    is_over,
    read_progress,
    read_reports,
    read_run,
    trim_checkpoints,
)
from lightning_app.errors import UserError
from tests.records import pruned, result

CELL = Cell(id="a1", name="post_ln-a1", axes={})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "runs" / CELL.name
    (folder / "attempts" / "1").mkdir(parents=True)
    return folder


def leave(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content))


def test_a_pruned_run_is_over_but_has_no_result(tmp_path: Path, folder: Path) -> None:
    assert read_run(tmp_path, CELL).state == "missing"
    (folder / "attempts" / "1" / "error.txt").write_text("ValueError: bad\n")
    assert read_run(tmp_path, CELL).status == "failed"
    leave(folder / PRUNED, pruned(CELL.id, step=4))
    run = read_run(tmp_path, CELL)
    assert (run.state, run.status, run.result) == ("pruned", "pruned", None)
    assert run.pruned is not None
    assert run.pruned["step"] == 4
    assert is_over(folder, prunes=True)
    assert not is_over(folder, prunes=False)
    leave(folder / RESULT, result(CELL.id, "diverged"))
    run = read_run(tmp_path, CELL)
    assert (run.state, run.status, run.pruned) == ("done", "diverged", None)
    assert is_over(folder, prunes=False)


@pytest.mark.parametrize("name", [RESULT, PRUNED])
@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "no valid JSON"),
        ("[]", "expected a JSON object, found list"),
        (json.dumps(result("b")), "'b' is not the planned a1"),
    ],
)
def test_what_is_not_the_cells_is_refused(
    tmp_path: Path, folder: Path, name: str, content: str, said: str
) -> None:
    (folder / name).write_text(content)
    with pytest.raises(UserError, match=f"{name}: .*({said}).*; `ablate doctor .* --fix` moves it"):
        read_run(tmp_path, CELL)


@pytest.mark.parametrize("name", [RESULT, PRUNED])
def test_a_run_of_a_newer_version_is_refused_without_advice_to_move_it(
    tmp_path: Path, folder: Path, name: str
) -> None:
    leave(folder / name, {**result(CELL.id), "schema": 99})
    with pytest.raises(UserError, match=f"{name}: schema 99: .* update the program$"):
        read_run(tmp_path, CELL)


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (result(CELL.id), "ok"),
        (result(CELL.id, nll=9.0, outcome="not_yet_learned"), "not yet learned"),
        (result(CELL.id, "diverged"), "stalled"),
        (result(CELL.id, "diverged", None), "non-finite"),
    ],
)
def test_how_a_run_ended_in_words(tmp_path: Path, folder: Path, content: dict, word: str) -> None:
    leave(folder / RESULT, content)
    run = read_run(tmp_path, CELL)
    assert (run.word, run.status) == (word, content["status"])


@pytest.mark.parametrize("content", ["[]", "\xff", "{", ""])
def test_progress_that_cannot_be_read_is_none(folder: Path, content: str) -> None:
    path = folder / "attempts" / "1" / "progress.json"
    path.write_bytes(content.encode("latin-1"))
    assert read_progress(folder, 1) is None


def test_states_are_counted_in_a_fixed_order() -> None:
    states = Counter({"waiting": 2, "stalled": 3, "ok": 1, "failed": 1, "not yet learned": 4})
    assert describe(states) == "1 ok, 4 not yet learned, 3 stalled, 1 failed, 2 waiting"


@pytest.mark.parametrize(
    ("keep", "left"),
    [("all", {"last", "best"}), ("last", {"last"}), ("best", {"best"}), ("none", set())],
)
def test_checkpoints_are_kept_as_the_grid_says(folder: Path, keep: str, left: set[str]) -> None:
    (folder / "checkpoints").mkdir()
    for name in ("last", "best"):
        (folder / "checkpoints" / f"{name}.ckpt").write_bytes(b"weights")
    for _ in range(2):  # what is gone already is no mistake
        trim_checkpoints(folder, keep)
        assert {path.stem for path in (folder / "checkpoints").iterdir()} == left


def test_a_run_without_checkpoints_has_none_to_remove(folder: Path) -> None:
    trim_checkpoints(folder, "none")


def test_reports_are_read_as_they_come_and_only_whole(folder: Path) -> None:
    path, reader = folder / "attempts" / "1" / REPORTS, ReportReader()
    assert list(reader.new(folder, 1)) == []
    path.write_text('{"step": 5, "value": 3.0}\n{"step": 10, "val')
    assert list(reader.new(folder, 1)) == [(5, 3.0)]
    assert list(reader.new(folder, 1)) == []
    with path.open("a") as file:
        file.write('ue": 2.5}\n{"step": 15, "value": null}\n')
    assert list(reader.new(folder, 1)) == [(10, 2.5)]


def test_a_report_that_was_not_dealt_with_comes_again(folder: Path) -> None:
    path, reader = folder / "attempts" / "1" / REPORTS, ReportReader()
    path.write_text('{"step": 5, "value": 3.0}\n{"step": 10, "value": 2.0}\n')
    for step, _ in reader.new(folder, 1):
        if step == 10:
            break
    assert list(reader.new(folder, 1)) == [(10, 2.0)]


def test_the_reports_of_all_attempts_are_one_curve(folder: Path) -> None:
    first, second = folder / "attempts" / "1" / REPORTS, folder / "attempts" / "2" / REPORTS
    second.parent.mkdir()
    first.write_bytes(b'{"step": 5, "value": 3.0}\n{"step": 10, "value": 2.0}\n\0\0\0\n{"st')
    second.write_text('{"step": 10, "value": 2.0}\n{"step": 15, "value": 1.0}\n')
    assert read_reports(folder) == {5: 3.0, 10: 2.0, 15: 1.0}
