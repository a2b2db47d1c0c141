"""The TensorBoard logger: at most about forty tags for a run, since more make it slow."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import lightning.pytorch as pl
import numpy as np
from lightning.pytorch.loggers import TensorBoardLogger
from PIL import Image

CSV_ONLY = ("epoch", "train/seconds", "test/perplexity", "test/accuracy")
"""Only in ``metrics.csv``: other tags contain the same, or TensorBoard counts it."""


FLUSHED = 10
"""Seconds between two writes. A `KeyboardInterrupt` may come while TensorBoard wakes its thread,
which then sleeps this long, while the end of the run waits for it. The first Ctrl-C raises none."""


class Events(TensorBoardLogger):
    """Write the event files of a run into `folder`, without the tags `CSV_ONLY`.

    A run that goes on from a checkpoint logs its steps from `purge_step` on again.
    """

    def __init__(self, folder: Path, purge_step: int | None = None) -> None:
        super().__init__(
            folder,
            name="",
            version="",
            default_hp_metric=False,
            purge_step=purge_step,
            flush_secs=FLUSHED,
        )

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        super().log_metrics({k: v for k, v in metrics.items() if k not in CSV_ONLY}, step)


def event_files(trainer: pl.Trainer) -> Iterator[TensorBoardLogger]:
    """Yield the loggers of this process that write event files."""
    if trainer.is_global_zero:
        yield from (each for each in trainer.loggers if isinstance(each, TensorBoardLogger))


def tell(
    trainer: pl.Trainer, metrics: Mapping[str, float], shown: Mapping[str, float], step: int
) -> None:
    """Log `metrics`; to event files only those of `shown`."""
    for logger in trainer.loggers:
        logger.log_metrics(dict(shown if isinstance(logger, TensorBoardLogger) else metrics), step)


def log_image(trainer: pl.Trainer, tag: str, image: Image.Image, step: int) -> None:
    """Put an image into the event files."""
    for logger in event_files(trainer):
        logger.experiment.add_image(tag, np.asarray(image), step, dataformats="HWC")
