"""A grid whose cells start from the runs of another grid."""

import json
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import stand_in
import yaml
from conftest import World

from lightning_app.config.grid import GridSpec, read_spec
from lightning_app.config.tree import PRESET, SEED, WARMUP
from lightning_app.core.errors import UserError
from lightning_app.grids.plan import (
    Grid,
    expand,
    is_valid,
    load_plan,
    waiting_document,
    waiting_lines,
)
from lightning_app.grids.supervisor import current_grid
from lightning_app.report.facts import state_counts
from lightning_app.report.results import read_results
from lightning_app.runs.folder import GridFolder, RunFolder
from lightning_app.runs.locks import FileLock
from lightning_app.runs.records import Plan
from lightning_app.runs.store import place_run
from tests.records import result
from tests.told import told

MATCH = [PRESET, SEED]
PARENT: dict[str, Any] = {"name": "parent", "base_config": {"data": {"delay": 0.02}}}
PARENT |= {"axes": {PRESET: ["post_ln", "pre_ln"], SEED: [1, 2]}}
CHILD: dict[str, Any] = {"name": "child", "base_config": {"data": {"delay": 0.01}}}
CHILD |= {"axes": {PRESET: ["post_ln", "pre_ln"], WARMUP: [0, 60], SEED: [1, 2]}}
CHILD |= {"init_from": {"grid": "sub/parent.yaml", "match": MATCH}}


def write(root: Path, child: dict[str, Any] | None = None, **parent: Any) -> Path:
    """Write both grid files, with changes; return the child's."""
    (root / "sub").mkdir(exist_ok=True)
    (root / "sub" / "parent.yaml").write_text(yaml.safe_dump(PARENT | parent, sort_keys=False))
    path = root / "child.yaml"
    path.write_text(yaml.safe_dump(CHILD | (child or {}), sort_keys=False))
    return path


@pytest.fixture
def spec(tmp_path: Path) -> GridSpec:
    return read_spec(write(tmp_path))


def plan_of(spec: GridSpec, root: Path) -> Plan:
    return expand(spec, stand_in.resolve, stand_in.identify, root / "experiments")[0]


def parents_of(spec: GridSpec, root: Path) -> dict[str, tuple[RunFolder, str]]:
    """The folders of the parent's cells, by preset and seed, and their ids."""
    assert spec.init_from is not None
    found = {}
    for cell in plan_of(spec.init_from.spec, root).cells:
        run = RunFolder(root / "experiments" / "parent" / "runs" / cell.name)
        found[f"{cell.axes[PRESET]} {cell.axes[SEED]}"] = (run, cell.id)
    return found


def finish(run: RunFolder, identity: str, text: str = "", loss: float | None = 3.0) -> None:
    """Leave the files of a finished run, which failed without a loss below 6."""
    run.path.mkdir(parents=True, exist_ok=True)
    stand_in.leave_weights(run, identity, text or run.name)
    run.config.write_text("data: {}\n")
    failed = loss is None or loss > 6.0
    ended = result(identity, "diverged" if failed else "ok", loss, name=run.name)
    run.result.write_text(json.dumps(ended))


def finish_parents(spec: GridSpec, root: Path) -> None:
    for run, identity in parents_of(spec, root).values():
        finish(run, identity)


def grid_of_child(root: Path) -> GridSpec:
    """A third grid, which continues the child."""
    tree = {**CHILD, "name": "last", "init_from": {"grid": "child.yaml", "match": [*MATCH, WARMUP]}}
    (root / "last.yaml").write_text(yaml.safe_dump(tree))
    return read_spec(root / "last.yaml")


def holds_in(plan: Plan, spec: GridSpec, root: Path, corpus: Any = None) -> bool:
    return is_valid(plan, spec, corpus or (lambda data: stand_in.CORPUS), root / "experiments")


def current(spec: GridSpec, root: Path, alone: bool = True) -> Grid:
    folder = GridFolder(root / "experiments" / "child")
    make = partial(plan_of, spec, root)
    return current_grid(spec, folder, make, alone, lambda data: stand_in.CORPUS)


