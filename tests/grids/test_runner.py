import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator

import psutil
import pytest
import yaml
from conftest import World  # pyright: ignore[reportMissingImports]

from lightning_app.grids.slots import default_workers
from lightning_app.runs.folder import STORE
from tests import warm
from tests.told import told


def cells_of(world: World) -> list[psutil.Process]:
    """The processes that train now, by the pids that they wrote down themselves."""
    ended = {tuple(line[1:3]) for line in world.lines("end")}
    pids = [int(line[3]) for line in world.lines("start") if tuple(line[1:3]) not in ended]
    return [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]


def kill_group(process: warm.Process) -> None:
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def test_a_grid_runs_seeds_slowest_and_a_finished_grid_runs_nothing(world: World) -> None:
    first = world.run(workers=1)
    assert (first.returncode, first.stderr) == (0, "")
    assert "[8/8]" in first.stdout
    assert "val/nll" in first.stdout
    world.assert_finished()
    assert [("seed1" in line[1]) for line in world.lines("start")] == [True] * 4 + [False] * 4
    before = world.ledger.read_text()
    again = world.run()
    assert (again.returncode, again.stderr) == (0, "")
    assert all(line.startswith("warning: model.") for line in again.stdout.splitlines())
    assert world.ledger.read_text() == before


def test_as_many_cells_run_as_there_are_workers_until_the_last(world: World) -> None:
    world.write(delay=0.15)
    assert world.run(workers=3).returncode == 0
    running, seen = 0, []
    for word, *_ in world.lines():
        running += {"start": 1, "end": -1}.get(word, 0)
        seen += [running] * (word == "start")
    assert max(seen) == 3
    assert 3 in seen[3:]  # also after a cell has ended


def test_no_cell_waits_for_an_index_and_a_slow_one_is_written_seldom(world: World) -> None:
    began = time.monotonic()
    done = world.run("index=1", workers=1)
    assert done.returncode == 0
    order = [line[0] for line in world.lines()]
    begins = [at for at, word in enumerate(order) if word == "index-begins"]
    # An index of one second may be written every 20 seconds, and at the end.
    assert 2 <= len(begins) <= 2 + (time.monotonic() - began) / 20.0
    first = begins[0]
    ended = order[first:].index("index-ends") + first
    assert 1 <= order[:first].count("end") < order[:ended].count("start") <= 8
    assert order[-1] == "index-ends"


