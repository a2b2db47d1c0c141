"""Several supervisors at once on one folder: starts, losses, disagreements."""

import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import optuna
import pytest
from conftest import World  # pyright: ignore[reportMissingImports]

from lightning_app.grids.queue import Queue
from lightning_app.grids.storages import StorageSpec, close_storage, open_storage, storage_spec
from tests.told import told

EITHER = pytest.mark.parametrize("spec", ["journal", "sqlite"], indirect=True)


@pytest.fixture
def spec(request: pytest.FixtureRequest, world: World) -> StorageSpec:
    """The storage that the supervisors share: the journal of the folder, or a database."""
    given = None
    if getattr(request, "param", "journal") == "sqlite":
        given = world.environment["ABLATE_STORAGE"] = f"sqlite:///{world.root}/queue.db"
    return storage_spec(given, world.folder / "optuna.journal", {})


@contextmanager
def study_of(world: World, spec: StorageSpec) -> Iterator[optuna.Study]:
    storage = open_storage(spec)
    try:
        yield optuna.load_study(study_name=world.plan().study, storage=storage)
    finally:
        close_storage(storage)


def trials(world: World, spec: StorageSpec) -> list[optuna.trial.FrozenTrial]:
    with study_of(world, spec) as study:
        return study.get_trials(deepcopy=False)


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
        out, err = process.communicate(timeout=90)
        assert (process.returncode, err) == (0, ""), out
    assert_one_result_a_cell(world, spec)
    assert {trial.state.name for trial in trials(world, spec)} == {"COMPLETE"}


@EITHER
@pytest.mark.parametrize("wait", ["wait", "nowait"])
# Over 5 s: a supervisor is lost after 1 s, and its cells run again.
def test_the_cells_of_a_lost_supervisor_are_run_by_the_other(
    world: World, spec: StorageSpec, wait: str
) -> None:
    world.write(seeds=1, delay=0.25)
    options = ["lost_after=1", *(["nowait"] if wait == "nowait" else [])]
    first = world.start(*options, workers=2)
    world.wait_for(lambda: len(world.lines("start")) == 2)
    second = world.start(*options, workers=2)
    world.wait_for(lambda: len(world.lines("start")) == 4)
    first.kill()
    out, err = second.communicate(timeout=60)
    assert (second.returncode, err) == (0, ""), out
    assert_one_result_a_cell(world, spec)


def test_after_the_only_supervisor_is_killed_the_next_goes_on_at_once(
    world: World, spec: StorageSpec
) -> None:
    world.write(seeds=1, delay=0.2)
    first = world.start(workers=2)
    world.wait_for(lambda: len(world.lines("start")) == 2)
    first.kill()
    first.communicate()
    world.assert_nothing_left()
    again = world.run("nowait")  # lost_after is 120 seconds
    assert (again.returncode, again.stderr) == (0, ""), again.stdout
    assert_one_result_a_cell(world, spec)


def test_a_trial_too_many_does_not_make_a_second_result(world: World, spec: StorageSpec) -> None:
    """As one is made where a database takes a trial and its answer is lost."""
    world.write(seeds=1, delay=0.3)
    first = world.start(workers=1)
    world.wait_for(lambda: len(world.lines("start")) == 1)
    waiting = [trial for trial in trials(world, spec) if trial.state.name == "WAITING"]
    assert len(waiting) == 3
    with study_of(world, spec) as study:
        running = study.get_trials(states=(optuna.trial.TrialState.RUNNING,))
        for trial in (*waiting, *running):
            study.add_trial(
                optuna.create_trial(
                    state=optuna.trial.TrialState.WAITING,
                    params=trial.params,
                    distributions=trial.distributions,
                    user_attrs=trial.user_attrs,
                )
            )
    second = world.start(workers=2)
    for process in (first, second):
        out, err = process.communicate(timeout=90)
        assert (process.returncode, err) == (0, ""), out
    assert_one_result_a_cell(world, spec)


