"""`ablate submit`: an array of supervisors for SLURM, each of which pulls cells until none is left.

The job that it writes holds no state: whatever ends it, another one goes on with the grid.
"""

import argparse
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from lightning_app.ablation.grid import find_grid, read_grid
from lightning_app.ablation.queue.storages import VARIABLE, StorageSpec, storage_spec
from lightning_app.ablation.slurm.options import (
    NOTICE,
    array_of,
    count_of,
    further_options,
    gpus_of,
    memory_of,
    name_of,
    time_of,
)
from lightning_app.errors import UserError
from lightning_app.files import write_whole, writing_in

DEFAULT = Path("experiments")
SCRIPT = "submit.sh"
LOGS = "slurm"

# Options of `ablate run` that `ablate submit` hands on, by their names in a parsed command line.
RUN_OPTIONS = (
    *("workers", "devices_per_cell", "slots_per_device"),
    *("lost_after", "hang_limit", "max_time", "retry_failed"),
)

_UNNOTICED = 128 + 10  # exit code of a supervisor that SIGUSR1 ended before it listened
_INTERRUPTED = 130

# Variables by which sbatch lets the environment overrule a script; others follow the name.
_INPUT = {"array": "ARRAY_INX", "mem": "MEM_PER_NODE", "time": "TIMELIMIT"}
# What a job says to sbatch about the cluster, not about itself.
_OF_THE_CLUSTER = frozenset({"SLURM_CONF", "SLURM_CLUSTERS", "SLURM_DEBUG_FLAGS", "SLURM_UMASK"})


def run_options(args: argparse.Namespace) -> list[str]:
    """The words for `ablate run` of those of its options that `args` holds."""
    words: list[str] = []
    for name in RUN_OPTIONS:
        value = getattr(args, name, None)
        if value is not None and value is not False:
            words.append(f"--{name.replace('_', '-')}")
            words += [] if value is True else [str(value)]
    return words


def submit_command(
    grid: str | Path,
    experiments: Path = DEFAULT,
    *,
    array: int = 1,
    concurrent: int | None = None,
    partition: str | None = None,
    time: str | None = None,
    account: str | None = None,
    qos: str | None = None,
    constraint: str | None = None,
    gpus: str | None = None,
    cpus: int | None = None,
    mem: str | None = None,
    sbatch: Sequence[str] = (),
    storage: str | None = None,
    run_options: Sequence[str] = (),
    requeue: bool = True,
    dry_run: bool = False,
) -> int:
    """`ablate submit`: write `submit.sh` into the grid's folder, and give it to sbatch.

    Args:
        array: Supervisors, one an array task on one host; more than one need a storage for
            several hosts.
        sbatch: Further options of sbatch, ``KEY=VALUE`` or ``KEY``.
        run_options: Words that every `ablate run` gets besides.
        requeue: Whether a task whose time is over goes on later.
        dry_run: Print the script, write and submit nothing.

    Returns:
        0, or 1 where sbatch refuses the script, which then says why itself.

    Raises:
        UserError: for what SLURM would misunderstand, and where there is no SLURM.
    """
    file = find_grid(grid).resolve()
    name = read_grid(grid).name
    directory = experiments.resolve() / name
    spec = storage_spec(storage, directory)
    _check_storage(spec, array)
    asked = {
        "partition": name_of("--partition", partition),
        "time": time_of(time),
        "account": name_of("--account", account),
        "qos": name_of("--qos", qos),
        "constraint": name_of("--constraint", constraint),
        "gpus-per-node": gpus_of(gpus),
        "cpus-per-task": count_of("--cpus", cpus),
        "mem": memory_of(mem),
    }
    directives: dict[str, str | None] = {
        "job-name": f"ablate-{name}",
        "array": array_of(array, concurrent),
        "nodes": "1",
        "ntasks": "1",
        **{key: value for key, value in asked.items() if value is not None},
        "chdir": str(Path.cwd()),
        "output": _logs(directory),
        "open-mode": "append",
        "signal": f"USR1@{NOTICE}",
        **({"requeue": None} if requeue else {"no-requeue": None}),
        **further_options(sbatch),
    }
    step = ["srun", "--nodes=1", "--ntasks=1"]
    step += [f"--cpus-per-task={cpus}"] if cpus else []  # srun does not take it from the job
    command = [sys.executable, "-m", "lightning_app", "run", str(file)]
    options = ["--experiments", str(experiments.resolve()), "--no-wait"]
    options += ["--storage", storage] if storage is not None else []
    text = script(
        directives,
        [step, command, [*options, *run_options]],
        needs=VARIABLE if storage is None and spec.kind != "journal" else None,
        requeue=requeue,
    )
    if dry_run:
        print(text, end="")
        return 0
    job = _submit(text, directory, directives)
    if job is None:
        print(f"ablate: sbatch refused {directory / SCRIPT}", file=sys.stderr)
        return 1
    where = [] if experiments == DEFAULT else ["--experiments", str(experiments)]
    status = shlex.join(["ablate", "status", str(grid), *where])
    print(f"job {job}: tasks {directives['array']} of {directory / SCRIPT}")
    print(f"logs: {directory / LOGS}")
    print(f"`{status}` shows the cells, `scancel {job}` ends the job")
    return 0