def test_a_cold_start_runs_a_grid_without_a_warning(world: World) -> None:
    world.write(seeds=1)
    command = [sys.executable, *world.arguments()]
    done = subprocess.run(command, env=world.environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    world.assert_finished()


@pytest.mark.parametrize("whom", ["supervisor", "group", "fork server"])
def test_killed_then_run_again(world: World, whom: str) -> None:
    world.write(seeds=3, delay=0.05)
    process = world.start()
    world.wait_for(lambda: len(world.lines("end")) >= 3 and cells_of(world))
    if whom == "fork server":
        server = cells_of(world)[0].parent()
        assert server is not None
        server.kill()
        assert process.wait(timeout=240) == 0
        process.communicate()
        world.assert_finished()
        return
    if whom == "supervisor":
        process.kill()
        process.communicate()
    else:
        kill_group(process)
    world.assert_nothing_left()
    done = {line[1] for line in world.lines("end")}
    assert 3 <= len(done) < 12
    assert world.states()["RUNNING"] > 0
    world.finish()
    restarted = Counter(line[1] for line in world.lines("start"))
    assert all(restarted[name] == 1 for name in done)


def test_killed_five_times_in_a_row(world: World) -> None:
    world.write(seeds=4, delay=0.03)
    for kills in range(5):
        process = world.start()
        world.wait_for(lambda kills=kills: len(world.lines("end")) >= 2 * (kills + 1))
        kill_group(process)
    world.finish()


def test_a_killed_worker_is_put_back(world: World) -> None:
    world.write(delay=0.1)
    process = world.start()
    world.wait_for(lambda: cells_of(world))
    cells_of(world)[0].kill()
    assert "killed (SIGKILL), put back" in world.end(process)
    world.assert_finished()
    assert world.states() == {"COMPLETE": 8, "FAIL": 1}


def test_a_stopped_worker_does_not_outlive_its_killed_supervisor(world: World) -> None:
    world.write(delay=0.1)
    process = world.start()
    world.wait_for(lambda: len(cells_of(world)) == 2)
    for cell in cells_of(world):
        cell.suspend()
    process.kill()
    process.communicate()
    world.assert_nothing_left()


@pytest.mark.parametrize("behaviour", ["child", "crash after the result"])
def test_what_a_cell_starts_dies_with_it_and_its_result_counts(world: World, behaviour) -> None:
    world.write(seeds=1, steps=1, base_config={"data": {"behaviour": behaviour}})
    world.finish()


def test_a_cell_that_is_killed_three_times_or_is_not_the_planned_one_fails(world: World) -> None:
    """The parser takes the last of these behaviours for another cell than the plan."""
    behaviours = ["ok", "die", "die once", "resolved otherwise"]
    world.write(seeds=1, steps=1, axes={"data.behaviour": behaviours})
    assert world.run().returncode == 0
    runs = world.runs()
    starts = Counter(line[1] for line in world.lines("start"))
    assert Counter(run.state for run in runs.values()) == {"done": 8, "failed": 8}
    for name, run in runs.items():
        if "behaviourdie-" in name:
            assert run.error == "3 attempts ended early, the last: killed (SIGKILL)"
            assert starts[name] == 3
        elif "otherwise" in name:
            assert "was planned:" in str(run.error)
            assert not (world.folder / "runs" / name / "config.yaml").exists()
            assert (run.state, starts[name]) == ("failed", 0)
        else:
            assert (run.state, starts[name]) == ("done", 2 if "die_once" in name else 1)
    world.assert_nothing_left()


def test_a_crash_fails_one_cell_and_only_a_retry_runs_it_again(world: World) -> None:
    world.write(seeds=1, steps=1, axes={"data.behaviour": ["ok", "crash", "crash once", "leave"]})
    assert "failed ValueError:" in world.run().stdout
    runs = world.runs()
    errors = {name: run.error for name, run in runs.items() if run.state == "failed"}
    said = ("ValueError: a bad day", "ValueError: once", "SystemExit: 0")
    assert Counter(errors.values()) == dict.fromkeys(said, 4)
    crashed = next(name for name in errors if "crash-" in name)
    log = (world.folder / "runs" / crashed / "attempts" / "1" / "log.txt").read_text()
    assert {"training", "Traceback"} <= {*log.split()}
    assert world.states() == {"COMPLETE": 4, "FAIL": 12}
    before = len(world.lines("start"))
    world.run()
    assert len(world.lines("start")) == before
    world.run("retry")
    assert len(world.lines("start")) == before + 12
    assert Counter(run.state for run in world.runs().values()) == {"done": 8, "failed": 8}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted(world: World, number: signal.Signals) -> None:
    world.write(seeds=3, delay=0.1)
    process = world.start()
    world.wait_for(lambda: len(world.lines("end")) >= 2)
    os.killpg(process.pid, number)
    process.communicate(timeout=240)
    assert process.returncode == 130
    world.assert_nothing_left()
    assert world.states()["RUNNING"] == 0
    world.finish()


def test_no_cell_starts_after_the_time_is_over(world: World) -> None:
    world.write(seeds=3, delay=0.1)
    assert world.run("seconds=2").returncode == 0
    done = len(world.lines("end"))
    assert 0 < done < 12
    world.assert_nothing_left()
    assert world.states()["COMPLETE"] == done
    world.finish()


@pytest.mark.parametrize("damage", ["torn", "garbage", "absent"])
def test_a_damaged_journal_is_mended_from_the_run_folders(world: World, damage: str) -> None:
    process = world.start()
    world.wait_for(lambda: len(world.lines("end")) >= 3)
    kill_group(process)
    journal = world.folder / "optuna.journal"
    whole = journal.read_bytes()
    if damage == "torn":
        journal.write_bytes(whole + b'{"op_code":6,"worker_id":"4f7')
    elif damage == "garbage":
        journal.write_bytes(whole[:200] + b"\0" * 50 + whole[250:])
    else:
        journal.unlink()
    start = time.monotonic()
    result = world.run()
    assert result.returncode == 0
    assert time.monotonic() - start < 15.0
    assert ("torn last line" in result.stdout) == (damage == "torn")
    assert ("damaged, kept" in result.stdout) == (damage == "garbage")
    world.assert_finished()


def test_finished_cells_outlive_a_study_that_was_lost(world: World) -> None:
    world.write(seeds=1, axes={"data.behaviour": ["ok", "crash"]})
    world.run()
    values = world.study().trials_dataframe()["value"].dropna().tolist()
    (world.folder / "optuna.journal").unlink()
    world.run()
    table = world.study().trials_dataframe()
    assert sorted(table["value"].dropna()) == sorted(values)
    assert Counter(table["state"]) == {"COMPLETE": 4, "FAIL": 4}
    assert set(table["user_attrs_error"].dropna()) == {"ValueError: a bad day"}
    assert len(world.lines("start")) == 8


def test_runs_of_another_grid_in_the_same_folder_stay_and_count_nowhere(world: World) -> None:
    world.run()
    store = world.folder.parent / STORE
    before = {path: path.read_bytes() for path in store.glob("*/result.json")}
    world.write(delay=0.01)
    result = world.run()
    assert (result.returncode, result.stderr) == (0, "")
    assert len(before) == len(world.runs()) == 8
    assert {run.state for run in world.runs().values()} == {"done"}
    assert not {path.parent.name for path in before} & {cell.id for cell in world.plan().cells}
    assert {path: path.read_bytes() for path in before} == before
    assert len(world.lines("end")) == 16


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"axes": {"model.optimizer.lrr": [1.0]}}, "did you mean 'model.optimizer.lr'?"),
        ({"base_config": {"data": {"name": "missing"}}}, "data.root: … folder: nowhere"),
        ({"base_config": {"modle": {}}}, "unknown key 'modle'"),
    ],
)
def test_a_mistake_is_one_line_from_any_process(world: World, changes: dict, said: str) -> None:
    world.write(**changes)
    result = world.refused()
    assert "[1/" not in result.stdout
    assert told(said).search(result.stderr)
    assert world.lines("start") == []
    world.assert_nothing_left()


