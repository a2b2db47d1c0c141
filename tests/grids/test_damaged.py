"""Damaged runs and those of other libraries are put aside and trained again."""

import errno
import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import World
from optuna.trial import TrialState

from lightning_app.commands.grid import status_command
from lightning_app.core.errors import UserError
from lightning_app.grids.supervisor import rerun_stale
from lightning_app.runs import records
from lightning_app.runs.folder import STORE, GridFolder, RunFolder
from lightning_app.runs.locks import run_lock, supervisor_lock
from tests.records import reseal
from tests.told import told

pytestmark = pytest.mark.xdist_group("finished")  # what they share is made once

CELLS = 4


def contents(folder: Path, less: str = "/") -> dict[str, bytes]:
    """The bytes of the files whose name does not have `less` in it."""
    files = (path for path in folder.rglob("*") if path.is_file() and less not in path.name)
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(files)}


def a_run(world: World, number: int = 0) -> Path:
    return sorted((world.folder / "runs").iterdir())[number].resolve()


def moved(world: World) -> list[str]:
    return sorted(path.name for path in (world.folder.parent / STORE).glob("*@damaged-*"))


def assert_one_result_each(world: World, *options: str) -> str:
    """Run what is missing; then each cell has one result, and the study says the same."""
    done = world.run(*options)
    assert done.returncode == 0, done.stderr
    grid = world.value()
    assert [grid.state(cell).state for cell in grid.cells] == ["done"] * CELLS
    trials = world.study().get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    assert sorted(trial.user_attrs["cell"] for trial in trials) == sorted(c.id for c in grid.cells)
    return done.stdout


def edit(**changes: object) -> Callable[[Path], None]:
    """Change fields of the result; "gone" removes one."""

    def damage(run: Path) -> None:
        path = run / "result.json"
        tree = json.loads(path.read_text()) | changes
        path.write_text(json.dumps({k: v for k, v in tree.items() if v != "gone"}))

    return damage


def write(name: str, data: bytes) -> Callable[[Path], object]:
    return lambda run: (run / name).write_bytes(data)


def of_another(run: Path) -> None:
    (other,) = sorted(set(run.parent.glob("[!.]*")) - {run})[:1]
    shutil.copyfile(other / "result.json", run / "result.json")


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "torn": (lambda run: os.truncate(run / "result.json", 90), "torn or damaged"),
    "empty": (write("result.json", b""), "torn or damaged"),
    "no UTF-8": (write("result.json", b"\xff{}"), "torn or damaged"),
    "list": (write("result.json", b"[1]"), "expected a JSON object, found list"),
    "missing field": (edit(metrics="gone"), "metrics: no value"),
    "a changed digit": (edit(unigram_entropy=5.5), "seal"),
    "of another": (of_another, "is not the planned"),
    "config changed": (write("config.yaml", b"seed_everything: 1\n"), "seal"),
    "config gone": (
        lambda run: (run / "config.yaml").unlink(),
        "its seal covers config.yaml, which is missing",
    ),
    "pruned.json": (write("pruned.json", b"{"), ""),  # nothing reads it beside a result
}


@pytest.mark.in_turn(2)
@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_run_is_listed_moved_and_trained_again(four: World, capsys, name: str) -> None:
    damage, words = DAMAGES[name]
    run = a_run(four)
    damage(run)
    before = contents(run)
    assert status_command(four.grid, four.folder.parent) == 0
    assert words in (said := capsys.readouterr().out)
    assert ("3 not yet" in said or "3 ok" in said) is bool(words)
    assert contents(run) == before
    starts = len(four.lines("start"))
    assert words in assert_one_result_each(four)
    assert moved(four) == [f"{run.name}@damaged-1"] * bool(words)
    assert len(four.lines("start")) == starts + bool(words)
    if words:
        after = contents(run.with_name(f"{run.name}@damaged-1"))
        assert before.items() <= after.items()
    assert_one_result_each(four)
    assert len(four.lines("start")) == starts + bool(words)


def test_many_damaged_runs_stop_the_grid_until_it_is_asked_for(four: World) -> None:
    for number in range(2):
        os.truncate(a_run(four, number) / "result.json", 90)
    before = contents(four.folder.parent / STORE)
    assert told("2 of 4 … --retry-damaged").search(four.refused().stderr)
    assert contents(four.folder.parent / STORE) == before
    assert_one_result_each(four, "damaged")
    assert len(moved(four)) == 2


def link_elsewhere(run: Path) -> None:
    (link,) = [p for p in (run.parents[1] / "tiny/runs").iterdir() if p.resolve() == run]
    link.unlink()
    link.symlink_to(run.parent / "elsewhere")


