import json
import os
import shutil
import subprocess
import sys
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import optuna
import psutil
import pytest
import yaml
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend

from lightning_app.config.grid import read_spec
from lightning_app.grids.plan import Grid, load_plan
from lightning_app.runs.folder import STORE, GridFolder
from lightning_app.runs.records import Plan, sealed
from lightning_app.runs.run import RunState
from tests import warm

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))


class World:
    """A grid in a temporary folder, the supervisors that run it, and their remains.

    Every process that a supervisor starts inherits a mark in its environment and writes into a
    ledger, which shows the tests what happened independently of the code under test.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.folder = root / "experiments" / "tiny"
        self.grid = root / "tiny.yaml"
        self.ledger = root / "ledger"
        self.mark = uuid.uuid4().hex
        self.environment = {
            **os.environ,
            "LEDGER": str(self.ledger),
            "MARK": self.mark,
            "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parents[1])]),
        }
        self.supervisors: list[warm.Process] = []
        self.write()

    def write(self, seeds: int = 2, delay: float = 0.02, steps: int = 4, **changes: Any) -> None:
        """Write the grid file: two presets, two warm-ups, `seeds` seeds."""
        axes = {"model.block.preset": ["post_ln", "pre_ln"], "model.schedule.warmup_steps": [0, 60]}
        axes |= {"seed_everything": list(range(1, seeds + 1))}
        base = {"data": {}, "trainer": {"max_steps": steps}, **changes.pop("base_config", {})}
        base["data"] = {"delay": delay, **base["data"]}
        tree = {"name": "tiny", "base_config": base, "axes": axes | changes.pop("axes", {})}
        self.grid.write_text("# Does it run?\n" + yaml.safe_dump(tree | changes, sort_keys=False))

    def start(self, *options: str, workers: int = 2) -> warm.Process:
        """Start a supervisor as the leader of a process group of its own."""
        text = self.grid.read_text() if self.grid.is_file() else ""
        searches = "\nsearch:" in text or "\nrefine:" in text
        modules = warm.MODULES if searches else warm.WITHOUT_TORCH
        words = self.arguments(*options, workers=workers)
        process = warm.start(words, environment=self.environment, modules=modules)
        self.supervisors.append(process)
        return process

    def arguments(self, *options: str, workers: int = 2) -> list[str]:
        words = ["-W", "error", str(HERE / "stand_in.py")]
        return [*words, str(self.grid), str(self.folder), str(workers), *options]

    def run(self, *options: str, workers: int = 2) -> subprocess.CompletedProcess[str]:
        process = self.start(*options, workers=workers)
        out, err = process.communicate(timeout=240)
        return subprocess.CompletedProcess(process.args, process.wait(), out, err)

    def refused(self, *options: str) -> subprocess.CompletedProcess[str]:
        """What a supervisor leaves that refuses in one line."""
        done = self.run(*options)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
        return done

    def end(self, process: warm.Process) -> str:
        """What a supervisor printed that ends well."""
        out, err = process.communicate(timeout=240)
        assert (process.returncode, err) == (0, ""), out
        return out

    def finish(self) -> None:
        """Run what is missing; then everything is finished."""
        assert self.run().returncode == 0
        self.assert_finished()

    def wait_for(self, happened: Callable[[], object], seconds: float = 120.0) -> None:
        until = time.monotonic() + seconds
        while not happened():
            assert time.monotonic() < until, f"did not happen; ledger: {self.lines()}"
            time.sleep(0.01)

    def lines(self, kind: str = "") -> list[list[str]]:
        text = self.ledger.read_text() if self.ledger.exists() else ""
        return [line.split(" ") for line in text.splitlines() if line.startswith(kind)]

    def processes(self) -> list[psutil.Process]:
        """Every living process that descends from one of our supervisors."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get("MARK") == self.mark:
                    found.append(process)
            except psutil.Error:
                continue  # ended meanwhile, or a zombie
        return found

    def plan(self) -> Plan:
        plan = load_plan(self.folder / "plan.json")
        assert plan is not None
        return plan

    def value(self) -> Grid:
        return Grid(read_spec(self.grid), GridFolder(self.folder), self.plan())

    def runs(self) -> dict[str, RunState]:
        grid = self.value()
        return {cell.name: grid.state(cell) for cell in grid.cells}

    def study(self) -> optuna.Study:
        storage = JournalStorage(JournalFileBackend(str(self.folder / "optuna.journal")))
        return optuna.load_study(study_name=self.plan().study, storage=storage)

    def states(self) -> Counter[str]:
        return Counter(trial.state.name for trial in self.study().get_trials(deepcopy=False))

    def assert_nothing_left(self) -> None:
        self.wait_for(lambda: not self.processes(), seconds=15.0)

    def assert_finished(self) -> None:
        """Each cell has exactly one result, was finished once, and has one complete trial.

        A kill between the result of a stand-in and its note "end" leaves the note out.
        """
        runs = self.runs()
        assert {name: run.state for name, run in runs.items()} == dict.fromkeys(runs, "done")
        ends = Counter(line[1] for line in self.lines("end"))
        assert ends <= Counter(runs.keys())
        trials = self.study().get_trials(deepcopy=False)
        complete = [trial for trial in trials if trial.state.name == "COMPLETE"]
        assert sorted(trial.user_attrs["name"] for trial in complete) == sorted(runs)
        assert {trial.state.name for trial in trials} <= {"COMPLETE", "FAIL"}
        # Links are not followed: the runs are in the store beside the grid.
        experiments = self.folder.parent
        parts = [path.relative_to(experiments).parts for path in experiments.rglob("*.part")]
        assert all("attempts" in part for part in parts)  # only where a killed attempt wrote
        self.assert_nothing_left()


def wait_for(happened: Callable[[], object], goes_on: Callable[[], bool], said: Any = "") -> None:
    until = time.monotonic() + 300.0
    while not happened():
        assert goes_on(), said
        assert time.monotonic() < until, said
        time.sleep(0.01)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path)
    yield world
    for process in world.processes():
        process.kill()
    for supervisor in world.supervisors:
        supervisor.communicate()


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> World:
    """A finished and sealed grid of four cells, made once."""
    world = World(tmp_path_factory.mktemp("finished"))
    world.write(seeds=1, delay=0, steps=1)
    assert world.run().returncode == 0
    for path in (world.folder.parent / STORE).glob("*/result.json"):
        path.write_text(json.dumps(sealed(json.loads(path.read_text()), path.parent)))
    return world


@pytest.fixture
def four(world: World, finished: World) -> World:
    shutil.copytree(finished.root, world.root, dirs_exist_ok=True, symlinks=True)
    return world


@pytest.fixture(autouse=True)
def quiet_optuna() -> None:
    optuna.logging.set_verbosity(optuna.logging.ERROR)
