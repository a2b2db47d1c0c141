"""The store of runs: what a link may be, what grids share, and how a former folder moves in."""

import errno
import json
import os
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import World

from lightning_app.commands.grid import plan_command, status_command
from lightning_app.config.config import resolve
from lightning_app.config.experiment import identity_of
from lightning_app.config.grid import read_spec
from lightning_app.core.errors import UserError
from lightning_app.grids.plan import Grid, expand, load_plan
from lightning_app.grids.supervisor import current_grid
from lightning_app.report.results import read_results as read_folder
from lightning_app.runs.folder import STORE, GridFolder, RunFolder
from lightning_app.runs.locks import is_held, run_lock
from lightning_app.runs.records import Plan
from lightning_app.runs.store import (
    drop_links,
    link_run,
    locate_run,
    place_run,
    put_aside,
    stored,
    superseded,
    trim_checkpoints,
)
from tests.told import told

FORMER = Path(__file__).parent / "made_at_4ea995c"
Edit = Callable[[dict[str, Any]], object]


@pytest.fixture
def former(tmp_path: Path) -> Path:
    """A grid and its folder as commit 4ea995c has left them."""
    shutil.copytree(FORMER / "former", tmp_path / "experiments" / "former")
    shutil.copy(FORMER / "former.yaml", tmp_path)
    return tmp_path


def planned(root: Path, name: str = "former", **changes: Any) -> Grid:
    """The grid with changes to its file, and with a new plan."""
    tree = yaml.safe_load((FORMER / "former.yaml").read_text()) | {"name": name}
    for key, value in changes.items():
        tree[key] = tree[key] | value if isinstance(value, dict) else value
    grid = root / f"{name}.yaml"
    grid.write_text(yaml.safe_dump(tree))
    return grid_of(grid)


def grid_of(path: Path) -> Grid:
    spec = read_spec(path)
    folder = GridFolder(path.parent / "experiments" / spec.name)
    return Grid(spec, folder, expand(spec, resolve, identity_of)[0])


def into_store(former: Path) -> None:
    """Move the runs of the former grid to where its later versions train them."""
    grid = planned(former)
    store = former / "experiments" / STORE
    store.mkdir()
    for cell in grid.cells:
        grid.folder.link(cell.name).rename(store / cell.id)
        link_run(grid.folder, cell.name, cell.id)


def states(grid: Grid) -> list[str]:
    return [grid.state(cell).state for cell in grid.cells]


def edit(path: Path, change: Edit) -> None:
    tree = yaml.safe_load(path.read_text())
    change(tree)
    path.write_text(json.dumps(tree) if path.suffix == ".json" else yaml.safe_dump(tree))


def test_a_folder_of_4ea995c_is_finished_for_every_command(former: Path, capsys) -> None:
    grid, experiments = former / "former.yaml", former / "experiments"
    folder = experiments / "former"
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert status_command(grid, experiments) == 0
    assert told("former: 4 cells: 1 … , 3 stalled").search(capsys.readouterr().out)
    assert plan_command(grid, experiments) == 0
    assert "4 cells, 0 excluded, 4 done, 0 failed, 0" in capsys.readouterr().out
    assert len(read_folder(folder).finished) == 4
    assert {path: path.read_bytes() for path in before} == before  # these were looks
    then: Any = load_plan(folder / "plan.json")
    spec = read_spec(grid)
    make = partial(expand, spec, resolve, identity_of)
    made = current_grid(spec, GridFolder(folder), lambda: make()[0], alone=True)
    assert made.plan.cells == then.cells
    assert states(made) == ["done"] * 4


def test_a_plan_of_schema_1_is_refused_and_stays(former: Path) -> None:
    path = former / "experiments/former/plan.json"
    edit(path, lambda tree: tree.update(schema=1))
    before = path.read_bytes()
    said = r"plan.json: schema 1: .* commit \w{7} is the last to read; move its folder away"
    for command in (
        lambda: read_folder(path.parent),
        lambda: status_command(former / "former.yaml", former / "experiments"),
    ):
        with pytest.raises(UserError, match=said):
            command()
    assert path.read_bytes() == before


