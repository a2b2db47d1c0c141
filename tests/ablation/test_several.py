"""Several supervisors at once on one host: starts, losses, disagreements."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import optuna
import pytest
from conftest import World  # pyright: ignore[reportMissingImports]

from lightning_app.ablation.queue.queue import Queue
from lightning_app.ablation.queue.storages import (
    StorageSpec,
    close_storage,
    open_storage,
    storage_spec,
)
from tests.postgres import Server, serve

pytestmark = pytest.mark.xdist_group("several")  # what they share is made once


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serve(tmp_path_factory.mktemp("database") / "pg") as server:
        yield server


@pytest.fixture
def spec(server: Server, world: World) -> StorageSpec:
    """The server's database, for a grid that no other test has."""
    world.grid.write_text(world.grid.read_text().replace("name: tiny", f"name: {world.mark}"))
    return storage_spec(server.url, Path("journal"), {})


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


def test_of_two_that_start_at_once_on_a_journal_one_runs_the_grid(world: World) -> None:
    pair = [world.start(), world.start()]
    ended = [process.communicate(timeout=60) for process in pair]
    assert {process.returncode for process in pair} == {0, 2}
    assert "Traceback" not in "".join(err for _, err in ended)
    world.assert_finished()


def test_two_that_start_at_once_on_a_database_share_the_grid(
    world: World, server: Server, spec: StorageSpec
) -> None:
    world.write(seeds=3, delay=0.1, name=world.mark)
    pair = [world.start(f"storage={server.url}", workers=1) for _ in range(2)]
    for process in pair:
        out, err = process.communicate(timeout=90)
        assert (process.returncode, err) == (0, ""), out
    assert_one_result_a_cell(world, spec)
    assert {trial.state.name for trial in trials(world, spec)} == {"COMPLETE"}


@pytest.mark.parametrize("wait", ["wait", "nowait"])
def test_the_cells_of_a_lost_supervisor_are_run_by_the_other(
    world: World, server: Server, spec: StorageSpec, wait: str
) -> None:
    world.write(seeds=1, delay=0.5, name=world.mark)
    options = [f"storage={server.url}", "lost_after=2", *(["nowait"] if wait == "nowait" else [])]
    first = world.start(*options, workers=2)
    world.wait_for(lambda: len(world.lines("start")) == 2)
    second = world.start(*options, workers=2)
    world.wait_for(lambda: len(world.lines("start")) == 4)
    first.kill()
    out, err = second.communicate(timeout=60)
    assert (second.returncode, err) == (0, ""), out
    assert_one_result_a_cell(world, spec)


def test_after_the_only_supervisor_is_killed_the_next_goes_on_at_once(
    world: World, server: Server, spec: StorageSpec
) -> None:
    world.write(seeds=1, delay=0.2, name=world.mark)
    first = world.start(f"storage={server.url}", workers=2)
    world.wait_for(lambda: len(world.lines("start")) == 2)
    first.kill()
    first.communicate()
    world.assert_nothing_left()
    again = world.run(f"storage={server.url}", "nowait")  # lost_after is 120 seconds
    assert (again.returncode, again.stderr) == (0, ""), again.stdout
    assert_one_result_a_cell(world, spec)


def test_a_trial_too_many_does_not_make_a_second_result(
    world: World, server: Server, spec: StorageSpec
) -> None:
    """As one is made where a database takes a trial and its answer is lost."""
    world.write(seeds=1, delay=0.3, name=world.mark)
    first = world.start(f"storage={server.url}", workers=1)
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
    second = world.start(f"storage={server.url}", workers=2)
    for process in (first, second):
        out, err = process.communicate(timeout=90)
        assert (process.returncode, err) == (0, ""), out
    assert_one_result_a_cell(world, spec)


def test_another_idea_of_when_one_is_lost_is_refused(
    world: World, server: Server, spec: StorageSpec
) -> None:
    world.write(seeds=1, delay=1.0, name=world.mark)
    first = world.start(f"storage={server.url}", "lost_after=30", workers=2)
    world.wait_for(lambda: len(world.lines("start")) == 2)
    second = world.run(f"storage={server.url}", "lost_after=3")
    assert second.returncode == 2
    assert "--lost-after: 3 here and 30 for the supervisors that run this grid" in second.stderr
    assert first.wait(timeout=60) == 0
    first.communicate()
    assert_one_result_a_cell(world, spec)


@pytest.mark.parametrize(
    "url", ["postgresql://127.0.0.1:1/x", "postgresql://nobody@{address}/ablate"]
)
def test_a_wrong_address_is_refused_not_waited_for(world: World, server: Server, url: str) -> None:
    result = world.run("storage=" + url.format(address=f"127.0.0.1:{server.port}"))
    assert result.returncode == 2
    assert result.stderr.startswith("ablate: postgresql://")
    assert result.stderr.count("\n") == 1


def test_sqlite_serves_one_worker_alone(world: World, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/queue.db"
    refused = world.run(f"storage={url}", workers=2)
    assert refused.returncode == 2
    assert "SQLite can give one cell to several workers" in refused.stderr
    assert not world.folder.exists()
    assert world.run(f"storage={url}", workers=1).returncode == 0
    assert_one_result_a_cell(world, storage_spec(url, Path("journal"), {}))


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
