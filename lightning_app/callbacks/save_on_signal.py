"""Save a checkpoint when a signal stops a run."""

import signal
import threading
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.exceptions import SIGTERMException


class SaveOnInterrupt(pl.Callback):
    """Write a checkpoint to resume from when Ctrl-C or SIGTERM ends the training.

    SIGTERM to any rank ends the training after the current step, which is the same on all ranks. A
    validation that runs or is due is finished first. Such a checkpoint is exact. Ctrl-C interrupts
    a step, and the current batch may be left out when the run goes on.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._asked = False
        self._saved = False
        self._before: Any = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # With Lightning's own handler each rank would stop at once; two ranks at different steps
        # would then wait for each other without end.
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, self._note)

    def _note(self, number: int, frame: object) -> None:
        self._asked = True

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs, batch, batch_idx: int
    ) -> None:
        asked = self._asked
        if trainer.world_size > 1:
            flag = torch.tensor(float(asked), device=trainer.strategy.root_device)
            asked = bool(trainer.strategy.reduce(flag, reduce_op="max"))
        if not asked:
            return
        # A validation that is due now would be skipped; its own checkpoint is exact, too.
        self._saved = trainer.enable_validation and _is_validated(trainer, batch_idx)
        if not self._saved:
            raise SIGTERMException

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch, batch_idx: int
    ) -> None:
        if self._saved:
            raise SIGTERMException

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        self._restore()
        asked = isinstance(exception, KeyboardInterrupt | SIGTERMException)
        if asked and not self._saved and trainer.training and trainer.global_step:
            trainer.save_checkpoint(self.path)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._restore()

    def _restore(self) -> None:
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)
            self._before = None


def _is_validated(trainer: pl.Trainer, batch_idx: int) -> bool:
    """Whether a validation follows this batch."""
    every, epochs = trainer.val_check_batch, trainer.check_val_every_n_epoch
    if every is None:
        return False
    if epochs is None:
        return (trainer.fit_loop.total_batch_idx + 1) % every == 0
    return (trainer.current_epoch + 1) % epochs == 0 and (batch_idx + 1) % every == 0
