"""`ablate submit`: the calls of SLURM, and the effects of the script."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import yaml

from lightning_app.cli import main
from lightning_app.core.errors import UserError
from lightning_app.grids.submit import submit_command
from tests.slurm_stand_in import install, told

BASE = Path("ablations/base/synthetic.yaml").resolve()
DATABASE = "postgresql://me@db.example.org:5433/ablate"
ODD = 'a b\'c "d" %j # $HOME ü'
TIMEOUT = 300.0


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A host with SLURM's commands; returns the folder with the records of their calls."""
    folder = tmp_path / "bin"
    install(folder)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
    monkeypatch.setenv("LIGHTNING_APP_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("ABLATE_STORAGE", raising=False)
    monkeypatch.chdir(tmp_path)
    return folder


def write_grid(folder: Path, seeds: int = 1, steps: int = 20) -> Path:
    base = yaml.safe_load(BASE.read_text())
    base["trainer"] |= {"max_steps": steps, "val_check_interval": 20, "limit_val_batches": 2}
    sizes = {"encoder_depth": 1, "decoder_depth": 1, "model_dim": 12, "ff_dim": 14, "num_heads": 3}
    base["model"]["architecture"] |= sizes | {"dropout": 0.1}
    base["model"]["schedule"]["warmup_steps"] = 0
    base["data"]["tokens_per_batch"] = 128
    tree = {"name": "tiny", "base_config": base, "axes": {"seed_everything": [*range(seeds)]}}
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


@pytest.fixture
def grid(tmp_path: Path) -> Path:
    return write_grid(tmp_path)


def options(slurm: Path) -> dict[str, str | None]:
    (call,) = told(slurm, "sbatch")
    return call["options"]


def step_of(script: str) -> list[str]:
    """The words of the step, as a shell reads them."""
    lines = script.replace("\\\n", " ").splitlines()
    (step,) = [line for line in lines if line.startswith("srun ")]
    return shlex.split(step)


def test_slurm_gets_every_word(slurm: Path, grid: Path, tmp_path: Path, capfd) -> None:
    words = ["--partition=gpu,spare", "--time=1-12:00", "--constraint=a100&[rack1|rack2]"]
    words += ["--gpus-per-node=a100:2", "--cpus-per-task=16", "--mem=64G", "--nice", "--hold"]
    words += ["--mail-type=FAIL,END", "--mail-user=me@example.org"]
    code = submit_command(
        grid,
        array=40,
        concurrent=8,
        sbatch=words,
        storage=DATABASE,
        workers=2,
        hang_limit="00:30",
    )
    assert code == 0
    folder = tmp_path / "experiments" / "tiny"
    assert options(slurm) == {
        "parsable": None,
        "job-name": "ablate-tiny",
        "array": "0-39%8",
        "nodes": "1",
        "ntasks": "1",
        "partition": "gpu,spare",
        "time": "1-12:00",
        "constraint": "a100&[rack1|rack2]",
        "gpus-per-node": "a100:2",
        "cpus-per-task": "16",
        "mem": "64G",
        "chdir": str(tmp_path),
        "output": f"{folder}/slurm/%A_%a.log",
        "open-mode": "append",
        "signal": "USR1@180",
        "requeue": None,
        "mail-type": "FAIL,END",
        "mail-user": "me@example.org",
        "nice": None,
        "hold": None,
    }
    script = (folder / "submit.sh").read_text()
    assert told(slurm, "sbatch")[0]["script"] == script
    assert f"# Submitted by: {shlex.join(['sbatch', *words, str(folder / 'submit.sh')])}" in script
    step = step_of(script)
    assert step[:3] == ["srun", "--nodes=1", "--ntasks=1"]
    step = step[step.index(sys.executable) :]
    assert step[1:5] == ["-m", "lightning_app", "run", str(grid)]
    assert step[5:7] == ["--experiments", str(tmp_path / "experiments")]
    assert step[7:10] == ["--no-wait", "--storage", DATABASE]
    assert step[10:] == ["--workers", "2", "--hang-limit", "00:30"]
    assert "job 4242: tasks 0-39%8" in capfd.readouterr().out


def test_one_job_needs_no_options(slurm: Path, grid: Path) -> None:
    assert submit_command(grid, requeue=False) == 0
    found = options(slurm)
    assert found["array"] == "0-0"
    assert "no-requeue" in found
    assert not {"partition", "time", "requeue", "cpus-per-task", "mem"} & found.keys()
    assert "scontrol" not in told(slurm, "sbatch")[0]["script"]


def test_paths_of_any_letters(slurm: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    """The stand-in of sbatch reads the script back and looks for the folder of the log."""
    folder = tmp_path / ODD
    folder.mkdir()
    monkeypatch.chdir(folder)
    grid = write_grid(folder)
    assert submit_command(grid, Path("out here")) == 0
    assert "--experiments 'out here'` shows the cells" in capsys.readouterr().out
    assert options(slurm)["chdir"] == str(folder)
    step = step_of((folder / "out here" / "tiny" / "submit.sh").read_text())
    assert str(grid) in step
    assert str(folder / "out here") in step


def test_dry_run_prints_what_would_be_submitted(
    slurm: Path, grid: Path, tmp_path: Path, monkeypatch, capsys
) -> None:
    asked: dict[str, Any] = {"array": 3, "storage": DATABASE, "sbatch": ["--time=240"]}
    with monkeypatch.context() as bare:
        bare.setenv("PATH", "/nowhere")
        assert submit_command(grid, **asked, dry_run=True) == 0
    printed = capsys.readouterr().out
    assert not (tmp_path / "experiments").exists()
    assert told(slurm, "sbatch") == []
    submit_command(grid, **asked)
    assert (tmp_path / "experiments" / "tiny" / "submit.sh").read_text() == printed


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({"array": 0}, "--array: expected 1 or more"),
        ({"concurrent": 0}, "--concurrent: expected 1 or more"),
        ({"storage": "postgresql://me:secret@host/ablate"}, "password"),
        ({"storage": "nowhere/queue"}, "--storage"),
        ({"sbatch": ["--partition", "gpu\n#SBATCH --uid=0"]}, "line breaks"),
        ({"workers": 0}, "--workers: expected 1 or more"),
        ({"sbatch": ["--array=0-9"]}, "--array: `ablate submit` sets it"),
        ({"sbatch": ["--time=5", "-a0-9"]}, "-a0-9: `ablate submit` sets it"),
        ({"sbatch": ["--output", "x.log"]}, "--output: `ablate submit` sets it"),
        ({"sbatch": ["--wrap=true"]}, "--wrap: `ablate submit` sets it"),
        ({"experiments": Path("a\\b")}, "--experiments"),
    ],
    ids=str,
)
def test_a_mistake_is_reported_before_anything_is_written(
    slurm: Path, grid: Path, tmp_path: Path, asked: dict[str, Any], expected: str
) -> None:
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UserError, match=re.escape(expected)) as refusal:
        submit_command(grid, **asked)
    assert "secret" not in str(refusal.value)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_broken_grid_is_not_submitted(slurm: Path, grid: Path) -> None:
    grid.write_text(grid.read_text().replace("axes:", "axis:"))
    with pytest.raises(UserError, match="unknown key 'axis'"):
        submit_command(grid)
    assert told(slurm, "sbatch") == []


