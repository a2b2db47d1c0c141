"""The size of a grid: its parameters, tokens, time and disk."""

import json
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from torch import nn

from lightning_app.blocks.config import BlockConfig
from lightning_app.config.config import model_config
from lightning_app.config.tree import RATE, SEED, WARMUP, label
from lightning_app.data.prepare import prepare
from lightning_app.data.sources import resolved_data
from lightning_app.grids.plan import Grid
from lightning_app.grids.plan_checks import devices_of, most_read
from lightning_app.grids.slots import default_workers
from lightning_app.models.heads import ArchitectureConfig
from lightning_app.models.initialization import without_values
from lightning_app.models.loss import ObjectiveConfig
from lightning_app.models.optim import build_optimizer, training_of
from lightning_app.runs.mixtures import Groups, others
from lightning_app.runs.records import Cell
from lightning_app.runs.run import RunState
from lightning_app.tasks.base import build_task

_OPTIMIZER_STATES = {"sgd": 1, "lion": 1, "signum": 1, "schedule_free": 3}
"""Numbers kept per parameter, others: 2; of schedule_free also those that are trained."""
KEPT = {  # by value of `checkpoints`: the number kept per finished cell, and a sentence
    "all": (2, "the last and the best checkpoint of a cell are kept"),
    "last": (1, "the last checkpoint of a cell is kept"),
    "best": (1, "the best checkpoint of a cell is kept"),
    "none": (0, "no checkpoint is kept once a cell is done"),
}
_RUNNING = 2  # checkpoints of a running cell, for every value of `checkpoints`
_SAMPLE = 20  # finished runs per shape whose files are measured
_FREE = (SEED, WARMUP, RATE)  # axes that do not change the cost of a step


def parameters(config: dict[str, Any]) -> int:
    """Return the number of trained parameters of a complete config, without allocating them."""
    said = model_config(config["model"])
    # Dropout has no parameters and may be an axis with many values.
    architecture = replace(said.architecture, dropout=0.0, attention_dropout=0.0)
    model = _model(architecture, said.block, said.objective, *_vocabularies(config["data"]))
    return sum(parameter.numel() for parameter in model.parameters())


def trained_by(config: dict[str, Any]) -> list[dict[str, Any]]:
    """Return which parameters a complete config trains by what, by role; see `training_of`."""
    said = model_config(config["model"])
    sizes = _vocabularies(config["data"])
    model = _model(said.architecture, said.block, said.objective, *sizes)
    optimizer = build_optimizer(
        said.optimizer, model, fused=False, width_factor=said.architecture.width_factor
    )
    return training_of(optimizer, said.schedule, model)


@cache
def _model(
    architecture: ArchitectureConfig,
    block: BlockConfig,
    objective: ObjectiveConfig,
    vocab_size: int,
    source_vocab: int | None,
) -> nn.Module:
    task = build_task(objective)
    return without_values(lambda: task.built(architecture, block, vocab_size, source_vocab))


def _vocabularies(data: dict[str, Any]) -> tuple[int, int | None]:
    """The tokens of a corpus, and those of its source if it has a vocabulary of its own."""
    if data["vocab_size"] is not None and data["vocabularies"] == "shared":
        return data["vocab_size"], None
    return _counted(json.dumps(data))


@cache
def _counted(data: str) -> tuple[int, int | None]:
    """Those that only a prepared corpus has; its config is passed as JSON."""
    meta = prepare(resolved_data(json.loads(data))).meta
    return meta["vocab_size"], meta.get("source_vocab_size")


@dataclass(kw_only=True)
class CostGroup:
    """Cells of one label and equal cost: one model on one corpus for one number of steps."""

    label: str
    config: dict[str, Any]
    cells: list[Cell] = field(default_factory=list)
    runs: list[RunState] = field(default_factory=list)
    step: float | None = None  # measured seconds

    @cached_property
    def parameters(self) -> int:
        return parameters(self.config)

    @property
    def done(self) -> int:
        return sum(run.state in ("done", "pruned") for run in self.runs)

    @property
    def checkpoint(self) -> int:
        """Bytes of one checkpoint: the parameters and the optimizer's state for each."""
        states = _OPTIMIZER_STATES.get(self.config["model"]["optimizer"]["kind"], 2)
        return 4 * (1 + states) * self.parameters

    @property
    def tokens(self) -> int | None:
        """The maximum tokens that one run trains on; None if its steps are unbounded."""
        return most_read(self.config)[0]

    @property
    def seconds(self) -> float | None:
        """Seconds of one run: the mean of the finished ones, otherwise from the measured step."""
        known = [run.result["seconds"] for run in self.runs if run.result is not None]
        if known:
            return sum(known) / len(known)
        steps = self.config["trainer"]["max_steps"]
        return None if self.step is None or steps < 1 else self.step * steps


