"""`docs/recipes/slurm_array.sh`, run as SLURM runs it: a mistake, a signal and a requeued task."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import torch
import yaml
from conftest import wait_for  # pyright: ignore[reportMissingImports]

from tests.small import tiny_config

RECIPE = Path("docs/recipes/slurm_array.sh").resolve()
TIMEOUT = 300.0
SRUN = """#!/bin/sh
while [ "${1#--}" != "$1" ]; do shift; done
export SLURM_STEP_ID=0 SLURM_PROCID=0 SLURM_LOCALID=0 PMI_RANK=0 PMI_SIZE=2 PMI_FD=7
exec "$@"
"""


def write_grid(folder: Path) -> None:
    trainer = {"max_steps": 300, "val_check_interval": 20, "limit_val_batches": 2}
    more = {"model__architecture__dropout": 0.1, "data__tokens_per_batch": 128}
    base = tiny_config(trainer, width=12, **more)
    tree = {"name": "tiny", "base_config": base, "axes": {"seed_everything": [0]}}
    (folder / "tiny.yaml").write_text(yaml.safe_dump(tree))


class Task:
    """One task of the array: the script, run as SLURM runs it, and all that it has started."""

    def __init__(self, script: Path) -> None:
        slurm = {"ARRAY_JOB_ID": "4242", "ARRAY_TASK_ID": "0", "ARRAY_TASK_COUNT": "2"}
        slurm |= {"JOB_ID": "4243", "JOB_NAME": "ablate-tiny", "JOB_NODELIST": "node[1-2]"}
        slurm |= {"NTASKS": "2", "NTASKS_PER_NODE": "2", "NNODES": "2", "CPUS_PER_TASK": "1"}
        environment = {**os.environ, **{f"SLURM_{name}": value for name, value in slurm.items()}}
        environment |= {"WORLD_SIZE": "2", "MASTER_PORT": "29500"}
        self.output = ""
        self._process = subprocess.Popen(
            ["bash", str(script)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def processes(self) -> list[psutil.Process]:
        """Every process of the step: SLURM sends its signals to all of them."""
        if not self.running:
            return []
        found = psutil.Process(self._process.pid).children(recursive=True)
        return [each for each in found if each.name() != "bash"]

    def runs(self, word: str) -> bool:
        return any(word in each.cmdline() for each in self.processes())

    def send(self, number: int) -> None:
        for process in self.processes():
            try:
                process.send_signal(number)
            except psutil.NoSuchProcess:
                continue  # the supervisor ended it meanwhile

    def end(self) -> int:
        """Wait for the end and return the exit code of the job; `output` is what it said."""
        self.output += self._process.communicate(timeout=TIMEOUT)[0]
        return self._process.returncode

    def kill(self) -> None:
        for process in [*self.processes(), self._process]:
            process.kill()
        self._process.communicate()


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Task]]:
    """Start the script for a folder of experiments, with stand-ins of srun and scontrol."""
    programs = tmp_path / "bin"
    programs.mkdir()
    requeues = f'#!/bin/sh\necho "$@" >> "{tmp_path}/requeued"\n'
    for name, text in {"srun": SRUN, "scontrol": requeues}.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(programs), prepend=os.pathsep)
    monkeypatch.setenv("LIGHTNING_APP_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    tasks: list[Task] = []

    def start(experiments: str) -> Task:
        command = f"'{sys.executable}' -m lightning_app run"
        script = RECIPE.read_text().replace("ablate run", command)
        script = script.replace("/shared/experiments", experiments).replace("/shared/grid", "tiny")
        (tmp_path / "job.sh").write_text(script)
        tasks.append(Task(tmp_path / "job.sh"))
        return tasks[-1]

    yield start
    for task in tasks:
        task.kill()


def step_reached(folder: Path) -> int:
    found = folder.glob("runs/*/attempts/*/progress.json")
    return max((json.loads(each.read_text())["step"] for each in found), default=0)


AGAIN = "requeue Incomplete 4242_0\n"


def test_a_mistake_ends_the_job_for_good(start: Callable[[str], Task]) -> None:
    task = start("experiments")
    assert task.end() == 2
    assert "there is no such file" in task.output
    assert not Path("requeued").exists()


def test_a_signal_before_the_supervisor_listens(tmp_path, start: Callable[[str], Task]) -> None:
    write_grid(tmp_path)
    task = start("experiments")
    wait_for(lambda: task.runs("run"), lambda: task.running, task)
    task.send(signal.SIGUSR1)
    assert task.end() == 138
    assert Path("requeued").read_text() == AGAIN


@pytest.mark.slow
def test_a_job_whose_time_is_over_comes_back_and_goes_on(tmp_path, start) -> None:
    write_grid(tmp_path)
    folder = tmp_path / "experiments" / "tiny"
    task = start("experiments")
    wait_for(lambda: step_reached(folder) > 20, lambda: task.running, task)
    task.send(signal.SIGUSR1)
    assert task.end() == 130, task.output
    assert Path("requeued").read_text() == AGAIN
    assert not list(folder.glob("runs/*/result.json"))
    for experiments in ("experiments", "whole"):
        task = start(experiments)
        assert task.end() == 0, task.output
    assert Path("requeued").read_text() == AGAIN
    (first,) = folder.glob("runs/*")
    (second,) = (tmp_path / "whole" / "tiny").glob("runs/*")
    assert sorted(each.name for each in (first / "attempts").iterdir()) == ["1", "2"]
    left, right = (
        torch.load(each / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
        for each in (first, second)
    )
    assert left.keys() == right.keys()
    assert all(torch.equal(left[key], right[key]) for key in left)
    one, other = (json.loads((each / "result.json").read_text()) for each in (first, second))
    assert one["steps"] == other["steps"] == 300
    assert one["metrics"]["val/nll"] == other["metrics"]["val/nll"]
