import json
import os
import random
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import World
from optuna.trial import TrialState

from lightning_app.commands.grid import status_command
from lightning_app.core.errors import UserError
from lightning_app.grids.doctor import doctor_command
from lightning_app.report.results import damaged_files
from lightning_app.report.results import read_results as read_folder
from lightning_app.runs.records import read_result, sealed

pytestmark = pytest.mark.xdist_group("doctor")  # what they share is made once

CELLS = 4


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> World:
    """A finished grid of four cells, made once and copied by every test."""
    world = World(tmp_path_factory.mktemp("finished"))
    world.write(seeds=1, delay=0, steps=1)
    assert world.run().returncode == 0
    return world


@pytest.fixture
def sick(world: World, finished: World) -> World:
    """A copy of the finished grid, to be damaged."""
    shutil.copytree(finished.root, world.root, dirs_exist_ok=True, symlinks=True)
    return world


def examine(world: World, fix: bool = False, storage: str | None = None) -> int:
    experiments = world.folder.parent
    return doctor_command(world.grid, experiments, storage=storage, fix=fix, program="stand_in")


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(files)}


def a_run(world: World, number: int = 0) -> Path:
    return sorted((world.folder / "runs").iterdir())[number]


def assert_one_result_each(world: World) -> None:
    """Run what is missing; then each cell has one result, and the study says the same."""
    done = world.run()
    assert done.returncode == 0, done.stderr
    grid = world.value()
    assert [grid.state(cell).state for cell in grid.cells] == ["done"] * CELLS
    trials = world.study().get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    assert sorted(trial.user_attrs["cell"] for trial in trials) == sorted(c.id for c in grid.cells)


def test_a_finished_grid_is_sound_and_stays_as_it_is(
    sick: World, capsys: pytest.CaptureFixture[str]
) -> None:
    before = contents(sick.folder.parent)
    assert examine(sick) == 0
    assert capsys.readouterr().out.endswith("tiny: 4 cells: sound\n")
    assert contents(sick.folder.parent) == before


def test_mending_what_is_sound_changes_no_file(sick: World) -> None:
    before = contents(sick.folder.parent)
    assert examine(sick, fix=True) == 0
    after = contents(sick.folder.parent)
    for name in ("tiny/.supervisor.json", "tiny/optuna.journal"):  # Optuna notes that it was opened
        del before[name], after[name]
    assert after == before


def edit(name: str, **changes: object) -> Callable[[World], None]:
    """Change fields of a JSON file of the first run; None removes one."""

    def damage(world: World) -> None:
        path = a_run(world) / name
        tree = json.loads(path.read_text()) | changes
        path.write_text(json.dumps({k: v for k, v in tree.items() if v != "gone"}))

    return damage


def write(name: str, data: bytes) -> Callable[[World], None]:
    def damage(world: World) -> None:
        path = a_run(world) / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)

    return damage


def of_grid(name: str, data: bytes | None) -> Callable[[World], None]:
    def damage(world: World) -> None:
        path = world.folder / name
        if data is None:
            path.unlink()
        else:
            path.write_bytes(data)

    return damage


def truncate(name: str, kept: int) -> Callable[[World], None]:
    def damage(world: World) -> None:
        path = next(world.folder.glob(name))
        os.truncate(path, path.stat().st_size + kept if kept < 0 else kept)

    return damage


def truncate_lines(name: str, kept: int) -> Callable[[World], None]:
    def damage(world: World) -> None:
        path = a_run(world) / name
        path.write_text("".join(path.read_text().splitlines(keepends=True)[:kept]))

    return damage


def copy_config_of_another(world: World) -> None:
    shutil.copyfile(a_run(world, 1) / "config.yaml", a_run(world) / "config.yaml")


def copy_result_of_another(world: World) -> None:
    shutil.copyfile(a_run(world, 1) / "result.json", a_run(world) / "result.json")


