"""Checks that averages of weights are exact."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from lightning.pytorch.trainer.states import TrainerFn

from lightning_app.bounds import check_callback
from lightning_app.callbacks.divergence import DivergenceMonitor
from lightning_app.errors import UserError


def averaging(trainer: pl.Trainer) -> list[WeightAveraging]:
    """Return the callbacks of a Trainer that average weights."""
    callbacks: list[Any] = trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]
    for callback in callbacks:
        check_callback(type(callback).__name__, (kind.__name__ for kind in type(callback).__mro__))
    return [callback for callback in callbacks if isinstance(callback, WeightAveraging)]


def check_averaging(trainer: pl.Trainer, checkpoint: Path | None, averaged: bool) -> None:
    """Refuse averages that would be wrong, before anything is written.

    Args:
        trainer: With all of its callbacks.
        checkpoint: The checkpoint from which the run continues, None if it starts at step 0.
        averaged: Whether the weights of the checkpoint are averages. Only the callback that wrote
            them finds the raw weights in it.

    Raises:
        UserError: naming the callback.
    """
    found = averaging(trainer)
    names = " and ".join(type(callback).__name__ for callback in found)
    if len(found) > 1:
        raise UserError(f"trainer.callbacks: {names}: expected at most one average of weights")
    if found and not isinstance(trainer.strategy, SingleDeviceStrategy | DDPStrategy):
        kind = type(trainer.strategy).__name__
        raise UserError(
            f"trainer.callbacks: {names} needs whole models, which {kind} does not have"
        )
    if checkpoint is None:
        return
    if averaged and not found:
        raise UserError(
            f"--ckpt_path {checkpoint}: holds averaged weights, and trainer.callbacks has no "
            "WeightAveraging to continue with; give the callback of the run that wrote it"
        )
    if found and not averaged:
        raise UserError(
            f"--ckpt_path {checkpoint}: holds no averaged weights for {names} of "
            "trainer.callbacks to continue with; a run averages from its start or not at all"
        )


class BeforeAveraging(pl.Callback):
    """Act before a callback that averages weights; it is the first of all callbacks.

    The model is built before they copy it. Initial weights never count as an average: the first
    validation, and the end, must come after the first update. The checkpoint of a last step on
    which no validation falls is written while the model still has its raw weights.

    Args:
        monitor: Records whether the run has diverged; such a run has no checkpoint of its end.
        last: That checkpoint.
    """

    def __init__(self, monitor: DivergenceMonitor, last: Path) -> None:
        self._monitor = monitor
        self._last = last

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        module: Any = pl_module
        module.ensure_built()

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking:
            self._check_updated(trainer)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._monitor.divergence is not None or trainer.global_step == 0:
            return
        self._check_updated(trainer)
        validated = int(trainer.callback_metrics.get("step", -1)) == trainer.global_step
        if trainer.checkpoint_callback is not None and not validated:
            trainer.save_checkpoint(self._last)

    def _check_updated(self, trainer: pl.Trainer) -> None:
        for callback in averaging(trainer):
            if callback.state_dict()["latest_update_step"] == 0:
                raise UserError(
                    f"trainer.callbacks: {type(callback).__name__} has averaged nothing by step "
                    f"{trainer.global_step}, where its average is evaluated; let it begin before"
                )
