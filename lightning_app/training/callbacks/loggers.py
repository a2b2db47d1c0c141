"""The loggers of a run: curves, TensorBoard, pictures, and loggers from the config.

They only observe: `trainer.logger` is not part of any id.
"""

import csv
import inspect
import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from pydoc import locate
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from lightning.pytorch.strategies import FSDPStrategy
from lightning.pytorch.utilities import rank_zero_only
from PIL import Image
from torch import nn

from lightning_app.catalogue.parts import stack_drawing
from lightning_app.catalogue.svg import picture
from lightning_app.config.classes import entries
from lightning_app.core.files import write_whole
from lightning_app.probes.figures import attention_image
from lightning_app.probes.probe import attention_maps
from lightning_app.runs.folder import DRAWING
from lightning_app.tasks.base import Task

CSV_ONLY = ("epoch", "train/seconds", "test/perplexity", "test/accuracy")
"""Tags only in ``metrics.csv``: other tags contain the same, or TensorBoard counts it itself."""


FLUSHED = 10
"""Seconds between two writes. A `KeyboardInterrupt` may come while TensorBoard wakes its thread,
which then sleeps this long while the end of the run waits for it. The first Ctrl-C raises
nothing."""


class Events(TensorBoardLogger):
    """Write the event files of a run into `folder`, without the tags `CSV_ONLY`.

    A run that continues from a checkpoint logs its steps from `purge_step` again.
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
    """Log `metrics`, but only those in `shown` to event files."""
    for logger in trainer.loggers:
        logger.log_metrics(dict(shown if isinstance(logger, TensorBoardLogger) else metrics), step)


def log_image(trainer: pl.Trainer, tag: str, image: Image.Image, step: int) -> None:
    """Add an image to the event files."""
    for logger in event_files(trainer):
        logger.experiment.add_image(tag, np.asarray(image), step, dataformats="HWC")


ATTENTION = "attention"
LONG, LOOKED_AT = 12, 20
"""The desired length of the example in tokens, and the number of batches to search for it."""


class Pictures(pl.Callback):
    """Draw the block when training starts (`block.svg`, linked from the Text tab), and the
    attention maps of an `example` when it ends.

    Nothing is drawn if no event file is written. Training is not affected: the maps are computed in
    evaluation mode, and the state of the RNG is restored.
    """

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.global_step > 0:
            return
        module: Any = pl_module
        for logger in event_files(trainer):
            stacks = module.architecture.stacks(module.block)
            drawings = [stack_drawing(spec, side) for side, spec in stacks.items()]
            write_whole(Path(logger.log_dir) / DRAWING, picture(module.block.preset, drawings))

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # A single rank cannot run a model sharded over all ranks.
        if any(event_files(trainer)) and not isinstance(trainer.strategy, FSDPStrategy):
            show_attention(trainer, pl_module, example(trainer, pl_module))


def example(trainer: pl.Trainer, module: pl.LightningModule) -> Any:
    """Return the longest row of a validation batch, always the same, as a batch.

    It is from the first batch with a row of `LONG` tokens, or else from the one with the longest
    row.
    """
    system: Any = module
    task: Task = system.objective

    def length(batch: Any) -> int:
        return task.texts(batch)[0].shape[1]

    with torch.random.fork_rng(devices=[]):
        loader = trainer.datamodule.val_dataloader()  # pyright: ignore[reportAttributeAccessIssue]
        longest = None
        for batch in islice(loader, LOOKED_AT):
            if longest is None or length(batch) > length(longest):
                longest = batch
            if length(longest) >= LONG:
                break
    assert longest is not None
    return task.longest(trainer.strategy.batch_to_device(longest))


def show_attention(trainer: pl.Trainer, module: pl.LightningModule, sentence: Any) -> None:
    """Write the attention maps of one row to the event files, at the current step."""
    system: Any = module
    task: Task = system.objective
    model = system.model
    assert isinstance(model, nn.Module)
    maps = attention_maps(model, task, sentence)
    tokenizer = trainer.datamodule.tokenizer  # pyright: ignore[reportAttributeAccessIssue]
    read = " → ".join(tokenizer.decode(text[0].tolist()) for text in task.texts(sentence))
    step = trainer.global_step
    lines = [f"{system.block.preset}, step {step}: softmax maps, before any shaping", read]
    log_image(trainer, ATTENTION, attention_image(maps, lines), step)


class Curves(CSVLogger):
    """`metrics.csv` of an attempt, in which new columns appear together with all earlier rows.

    Lightning empties the file before writing a longer header. A kill in between would lose rows
    older than the checkpoint, which no later attempt logs again.
    """

    @rank_zero_only
    def save(self) -> None:
        writer = self.experiment
        path = Path(writer.metrics_file_path)
        columns = sorted({*writer.metrics_keys, *(key for row in writer.metrics for key in row)})
        if columns != writer.metrics_keys and path.is_file():
            text = io.StringIO(newline="")
            table = csv.DictWriter(text, columns)
            table.writeheader()
            with path.open(newline="", encoding="utf-8") as file:
                table.writerows(csv.DictReader(file))
            write_whole(path, text.getvalue().encode())
            writer.metrics_keys = columns
        super().save()


@dataclass(frozen=True, kw_only=True)
class Labels:
    """The labels of a run for a logger.

    Attributes:
        name: The name of the run's folder.
        group: The name of its grid, None outside a grid.
        attempt: The number of the attempt; loggers treat each one as a separate run.
        tags: Short facts, by name.
    """

    name: str
    group: str | None
    attempt: int
    tags: Mapping[str, str]


Arguments = dict[str, Any]


def _wandb(labels: Labels) -> tuple[Arguments, Arguments]:
    tags = [f"{name}:{value}" for name, value in labels.tags.items()]
    return {"name": labels.name}, {"group": labels.group, "tags": tags}


def _mlflow(labels: Labels) -> tuple[Arguments, Arguments]:
    group = {} if labels.group is None else {"experiment_name": labels.group}
    return {"run_name": labels.name, "tags": dict(labels.tags), **group}, {}


def _folders(labels: Labels) -> tuple[Arguments, Arguments]:
    # One folder per attempt: Lightning would remove the curves of the previous attempt.
    return {"name": labels.group or "", "version": f"{labels.name}/{labels.attempt}"}, {}


LABELLED: Mapping[str, Callable[[Labels], tuple[Arguments, Arguments]]] = {
    "WandbLogger": _wandb,
    "MLFlowLogger": _mlflow,
    "CSVLogger": _folders,
    "TensorBoardLogger": _folders,
}
"""For Lightning's loggers: constructor arguments, and additional ones that it passes on."""