def test_cells_wait_until_their_parents_are_finished(tmp_path: Path, spec: GridSpec) -> None:
    experiments, parents = tmp_path / "experiments", parents_of(spec, tmp_path)
    plan = plan_of(spec, tmp_path)
    assert plan.cells == ()
    names = [cell.name for cell in plan.waiting]
    assert names[:2] == ["post_ln-warmup0-seed1", "post_ln-warmup60-seed1"]
    assert (len(plan.waiting), plan.excluded) == (8, 0)

    finish(*parents["post_ln 2"])
    crashed, _ = parents["pre_ln 2"]
    crashed.attempt(1).path.mkdir(parents=True)
    crashed.attempt(1).error.write_text("Traceback\nValueError: a bad day\n")
    running, _ = parents["pre_ln 1"]
    running.path.mkdir(parents=True)
    with FileLock(running.lock):
        plan = plan_of(spec, tmp_path)
        listed = waiting_document(plan.waiting, experiments)
        lines = waiting_lines(listed)
    assert {(cell.axes[PRESET], cell.axes[SEED]) for cell in plan.cells} == {("post_ln", 2)}
    assert {cell.parent for cell in plan.cells} == {f"parent/runs/{parents['post_ln 2'][0].name}"}
    assert len({cell.id for cell in plan.cells}) == len(plan.cells) == 2
    states = [(each["state"], each["error"]) for each in listed]
    assert states == [
        *[("missing", None)] * 2,
        *[("running", None)] * 2,
        *[("failed", "ValueError: a bad day")] * 2,
    ]
    waits = f"{crashed.name} (failed: ValueError: a bad day)"
    assert lines[2] == f"2 cells wait for parent/runs/{waits}"

    finish_parents(spec, tmp_path)
    assert lines != waiting_lines(waiting_document(plan.waiting, experiments))
    whole = plan_of(spec, tmp_path)
    assert (len(whole.cells), whole.waiting) == (8, ())
    assert {cell.id for cell in plan.cells} < {cell.id for cell in whole.cells}
    grid = Grid(spec, GridFolder(experiments / "child"), whole)
    for cell in whole.cells:
        run, _ = parents[f"{cell.axes[PRESET]} {cell.axes[SEED]}"]
        assert grid.tree(cell)["model"]["init_from"] == str(run.path)
    paths = {str(run.path) for run, _ in parents.values()}
    assert {each["init_from"] for each in grid.data} == paths


def test_a_plan_holds_while_its_parents_are_the_same(tmp_path: Path, spec: GridSpec) -> None:
    finish_parents(spec, tmp_path)
    plan = plan_of(spec, tmp_path)
    holds = partial(holds_in, plan, spec)
    assert holds(tmp_path)
    (tmp_path / "moved").mkdir()
    shutil.copytree(tmp_path / "experiments", tmp_path / "moved" / "experiments")
    assert holds(tmp_path / "moved")
    assert plan_of(spec, tmp_path / "moved") == plan
    other, identity = parents_of(spec, tmp_path / "moved")["pre_ln 1"]
    finish(other, identity, text="trained again")
    assert not holds(tmp_path / "moved")
    again = plan_of(spec, tmp_path / "moved")
    changed = [cell for cell in again.cells if cell.id not in {old.id for old in plan.cells}]
    assert [(cell.axes[PRESET], cell.axes[SEED]) for cell in changed] == [("pre_ln", 1)] * 2
    shutil.rmtree(other.path)
    assert holds(tmp_path / "moved")
    assert len(plan_of(spec, tmp_path / "moved").waiting) == 2


def test_a_plan_ends_with_the_corpus_of_its_parents(tmp_path: Path) -> None:
    """On an edited corpus the parent grid has other runs, of which the old ones say nothing."""
    child = {"base_config": {"data": {"name": "rte"}}}
    spec = read_spec(write(tmp_path, child, base_config={"data": {"name": "books"}}))
    finish_parents(spec, tmp_path)
    folder = GridFolder(tmp_path / "experiments" / "child")
    folder.path.mkdir()
    Grid(spec, folder, plan_of(spec, tmp_path)).save()
    plan: Any = load_plan(folder.plan)
    assert plan == plan_of(spec, tmp_path)
    digests = {"books": stand_in.CORPUS, "rte": stand_in.CORPUS}

    def corpus(data: Any) -> str | None:
        if (found := digests[data["name"]]) == "gone":
            raise UserError("data.root: not a folder")
        return found

    holds = partial(holds_in, plan, spec, tmp_path, corpus)
    assert holds()
    digests["books"] = "1" * 64
    assert not holds()
    digests["books"] = "gone"
    assert holds()