def shapes_of(grid: Grid, configs: list[dict[str, Any]]) -> list[CostGroup]:
    """The cells of a plan in groups of equal cost."""
    shapes: dict[str, CostGroup] = {}
    wiring = grid.spec.wiring
    for cell, config in zip(grid.cells, configs, strict=True):
        model, data = config["model"], {**config["data"], "seed": None, "init_from": None}
        kind = model["optimizer"]["kind"]
        parts = [model["block"], model["architecture"], model["objective"], kind]
        others = [each for each in cell.axes if each not in _FREE and not each.startswith(wiring)]
        label = " ".join([grid.variant(cell), *(f"{each}={cell.axes[each]}" for each in others)])
        key = json.dumps([label, *parts, data, config["trainer"]], sort_keys=True)
        shape = shapes.setdefault(key, CostGroup(label=label, config=config))
        shape.cells.append(cell)
        shape.runs.append(grid.state(cell))
    return list(shapes.values())


def stale_cells(grid: Grid, shapes: list[CostGroup]) -> dict[str, Groups]:
    """The finished cells from other code, data, libraries or devices, by kind."""
    from lightning_app.training.hardware import here

    pairs = (zip(shape.cells, shape.runs, strict=True) for shape in shapes)
    runs = {cell.name: run for each in pairs for cell, run in each}
    records = {name: run.result for name, run in runs.items() if run.result is not None}
    if not records:
        return {}
    accelerator = grid.spec.base_config.get("trainer", {}).get("accelerator", "auto")
    return others(records, here(grid.data, accelerator))


def plan_document(grid: Grid, shapes: list[CostGroup]) -> dict[str, Any]:
    """The printed values in plain numbers: bytes, seconds, tokens; None for unknown values."""
    states = [run.state for shape in shapes for run in shape.runs]
    done, pruned, failed = (states.count(each) for each in ("done", "pruned", "failed"))
    waiting = len(grid.plan.waiting)
    left = len(grid.cells) - done - pruned
    counts = [(shape.tokens, len(shape.cells)) for shape in shapes]
    bounded = all(tokens is not None for tokens, _ in counts)
    devices = devices_of(grid.spec)
    workers = max(1, default_workers() // devices)
    counted = {"done": done, "pruned": pruned, "failed": failed, "to_run": left}
    sizes = ("done", "parameters", "tokens", "seconds")
    return {
        "grid": grid.name,
        "folder": grid.folder.path,
        "cells": len(grid.cells) + waiting,
        "excluded": grid.plan.excluded,
        "more": grid.plan.more,
        "states": {**counted, "waiting": waiting},
        "axes": grid.plan.axes,
        "trials": trials_of(grid),
        "shapes": [
            {"label": shape.label, "cells": len(shape.cells)}
            | {name: getattr(shape, name) for name in sizes}
            for shape in shapes
        ],
        "tokens": sum((tokens or 0) * cells for tokens, cells in counts) if bounded else None,
        "devices": devices,
        "workers": min(workers, left),
        "seconds_left": _seconds(shapes, workers),
        "probed": any(shape.step is not None for shape in shapes),
        "bytes": _disk(grid, shapes, workers),
    }


def trials_of(grid: Grid) -> dict[str, dict[str, list[Any]]]:
    """The values of each searched field by seed, where each seed is a study of its own."""
    search = grid.spec.search
    if search is None or search.per != "seed":
        return {}
    found: dict[str, dict[str, dict[Any, None]]] = {key: {} for key in search.fields}
    for cell in grid.cells:
        for key, of_seed in found.items():
            of_seed.setdefault(label(cell.axes.get(SEED)), {})[cell.axes[key]] = None
    return {
        key: {seed: sorted(values) for seed, values in of_seed.items()}
        for key, of_seed in found.items()
    }


def _seconds(shapes: list[CostGroup], workers: int) -> float | None:
    """The estimated seconds of the remaining cells, divided among the workers."""
    left = [(shape, len(shape.cells) - shape.done) for shape in shapes]
    cells = sum(count for _, count in left)
    if not cells:
        return 0.0
    known = [shape.seconds for shape in shapes if shape.seconds is not None]
    if not known:
        return None
    mean = sum(known) / len(known)  # for shapes without a finished run
    total = sum((mean if shape.seconds is None else shape.seconds) * n for shape, n in left)
    return total / min(workers, cells)


def _disk(grid: Grid, shapes: list[CostGroup], workers: int) -> float:
    """Bytes of all finished run folders, and of the checkpoints of running cells.

    The size of the files besides the checkpoints is measured on finished runs.
    """
    kept, total = KEPT[grid.spec.checkpoints][0], 0.0
    for shape in shapes:
        done = [cell for cell, run in zip(shape.cells, shape.runs, strict=True) if run.result]
        sizes = [_size(grid.run(cell).path) for cell in done[:_SAMPLE]]
        rest = sum(sizes) / len(sizes) if sizes else 0.0
        total += len(shape.cells) * (kept * shape.checkpoint + rest)
    left = sum(len(shape.cells) - shape.done for shape in shapes)
    largest = max((shape.checkpoint for shape in shapes), default=0)
    return total + min(workers, left) * (_RUNNING - kept) * largest


def _size(folder: Path) -> int:
    files = (path for path in folder.rglob("*") if path.is_file() and path.suffix != ".ckpt")
    return sum(path.stat().st_size for path in files)