def prune_as_well(world: World) -> None:
    result = json.loads((a_run(world) / "result.json").read_text())
    pruned = {**result, "status": "pruned", "step": 1, "value": 4.0}
    (a_run(world) / "pruned.json").write_text(json.dumps(pruned))


def run_is_a_file(world: World) -> None:
    folder = a_run(world)
    folder.unlink()
    folder.write_text("no folder")


def copy_of_a_run(world: World) -> None:
    shutil.copytree(a_run(world), world.folder / "runs" / "copy of it")


def in_the_grid(world: World) -> None:
    link = a_run(world)
    link.resolve().rename(world.folder / "runs" / "renamed")
    link.unlink()


def edit_plan(world: World) -> None:
    path = world.folder / "plan.json"
    path.write_text(path.read_text().replace('"post_ln-', '"past_ln-'))


def damaged_in_the_middle(world: World) -> None:
    path = world.folder / "optuna.journal"
    path.write_bytes(path.read_bytes().replace(b'"op_code"', b'"op_co\xffe"', 2))


DAMAGES: dict[str, tuple[Callable[[World], None], str]] = {
    "torn result": (truncate("runs/*/result.json", -9), "result.json: torn or damaged"),
    "empty result": (write("result.json", b""), "result.json: torn or damaged"),
    "result in no UTF-8": (write("result.json", b"\xff{}"), "result.json: torn or damaged"),
    "list as result": (write("result.json", b"[1]"), "expected a JSON object, found list"),
    "NaN": (edit("result.json", unigram_entropy=float("nan")), "holds NaN, which is not JSON"),
    "missing field": (edit("result.json", metrics="gone"), "metrics: no value"),
    "wrong type": (edit("result.json", seconds="long"), "seconds: expected a number"),
    "wrong status": (edit("result.json", status="fine"), "status: expected 'ok' or"),
    "contradiction": (edit("result.json", status="diverged"), "contradict each other"),
    "metric gone": (edit("result.json", metrics={"val/bleu": 1.0}), "reports no finite 'val/nll'"),
    "ok without a loss": (edit("result.json", metrics={"val/nll": None}), "reports no finite"),
    "result of another": (copy_result_of_another, "is not the planned"),
    "config of another": (copy_config_of_another, "config.yaml is of another experiment"),
    "config gone": (lambda world: (a_run(world) / "config.yaml").unlink(), "config.yaml: missing"),
    "config torn": (truncate("runs/*/config.yaml", 70), "config.yaml: torn or damaged"),
    "config cut": (truncate_lines("config.yaml", 5), "config.yaml: torn or damaged: lacks"),
    "config a word": (write("config.yaml", b"word\n"), "expected a YAML mapping, found str"),
    "pruned as well": (prune_as_well, "pruned.json: a pruned run has no result.json"),
    "pruned damaged": (write("pruned.json", b"{"), "pruned.json: torn or damaged"),
    "run a file": (run_is_a_file, "is not a folder"),
    "copy": (copy_of_a_run, "copy of it: is a second folder of"),
    "in the grid": (in_the_grid, "renamed: lies in the folder of its grid"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_found_and_mended(
    sick: World, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    damage, words = DAMAGES[name]
    damage(sick)
    before = contents(sick.folder.parent)
    assert examine(sick) == 1
    assert words in capsys.readouterr().out
    assert contents(sick.folder.parent) == before
    results = {data for name, data in before.items() if "result.json" in name}

    assert examine(sick, fix=True) == 0
    assert words in capsys.readouterr().out
    after = contents(sick.folder.parent)
    assert results <= {data for name, data in after.items() if "result.json" in name}
    assert examine(sick) == 0
    assert capsys.readouterr().out.endswith("tiny: 4 cells: sound\n")

    assert_one_result_each(sick)
    assert examine(sick) == 0


def test_a_sound_result_survives_the_loss_of_its_config(sick: World) -> None:
    """The config comes back from the grid file, so the cell need not run again."""
    config = a_run(sick) / "config.yaml"
    before = config.read_bytes()
    config.write_bytes(before[: len(before) // 2])
    starts = len(sick.lines("start"))
    assert examine(sick, fix=True) == 0
    assert config.read_bytes() == before
    assert_one_result_each(sick)
    assert len(sick.lines("start")) == starts


RUN_REPAIRS: dict[str, Callable[[World], None]] = {
    "no plan": of_grid("plan.json", None),
    "torn plan": truncate("plan.json", 100),
    "plan a list": of_grid("plan.json", b"[]"),
    "edited plan": edit_plan,
    "no grid.yaml": of_grid("grid.yaml", None),
    "torn grid.yaml": truncate("grid.yaml", 40),
    "no journal": of_grid("optuna.journal", None),
    "torn journal": truncate("optuna.journal", -30),
    "damaged journal": damaged_in_the_middle,
    "part": write("attempts/1/.progress.json.part", b"{"),
    "attempts a file": lambda world: (
        shutil.rmtree(a_run(world) / "attempts"),
        write("attempts", b"")(world),
    )[1],
}


@pytest.mark.parametrize("name", RUN_REPAIRS)
def test_what_run_repairs_needs_no_doctor(sick: World, name: str) -> None:
    before = contents(sick.folder.parent)
    RUN_REPAIRS[name](sick)
    starts = len(sick.lines("start"))
    assert_one_result_each(sick)
    assert len(sick.lines("start")) == starts
    after = contents(sick.folder.parent)
    for kept in ("tiny/plan.json", "tiny/grid.yaml"):
        assert after[kept] == before[kept]
    assert examine(sick) == 0


def test_a_link_out_of_the_store_is_replaced_and_what_it_leads_to_stays(
    sick: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    link, outside = a_run(sick), tmp_path / "outside"
    link.resolve().rename(outside)
    link.unlink()
    link.symlink_to(outside)
    before = contents(outside)
    with pytest.raises(UserError, match=f"{outside}"):
        status_command(sick.grid, sick.folder.parent)
    assert examine(sick, fix=True) == 0
    assert f"{outside}" in capsys.readouterr().out
    assert contents(outside) == before
    assert sorted(run.state for run in sick.runs().values()) == ["done"] * 3 + ["missing"]


def test_folders_of_another_grid_are_a_note(
    sick: World, capsys: pytest.CaptureFixture[str]
) -> None:
    (sick.folder / "runs" / "of another").mkdir()
    assert examine(sick, fix=True) == 0
    assert "note: " in (out := capsys.readouterr().out)
    assert "1 names that" in out


def test_a_grid_that_grew_is_planned_again_and_keeps_its_results(
    sick: World, capsys: pytest.CaptureFixture[str]
) -> None:
    """Names may change with the axes; a run lies where its id says."""
    sick.write(seeds=2, delay=0, steps=1, axes={"model.optimizer.lr": [0.1, 0.2]})
    assert examine(sick) == 0
    assert "12 cells have" in capsys.readouterr().out
    starts = len(sick.lines("start"))
    assert sick.run().returncode == 0
    assert {run.state for run in sick.runs().values()} == {"done"}
    assert len(sick.lines("start")) - starts == 16 - CELLS
    assert examine(sick) == 0


def test_unfinished_cells_are_a_note(sick: World, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(a_run(sick).resolve())
    (sick.folder / "optuna.journal").unlink()
    assert examine(sick, fix=True) == 0
    assert "1 cells have" in capsys.readouterr().out
    assert_one_result_each(sick)


def test_a_killed_supervisor_leaves_what_mends_itself(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    world.write(seeds=1, delay=0.3, steps=20)
    supervisor = world.start()
    world.wait_for(lambda: len(world.lines("start")) == 2)
    assert examine(world) == 0  # changes nothing while cells run
    assert "2 running now" in capsys.readouterr().out
    with pytest.raises(UserError, match="already running this"):
        examine(world, fix=True)
    os.kill(supervisor.pid, signal.SIGKILL)
    world.assert_nothing_left()
    assert examine(world) == 0
    assert examine(world, fix=True) == 0


def test_a_pruned_run_is_over_where_the_grid_prunes(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    axes = {"model.schedule.warmup_steps": [0]}
    world.write(seeds=2, delay=0, steps=1, axes=axes, pruner="median")
    assert world.run().returncode == 0
    prune_as_well(world)
    (a_run(world) / "result.json").unlink()
    assert examine(world, fix=True) == 0
    starts = len(world.lines("start"))
    assert world.run().returncode == 0
    assert len(world.lines("start")) == starts
    assert examine(world) == 0


def test_a_metric_that_no_run_reports_is_a_mistake_of_the_grid(
    sick: World, capsys: pytest.CaptureFixture[str]
) -> None:
    sick.write(seeds=1, delay=0, steps=1, metric={"name": "val/accuracy", "mode": "max"})
    before = {name: data for name, data in contents(sick.folder.parent).items() if "runs/" in name}
    assert examine(sick, fix=True) == 1
    assert "'val/accuracy'; set metric.name in" in capsys.readouterr().out
    assert {n: d for n, d in contents(sick.folder.parent).items() if "runs/" in n} == before


def test_no_folder_is_a_mistake(world: World) -> None:
    with pytest.raises(UserError, match="`ablate run`"):
        examine(world)


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may write everywhere")
def test_a_folder_that_cannot_be_written(sick: World, capsys: pytest.CaptureFixture[str]) -> None:
    a_run(sick).chmod(0o500)
    try:
        assert examine(sick, fix=True) == 1
    finally:
        a_run(sick).chmod(0o700)
    assert "cannot be written" in capsys.readouterr().out


def damage_at_random(folder: Path, chance: random.Random) -> str:
    """Damage one file of a grid's folder as disks, editors and people do; say what was done."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != ".lock")
    path = chance.choice(files)
    data = bytearray(path.read_bytes())
    kind = chance.choice(("truncate", "delete", "flip", "copy", "garbage", "swap"))
    if kind == "truncate":
        path.write_bytes(data[: chance.randrange(len(data) + 1)])
    elif kind == "delete":
        path.unlink()
    elif kind == "flip" and data:
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        path.write_bytes(data)
    elif kind == "copy":
        folder_of_run = chance.choice(sorted((folder / "runs").iterdir()))
        if folder_of_run.is_dir():
            shutil.copytree(folder_of_run, folder / "runs" / f"copy{chance.random()}")
    elif kind == "garbage":
        path.write_bytes(chance.randbytes(chance.randrange(200)))
    else:
        other = chance.choice([each for each in files if each.name == path.name])
        content = other.read_bytes()
        other.write_bytes(data)
        path.write_bytes(content)
    return f"{kind} {path.relative_to(folder)}"


def chaos(world: World, finished: World, seed: int, damages: int) -> None:
    """Damage a finished grid, mend it, run it: one result a cell, no result lost on the way."""
    shutil.rmtree(world.root)
    shutil.copytree(finished.root, world.root, symlinks=True)
    chance = random.Random(seed)
    done = [damage_at_random(world.folder, chance) for _ in range(damages)]
    results = {
        path.read_bytes() for path in world.root.rglob("result.json*") if path.stat().st_size
    }
    assert examine(world, fix=True) == 0, (seed, done)
    kept = {path.read_bytes() for path in world.root.rglob("result.json*")}
    assert results <= kept, (seed, done)
    assert examine(world) == 0, (seed, done)
    assert_one_result_each(world)
    assert examine(world) == 0, (seed, done)


@pytest.mark.parametrize("seed", range(6))
def test_random_damage_is_mended(world: World, finished: World, seed: int) -> None:
    chaos(world, finished, seed, damages=4)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 120))
def test_much_random_damage_is_mended(world: World, finished: World, seed: int) -> None:
    chaos(world, finished, seed, damages=1 + seed % 8)


@pytest.mark.parametrize("name", ["result.json", "pruned.json"])
def test_a_run_of_a_newer_version_is_left_as_it_is(
    sick: World, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    """Neither moved nor counted nor trained again, not even where its config is another."""
    run = a_run(sick)
    record = json.loads((run / "result.json").read_text())
    (run / "result.json").unlink()
    (run / name).write_text(json.dumps({**record, "schema": 99}))
    copy_config_of_another(sick)
    before = contents(run)
    assert examine(sick, fix=True) == 1
    said = f"{name}: schema 99: made by a newer version of this program; update the program\n"
    assert said in capsys.readouterr().out
    assert contents(run) == before
    starts = len(sick.lines("start"))
    refused = sick.run()
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
    assert said in refused.stderr
    with pytest.raises(UserError, match=said.strip()):
        status_command(sick.grid, sick.folder.parent)
    assert len(sick.lines("start")) == starts
    assert contents(run) == before


def test_a_plan_of_a_newer_version_is_left_as_it_is(sick: World) -> None:
    path = sick.folder / "plan.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "schema": 99}))
    before = contents(sick.folder.parent)
    with pytest.raises(UserError, match=r"plan\.json: schema 99:"):
        examine(sick, fix=True)
    refused = sick.run()
    assert refused.returncode == 2
    assert "plan.json: schema 99:" in refused.stderr
    after = contents(sick.folder.parent)
    del before["tiny/.supervisor.json"], after["tiny/.supervisor.json"]
    assert after == before


def test_all_commands_agree_on_a_result_without_a_finite_loss(
    sick: World, capsys: pytest.CaptureFixture[str]
) -> None:
    path = a_run(sick) / "result.json"
    record = json.loads(path.read_text())
    path.write_text(json.dumps({**record, "metrics": {**record["metrics"], "val/nll": None}}))
    said = "reports no finite 'val/nll', though its status is ok"
    with pytest.raises(UserError, match=f"{path}: {said}; `ablate doctor tiny --fix` moves it"):
        status_command(sick.grid, sick.folder.parent)
    refused = sick.run()
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
    assert said in refused.stderr
    assert damaged_files(read_folder(sick.folder)) == [f"{path}: {said}"]
    assert examine(sick) == 1
    assert said in capsys.readouterr().out


def test_a_changed_digit_is_found_and_the_cell_runs_again(
    sick: World, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every command sees it: none counts the cell."""
    run = a_run(sick)
    path = run / "result.json"
    path.write_text(json.dumps(sealed(json.loads(path.read_text()), run)))
    assert examine(sick) == 0
    changed = json.loads(path.read_text())
    changed["metrics"]["val/nll"] -= 1.0
    path.write_text(json.dumps(changed))
    with pytest.raises(UserError, match="seal"):
        sick.runs()
    cells = read_folder(sick.folder).cells
    assert [cell.state for cell in cells if cell.folder == run] == ["damaged"]
    assert examine(sick) == 1
    assert "seal" in capsys.readouterr().out
    assert examine(sick, fix=True) == 0
    assert (run / "result.json.damaged").is_file()
    assert_one_result_each(sick)


def test_a_config_that_is_written_again_is_sealed_again(sick: World) -> None:
    run = a_run(sick)
    path = run / "result.json"
    path.write_text(json.dumps(sealed(json.loads(path.read_text()), run)))
    (run / "config.yaml").write_text("seed_everything: 1\ntrainer: {")
    assert examine(sick, fix=True) == 0
    assert read_result(path, json.loads(path.read_text())["id"]) is not None
    assert not (run / "result.json.damaged").exists()
