"""`ablate run --rerun-stale`: cells of other libraries are done again, beside the old runs."""

import json
from pathlib import Path

import pytest
from conftest import World

from lightning_app.core.errors import UserError
from lightning_app.grids.supervisor import rerun_stale
from lightning_app.runs.folder import STORE, GridFolder
from lightning_app.runs.locks import run_lock, supervisor_lock
from tests.told import told

pytestmark = pytest.mark.xdist_group("finished")  # what they share is made once

CELLS = 4


def codes(folder: Path) -> list[str]:
    results = [json.loads(path.read_text()) for path in folder.glob("*/result.json")]
    return sorted(result["provenance"]["code"] for result in results)


def run(world: World, code: str, *options: str) -> str:
    world.environment["CODE"] = code
    done = world.run(*options)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_cells_of_other_libraries_are_done_again(four: World) -> None:
    runs, store = four.folder / "runs", four.folder.parent / STORE
    assert "no cell is" in run(four, "a", "rerun")
    run(four, "b")
    assert codes(runs) == ["a"] * CELLS  # only on request

    said = run(four, "b", "rerun")
    place = store / "ID@superseded-N"
    assert told(f"{CELLS} … {place}; … (libraries: torch a: {CELLS})").search(said)
    assert (codes(runs), codes(store)) == (["b"] * CELLS, ["a"] * CELLS + ["b"] * CELLS)
    assert len(four.lines("end")) == 2 * CELLS
    trials = four.study().get_trials(deepcopy=False)
    values = sorted(trial.value or 0 for trial in trials if trial.state.name == "COMPLETE")
    assert values == pytest.approx([3.5, 3.5, 4.1, 4.1])  # of the new runs alone

    run(four, "c", "rerun")
    assert codes(runs) == ["c"] * CELLS
    assert codes(store) == ["a"] * CELLS + ["b"] * CELLS + ["c"] * CELLS
    assert sum(path.name.endswith("@superseded-2") for path in store.iterdir()) == CELLS


def test_what_was_cut_short_by_other_libraries_starts_again(four: World) -> None:
    grid = four.value()
    here = {"provenance": {"code": "b", "libraries": {"torch": "a"}}, "corpora": None}
    assert "no cell is" in rerun_stale(grid, here)  # another code alone is no reason
    begun, without, lost = (four.folder / "runs" / cell.name for cell in grid.cells[:3])
    for folder in (begun, without, lost):
        (folder / "result.json").unlink()
        (folder / "attempts" / "1" / "provenance.json").write_text(
            '{"code": "a", "libraries": {"torch": "old"}}'
        )
    (without / "checkpoints" / "last.ckpt").unlink()
    for folder in (begun, lost):
        assert (folder / "checkpoints" / "last.ckpt").is_file()
    (lost / "attempts" / "1" / "provenance.json").unlink()
    rerun_stale(grid, here)
    store = four.folder.parent / STORE
    aside = {path.name for path in store.iterdir() if "@" in path.name}
    ids = {cell.name: cell.id for cell in grid.cells}
    assert aside == {f"{ids[run.name]}@superseded-1" for run in (begun, lost)}
    assert (without / "attempts").is_dir()


def test_a_damaged_result_is_not_superseded(four: World) -> None:
    grid = four.value()
    result = grid.run(grid.cells[-1]).result
    result.write_bytes(result.read_bytes()[:-9])
    with pytest.raises(UserError, match=r"result\.json:.*moves the run aside"):
        rerun_stale(grid, {"provenance": {"code": "b"}, "corpora": None})
    assert "@damaged-1, the cell runs again" in run(four, "a", "rerun")
    assert [path.name for path in (four.folder.parent / STORE).glob("*@*")] == [
        f"{result.parent.resolve().name}@damaged-1"
    ]
    assert len(four.lines("start")) == CELLS + 1


def test_nobody_else_may_be_at_work(four: World) -> None:
    with supervisor_lock(GridFolder(four.folder)):
        four.environment["CODE"] = "b"
        done = four.run("rerun")
    assert done.returncode == 2
    assert "is already running" in done.stderr
    assert codes(four.folder / "runs") == ["a"] * CELLS


def test_a_run_that_another_process_trains_stays(four: World) -> None:
    grid = four.value()
    with run_lock(grid.run(grid.cells[0])):
        said = rerun_stale(grid, {"provenance": {"code": "b"}, "corpora": None})
    assert f"{CELLS - 1} runs moved" in said
    assert "1 others are" in said
    assert [grid.state(cell).state for cell in grid.cells] == ["done"] + ["missing"] * (CELLS - 1)


def test_what_lacks_what_the_grid_keeps_runs_again(four: World) -> None:
    grid = four.value()
    grid.run(grid.cells[1]).checkpoint("best").unlink()
    assert told("1 … best.ckpt").search(run(four, "a"))
    assert len(four.lines("end")) == CELLS
    assert "without best.ckpt: 1" in run(four, "a", "rerun")
    assert len(four.lines("end")) == CELLS + 1
    assert grid.run(grid.cells[1]).checkpoint("best").is_file()