def test_without_slurm(grid: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(UserError, match="PATH"):
        submit_command(grid, tmp_path / "experiments")
    assert not (tmp_path / "experiments").exists()


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("--partition=nowhere", "specified: nowhere"),
        ("--mem=lots", "mem"),
        ("--reservaton=x", "reservaton"),
        ("--hold=yes", "hold"),
        ("gpu", "expected one script"),
    ],
    ids=str,
)
def test_sbatch_itself_says_what_it_refuses(
    slurm: Path, grid: Path, capfd, word: str, said: str
) -> None:
    assert submit_command(grid, sbatch=[word]) == 1
    captured = capfd.readouterr()
    assert "sbatch: " in captured.err
    assert said in captured.err
    assert captured.out == ""


def test_the_surroundings_overrule_nothing(slurm: Path, grid: Path, monkeypatch) -> None:
    """As from a job, and with the defaults of a cluster in the environment."""
    for name in ("PARTITION", "ARRAY_INX", "TIMELIMIT", "SIGNAL", "NO_REQUEUE", "OUTPUT"):
        monkeypatch.setenv(f"SBATCH_{name}", "7")
    monkeypatch.setenv("SBATCH_ACCOUNT", "physics")
    monkeypatch.setenv("SLURM_CONF", "/etc/slurm.conf")
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    monkeypatch.setenv("SLURM_MEM_PER_CPU", "1024")
    assert submit_command(grid, sbatch=["--partition=gpu", "--time=60"]) == 0
    found = options(slurm)
    assert (found["partition"], found["time"], found["array"]) == ("gpu", "60", "0-0")
    assert (found["signal"], found["account"]) == ("USR1@180", "physics")
    assert "no-requeue" not in found
    environment = told(slurm, "sbatch")[0]["environment"]
    assert [key for key in environment if key.startswith("SLURM_")] == ["SLURM_CONF"]


