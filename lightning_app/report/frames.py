"""The results of a grid as data frames: one row per cell, and one per validation."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_app.config.tree import RATE, SEED, WARMUP, label
from lightning_app.report.results import SUMS, CellResult, GridResults, as_number
from lightning_app.scores.task_facts import LOSS

if TYPE_CHECKING:
    import pandas as pd


def results_frame(grid: GridResults) -> "pd.DataFrame":
    """One row per planned cell: identity, state, axes, metrics, loss, budget, device, data sizes.

    `status` is the cell's state; only `ok` and `diverged` have finished and have metrics.
    `outcome` is how those ended. `loss` is the `l` of every score (`CellResult.loss`),
    `reference_warmup` the warm-up with which its grid compares. A number that is missing or was not
    finite is NaN.
    """
    import pandas as pd

    axes = [key for key in grid.axes if key not in (SEED, WARMUP, RATE)]
    # A column cannot hold values that do not share one primitive type.
    kinds = {key: {type(value) for value in grid.axes[key] if value is not None} for key in axes}
    text = {key for key in kinds if len(kinds[key]) > 1 or kinds[key] & {dict, list}}
    measured = [cell.metrics for cell in grid.finished]
    metrics = list(dict.fromkeys(name for each in measured for name in each)) or [grid.metric]
    rows = []
    for cell in grid.cells:
        diverged, sizes = cell.record.get("diverged") or {}, cell.data.get("sizes") or {}
        values = {key: cell.axes.get(key) for key in axes}
        rows.append(
            _identity(cell)
            | {"reference_warmup": grid.reference_warmup}
            | {key: label(values[key]) if key in text else values[key] for key in axes}
            | {name: as_number(cell.metrics.get(name)) for name in metrics}
            | {"outcome": cell.outcome, "loss": cell.loss, "unigram_entropy": cell.entropy}
            | {"diverged_step": diverged.get("step"), "diverged_rule": diverged.get("rule")}
            | {key: cell.record.get(key) for key in _BUDGET}
            | {"data": cell.data.get("name"), "protocol": cell.data.get("protocol")}
            | {f"data_{split}": sizes.get(split) for split in ("train", "valid", "test")}
        )
    columns = [*_IDENTITY, "reference_warmup", *axes, *metrics, "outcome"]
    columns += ["loss", "unigram_entropy"]
    columns += ["diverged_step", "diverged_rule", *_BUDGET]
    columns += ["data", "protocol", "data_train", "data_valid", "data_test"]
    return pd.DataFrame(rows, columns=columns).astype(_kinds(columns))


def validations_frame(grid: GridResults) -> "pd.DataFrame":
    """One row per cell and validation: identity, step, tokens, seconds, every `val/` metric.

    Each `metrics.csv` is read once. `tokens` and `seconds` are sums since the start of training,
    NaN where the run did not log them at that step.
    """
    import pandas as pd

    rows: list[dict[str, Any]] = []
    for cell in grid.cells:
        by_step = _validations(cell)
        rows += [_identity(cell) | {"step": step} | by_step[step] for step in sorted(by_step)]
    logged = dict.fromkeys(key for row in rows for key in row if key.startswith("val/"))
    columns = [*_IDENTITY, "step", "tokens", "seconds", *(sorted(logged) or [LOSS])]
    return pd.DataFrame(rows, columns=columns).astype(_kinds(columns))


_IDENTITY = ("id", "name", "status", "group", "variant", "baseline", "warmup", "lr", "seed")
_BUDGET = ("steps", "tokens", "seconds", "parameters", "device", "devices", "precision")
_BUDGET += ("peak_memory_bytes", "attempt")
_WHOLE = ("warmup", "reference_warmup", "seed", "diverged_step", "step", "steps", "tokens")
_WHOLE += ("parameters", "devices", "peak_memory_bytes", "attempt")
_WHOLE += ("data_train", "data_valid", "data_test")


def _identity(cell: CellResult) -> dict[str, Any]:
    return {key: getattr(cell, "state" if key == "status" else key) for key in _IDENTITY}


def _kinds(columns: Iterable[str]) -> dict[str, str]:
    """The types that pandas would not infer: integers with gaps, and columns without values."""
    whole = {key: "Int64" for key in columns if key in _WHOLE}
    return whole | {"lr": "float64", "seconds": "float64"}


def _validations(cell: CellResult) -> dict[int, dict[str, float]]:
    """The values of each validation of a run, by step."""
    curves = cell.run.curves(lambda name: name.startswith("val/") or name in SUMS)
    by_step: dict[int, dict[str, float]] = {}
    for name, curve in curves.items():
        if name not in SUMS:
            for step, value in curve.items():
                by_step.setdefault(step, {})[name] = value
    for step, values in by_step.items():
        sums = {SUMS[name]: curves[name] for name in SUMS if name in curves}
        values |= {name: curve[step] for name, curve in sums.items() if step in curve}
    return by_step


SHORT = {SEED: "seed", WARMUP: "warmup", RATE: "lr"}
"""The columns of `results_frame` that hold these axes."""


def runs_frame(
    grid: GridResults,
    runs_now: Callable[[Path], bool] = lambda folder: False,
    *,
    restored: bool = False,
) -> "pd.DataFrame":
    """One row for each planned run.

    The columns are those of `results_frame`, with these besides: each axis by its dotted key (seed,
    warm-up and rate, too), `error` (the last line of the error of a failed run, or what is damaged)
    and `folder`. `status` is `ok`, `diverged`, `pruned`, `failed`, `running`, `unfinished` (cut
    short; the grid goes on there), `waiting`, `damaged` or `other_data`.

    Args:
        grid: The results of a grid.
        runs_now: Whether a process trains the run in this folder.
        restored: Whether the folders of the runs will be removed, so that none is named.
    """
    frame = results_frame(grid)
    frame["status"] = [_status(cell, runs_now) for cell in grid.cells]
    for axis in (each for each in grid.axes if each in SHORT):
        frame.insert(list(frame.columns).index("reference_warmup"), axis, frame[SHORT[axis]])
    frame["error"] = [cell.error for cell in grid.cells]
    frame["folder"] = [None if restored else str(cell.folder) for cell in grid.cells]
    return frame


def _status(cell: CellResult, runs_now: Callable[[Path], bool]) -> str:
    if cell.state in ("unfinished", "failed", "waiting") and runs_now(cell.folder):
        return "running"
    return cell.state