def of_another_metric(run: Path) -> None:
    metrics = json.loads((run / "result.json").read_text())["metrics"]
    metrics["val/other"] = metrics.pop("val/bleu")
    reseal(run / "result.json", metrics=metrics)


def result_is_a_folder(run: Path) -> None:
    (run / "result.json").unlink()
    (run / "result.json").mkdir()


@pytest.mark.parametrize(
    ("damage", "said", "metric"),
    [
        (edit(schema=99), "schema 99: made by a newer version", None),
        (edit(schema=1), "schema 1: made by an early version", None),
        (link_elsewhere, "is a link to", None),
        (result_is_a_folder, "is not a file", None),
        (of_another_metric, "reports no 'val/bleu'", "val/bleu"),
    ],
)
def test_what_is_no_damage_of_the_run_stays(four, damage, said: str, metric: str | None) -> None:
    if metric is not None:
        four.write(seeds=1, delay=0, steps=1, metric={"name": metric, "mode": "max"})
    damage(a_run(four))
    before = contents(four.folder.parent / STORE, less="lock")
    for options in ((), ("damaged",)):
        refused = four.refused(*options).stderr
        assert said in refused
        assert "moves the run aside" not in refused
    if metric is None:
        with pytest.raises(UserError, match=said):
            status_command(four.grid, four.folder.parent)
    assert contents(four.folder.parent / STORE, less="lock") == before
    assert not moved(four)


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO])
@pytest.mark.parametrize("name", ["result.json", "config.yaml"])
def test_a_file_that_cannot_be_read_is_no_damage(four, monkeypatch, name: str, number: int) -> None:
    grid, read = four.value(), Path.read_bytes

    def refuse(path: Path) -> bytes:
        if path.name == name:
            raise OSError(number, os.strerror(number))
        return read(path)

    monkeypatch.setattr(records.Path, "read_bytes", refuse)
    assert [grid.damage(cell) for cell in grid.cells] == [None] * CELLS
    with pytest.raises(UserError, match=os.strerror(number)):
        grid.state(grid.cells[0])


def test_a_damaged_run_that_is_being_trained_stays(four: World) -> None:
    run = a_run(four)
    os.truncate(run / "result.json", 90)
    with run_lock(RunFolder(run)):
        assert "another process is training this run" in four.refused().stderr
    assert not moved(four)
    assert_one_result_each(four)


def test_a_damaged_pruned_run_is_trained_again(world: World) -> None:
    axes = {"model.schedule.warmup_steps": [0]}
    world.write(seeds=2, delay=0, steps=1, axes=axes, pruner="median")
    assert world.run().returncode == 0
    run = a_run(world)
    (run / "result.json").unlink()
    (run / "pruned.json").write_bytes(b"{")
    assert world.run().returncode == 0
    assert world.states() == {"COMPLETE": CELLS}
    assert moved(world) == [f"{run.name}@damaged-1"]


def truncate(name: str, kept: int) -> Callable[[World], None]:
    def damage(world: World) -> None:
        path = world.folder / name
        os.truncate(path, path.stat().st_size + kept if kept < 0 else kept)

    return damage


def replace(name: str, old: bytes, new: bytes, count: int = -1) -> Callable[[World], object]:
    return lambda world: (world.folder / name).write_bytes(
        (world.folder / name).read_bytes().replace(old, new, count)
    )


def attempts_a_file(world: World) -> None:
    shutil.rmtree(a_run(world) / "attempts")
    (a_run(world) / "attempts").touch()


RUN_REPAIRS: dict[str, Callable[[World], object]] = {
    "no plan": lambda world: (world.folder / "plan.json").unlink(),
    "torn plan": truncate("plan.json", 100),
    "plan a list": lambda world: (world.folder / "plan.json").write_text("[]"),
    "edited plan": replace("plan.json", b'"post_ln-', b'"past_ln-'),
    "no grid.yaml": lambda world: (world.folder / "grid.yaml").unlink(),
    "torn grid.yaml": truncate("grid.yaml", 40),
    "no journal": lambda world: (world.folder / "optuna.journal").unlink(),
    "torn journal": truncate("optuna.journal", -30),
    "damaged journal": replace("optuna.journal", b'"op_code"', b'"op_co\xffe"', 2),
    "attempts a file": attempts_a_file,
}


@pytest.mark.parametrize("name", RUN_REPAIRS)
def test_what_follows_from_the_runs_is_made_again(four: World, name: str) -> None:
    before = contents(four.folder.parent)
    RUN_REPAIRS[name](four)
    starts = len(four.lines("start"))
    assert_one_result_each(four)
    assert len(four.lines("start")) == starts
    after = contents(four.folder.parent)
    for kept in ("tiny/plan.json", "tiny/grid.yaml"):
        assert after[kept] == before[kept]


