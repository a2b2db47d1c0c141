"""What TensorBoard is told of a run: at most some forty tags, more make it slow."""

from collections.abc import Iterator, Mapping

import lightning.pytorch as pl
import numpy as np
from lightning.pytorch.loggers import TensorBoardLogger
from PIL import Image

UNTOLD = ("epoch", "train/seconds", "test/perplexity", "test/accuracy")
"""What stands in ``metrics.csv`` alone: other tags say the same, or TensorBoard counts it."""


class Events(TensorBoardLogger):
    """The event files of a run, without `UNTOLD`."""

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        super().log_metrics({k: v for k, v in metrics.items() if k not in UNTOLD}, step)


def event_files(trainer: pl.Trainer) -> Iterator[TensorBoardLogger]:
    """Yield the loggers of this process that write event files."""
    if trainer.is_global_zero:
        yield from (each for each in trainer.loggers if isinstance(each, TensorBoardLogger))


def tell(
    trainer: pl.Trainer, metrics: Mapping[str, float], told: Mapping[str, float], step: int
) -> None:
    """Log `metrics`; to event files those of `told` alone."""
    for logger in trainer.loggers:
        logger.log_metrics(dict(told if isinstance(logger, TensorBoardLogger) else metrics), step)


def show(trainer: pl.Trainer, tag: str, image: Image.Image, step: int) -> None:
    """Put an image into the event files."""
    for logger in event_files(trainer):
        logger.experiment.add_image(tag, np.asarray(image), step, dataformats="HWC")
