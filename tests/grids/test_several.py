"""Several supervisors at once on one folder: starts, losses, disagreements."""

import json
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import optuna
import psutil
import pytest
from conftest import World  # pyright: ignore[reportMissingImports]

from lightning_app.grids.storages import StorageSpec, close_storage, open_storage, storage_spec

EITHER = pytest.mark.parametrize("spec", ["journal", "sqlite"], indirect=True)


@pytest.fixture
def spec(request: pytest.FixtureRequest, world: World) -> StorageSpec:
    """The storage that the supervisors share: the journal of the folder, or a database."""
    given = None
    if getattr(request, "param", "journal") == "sqlite":
        given = world.environment["ABLATE_STORAGE"] = f"sqlite:///{world.root}/queue.db"
    return storage_spec(given, world.folder / "optuna.journal", {})


def trials(world: World, spec: StorageSpec) -> list[optuna.trial.FrozenTrial]:
    storage = open_storage(spec)
    try:
        study = optuna.load_study(study_name=world.plan().study, storage=storage)
        return study.get_trials(deepcopy=False)
    finally:
        close_storage(storage)


def assert_one_result_a_cell(world: World, spec: StorageSpec) -> None:
    assert {run.state for run in world.runs().values()} == {"done"}
    assert Counter(line[1] for line in world.lines("end")) == dict.fromkeys(world.runs(), 1)
    states = Counter(trial.state.name for trial in trials(world, spec))
    assert states["COMPLETE"] == len(world.runs())
    assert states.keys() <= {"COMPLETE", "FAIL"}
    world.assert_nothing_left()


@pytest.mark.in_turn(2)
@EITHER
# Over 5 s: twelve cells.
def test_two_that_start_at_once_share_the_grid(world: World, spec: StorageSpec) -> None:
    world.write(seeds=3, delay=0.1)
    pair = [world.start(workers=1) for _ in range(2)]
    for process in pair:
        world.end(process)
    assert_one_result_a_cell(world, spec)
    assert {trial.state.name for trial in trials(world, spec)} == {"COMPLETE"}


@EITHER
def test_the_cells_of_a_lost_supervisor_are_run_by_the_other(world, spec: StorageSpec) -> None:
    world.write(seeds=1, delay=0.25)
    first = world.start(workers=2)
    world.wait_for(lambda: len(world.lines("start")) == 2)
    second = world.start(workers=2)
    world.wait_for(lambda: len(world.lines("start")) == 4)
    first.kill()
    world.end(second)
    assert_one_result_a_cell(world, spec)


def test_after_the_only_supervisor_is_killed_the_next_goes_on_at_once(world, spec) -> None:
    world.write(seeds=1, delay=0.2)
    first = world.start(workers=2)
    world.wait_for(lambda: len(world.lines("start")) == 2)
    first.kill()
    first.communicate()
    world.assert_nothing_left()
    again = world.run("nowait")
    assert (again.returncode, again.stderr) == (0, ""), again.stdout
    assert_one_result_a_cell(world, spec)


def test_a_stopped_supervisor_keeps_its_cells_until_it_is_killed(world, spec: StorageSpec) -> None:
    world.write(seeds=1, delay=0.5)
    first = world.start(workers=2)
    world.wait_for(lambda: len(world.lines("start")) == 2)
    first.send_signal(signal.SIGSTOP)
    for cell in world.lines("start"):
        psutil.Process(int(cell[3])).suspend()
    without = world.run("nowait")
    assert (without.returncode, without.stderr) == (0, "")
    assert (len(world.lines("start")), len(world.lines("end"))) == (4, 2)
    second = world.start(workers=2)
    until = time.monotonic() + 8.0
    while time.monotonic() < until:
        assert second.poll() is None
        time.sleep(0.1)
    assert len(world.lines("start")) == 4
    first.kill()
    out = world.end(second)
    assert "2 cells run elsewhere; waiting in case one is lost" in out
    assert_one_result_a_cell(world, spec)


@pytest.mark.parametrize("url", ["sqlite:////nowhere/x.db", "postgresql+psycopg://127.0.0.1:1/x"])
def test_a_wrong_address_is_refused_not_waited_for(world: World, url: str) -> None:
    assert world.refused(f"storage={url}").stderr.startswith("ablate: --storage: ")


def test_a_damaged_journal_is_left_alone_while_others_work(world: World) -> None:
    world.write(seeds=1, delay=0.5)
    first = world.start()
    world.wait_for(lambda: len(world.lines("start")) == 2)
    with (world.folder / "optuna.journal").open("r+b") as journal:
        whole = journal.read()
        journal.seek(200)
        journal.write(b"\0" * 50)
    assert "optuna.journal:" in world.refused().stderr
    with (world.folder / "optuna.journal").open("r+b") as journal:
        journal.write(whole[:250])
    first.communicate(timeout=240)
    world.assert_finished()


CHAOS = Path(__file__).parents[2] / "benchmarks" / "chaos.py"


@pytest.mark.slow
def test_two_hosts_and_a_journal_that_is_torn() -> None:
    with tempfile.TemporaryDirectory() as folder:  # a short name: hosts keep their sockets in it
        command = [sys.executable, str(CHAOS), "--short", "--folder", folder]
        command += ["--cells", "8", "--ddp-cells", "4"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert (found["problems"], found["faults_without_a_victim"]) == ([], {})
    assert found["wasted_attempts"] >= 1
    faults = found["faults"]
    assert faults.pop("journal torn") >= 1
    assert faults == {"worker killed": 1, "rank killed": 1, "supervisor killed": 2}