def test_a_plan_of_a_newer_version_is_left_as_it_is(four: World) -> None:
    path = four.folder / "plan.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "schema": 99}))
    before = contents(four.folder.parent, less=".supervisor.json")
    assert "plan.json: schema 99:" in four.refused().stderr
    assert contents(four.folder.parent, less=".supervisor.json") == before


def damage_at_random(folder: Path, chance: random.Random) -> str:
    """Damage one file of a folder as disks, editors and people do; say what was done."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and "lock" not in path.name)
    path = chance.choice(files)
    data = bytearray(path.read_bytes())
    kind = chance.choice(("truncate", "delete", "flip", "garbage", "swap"))
    if kind == "truncate":
        path.write_bytes(data[: chance.randrange(len(data) + 1)])
    elif kind == "delete":
        path.unlink()
    elif kind == "flip" and data:
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        path.write_bytes(data)
    elif kind == "garbage":
        path.write_bytes(chance.randbytes(chance.randrange(200)))
    else:
        other = chance.choice([each for each in files if each.name == path.name])
        content = other.read_bytes()
        other.write_bytes(data)
        path.write_bytes(content)
    return f"{kind} {path.relative_to(folder)}"


SEEDS = [*range(6), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(100, 120))]


@pytest.mark.in_turn(3)
@pytest.mark.parametrize("seed", SEEDS)
def test_random_damage_is_mended(world: World, finished: World, seed: int) -> None:
    shutil.rmtree(world.root)
    shutil.copytree(finished.root, world.root, symlinks=True)
    chance, experiments = random.Random(seed), world.folder.parent
    done = [damage_at_random(experiments, chance) for _ in range(1 + (seed + 3) % 8)]
    results = {path.read_bytes() for path in experiments.rglob("result.json")}
    assert_one_result_each(world, "damaged")
    assert results <= {path.read_bytes() for path in experiments.rglob("result.json")}, done
    assert_one_result_each(world)


def codes(folder: Path) -> list[str]:
    results = [json.loads(path.read_text()) for path in folder.glob("*/result.json")]
    return sorted(result["provenance"]["code"] for result in results)


def run_code(world: World, code: str, *options: str) -> str:
    world.environment["CODE"] = code
    done = world.run(*options)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_cells_of_other_libraries_are_done_again(four: World) -> None:
    runs, store = four.folder / "runs", four.folder.parent / STORE
    assert "no cell is" in run_code(four, "a", "rerun")
    run_code(four, "b")
    assert codes(runs) == ["a"] * CELLS  # only on request

    said = run_code(four, "b", "rerun")
    place = store / "ID@superseded-N"
    assert told(f"{CELLS} … {place}; … (libraries: torch a: {CELLS})").search(said)
    assert (codes(runs), codes(store)) == (["b"] * CELLS, ["a"] * CELLS + ["b"] * CELLS)
    assert len(four.lines("end")) == 2 * CELLS
    trials = four.study().get_trials(deepcopy=False)
    values = sorted(trial.value or 0 for trial in trials if trial.state.name == "COMPLETE")
    assert values == pytest.approx([3.5, 3.5, 4.1, 4.1])  # of the new runs alone

    run_code(four, "c", "rerun")
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
    assert "@damaged-1, the cell runs again" in run_code(four, "a", "rerun")
    assert [path.name for path in (four.folder.parent / STORE).glob("*@*")] == [
        f"{result.parent.resolve().name}@damaged-1"
    ]
    assert len(four.lines("start")) == CELLS + 1


def test_no_run_beside_another_supervisor_and_none_that_is_trained_is_superseded(four: World):
    with supervisor_lock(GridFolder(four.folder)):
        four.environment["CODE"] = "b"
        assert "is already running" in four.refused("rerun").stderr
    assert codes(four.folder / "runs") == ["a"] * CELLS
    grid = four.value()
    with run_lock(grid.run(grid.cells[0])):
        said = rerun_stale(grid, {"provenance": {"code": "b"}, "corpora": None})
    assert f"{CELLS - 1} runs moved" in said
    assert "1 others are" in said
    assert [grid.state(cell).state for cell in grid.cells] == ["done"] + ["missing"] * (CELLS - 1)


def test_what_lacks_what_the_grid_keeps_runs_again(four: World) -> None:
    grid = four.value()
    grid.run(grid.cells[1]).checkpoint("best").unlink()
    assert told("1 … best.ckpt").search(run_code(four, "a"))
    assert len(four.lines("end")) == CELLS
    assert "without best.ckpt: 1" in run_code(four, "a", "rerun")
    assert len(four.lines("end")) == CELLS + 1
    assert grid.run(grid.cells[1]).checkpoint("best").is_file()