def test_a_storage_of_the_environment_stays_there(
    slurm: Path, grid: Path, monkeypatch, start
) -> None:
    """Its password is in no file of ours, and a job without it says so."""
    monkeypatch.setenv("ABLATE_STORAGE", "postgresql://me:secret@db.example.org/ablate")
    assert submit_command(grid, array=2) == 0
    (call,) = told(slurm, "sbatch")
    assert "secret" not in call["script"]
    assert "db.example.org" not in call["script"]
    assert call["environment"]["ABLATE_STORAGE"].endswith("secret@db.example.org/ablate")
    monkeypatch.delenv("ABLATE_STORAGE")
    task = start(Path("experiments/tiny"))
    assert task.end() != 0
    assert "ABLATE_STORAGE" in task.output
    assert told(slurm, "srun") == []


def test_a_storage_out_of_reach_is_noted(slurm: Path, grid: Path, capsys) -> None:
    assert submit_command(grid, storage="postgresql://me@127.0.0.1:5433/ablate", array=2) == 0
    assert "127.0.0.1:5433/ablate is on this host" in capsys.readouterr().err


def test_the_words_of_the_command_line(slurm: Path, grid: Path, tmp_path: Path) -> None:
    line = "--array 2 --concurrent 1 --no-requeue --workers 2"
    line += f" --devices-per-cell 1 --storage {DATABASE} --max-time 01:00 --retry-failed"
    line += " -- --partition=p --time=90 --cpus-per-task=2 --nice --hold"
    assert main(["submit", str(grid), *line.split()]) == 0
    found = options(slurm)
    assert found["array"] == "0-1%1"
    assert (found["partition"], found["time"], found["cpus-per-task"]) == ("p", "90", "2")
    assert {"nice", "hold", "no-requeue"} <= found.keys()
    step = step_of((tmp_path / "experiments" / "tiny" / "submit.sh").read_text())
    for words in (f"--no-wait --storage {DATABASE} --workers 2", "--devices-per-cell 1"):
        assert words in " ".join(step)
    assert step[-3:] == ["--max-time", "01:00", "--retry-failed"]


def test_an_option_of_sbatch_before_the_dashes_is_refused(grid: Path, capsys) -> None:
    assert main(["submit", str(grid), "--partition", "gpu"]) == 2
    assert "'--partition'" in (said := capsys.readouterr().err)
    assert "ablate submit GRID -- --partition" in said


RECIPE = Path("docs/recipes/slurm_array.sh").resolve()


def test_the_script_to_edit_is_that_of_submit(
    slurm: Path, grid: Path, tmp_path: Path, capsys
) -> None:
    """But for the names that `ablate submit` fills in, and the command, which is on the PATH.

    Other tests run the script of `ablate submit`.
    """
    submit_command(grid, array=4, dry_run=True)
    command = shlex.join([sys.executable, "-m", "lightning_app", "run", str(grid)])
    experiments = str(tmp_path / "experiments")

    def edited(script: str) -> str:
        script = script.replace("ablate run /shared/grid.yaml", command)
        return script.replace("/shared/experiments", experiments)

    def lines(script: str) -> list[str]:
        ours = r"# |#$|#SBATCH --(job-name|chdir|output)="
        return [line for line in script.splitlines() if line and not re.match(ours, line)]

    script = RECIPE.read_text()
    assert lines(edited(script)) == lines(capsys.readouterr().out)
    subprocess.run(["sbatch", str(RECIPE)], check=True, capture_output=True)
    assert (options(slurm)["array"], options(slurm)["signal"]) == ("0-3", "USR1@180")


