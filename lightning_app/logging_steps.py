"""Which optimizer steps are logged."""

from typing import Any

import lightning.pytorch as pl
from torch import Tensor


def is_logged(trainer: pl.Trainer, step: int) -> bool:
    """Whether optimizer step `step`, from 1, is logged: the first, then every n-th."""
    interval: int = trainer.log_every_n_steps  # pyright: ignore[reportAttributeAccessIssue]
    return step == 1 or step % interval == 0


def loss_of(outputs: Any) -> Tensor:
    """Return the training loss that Lightning passes to callbacks after a step."""
    return outputs["loss"].detach()


def nll_of(outputs: Any) -> Tensor:
    """Return the training loss without label smoothing."""
    return outputs["nll"]
