"""`ablate submit`: an array of supervisors for SLURM; each takes cells until none are left.

The job has no state: whatever ends it, another job continues the grid.
"""

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from string import Template
from typing import Any
from urllib.parse import urlsplit

from lightning_app.config.grid import find_grid, read_spec
from lightning_app.core.errors import UserError
from lightning_app.core.files import write_whole, writing_in
from lightning_app.grids.slots import Options, check_count
from lightning_app.grids.storages import VARIABLE, storage_spec
from lightning_app.plugins import given
from lightning_app.runs.folder import GridFolder

DEFAULT = Path("experiments")

# The options of `ablate run` that `ablate submit` passes on, by their names in `Options.of`.
RUN_OPTIONS = (
    *("workers", "devices_per_cell", "slots_per_device"),
    *("lost_after", "hang_limit", "max_time", "retry_failed"),
)

# SLURM sends SIGUSR1 180 seconds before the job's time limit, so that the cells save their state.
# Exit code 130: the supervisor was interrupted; 138: SIGUSR1 ended it before it was ready. With
# `Incomplete`, scontrol does not requeue a job that its user cancelled.
_SCRIPT = Template("""\
#!/bin/bash
# Written by `ablate submit`, which also makes the folder of the logs.
#SBATCH --job-name=$name
#SBATCH --array=$array
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --chdir=$here
#SBATCH --output=$logs/%A_%a.log
#SBATCH --open-mode=append
#SBATCH --signal=USR1@180
#SBATCH --$requeue
#
# Submitted by: $submitted

set -u
$needs$command
code=$$?
${again}exit "$$code"
""")

# srun does not inherit this option from the job.
_STEP = "srun --nodes=1 --ntasks=1 ${SLURM_CPUS_PER_TASK:+--cpus-per-task=$SLURM_CPUS_PER_TASK}"

_AGAIN = """\
if [ "$code" -eq 130 ] || [ "$code" -eq 138 ]; then
    # Cut short, its state saved: the same task continues when its turn comes again.
    scontrol requeue Incomplete "${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}"
fi
"""

# Options of sbatch that the template or an option of this command sets.
_OURS = ("job-name", "array", "nodes", "ntasks", "chdir", "output", "open-mode", "signal")
_OURS += ("requeue", "no-requeue", "wrap", "parsable", "test-only")
_SHORT = ("-J", "-a", "-N", "-n", "-D", "-o")  # the short forms of some of these

# Settings of the cluster: a job that submits another job passes them on.
_OF_THE_CLUSTER = frozenset({"SLURM_CONF", "SLURM_CLUSTERS", "SLURM_DEBUG_FLAGS", "SLURM_UMASK"})