def test_a_grid_may_continue_another_and_its_plan_ends_with_their_parents(tmp_path, spec) -> None:
    last, parents = grid_of_child(tmp_path), parents_of(spec, tmp_path)
    copy = tmp_path / "grid.yaml"
    copy.write_text(yaml.safe_dump(last.tree()))
    assert read_spec(copy).tree() == last.tree()
    assert waiting_lines(waiting_document(plan_of(last, tmp_path).waiting, tmp_path)) == [
        "8 cells wait for a run that has no id yet (waiting)"
    ]
    finish_parents(spec, tmp_path)
    waiting = plan_of(last, tmp_path).waiting
    names = {f"child/runs/{cell.name}" for cell in plan_of(spec, tmp_path).cells}
    assert {cell.parent for cell in waiting} == names
    for cell in plan_of(spec, tmp_path).cells:
        finish(RunFolder(tmp_path / "experiments/child/runs" / cell.name), cell.id)
    plan = plan_of(last, tmp_path)
    assert len(plan.cells) == 8
    holds = partial(holds_in, plan, last, tmp_path)
    assert holds()
    again, identity = parents["post_ln 2"]
    finish(again, identity, text="trained again")
    assert not holds()
    assert len(plan_of(last, tmp_path).waiting) == 2


def test_only_a_supervisor_that_is_alone_takes_up_new_parents(tmp_path: Path, spec) -> None:
    """Beside others the set of cells stays as it is, so that they share one queue."""
    folder, parents = GridFolder(tmp_path / "experiments" / "child"), parents_of(spec, tmp_path)
    folder.runs.mkdir(parents=True)
    grid = partial(current, spec, tmp_path)

    assert len(grid(alone=True).cells) == 0
    finish_parents(spec, tmp_path)
    assert len(grid(alone=False).cells) == 0
    assert len(grid(alone=True).cells) == 8
    saved: Any = load_plan(folder.plan)
    assert saved == grid(alone=False).plan
    assert saved.waiting == ()

    again, identity = parents["pre_ln 1"]  # is trained again
    again.result.unlink()
    plan = grid().plan
    assert {cell.parent for cell in plan.waiting} == {f"parent/runs/{again.name}"}
    assert (len(plan.cells), len(plan.waiting)) == (6, 2)
    finish(again, identity)
    assert grid().plan == saved

    lost = next(cell for cell in saved.cells if cell.axes[PRESET] == "pre_ln")
    finish(place_run(folder, lost.name, lost.id), lost.id)
    shutil.rmtree(tmp_path / "experiments" / lost.parent)
    assert grid(alone=True).plan == saved
    replace_plan = replace(saved, made_from="an earlier program")
    Grid(spec, folder, replace_plan).save()
    with pytest.raises(UserError, match=r"finished cells started"):
        grid(alone=True)
    assert load_plan(folder.plan) == replace_plan


def test_the_steps_of_a_child_may_follow_its_task(tmp_path: Path) -> None:
    axes = {
        "data.name": ["rte", "cola"],
        "trainer.max_steps": {"data.name": {"cola": 7, "rte": 5}},
        **{key: PARENT["axes"][key] for key in MATCH},
    }
    spec = read_spec(write(tmp_path, {"axes": axes}))
    finish_parents(spec, tmp_path)
    experiments = tmp_path / "experiments"
    plan, configs = expand(spec, stand_in.resolve, stand_in.identify, experiments)
    assert (len(plan.cells), plan.excluded) == (8, 0)
    for cell, config in zip(plan.cells, configs, strict=True):
        steps = {"rte": 5, "cola": 7}[config["data"]["name"]]
        assert config["trainer"]["max_steps"] == cell.axes["trainer.max_steps"] == steps
        grid = Grid(spec, GridFolder(experiments / "child"), plan)
        assert stand_in.resolve(grid.tree(cell), "cell") == config
    assert is_valid(plan, spec, lambda data: stand_in.CORPUS, experiments)


def test_a_report_counts_the_cells_that_wait(tmp_path: Path, spec: GridSpec) -> None:
    finish(*parents_of(spec, tmp_path)["pre_ln 1"])
    folder = GridFolder(tmp_path / "experiments" / "child")
    grid = Grid(spec, folder, plan_of(spec, tmp_path))
    grid.save()
    finish(grid.run(grid.cells[0]), grid.cells[0].id)
    said = state_counts(read_results(folder.path))
    assert said.startswith("1 of 8 planned cells finished: ")
    assert "6 waiting for" in said