def label_loggers(written: Any, labels: Labels) -> None:
    """Set arguments that a config leaves at their defaults in the loggers of ``trainer.logger``.

    Args:
        written: The complete value of the field; it is changed.
        labels: The labels of the run for the loggers.
    """
    for entry in entries(written):
        path = entry["class_path"]
        label = LABELLED.get(path.rpartition(".")[2])
        if label is None:
            continue
        own, passed_on = label(labels)
        parameters = inspect.signature(locate(path)).parameters  # pyright: ignore[reportArgumentType]
        for name, value in own.items():
            given = entry.setdefault("init_args", {})
            if name in parameters and given.get(name) == parameters[name].default:
                given[name] = value
        if passed_on:
            entry["dict_kwargs"] = {**passed_on, **(entry.get("dict_kwargs") or {})}


def added_loggers(value: Any) -> list[Logger]:
    """Return the loggers in the value of ``trainer.logger``; null, true and false add none."""
    if value is None or isinstance(value, bool):
        return []
    return list(value) if isinstance(value, Sequence) else [value]


class Hyperparameters(pl.Callback):
    """Pass the config of the run, with its id, to the added loggers once at the start."""

    def __init__(self, loggers: Iterable[Logger], config: Mapping[str, Any]) -> None:
        self._loggers = list(loggers)
        self._config = dict(config)

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        for logger in self._loggers:
            logger.log_hyperparams(self._config)


def close_loggers(loggers: Iterable[Logger]) -> None:
    """Close the loggers that otherwise close only with the interpreter.

    A cell's process is a fork that skips `atexit` functions, with which W&B ends a run.
    """
    for logger in loggers:
        finish = getattr(getattr(logger, "experiment", None), "finish", None)
        if callable(finish):
            finish()
