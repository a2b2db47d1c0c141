"""How many batches and steps the limits of a Trainer allow, and which of its ranks this is."""

import os
from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities import rank_zero_only

from lightning_app.errors import UserError


def limited(batches: int, limit: float) -> int:
    """Return how many batches Lightning takes: `limit` is their number, or a share up to 1.0."""
    return min(batches, limit) if isinstance(limit, int) else int(batches * limit)


def steps_asked(limits: Mapping[str, Any], batches: int) -> int:
    """Return the number of steps that `max_steps` and `max_epochs` ask for, whichever is less.

    -1 where neither limits the run, which then only its time ends.

    Args:
        limits: `max_steps`, `max_epochs` and `limit_train_batches`, as a section `trainer` has
            them.
        batches: The batches of an epoch.
    """
    epochs, steps, limit = (limits[name] for name in ("max_epochs", "max_steps", _LIMIT))
    if epochs is None or epochs == -1:
        return steps
    total = limited(batches, 1.0 if limit is None else limit) * epochs
    return total if steps == -1 else min(steps, total)


def training_steps(trainer: pl.Trainer) -> int:
    """Return the number of steps of a run, -1 where only its time is limited.

    `Trainer.estimated_stepping_batches` would make Lightning read the training data before it
    restores their place from a checkpoint, and then not restore it.
    """
    limits = {"max_epochs": trainer.max_epochs, "max_steps": trainer.max_steps}
    if limits["max_epochs"] in (None, -1):
        return trainer.max_steps  # the data need not be read
    batches = len(trainer.datamodule.train_dataloader())  # pyright: ignore[reportAttributeAccessIssue]
    return steps_asked({**limits, _LIMIT: trainer.limit_train_batches}, batches)


_LIMIT = "limit_train_batches"


def check_limits(trainer: pl.Trainer, limits: Mapping[str, Any], callbacks: str) -> None:
    """Refuse the result of a run that has read other parts of its splits than its config says.

    Args:
        trainer: After the run.
        limits: The section `trainer` of the config.
        callbacks: Those of the config, for the message.

    Raises:
        UserError: naming the limit that a callback or a module has changed.
    """
    for name in (_LIMIT, "limit_val_batches", "limit_test_batches"):
        asked = 1.0 if limits[name] is None else limits[name]
        found = getattr(trainer, name)
        if found != asked or isinstance(found, int) != isinstance(asked, int):
            raise UserError(
                f"trainer.{name}: {asked} in the config and {found} at the end of the run; a "
                f"callback or a module may not change it{callbacks}"
            )


def check_ranks(trainer: pl.Trainer) -> None:
    """Refuse a Trainer that is not the process which the environment says.

    Raises:
        UserError: naming the variable of the environment.
    """
    expected = {
        "RANK": trainer.global_rank,
        "WORLD_SIZE": trainer.world_size,
        "LOCAL_RANK": trainer.local_rank,
    }
    for name, value in expected.items():
        if name in os.environ and int(os.environ[name]) != value:
            raise UserError(
                f"{name}={os.environ[name]} is set, but trainer.devices, num_nodes and strategy "
                f"make {trainer.world_size} processes, of which this is {trainer.global_rank}: "
                f"unset {name}, or let the launcher start as many"
            )
    if rank_zero_only.rank != trainer.global_rank:  # pyright: ignore[reportFunctionMemberAccess]
        raise UserError(
            "SLURM_PROCID: the launcher has started several processes, but trainer.devices and "
            f"num_nodes make {trainer.world_size}: start one, or set these"
        )
