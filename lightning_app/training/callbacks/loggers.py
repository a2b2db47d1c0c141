"""The loggers of a run: curves, TensorBoard, pictures, and loggers from the config.

They only observe: `trainer.logger` is not part of any id.
"""

import csv
import inspect
import io
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from pydoc import locate
from typing import Any, final

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.callbacks import ModelSummary
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.strategies import FSDPStrategy
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor, nn

from lightning_app.catalogue.parts import stack_drawing
from lightning_app.catalogue.svg import picture
from lightning_app.config.classes import entries
from lightning_app.core.errors import UserError
from lightning_app.core.files import write_whole
from lightning_app.probes.figures import attention_image
from lightning_app.probes.probe import attention_maps
from lightning_app.runs.folder import DRAWING
from lightning_app.tasks.base import Task
from lightning_app.training.datamodule import training_steps
from lightning_app.training.module import is_logged, loss_of, tell_all

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
        how: dict[str, Any] = {"default_hp_metric": False, "flush_secs": FLUSHED}
        super().__init__(folder, name="", version="", purge_step=purge_step, **how)

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        super().log_metrics({k: v for k, v in metrics.items() if k not in CSV_ONLY}, step)


def event_files(trainer: pl.Trainer) -> Iterator[TensorBoardLogger]:
    """Yield the loggers of this process that write event files."""
    if trainer.is_global_zero:
        yield from (each for each in trainer.loggers if isinstance(each, TensorBoardLogger))


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
    if not maps:
        return
    tokenizer = trainer.datamodule.tokenizer  # pyright: ignore[reportAttributeAccessIssue]
    texts = task.texts(sentence)
    readers = (tokenizer.source, tokenizer)[-len(texts) :]
    pairs = zip(readers, texts, strict=True)
    read = " → ".join(reader.decode(text[0].tolist()) for reader, text in pairs)
    step = trainer.global_step
    lines = [f"{system.block.preset}, step {step}: softmax maps, before any shaping", read]
    image = np.asarray(attention_image(maps, lines))
    for logger in event_files(trainer):
        logger.experiment.add_image(ATTENTION, image, step, dataformats="HWC")


class Curves(CSVLogger):
    """`metrics.csv` of an attempt, in which new columns appear together with all earlier rows.

    Lightning empties the file before writing a longer header. A kill in between would lose rows
    older than the checkpoint, which no later attempt logs again.
    """

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        for tag in metrics:
            if not tag.isprintable():
                raise UserError(f"the tag {tag!r} is logged: expected one line of printable text")
        super().log_metrics(metrics, step)

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
    """The labels of a run for a logger."""

    name: str  # of the run's folder
    group: str | None  # its grid, None outside a grid
    attempt: int  # loggers treat each one as a separate run
    tags: Mapping[str, str]  # short facts, by name


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

    The complete value of the field, `written`, is changed.
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


def close_loggers(loggers: Iterable[Logger]) -> None:
    """Close the loggers that otherwise close only with the interpreter.

    A cell's process is a fork that skips `atexit` functions, with which W&B ends a run.
    """
    for logger in loggers:
        finish = getattr(getattr(logger, "experiment", None), "finish", None)
        if callable(finish):
            finish()