def test_another_idea_of_when_one_is_lost_is_refused(world: World, spec: StorageSpec) -> None:
    world.write(seeds=1, delay=1.0)
    first = world.start("lost_after=30", workers=2)
    world.wait_for(lambda: len(world.lines("start")) == 2)
    second = world.run("lost_after=3")
    assert second.returncode == 2
    assert told("--lost-after: 3 … 30").search(second.stderr)
    assert first.wait(timeout=60) == 0
    first.communicate()
    assert_one_result_a_cell(world, spec)


# Over 5 s: a supervisor is lost after 2 s.
def test_a_stopped_supervisor_loses_its_cells_and_goes_on(world: World, spec: StorageSpec) -> None:
    """Its heartbeats are files, whose locks the kernel would not have released."""
    world.write(seeds=1, delay=0.5)
    first = world.start("lost_after=2", workers=2)
    world.wait_for(lambda: len(world.lines("start")) == 2)
    first.send_signal(signal.SIGSTOP)
    second = world.start("lost_after=2", workers=2)
    out, err = second.communicate(timeout=60)
    assert (second.returncode, err) == (0, ""), out
    first.send_signal(signal.SIGCONT)
    out, err = first.communicate(timeout=60)
    assert (first.returncode, err) == (0, ""), out
    assert {run.state for run in world.runs().values()} == {"done"}
    states = Counter(trial.state.name for trial in trials(world, spec))
    assert states["COMPLETE"] == len(world.runs())
    assert states.keys() <= {"COMPLETE", "FAIL"}
    world.assert_nothing_left()


@pytest.mark.parametrize("url", ["sqlite:////nowhere/x.db", "postgresql://127.0.0.1:1/x"])
def test_a_wrong_address_is_refused_not_waited_for(world: World, url: str) -> None:
    result = world.run(f"storage={url}")
    assert result.returncode == 2
    assert result.stderr.startswith(f"ablate: {url}: ")
    assert result.stderr.count("\n") == 1


def test_another_storage_than_that_of_the_others_is_refused(world: World) -> None:
    world.write(seeds=1, delay=0.5)
    first = world.start()
    world.wait_for(lambda: len(world.lines("start")) == 2)
    second = world.run(f"storage={world.root}/queue")
    assert second.returncode == 2
    assert f"--storage: {world.root}/queue is not the {world.folder}/optuna.jour" in second.stderr
    first.communicate(timeout=60)
    world.assert_finished()


def test_a_damaged_journal_is_left_alone_while_others_work(world: World) -> None:
    world.write(seeds=1, delay=0.5)
    first = world.start()
    world.wait_for(lambda: len(world.lines("start")) == 2)
    with (world.folder / "optuna.journal").open("r+b") as journal:
        whole = journal.read()
        journal.seek(200)
        journal.write(b"\0" * 50)
    second = world.run()
    assert (second.returncode, second.stderr.count("\n")) == (2, 1), second.stderr
    assert "optuna.journal:" in second.stderr
    with (world.folder / "optuna.journal").open("r+b") as journal:
        journal.write(whole[:250])
    first.communicate(timeout=60)
    world.assert_finished()


def test_a_queue_larger_than_a_batch_is_run_to_its_end(world: World) -> None:
    """The batch is 256 cells; a queue of 300, each of them entered as if it had run."""
    world.write(seeds=75)
    stopped = world.run("seconds=0")
    assert stopped.returncode == 0, stopped.stderr
    grid = world.value()
    assert len(grid.cells) == 300
    assert world.states() == {"WAITING": 256}
    queue = Queue(grid, storage_spec(None, grid.folder.journal, {}))
    names = []
    while (claim := queue.pop()) is not None:
        names.append(claim.cell.name)
        queue.failed(claim, "not run")
        folder = world.folder / "runs" / claim.cell.name / "attempts" / "1"
        folder.mkdir(parents=True)
        (folder / "error.txt").write_text("not run\n")
    assert names == [cell.name for cell in grid.cells]
