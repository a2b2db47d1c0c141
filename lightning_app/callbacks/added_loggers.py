"""Loggers that a config adds to those of every run: their names, groups, tags and hyperparameters.

They only observe: `trainer.logger` is part of no id.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pydoc import locate
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.loggers import Logger

from lightning_app.config.classes import entries


@dataclass(frozen=True, kw_only=True)
class Labels:
    """What a logger can say about a run.

    Attributes:
        name: The name of the run's folder.
        group: The name of its grid, None outside of one.
        attempt: The number of the attempt; each one is a run of its own for a logger.
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
    # A folder for each attempt: Lightning would remove the curves of the attempt before.
    return {"name": labels.group or "", "version": f"{labels.name}/{labels.attempt}"}, {}


LABELLED: Mapping[str, Callable[[Labels], tuple[Arguments, Arguments]]] = {
    "WandbLogger": _wandb,
    "MLFlowLogger": _mlflow,
    "CSVLogger": _folders,
    "TensorBoardLogger": _folders,
}
"""For Lightning's loggers: arguments of the constructor, and further ones that it passes on."""


def label_loggers(written: Any, labels: Labels) -> None:
    """Set what a config leaves at its default in the loggers of ``trainer.logger``.

    Args:
        written: The complete value of the field; it is changed.
        labels: What the loggers shall say about the run.
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
    """Give the added loggers the config of the run, with its id, once at the start."""

    def __init__(self, loggers: Iterable[Logger], config: Mapping[str, Any]) -> None:
        self._loggers = list(loggers)
        self._config = dict(config)

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        for logger in self._loggers:
            logger.log_hyperparams(self._config)


def close_loggers(loggers: Iterable[Logger]) -> None:
    """End the loggers that end by themselves only when the interpreter does.

    A cell's process is a fork that ends without the functions of `atexit`, by which W&B ends a run.
    """
    for logger in loggers:
        finish = getattr(getattr(logger, "experiment", None), "finish", None)
        if callable(finish):
            finish()