class Task:
    """One task of the array: the script, run as SLURM runs it, and all that it has started."""

    def __init__(self, script: Path, index: int) -> None:
        environment = {
            **os.environ,
            "SLURM_ARRAY_JOB_ID": "4242",
            "SLURM_ARRAY_TASK_ID": str(index),
            "SLURM_ARRAY_TASK_COUNT": "2",
            "SLURM_JOB_ID": str(4243 + index),
            "SLURM_JOB_NAME": "ablate-tiny",
            "SLURM_JOB_NODELIST": "node[1-2]",
            "SLURM_NTASKS": "2",
            "SLURM_NTASKS_PER_NODE": "2",
            "SLURM_NNODES": "2",
            "SLURM_CPUS_PER_TASK": "1",
            "WORLD_SIZE": "2",
            "MASTER_PORT": "29500",
        }
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
def start() -> Iterator[Callable[[Path, int], Task]]:
    """Start the script in a folder as a task of the array; none outlives the test."""
    tasks: list[Task] = []

    def start(folder: Path, index: int = 0) -> Task:
        tasks.append(Task(folder / "submit.sh", index))
        return tasks[-1]

    yield start
    for task in tasks:
        task.kill()


def wait_for(happened: Callable[[], object], task: Task) -> None:
    until = time.monotonic() + TIMEOUT
    while not happened():
        assert task.running, (task.end(), task.output)
        assert time.monotonic() < until
        time.sleep(0.01)


def step_reached(folder: Path) -> int:
    steps = [json.loads(each.read_text())["step"] for each in folder.rglob("progress.json")]
    return max(steps, default=0)


def requeued(slurm: Path) -> list[list[str]]:
    return [call["words"] for call in told(slurm, "scontrol")]


def test_a_mistake_ends_the_job_for_good(slurm: Path, grid: Path, start) -> None:
    submit_command(grid)
    grid.unlink()
    task = start(Path("experiments/tiny"))
    assert task.end() == 2
    assert "no such grid file" in task.output
    assert requeued(slurm) == []


def test_a_signal_before_the_supervisor_listens(slurm: Path, grid: Path, start) -> None:
    submit_command(grid)
    task = start(Path("experiments/tiny"))
    wait_for(lambda: any("run" in each.cmdline() for each in task.processes()), task)
    task.send(signal.SIGUSR1)
    assert task.end() == 138
    assert requeued(slurm) == [["requeue", "Incomplete", "4242_0"]]


@pytest.mark.slow
def test_a_job_whose_time_is_over_comes_back_and_goes_on(
    slurm: Path, tmp_path: Path, start
) -> None:
    """To the weights of a run without a break, one step of the way after the other."""
    grid = write_grid(tmp_path, steps=300)
    submit_command(grid)
    folder = tmp_path / "experiments" / "tiny"
    task = start(folder)
    wait_for(lambda: step_reached(folder) > 20, task)
    task.send(signal.SIGUSR1)
    assert task.end() == 130, task.output
    assert requeued(slurm) == [["requeue", "Incomplete", "4242_0"]]
    assert not list(folder.glob("runs/*/result.json"))

    again = start(folder)
    assert again.end() == 0, again.output
    assert len(requeued(slurm)) == 1
    submit_command(grid, tmp_path / "whole")
    whole = start(tmp_path / "whole" / "tiny")
    assert whole.end() == 0, whole.output

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


def test_two_tasks_share_a_grid(slurm: Path, tmp_path: Path, start) -> None:
    """Takes over 5 s: two jobs start the program cold, as a scheduler does."""
    submit_command(write_grid(tmp_path, seeds=2), array=2)
    folder = tmp_path / "experiments" / "tiny"
    tasks = [start(folder, index) for index in range(2)]
    assert [task.end() for task in tasks] == [0, 0], [task.output for task in tasks]
    assert {call["options"]["cpus-per-task"] for call in told(slurm, "srun")} == {"1"}
    runs = list(folder.glob("runs/*"))
    assert len(runs) == 2
    for run in runs:
        assert (run / "result.json").is_file()
        assert [each.name for each in (run / "attempts").iterdir()] == ["1"]