def test_cells_get_a_clean_environment_and_their_share_of_the_cores(world: World) -> None:
    foreign = {"RANK": "1", "MASTER_PORT": "29500", "SLURM_JOB_ID": "7", "PL_GLOBAL_SEED": "3"}
    world.environment |= foreign
    del world.environment["OMP_NUM_THREADS"]  # the user sets no number
    world.write(seeds=1, steps=1, base_config={"data": {"behaviour": "environment"}})
    assert world.run(workers=1).returncode == 0
    name = next(iter(world.runs()))
    log = (world.folder / "runs" / name / "attempts" / "1" / "log.txt").read_text()
    seen = yaml.safe_load(log.partition("environment ")[2].replace("None", "null"))
    assert seen == {**dict.fromkeys(foreign), "OMP_NUM_THREADS": str(default_workers())}


@pytest.fixture
def mount(world: World) -> Iterator[Callable[[str], None]]:
    """Put the experiments on a small disk."""
    experiments = world.folder.parent
    experiments.mkdir(parents=True)

    def mounted(options: str) -> None:
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(experiments)]
        if subprocess.run(command, capture_output=True).returncode != 0:
            pytest.skip("mounting a tmpfs is not allowed here")

    yield mounted
    subprocess.run(["umount", "-l", str(experiments)], capture_output=True)


def test_a_full_disk_stops_the_grid_and_loses_nothing(world: World, mount) -> None:
    mount("size=3m")
    world.write(seeds=1, steps=8, axes={"data.behaviour": ["ok", "fill"]})
    result = world.run(workers=1)
    assert result.returncode == 1
    assert result.stderr.count("\n") == 1
    assert "No space left" in result.stderr
    world.assert_nothing_left()
    states = Counter(run.state for run in world.runs().values())
    assert states["done"] >= 1
    assert states["failed"] == 0
    for big in world.folder.parent.rglob("big"):
        big.unlink()
    subprocess.run(["mount", "-o", "remount,size=100m", str(world.folder.parent)], check=True)
    assert world.run(workers=1).returncode == 0
    world.assert_finished()


def test_a_disk_that_a_cell_reports_as_full_stops_the_grid(world: World) -> None:
    world.write(seeds=1, axes={"data.behaviour": ["ok", "full disk"]})
    result = world.run(workers=1)
    assert result.returncode == 1
    assert "No space left" in result.stderr
    assert Counter(run.state for run in world.runs().values())["failed"] == 0


def test_a_folder_that_is_full_before_anything_is_planned(world: World, mount) -> None:
    mount("size=16k")
    (world.folder.parent / "ballast").write_bytes(b"x" * 16384)
    result = world.run()
    assert result.returncode == 1
    assert "No space left" in result.stderr
    assert not (world.folder / "plan.json").exists()


def test_a_read_only_folder_is_named(world: World, mount) -> None:
    mount("size=1m,ro")
    result = world.refused()
    assert result.stdout == ""
    assert told(f"{world.folder}: … written:").search(result.stderr)


def test_a_journal_that_is_removed_under_a_supervisor(world: World) -> None:
    world.write(seeds=2, delay=0.1)
    supervisor = world.start()
    world.wait_for(lambda: world.lines("end"))
    (world.folder / "optuna.journal").unlink()
    out = world.end(supervisor)
    assert out.count("optuna.journal: ") == out.count("the study is caught up later") == 1
    world.assert_finished()


def test_a_folder_that_is_removed_under_a_supervisor(world: World) -> None:
    world.write(seeds=2, delay=0.1)
    supervisor = world.start()
    world.wait_for(lambda: world.lines("end"))
    world.folder.rename(world.root / "elsewhere")
    _, err = supervisor.communicate(timeout=240)
    assert (supervisor.returncode, err.count("\n")) == (2, 1), err
    assert "was removed while" in err
    world.assert_nothing_left()
