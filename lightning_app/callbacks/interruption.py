"""An interrupted run keeps what it has learned."""

from pathlib import Path

import lightning.pytorch as pl
from lightning.pytorch.utilities.exceptions import SIGTERMException


class SaveOnInterrupt(pl.Callback):
    """Write a checkpoint when Ctrl-C or SIGTERM ends the training, to go on from."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        asked = isinstance(exception, KeyboardInterrupt | SIGTERMException)
        if asked and trainer.training and trainer.global_step:
            trainer.save_checkpoint(self.path)