def test_cells_are_finished_for_every_grid_and_under_every_name(former: Path, capsys) -> None:
    other = planned(former, name="other", checkpoints="none")
    assert states(other) == ["missing"] * 4  # in the folder of the other grid they are its own
    into_store(former)
    assert states(other) == ["done"] * 4
    capsys.readouterr()
    assert plan_command(former / "other.yaml", former / "experiments") == 0
    assert "4 cells, 0 excluded, 4 done, 0 failed, 0" in capsys.readouterr().out
    assert states(planned(former)) == ["done"] * 4
    # A value or an axis that goes, or names that change, lose no run.
    fewer = {"model.block.preset": ["pre_ln"], "model.schedule.warmup_steps": [2]}
    grid = planned(former, axes=fewer)
    assert states(grid) == ["done"]
    drop_links(grid.folder, {cell.name for cell in grid.cells})
    assert [path.name for path in grid.folder.runs.iterdir()] == [grid.cells[0].name]
    tree = yaml.safe_load((FORMER / "former.yaml").read_text())
    tree["base_config"]["model"]["schedule"]["warmup_steps"] = 2
    tree["axes"] = {"model.block.preset": ["pre_ln"]}
    (former / "former.yaml").write_text(yaml.safe_dump(tree))
    assert states(grid_of(former / "former.yaml")) == ["done"]
    assert states(planned(former)) == ["done"] * 4


def test_a_look_does_not_rewrite_a_plan(former: Path, capsys: pytest.CaptureFixture[str]) -> None:
    grid, experiments = former / "former.yaml", former / "experiments"
    before = [(experiments / "former" / name).read_bytes() for name in ("grid.yaml", "plan.json")]
    assert plan_command(grid, experiments) == 0
    capsys.readouterr()
    tree = yaml.safe_load(grid.read_text())
    tree["axes"]["seed_everything"] = [1, 2]
    (former / "wider.yaml").write_text(yaml.safe_dump(tree))
    assert plan_command(former / "wider.yaml", experiments) == 0
    assert "8 cells, 0 excluded, 0 done, 0 failed, 8" in capsys.readouterr().out
    into_store(former)
    assert plan_command(former / "wider.yaml", experiments) == 0
    assert "8 cells, 0 excluded, 4 done, 0 failed, 4" in capsys.readouterr().out
    after = [(experiments / "former" / name).read_bytes() for name in ("grid.yaml", "plan.json")]
    assert after == before
    assert status_command(grid, experiments) == 0
    with pytest.raises(UserError, match="its axes differ"):
        status_command(former / "wider.yaml", experiments)