def script(
    directives: Mapping[str, str | None],
    command: Sequence[Sequence[str]],
    needs: str | None,
    requeue: bool,
) -> str:
    """The text of the job: options of sbatch, then `command`, one part a line, as its step.

    `needs` is a variable without which the step cannot work. Raises `UserError` for what no line
    of a script can hold.
    """
    words = [*(value for value in directives.values() if value), *(w for p in command for w in p)]
    for word in words:
        if not word.isprintable():
            raise UserError(f"submit: {word!r}: line breaks and control characters cannot be used")
    lines = [
        "#!/bin/bash",
        "# Written by `ablate submit`, which also makes the folder of the logs.",
    ]
    for key, value in directives.items():
        lines.append(f"#SBATCH --{key}" + ("" if value is None else f"={shlex.quote(value)}"))
    lines += ["", "set -u"]
    if needs is not None:
        lines.append(f': "${{{needs}:?the environment of this job does not hold it}}"')
    lines.append(" \\\n    ".join(shlex.join(part) for part in command))
    lines.append("code=$?")
    if requeue:
        # `Incomplete` leaves a job alone that its user has cancelled meanwhile.
        lines += [
            f'if [ "$code" -eq {_INTERRUPTED} ] || [ "$code" -eq {_UNNOTICED} ]; then',
            "    # Cut short, its state saved: the same task goes on when its turn comes again.",
            '    scontrol requeue Incomplete "${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}"',
            "fi",
        ]
    return "\n".join([*lines, 'exit "$code"', ""])


def _logs(directory: Path) -> str:
    """The log of each task, as a pattern of SLURM: array and index, with % for itself doubled."""
    folder = str(directory / LOGS)
    if "\\" in folder:
        raise UserError(f"--experiments: SLURM cannot write logs below a '\\': {folder}")
    return f"{folder.replace('%', '%%')}/%A_%a.log"


def _submit(text: str, directory: Path, directives: Iterable[str]) -> str | None:
    """Write the script and return the job that sbatch makes of it, or None where it refuses.

    Its complaints reach the user as they are.
    """
    if shutil.which("sbatch") is None:
        raise UserError("submit: no sbatch on the PATH; this needs a host from which SLURM is used")
    path = directory / SCRIPT
    write_whole(path, text)
    with writing_in(directory):
        (directory / LOGS).mkdir(exist_ok=True)  # SLURM fails without a word where it is missing
    done = subprocess.run(
        ["sbatch", "--parsable", str(path)],
        env=submission_environment(directives, os.environ),
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    # After the job comes the name of the cluster.
    return done.stdout.strip().partition(";")[0] if done.returncode == 0 else None


def submission_environment(
    directives: Iterable[str], environment: Mapping[str, str]
) -> dict[str, str]:
    """The environment for sbatch: nothing in it overrules the script or speaks of another job."""
    overruling = {f"SBATCH_{_INPUT.get(key, key.upper().replace('-', '_'))}" for key in directives}
    overruling |= {"SBATCH_REQUEUE", "SBATCH_NO_REQUEUE"}
    in_a_job = "SLURM_JOB_ID" in environment
    return {
        key: value
        for key, value in environment.items()
        if key not in overruling
        and not (in_a_job and key.startswith("SLURM_") and key not in _OF_THE_CLUSTER)
    }


def _check_storage(spec: StorageSpec, array: int) -> None:
    if array > 1 and not spec.several:
        raise UserError(
            f"--array {array}: several hosts need one database, and {spec.shown} is for one "
            "supervisor; give --storage postgresql://... (`ablate storage serve` starts one)"
        )
    if spec.several and urlsplit(spec.url).hostname in ("localhost", "127.0.0.1", "::1"):
        print(
            f"note: {spec.shown} lies on this host alone, out of reach of others", file=sys.stderr
        )