def test_a_parent_without_finite_weights_is_a_parent(tmp_path: Path, spec: GridSpec) -> None:
    for number, (run, identity) in enumerate(parents_of(spec, tmp_path).values()):
        finish(run, identity, loss=6.1 if number else None)
        if not number:
            run.checkpoint("last").unlink()
    plan = plan_of(spec, tmp_path)
    assert len(plan.cells) == 8
    assert [name.endswith("@non_finite") for name in plan.parents.values()] == [True, *[False] * 3]


def continues(match: Any = MATCH, grid: str = "sub/parent.yaml") -> dict[str, Any]:
    return {"init_from": {"grid": grid, "match": match}}


REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"init_from": "parent"}, {}, "init_from: expected a mapping"),
    (continues(grid=""), {}, "init_from: grid: expected"),
    (continues([]), {}, "init_from: match: expected a"),
    (continues([*MATCH, *MATCH]), {}, "init_from: match: expected a list of different"),
    (continues(grid="sub/nowhere.yaml"), {}, "sub/nowhere.yaml: "),
    (continues(grid="child.yaml"), {}, "the grid continues itself"),
    ({"init_from": {"gird": "child.yaml", "match": MATCH}}, {}, "did you mean 'grid'?"),
    ({"name": "parent"}, {}, "init_from.grid: has the name of this grid, 'parent'"),
    ({"base_config": {"model": {"init_from": "x"}}}, {}, "cannot be combined with model.init_from"),
    ({"axes": {"model.init_from": ["x"]}}, {}, "cannot be combined with model.init_from"),
    ({}, {"checkpoints": "best"}, "keeps checkpoints: best"),
    ({}, {"pruner": "median"}, "has a pruner"),
    (continues(["model.block.prest"]), {}, "did you mean 'model.block.preset'?"),
    (continues([PRESET]), {}, f"'parent' has 2 cells with {PRESET}=post_ln (such as post_ln-seed1"),
    ({"axes": {PRESET: ["sas"], SEED: [1]}}, {}, f"has no cell with {PRESET}=sas, {SEED}=1"),
]


@pytest.mark.parametrize(("child", "parent", "said"), REFUSED)
def test_a_mistake_is_refused_in_one_line(tmp_path, child, parent, said: str) -> None:
    path = write(tmp_path, child, **parent)
    with pytest.raises(UserError, match=told(said)) as error:
        plan_of(read_spec(path), tmp_path)
    assert str(error.value).startswith(str(path))
    assert "\n" not in str(error.value)
    assert not (tmp_path / "experiments").exists()


@pytest.mark.slow
def test_both_grids_may_be_killed_at_any_time(world: World) -> None:
    """One cell at a time: each has one result, and each child started from its own parent."""
    seeds = {SEED: [1, 2, 3]}
    child = write(world.root, {"axes": CHILD["axes"] | seeds}, axes=PARENT["axes"] | seeds)
    parent, folder = world.root / "sub" / "parent.yaml", world.root / "experiments"
    for grid, cells in ((parent, 6), (child, 12)):
        world.grid, world.folder = grid, folder / grid.stem
        seen = 0
        while seen < 2:
            supervisor = world.start(workers=1)
            before = len(world.lines("end"))
            world.wait_for(lambda before=before: len(world.lines("end")) > before)
            supervisor.kill()
            supervisor.wait()
            seen += 1
            if grid == parent:
                other = world.grid, world.folder
                world.grid, world.folder = child, folder / "child"
                assert world.run().returncode == 0  # what can start does
                world.grid, world.folder = other
        assert world.run().returncode == 0
        runs = world.runs()
        assert (len(runs), {run.state for run in runs.values()}) == (cells, {"done"})
    ends = [line[1] for line in world.lines("end")]
    assert len(ends) == len(set(ends)) == 18
    for cell in world.plan().cells:
        config = yaml.safe_load((world.folder / "runs" / cell.name / "config.yaml").read_text())
        there = yaml.safe_load((folder / cell.parent / "config.yaml").read_text())
        assert config["model"]["init_from"] == str(folder / cell.parent)
        assert config["model"]["block"] == there["model"]["block"]
        assert config["seed_everything"] == there["seed_everything"]