def test_a_plan_holds_no_longer_once_its_corpus_is_edited(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for split in ("train", "valid", "test"):
        (corpus / f"{split}.de").write_text("eins\nzwei\n")
        (corpus / f"{split}.en").write_text("one\ntwo\n")
    data = {"name": "text", "root": str(corpus), "tokenizer": "word", "vocab_size": None}
    base = yaml.safe_load((FORMER / "former.yaml").read_text())["base_config"] | {"data": data}
    grid = planned(tmp_path, base_config=base)
    grid.folder.path.mkdir(parents=True)
    made = []

    def make() -> Plan:
        made.append(expand(grid.spec, resolve, identity_of)[0])
        return made[-1]

    def current(alone: bool) -> Grid:
        return current_grid(grid.spec, grid.folder, make, alone)

    assert current(alone=True).plan == grid.plan
    assert current(alone=True).plan == grid.plan
    assert len(made) == 1
    grid.folder.specification.write_text("[torn")
    assert current(alone=True).plan == grid.plan
    assert read_spec(grid.folder.specification).tree() == grid.spec.tree()
    grid.folder.plan.write_text("{")
    assert current(alone=True).plan == grid.plan
    assert len(made) == 2
    (corpus / "train.de").write_text("eins\ndrei\n")
    again = current(alone=True)
    assert len(made) == 3
    assert not {cell.id for cell in again.cells} & {cell.id for cell in grid.cells}
    (corpus / "train.de").write_text("eins\nvier\n")
    with pytest.raises(UserError, match=r"has changed while"):
        current(alone=False)


ID, OTHER = "0123456789abcdef", "f" * 16


@pytest.fixture
def grid(tmp_path: Path) -> GridFolder:
    folder = GridFolder(tmp_path / "experiments" / "grid")
    folder.runs.mkdir(parents=True)
    return folder


def test_a_run_lies_where_its_id_says_with_one_lock_and_the_names_of_its_grids(grid) -> None:
    store = grid.experiments / STORE
    assert locate_run(grid, "name", ID).path == grid.runs / "name"  # nothing is there yet
    run = place_run(grid, "name", ID)
    assert run.path == grid.runs / "name"
    assert os.readlink(run.path) == f"../../{STORE}/{ID}"
    assert run.path.resolve() == (store / ID).resolve()
    other = GridFolder(grid.experiments / "other")
    assert locate_run(other, "its name", ID).path == store / ID  # without a link
    link_run(other, "its name", ID)
    assert locate_run(other, "its name", ID).path == other.runs / "its name"
    assert run.grids() == {"grid": "name", "other": "its name"}
    assert (run.grid, RunFolder(store / ID).grid) == ("grid", None)
    with run_lock(run):
        theirs = place_run(other, "other name", ID)
        assert is_held(theirs.lock)
        with pytest.raises(UserError, match="is training this"), run_lock(theirs):
            pass
    shutil.rmtree(other.path)
    drop_links(grid, {"another name"})
    assert not run.path.exists()
    assert RunFolder(store / ID).grids() == {}  # the links are gone, the run is not
    link_run(grid, "of no run", OTHER)
    assert list(grid.runs.iterdir()) == []


WRONG: dict[str, tuple[Callable[[Path, Path], object], str]] = {
    "out of the store": (lambda link, place: link.symlink_to(link.parents[3]), "is a link to /"),
    "another run": (
        lambda link, place: link.symlink_to(f"../../{STORE}/{OTHER}"),
        f"is a link to ../../{STORE}/{OTHER}, expected one to ../../{STORE}/{ID}",
    ),
    "a link to itself": (lambda link, place: link.symlink_to(link.name), "is a link to name"),
    "a file": (lambda link, place: link.write_text(""), "is not a folder"),
    "a pipe": (lambda link, place: os.mkfifo(link), "is not a folder"),
    "a link in the store": (lambda link, place: place.symlink_to(link.parents[3]), "not a folder"),
    "a loop in the store": (lambda link, place: place.symlink_to(place.name), "is not a folder"),
    "a pipe in the store": (lambda link, place: os.mkfifo(place), "is not a folder"),
    "a file in the store": (lambda link, place: place.write_text(""), "is not a folder"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_no_link_into_the_store_is_refused(grid: GridFolder, case: str) -> None:
    make, said = WRONG[case]
    place = grid.experiments / STORE / ID
    place.parent.mkdir()
    make(grid.runs / "name", place)
    for use in (locate_run, place_run):
        with pytest.raises(UserError, match=told(said)) as caught:
            use(grid, "name", ID)
        assert "\n" not in str(caught.value)


@pytest.mark.skipif(os.geteuid() != 0, reason="only the superuser may give folders away")
def test_a_run_of_a_foreign_owner_is_refused(grid: GridFolder) -> None:
    place = grid.experiments / STORE / ID
    place.mkdir(parents=True)
    os.chown(place, 12345, 12345)
    with pytest.raises(UserError, match=r"\(uid 12345\)"):
        locate_run(grid, "name", ID)
    os.chown(place.parent, 12345, 12345)  # the owner of the whole store
    assert locate_run(grid, "name", ID).path == place


@pytest.mark.parametrize("name", ["..", "a/b", "", "/etc", f"../{ID}"])
def test_an_id_or_a_name_leads_nowhere_else(grid: GridFolder, name: str) -> None:
    with pytest.raises(UserError, match="expected the id"):
        stored(grid.experiments, name)
    with pytest.raises(UserError, match="expected the name"):
        locate_run(grid, name, ID)


def test_a_grid_that_was_copied_without_the_store_is_refused(grid: GridFolder) -> None:
    place_run(grid, "name", ID).result.write_text("{}")
    elsewhere = grid.experiments.parent / "elsewhere" / "grid"
    shutil.copytree(grid.path, elsewhere, symlinks=True)
    with pytest.raises(UserError, match="copy the folder"):
        locate_run(GridFolder(elsewhere), "name", ID)
    shutil.rmtree(elsewhere)
    shutil.copytree(grid.path, elsewhere)  # with links followed
    assert locate_run(GridFolder(elsewhere), "name", ID).result.is_file()


def test_a_grid_that_was_copied_beside_another_store_is_refused(grid: GridFolder) -> None:
    """Read as a grid that never started, its report would be written again without a result."""
    for name, identity in (("name", ID), ("other", OTHER)):
        place_run(grid, name, identity)
    grid.plan.write_text("{}")
    elsewhere = grid.experiments.parent / "elsewhere"
    shutil.copytree(grid.path, elsewhere / "grid", symlinks=True)
    place_run(GridFolder(elsewhere / "another"), "name", "0" * 16)
    copied = GridFolder(elsewhere / "grid")
    with pytest.raises(UserError, match="of the 2 runs linked there none"):
        locate_run(copied, "name", ID)
    copied.runs.rename(copied.path / "before")  # as the message advises
    assert not locate_run(copied, "name", ID).path.exists()
    # A grid whose runs were removed or put aside is no copy.
    shutil.rmtree(grid.experiments / STORE / OTHER)
    assert not locate_run(grid, "other", OTHER).path.exists()
    put_aside(grid.experiments, ID)
    for name, identity in (("name", ID), ("other", OTHER)):
        assert not locate_run(grid, name, identity).result.exists()


def test_without_links_a_run_lies_under_its_grid(grid: GridFolder, monkeypatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "symlink", refuse)
    run = place_run(grid, "name", ID)
    assert run.path == grid.runs / "name"
    assert not run.path.is_symlink()
    assert run.path.is_dir()
    assert not (grid.experiments / STORE / ID).exists()
    assert place_run(grid, "name", ID).path == run.path
    run.result.write_text("{}")
    assert locate_run(grid, "name", ID).result.is_file()


def test_a_folder_of_runs_on_another_disk_has_its_own(grid: GridFolder, tmp_path: Path) -> None:
    """There a relative link would lead past the store."""
    grid.runs.rmdir()
    (tmp_path / "disk" / "deep" / "down").mkdir(parents=True)
    grid.runs.symlink_to(tmp_path / "disk" / "deep" / "down")
    run = place_run(grid, "name", ID)
    assert run.path.is_dir()
    assert not run.path.is_symlink()


@pytest.mark.parametrize(
    ("mine", "other", "kept"),
    [
        ("none", "best", ["best"]),
        ("last", "best", ["best", "last"]),
        ("none", "all", ["best", "last"]),
        ("last", "none", ["last"]),
        ("none", None, ["best", "last"]),  # a single run, or a grid that cannot be read
    ],
)
def test_a_run_keeps_the_checkpoints_that_any_of_its_grids_keeps(grid, mine, other, kept) -> None:
    run = place_run(grid, "name", ID)
    second = GridFolder(grid.experiments / "second")
    link_run(second, "name", ID)
    if other is not None:
        second.specification.write_text(f"checkpoints: {other}\n")
    run.checkpoints.mkdir()
    for name in ("last", "best"):
        run.checkpoint(name).touch()
    trim_checkpoints(run, mine)
    assert sorted(path.stem for path in run.checkpoints.iterdir()) == kept
    drop_links(second, set())  # it lists the run no longer
    trim_checkpoints(run, "none")
    assert list(run.checkpoints.iterdir()) == []


def test_a_run_that_is_put_aside_leaves_its_place_to_a_new_one(grid: GridFolder) -> None:
    other = GridFolder(grid.experiments / "other")
    for number in (1, 2):
        run = place_run(grid, "name", ID)
        link_run(other, "name", ID)
        run.result.write_text(str(number))
        old = put_aside(grid.experiments, ID)
        assert old.name == f"{ID}@superseded-{number}"
        assert (old / "result.json").read_text() == str(number)
        assert not run.result.exists()
        assert run.grids() == {"grid": "name", "other": "name"}
    assert len(superseded(grid.experiments, {ID})) == 2
    assert superseded(grid.experiments, {OTHER}) == []


def test_what_a_finished_run_lacks_is_named(former: Path) -> None:
    grid = planned(former, axes={"model.schedule.warmup_steps": [2]})
    for cell in grid.cells:
        grid.run(cell).checkpoints.mkdir()
        for name in ("last", "best"):
            grid.run(cell).checkpoint(name).write_text(name)
    grid.run(grid.cells[0]).checkpoint("last").unlink()

    def lacking(**changes: Any) -> dict[str, int]:
        changed = Grid(replace(grid.spec, **changes), grid.folder, grid.plan)
        found = changed.lacking({cell.id: grid.state(cell) for cell in grid.cells})
        return {name: len(cells) for name, cells in found.items()}

    def trainer(**fields: Any) -> dict[str, Any]:
        base = grid.spec.base_config
        return {**base, "trainer": {**base["trainer"], **fields}}

    assert lacking() == {"last.ckpt": 1}
    assert lacking(checkpoints="best") == {}
    probe = {"class_path": "lightning_app.training.callbacks.probes.SignalProbe"}
    probing = trainer(callbacks=[probe])
    assert lacking(checkpoints="none", base_config=probing) == {"probes.csv": 2}
    # Probes of other steps, or others, leave other rows in the same file.
    for cell in grid.cells:
        run, all_steps = grid.run(cell), {**probe, "init_args": {"steps": None}}
        run.probes.write_text("step\n")
        edit(run.config, lambda t, of=all_steps: t["trainer"].update(callbacks=[of]))
    assert lacking(checkpoints="none", base_config=probing) == {}
    others = trainer(callbacks=[{**probe, "init_args": {"steps": [1]}}])
    assert lacking(checkpoints="none", base_config=others) == {"probes.csv": 2}
    assert lacking(base_config=trainer(enable_checkpointing=False)) == {}
    for cell in grid.cells:  # such a run may have left no checkpoint
        path = grid.run(cell).result
        edit(path, lambda t: t.update(outcome="non_finite", metrics={"val/nll": None}))
    assert lacking() == {}


def second_world(world: World, **changes: Any) -> World:
    """A grid that shares half of its cells with another one, in the same folder of experiments."""
    other = World(world.root)
    other.folder, other.grid = world.folder.with_name("second"), world.root / "second.yaml"
    other.environment, other.mark = world.environment, world.mark
    axes = {"model.schedule.warmup_steps": [30, 60]}
    other.write(name="second", axes=axes, **changes)
    world.write(**changes)
    return other


def test_two_grids_train_what_they_share_once(world: World) -> None:
    other = second_world(world, seeds=2, delay=0.05, steps=6)
    both = [world.start(), other.start()]
    for process in both:
        world.end(process)
    ids = [{cell.id for cell in each.value().cells} for each in (world, other)]
    assert len(ids[0] & ids[1]) == 4
    assert {run.state for each in (world, other) for run in each.runs().values()} == {"done"}
    assert len(world.lines("end")) == len(ids[0] | ids[1])  # each was trained once
    assert other.states()["COMPLETE"] == world.states()["COMPLETE"] == 8


# Over 5 s: two grids of cells that last 2 s.
def test_a_grid_goes_on_with_what_a_killed_one_has_begun(world: World) -> None:
    other = second_world(world, seeds=1, delay=0.2, steps=10)
    first = world.start(workers=4)
    world.wait_for(lambda: len(world.lines("start")) == 4)
    second = other.start(workers=4)
    world.wait_for(lambda: len(world.lines("start")) == 6)  # two of its four are being trained
    os.kill(first.pid, signal.SIGKILL)
    world.end(second)
    assert {run.state for run in other.runs().values()} == {"done"}
    assert world.run().returncode == 0
    ids = {cell.id for each in (world, other) for cell in each.value().cells}
    assert len(world.lines("end")) == len(ids)
