"""Cells of two ranks inside of a grid: real training, with faults from outside."""

import json
import os
import signal
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest
import torch
import yaml
from conftest import HERE, World  # pyright: ignore[reportMissingImports]

from tests import warm
from tests.small import tiny_config

pytestmark = pytest.mark.xdist_group("ranks")  # what they share is made once

STEPS = 60
SECONDS = 240.0  # a loaded machine may take long


class Step(NamedTuple):
    """What a rank wrote after a step of its optimizer: process, learning rate, hash of weights."""

    pid: int
    rate: float
    weights: str


class Ranks(World):
    """A grid whose cells are trainings of two processes."""

    cache: str

    def write_training(self, seeds: int = 1, rates: tuple[float, ...] = (3e-2,)) -> None:
        """Write a grid with dropout, and a checkpoint every 20 of its 60 steps."""
        trainer = {"max_steps": STEPS, "val_check_interval": 20, "limit_val_batches": 2}
        trainer |= {"log_every_n_steps": 1, "strategy": "ddp"}
        base = tiny_config(trainer, data__cache=self.cache, data__tokens_per_batch=512)
        base["model"]["schedule"] |= {"warmup_steps": 8, "reference_steps": 8}
        base["model"]["architecture"]["dropout"] = 0.3
        axes = {"model.optimizer.lr": list(rates), "seed_everything": list(range(1, seeds + 1))}
        self.grid.write_text(yaml.safe_dump({"name": "tiny", "base_config": base, "axes": axes}))

    def start(self, *options: str, workers: int = 1) -> warm.Process:
        words = [str(HERE / "watched.py"), str(self.grid), str(self.folder), *options]
        process = warm.start(words, environment=self.environment)
        self.supervisors.append(process)
        return process

    def cells(self) -> list[Path]:
        plan = json.loads((self.folder / "plan.json").read_text())
        return [self.folder / "runs" / cell["name"] for cell in plan["cells"]]

    def training(self, seed: int, attempt: int = 1) -> list[Step] | None:
        """A step of each rank of a cell that trains, once both have made ten steps."""
        for run in (self.folder / "runs").glob(f"*-seed{seed}-*"):
            told = [steps(run, attempt, rank) for rank in (0, 1)]
            if min(map(len, told)) >= 10:
                return [each[-1] for each in told]
        return None

    def wait_for_training(self, seed: int) -> list[Step]:
        self.wait_for(lambda: self.training(seed), SECONDS)
        told = self.training(seed)
        assert told is not None
        return told


def steps(run: Path, attempt: int, rank: int) -> list[Step]:
    path = run / "attempts" / str(attempt) / f"steps-rank{rank}.txt"
    text = path.read_text() if path.is_file() else ""
    lines = text[: text.rfind("\n") + 1].splitlines()  # the last may be under way
    parts = [line.split() for line in lines]
    return [Step(int(pid), float(rate), weights) for pid, rate, weights in parts]


def finish(process: warm.Process, code: int = 0) -> str:
    said, errors = process.communicate(timeout=SECONDS)
    assert process.returncode == code, said + errors
    return said


def weights(run: Path) -> dict[str, torch.Tensor]:
    checkpoint = torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)
    assert checkpoint["global_step"] == STEPS
    return checkpoint["state_dict"]


def assert_same_weights(whole: Path, broken: Path) -> None:
    assert whole.name == broken.name
    ours, theirs = weights(whole), weights(broken)
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert torch.equal(value, theirs[name]), name


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, cache: str) -> dict[str, Path]:
    ranks = Ranks(tmp_path_factory.mktemp("undisturbed"))
    ranks.cache = cache
    ranks.write_training(seeds=2)
    finish(ranks.start())
    return {run.name: run for run in ranks.cells()}


@pytest.fixture
def ranks(tmp_path: Path, cache: str):
    world = Ranks(tmp_path)
    world.cache = cache
    yield world
    for process in world.processes():
        process.kill()
    for supervisor in world.supervisors:
        supervisor.communicate()


# Over 5 s: four trainings of sixty steps, of two supervisors.
def test_both_ranks_train_the_cell_that_was_claimed(ranks: Ranks) -> None:
    """Where each rank asked the shared queue itself, they trained two cells into one."""
    ranks.write_training(rates=(1e-2, 3e-2))
    supervisors = [ranks.start() for _ in range(2)]
    for supervisor in supervisors:
        finish(supervisor)
    trials = ranks.study().get_trials()
    assert [trial.state.name for trial in trials] == ["COMPLETE"] * 2
    ended = set()
    for run in ranks.cells():
        first, second = (steps(run, 1, rank) for rank in (0, 1))
        assert len(first) == len(second) == STEPS
        assert {step.pid for step in first}.isdisjoint(step.pid for step in second)
        assert [step[1:] for step in first] == [step[1:] for step in second]
        rate = yaml.safe_load((run / "config.yaml").read_text())["model"]["optimizer"]["lr"]
        assert f"lr{rate:g}" in run.name
        assert max(step.rate for step in first) == pytest.approx(rate)
        ended.add(first[-1].weights)
    assert len(ended) == 2  # no two cells are the same training
    ranks.assert_nothing_left()


# Over 5 s: four attempts of sixty steps, beside two undisturbed runs.
def test_a_killed_rank_takes_the_other_with_it_and_the_cell_goes_on(ranks, undisturbed) -> None:
    ranks.write_training(seeds=2)
    supervisor = ranks.start()
    for seed, rank in ((1, 0), (2, 1)):
        told = ranks.wait_for_training(seed)
        os.kill(told[rank].pid, signal.SIGKILL)
        ranks.wait_for(lambda told=told: not any(psutil.pid_exists(step.pid) for step in told), 60)
    said = finish(supervisor)
    assert said.count("killed (SIGKILL), put back") == 2
    for run in ranks.cells():
        assert len(list((run / "attempts").iterdir())) == 2
        assert_same_weights(undisturbed[run.name], run)
    ranks.assert_nothing_left()


# Over 5 s: the limit of 6 s has to pass.
def test_a_stopped_rank_is_ended_by_the_hang_limit(ranks, undisturbed: dict[str, Path]) -> None:
    ranks.write_training()
    supervisor = ranks.start("hang_limit=6")
    told = ranks.wait_for_training(1)
    os.kill(told[1].pid, signal.SIGSTOP)
    said = finish(supervisor)
    assert "0:00:06" in said
    (run,) = ranks.cells()
    assert_same_weights(undisturbed[run.name], run)
    ranks.assert_nothing_left()


# Over 5 s: two attempts of sixty steps.
def test_a_pre_empted_cell_keeps_every_step(ranks: Ranks, undisturbed: dict[str, Path]) -> None:
    ranks.write_training()
    supervisor = ranks.start()
    ranks.wait_for_training(1)
    supervisor.send_signal(signal.SIGTERM)
    finish(supervisor, 130)
    ranks.assert_nothing_left()
    (run,) = ranks.cells()
    saved = torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)["global_step"]
    assert [len(steps(run, 1, rank)) for rank in (0, 1)] == [saved] * 2
    assert 10 <= saved < STEPS
    finish(ranks.start())
    assert [len(steps(run, 2, rank)) for rank in (0, 1)] == [STEPS - saved] * 2
    assert_same_weights(undisturbed[run.name], run)
    ranks.assert_nothing_left()
