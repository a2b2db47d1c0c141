"""Start of a run, and the rank of this process in it. Fast to import."""

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from lightning_app.config.sources import CHECKPOINT, Written
from lightning_app.core.errors import UserError

if TYPE_CHECKING:
    from lightning_app.training.run import TrainingRun

_RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "SLURM_PROCID", "JSM_NAMESPACE_RANK")
"""The variables from which Lightning reads the rank of this process."""

_LAUNCHERS = (
    ("TORCHELASTIC_RUN_ID", "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    ("LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),  # Lightning's own
    ("SLURM_PROCID", "SLURM_JOB_ID", "SLURM_NTASKS"),
    ("JSM_NAMESPACE_RANK", "LSB_JOBID"),
)
"""The variables set by each process launcher: torchrun, Lightning, SLURM, LSF."""

_KUBEFLOW = ("KUBERNETES_PORT", "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""The variables set by Kubeflow, which Lightning ignores: each of several hosts would take itself
for the first. So they allow a run on one host; a run on several hosts must use torchrun."""

LAUNCH = {"LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
"""The variables that Lightning sets when it starts the processes of a run."""


def check_launcher(environment: Mapping[str, str]) -> None:
    """Refuse a rank in the environment that was not set by a process launcher.

    Such a process would train as one of several and keep no result.

    Raises:
        UserError: naming the variable.
    """
    given = [name for name in _RANKS if name in environment]
    for name in given:
        if not environment[name].isdecimal():
            raise UserError(f"{name}: expected a whole number, found {environment[name]!r}")
    if given and not any(environment.keys() >= {*each} for each in (*_LAUNCHERS, _KUBEFLOW)):
        raise UserError(
            f"{given[0]}={environment[given[0]]} is set, but no launcher of processes such as "
            f"torchrun or srun: unset {' '.join(given)}"
        )


def check_hosts(hosts: int, environment: Mapping[str, str]) -> None:
    """Refuse a run on several hosts without a launcher on each: it would wait forever.

    Raises:
        UserError: naming the launchers that start the others.
    """
    by_hand = ("NODE_RANK", "MASTER_ADDR", "MASTER_PORT")  # as Lightning documents for any cluster
    if hosts > 1 and not any(environment.keys() >= {*each} for each in (*_LAUNCHERS, by_hand)):
        raise UserError(
            f"trainer.num_nodes: {hosts}, but no launcher has started this process on each host; "
            f"call it by srun or torchrun, or on each host with {', '.join(by_hand)} set"
        )


def run_written(
    command: str,
    written: Written,
    *,
    imports: bool = True,
    again: bool = False,
    name: str | None = None,
) -> "TrainingRun":
    """Complete the config of a call and run it, for the command line and for Python.

    `command` is fit, validate, test or predict. With `imports` the config may name classes outside
    the tables, which are then imported. `again` and `name` are as in `TrainingRun`.

    Raises:
        UserError: for a mistake in the config or its checkpoint, with the source of the value.
    """
    from lightning_app.config.config import load_config

    tree = load_config(written, imports=imports, trains=command == "fit")
    with written.located():
        check_hosts(tree["trainer"]["num_nodes"], os.environ)
    from lightning_app.training.run import TrainingRun  # Lightning, after the checks

    with written.located():
        checkpoint = written.fields.get(CHECKPOINT)
        run = TrainingRun(tree, command=command, ckpt_path=checkpoint, again=again, name=name)
        if command == "fit":
            run.fit()
        elif command == "predict":
            run.predict()
        else:
            run.evaluate(verbose=written.fields.get("verbose", True))
    return run