def submit_command(
    grid: str | Path,
    experiments: Path = DEFAULT,
    *,
    array: int = 1,
    concurrent: int | None = None,
    sbatch: Sequence[str] = (),
    storage: str | None = None,
    requeue: bool = True,
    dry_run: bool = False,
    **options: Any,
) -> int:
    """`ablate submit`: write `submit.sh` into the grid's folder, and submit it with sbatch.

    Args:
        grid: The grid, as for `ablate run`.
        experiments: The folder that holds the grid's folder.
        array: The number of supervisors, one per task of the array.
        concurrent: How many of them run at the same time; None for all.
        sbatch: Additional words for sbatch, which checks them, such as ``--partition gpu``.
        storage: As for `ablate run`.
        requeue: Whether a task that reached its time limit is queued again.
        dry_run: Print the script; write and submit nothing.
        options: Those of every `ablate run`, as `Options.of` reads them.

    Returns:
        0, or 1 if sbatch refuses the script; sbatch prints the reason.

    Raises:
        UserError: for options of sbatch that this command sets, and if SLURM is not installed.
    """
    Options.of(options)  # refuse wrong values here rather than in each job
    file = find_grid(grid).resolve()
    name = read_spec(grid).name
    folder = GridFolder(experiments.resolve() / name)
    spec = storage_spec(storage, folder.journal)
    if urlsplit(spec.shown).hostname in ("localhost", "127.0.0.1", "::1"):
        print(
            f"note: {spec.shown} is on this host, and other hosts cannot reach it", file=sys.stderr
        )
    for option, number in (("--array", array), ("--concurrent", concurrent)):
        if number is not None:
            check_count(option, number)
    if "\\" in str(folder):
        raise UserError(f"--experiments: SLURM cannot write logs below a '\\': {folder}")
    _check_words(sbatch)
    tasks = f"0-{array - 1}" + (f"%{concurrent}" if concurrent else "")
    named = [word for each in given() for word in ("--plugin", each.source)]
    command = [sys.executable, "-m", "lightning_app", *named, "run", str(file)]
    words = ["--experiments", str(experiments.resolve()), "--no-wait"]
    words += ["--storage", storage] if storage is not None else []
    for option, value in ((each, options.get(each)) for each in RUN_OPTIONS):
        if value is not None and value is not False:
            words.append(f"--{option.replace('_', '-')}")
            words += [] if value is True else [str(value)]
    text = _fill(
        name=f"ablate-{name}",
        array=tasks,
        here=str(Path.cwd()),
        logs=str(folder.logs).replace("%", "%%"),
        requeue=requeue,
        submitted=["sbatch", *sbatch, str(folder.script)],
        command=[command, words],
        needs=storage is None and spec.journal != folder.journal,
    )
    if dry_run:
        print(text, end="")
        return 0
    job = _submit(text, folder, sbatch)
    if job is None:
        print(f"ablate: sbatch refused {folder.script}", file=sys.stderr)
        return 1
    where = [] if experiments == DEFAULT else ["--experiments", str(experiments)]
    status = shlex.join(["ablate", "status", str(grid), *where])
    print(f"job {job}: tasks {tasks} of {folder.script}")
    print(f"logs: {folder.logs}")
    print(f"`{status}` shows the cells, `scancel {job}` ends the job")
    return 0


def _check_words(words: Iterable[str]) -> None:
    """Check that no word for sbatch overrides an option that the script sets."""
    for word in words:
        key = word.partition("=")[0]
        if (key.removeprefix("--") in _OURS and key.startswith("--")) or word[:2] in _SHORT:
            raise UserError(f"submit: {key}: `ablate submit` sets it; see its options")


def _fill(
    *,
    name: str,
    array: str,
    here: str,
    logs: str,
    requeue: bool,
    submitted: Sequence[str],
    command: Sequence[Sequence[str]],
    needs: bool,
) -> str:
    """Return the script. Raises `UserError` for characters that a script cannot contain.

    `needs`: whether the job reads its storage from the environment.
    """
    for word in (here, logs, *submitted, *(word for part in command for word in part)):
        if not word.isprintable():
            raise UserError(f"submit: {word!r}: line breaks and control characters cannot be used")
    variable = f': "${{{VARIABLE}:?the environment of this job does not hold it}}"\n'
    return _SCRIPT.substitute(
        name=name,
        array=array,
        here=shlex.quote(here),
        logs=shlex.quote(logs),
        requeue="requeue" if requeue else "no-requeue",
        submitted=shlex.join(submitted),
        needs=variable if needs else "",
        again=_AGAIN if requeue else "",
        command=" \\\n    ".join([_STEP, *map(shlex.join, command)]),
    )


def _submit(text: str, folder: GridFolder, words: Sequence[str]) -> str | None:
    """Write the script, pass it to sbatch after `words`, and return the job; None if refused.

    Environment variables are removed if they would override options of the script or
    describe the job in which this process runs.
    """
    if shutil.which("sbatch") is None:
        raise UserError("submit: no sbatch on the PATH; submit from a host that has SLURM")
    write_whole(folder.script, text)
    with writing_in(folder.path):
        folder.logs.mkdir(exist_ok=True)  # without it, SLURM fails without a message
    overruling = {f"SBATCH_{key.upper().replace('-', '_')}" for key in _OURS}
    overruling.add("SBATCH_ARRAY_INX")  # the variable for --array
    in_a_job = "SLURM_JOB_ID" in os.environ
    environment = {
        key: value
        for key, value in os.environ.items()
        if key not in overruling
        and not (in_a_job and key.startswith("SLURM_") and key not in _OF_THE_CLUSTER)
    }
    done = subprocess.run(
        ["sbatch", "--parsable", *words, str(folder.script)],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    # The job number may be followed by the cluster name.
    return done.stdout.strip().partition(";")[0] if done.returncode == 0 else None