class Throughput(pl.Callback):
    """Log the tokens and seconds of the run so far, and the speed since the last logged step.

    ``train/tokens``, predicted tokens of all devices, and ``train/seconds``, wall-clock seconds of
    training, are sums over the run and all its attempts. ``train/tokens_per_second`` and
    ``train/data_wait_share`` cover the steps since the last log: the share of their seconds, from 0
    to 1, that passed between the end of a step and the start of the next, waiting for its batch.
    Time spent in validation does not count. `tokens` and `seconds` are the sums; they are
    updated every `log_every_n_steps` steps and at the end.
    """

    def __init__(self) -> None:
        self.tokens = 0
        self.seconds = 0.0
        self._since = 0.0
        # Kept on the device: reading it at each step would make the GPU wait.
        self._counted: Tensor | None = None
        self._elapsed = 0.0
        self._waited = 0.0

    @property
    def rate(self) -> float:
        """Tokens per second over the whole run."""
        return self.tokens / self.seconds if self.seconds else 0.0

    def state_dict(self) -> dict[str, Any]:
        self._take()
        return {"tokens": self.tokens, "seconds": self.seconds}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.tokens, self.seconds = state_dict["tokens"], state_dict["seconds"]

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._since = time.perf_counter()
        self._elapsed = 0.0  # a validation before the first step does not count as training

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._elapsed += time.perf_counter() - self._since

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._since = time.perf_counter()

    def on_train_batch_start(self, *_: Any, **__: Any) -> None:
        self._waited += time.perf_counter() - self._since

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs, batch, batch_idx: int
    ) -> None:
        now = time.perf_counter()
        self._elapsed += now - self._since
        self._since = now
        counted = batch.predicted_tokens
        self._counted = counted if self._counted is None else self._counted + counted
        if is_logged(trainer, trainer.global_step):
            rate, share = self._take()
            logged = {"train/tokens_per_second": rate, "train/data_wait_share": share}
            logged |= {"train/tokens": self.tokens, "train/seconds": self.seconds}
            tell_all(trainer, logged, trainer.global_step)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._take()

    def _take(self) -> tuple[float, float]:
        """Add new tokens and seconds to the sums; return the speed and the share of waiting."""
        counted = 0 if self._counted is None else round(float(self._counted))
        elapsed, waited = self._elapsed, self._waited
        self.tokens += counted
        self.seconds += elapsed
        self._counted, self._elapsed, self._waited = None, 0.0, 0.0
        return (counted / elapsed, waited / elapsed) if elapsed > 0 else (0.0, 0.0)


class WallClock(pl.Callback):
    """The seconds of a run over all its attempts, each up to the checkpoint that was continued."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._before = 0.0

    @property
    def seconds(self) -> float:
        return self._before + time.perf_counter() - self._start

    def state_dict(self) -> dict[str, Any]:
        return {"seconds": self.seconds}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._before = state_dict["seconds"]


class Progress(pl.Callback):
    """Write ``progress.json`` about once a second, for programs that watch the run from outside.

    It also changes during validation and test, and thus shows whether a run hangs.

    Args:
        paths: The file of the run, or those of all runs of a pack.
    """

    def __init__(self, *paths: Path) -> None:
        self.paths = paths
        self._started = time.monotonic()
        self._first_step, self._asked = 0, -1
        self._written = 0.0

    def _write(self, trainer: pl.Trainer, stage: str, *losses: float) -> None:
        if not trainer.is_global_zero:
            return
        self._written, step = time.monotonic(), trainer.global_step
        rate = (step - self._first_step) / max(self._written - self._started, 1e-9)
        report = {"step": step, "max_steps": self._asked, "rate": rate}
        report |= {"time": time.time(), "stage": stage}
        for place, path in enumerate(self.paths):
            partial = path.with_suffix(".partial")
            partial.write_text(json.dumps({**report, "loss": losses[place] if losses else None}))
            os.replace(partial, path)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._started, self._first_step = time.monotonic(), trainer.global_step
        self._asked = training_steps(trainer)
        self._write(trainer, "train")

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs, batch, batch_idx: int
    ) -> None:
        if self._due():
            self._write(trainer, "train", float(loss_of(outputs)))

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._write(trainer, "validate")

    def on_validation_batch_end(self, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
        if self._due():
            self._write(trainer, "validate")

    def on_test_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._write(trainer, "test")

    def on_test_batch_end(self, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
        if self._due():
            self._write(trainer, "test")

    def _due(self) -> bool:
        return time.monotonic() - self._written >= 1.0


class ParameterCount(ModelSummary):
    """Print a run's number of parameters when it starts.

    Lightning's table has a row for each metric, and FLOPs, which are 0 without an example input.
    """

    @staticmethod
    def summarize(
        summary_data: Any, total_parameters: int, trainable_parameters: int, *_: Any, **__: Any
    ) -> None:
        kept = total_parameters - trainable_parameters
        fixed = f", {kept:,} of them fixed" if kept else ""
        print(f"model: {total_parameters:,} parameters{fixed}")


_NOTHING = nullcontext()


@final
class Unprofiled(PassThroughProfiler):
    """Do nothing, at lower cost than Lightning's own, whose generators run 70 times per step."""

    def profile(self, action_name: str) -> AbstractContextManager[Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _NOTHING
