"""Save a checkpoint when a signal stops a run."""

import os
import signal
import threading
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.exceptions import SIGTERMException

STOPPING = (
    "\nablate: stopping after this step, or after the validation that is running, with a "
    "checkpoint; Ctrl-C again stops at once, without one\n"
)


class SaveOnInterrupt(pl.Callback):
    """Write a checkpoint to resume from when Ctrl-C or SIGTERM ends the training.

    The handlers only note the signal. The training ends after the current step, which is the same
    on all ranks, whichever of them received it; a validation that runs or is due is finished first.
    So the checkpoint is exact: the continued run has the weights of one that was not interrupted.

    Each further Ctrl-C raises `KeyboardInterrupt` at once, and nothing is saved, since the step may
    be half done. A process that was started with SIGINT ignored, as a shell script starts its
    background jobs, goes on ignoring it. Before the first step and after the last validation both
    signals have their usual effect.

    Args:
        path: The checkpoint; None to stop without one.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._asked = False
        self._saved = False
        self._interrupts = 0
        self._first_rank = True
        self._before: dict[int, Any] = {}

    @property
    def asked(self) -> bool:
        """Whether a signal has asked for the end of the run."""
        return self._asked

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        self._first_rank = trainer.is_global_zero
        # With Lightning's own handler of SIGTERM each rank would stop at once; two ranks at
        # different steps would then wait for each other without end.
        self._before[signal.SIGTERM] = signal.signal(signal.SIGTERM, self._note)
        # KeyboardInterrupt at an arbitrary instruction can leave the queue of TensorBoard's thread
        # locked, and the end of the run then waits for that thread without end. In a `__del__` or
        # another callback of the interpreter it is lost.
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            self._before[signal.SIGINT] = signal.signal(signal.SIGINT, self._note)

    def _note(self, number: int, frame: object) -> None:
        self._asked = True
        if number != signal.SIGINT:
            return
        self._interrupts += 1
        if self._interrupts > 1:
            raise KeyboardInterrupt
        if self._first_rank:
            os.write(2, STOPPING.encode())  # `print` fails in a handler that interrupts `print`

    def _is_asked(self, trainer: pl.Trainer) -> bool:
        """Whether any rank has received a signal; all ranks call this at the same step."""
        if trainer.world_size == 1:
            return self._asked
        flag = torch.tensor(float(self._asked), device=trainer.strategy.root_device)
        return bool(trainer.strategy.reduce(flag, reduce_op="max"))

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs, batch, batch_idx: int
    ) -> None:
        if not self._is_asked(trainer):
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

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._restore()
        # A signal in the last validation has stopped nothing yet. The last step has its checkpoint.
        if self._is_asked(trainer):
            self._saved = True
            raise SIGTERMException

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        unsaved = isinstance(exception, SIGTERMException) and not self._saved
        try:
            if unsaved and self.path is not None and trainer.training and trainer.global_step:
                trainer.save_checkpoint(self.path)
        finally:
            self._restore()

    def _restore(self) -> None:
        while self._before:
            signal.signal(*self._before.popitem())


def _is_validated(trainer: pl.Trainer, batch_idx: int) -> bool:
    """Whether a validation follows this batch."""
    every, epochs = trainer.val_check_batch, trainer.check_val_every_n_epoch
    if every is None:
        return False
    if epochs is None:
        return (trainer.fit_loop.total_batch_idx + 1) % every == 0
    return (trainer.current_epoch + 1) % epochs == 0 and (batch_idx + 1) % every == 0
