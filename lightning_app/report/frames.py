"""The results of a grid as data frames: one row per cell, one per validation, and one per published
figure, next to ours and with the differences between their settings."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_app.config.tree import RATE, SEED, WARMUP, label, lookup
from lightning_app.report.bibliography import bibliography
from lightning_app.report.facts import DASH, facts, in_short, share_of
from lightning_app.report.results import SUMS, CellResult, GridResults, as_number, failures
from lightning_app.report.statistics import mean
from lightning_app.report.tasks import AVERAGE, failed, over_seeds
from lightning_app.scores.task_facts import LOSS, TASKS, glue_task_of

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
    text = _columns_as_text(grid.axes, axes)
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
_WHOLE = (
    "warmup",
    "reference_warmup",
    "seed",
    "diverged_step",
    "step",
    "steps",
    "tokens",
    "parameters",
    "devices",
)
_WHOLE += ("peak_memory_bytes", "attempt", "data_train", "data_valid", "data_test")


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


def _columns_as_text(axes: Mapping[str, list[Any]], keys: Iterable[str]) -> set[str]:
    """Axes whose values do not share one primitive type, so that a column cannot hold them."""
    kinds = {key: {type(value) for value in axes[key] if value is not None} for key in keys}
    return {key for key in kinds if len(kinds[key]) > 1 or kinds[key] & {dict, list}}


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


COLUMNS = ("paper", "variant", "warmup", "lr", "metric", "theirs", "ours", "low", "high", "seeds")
COLUMNS += ("setting", "differences", "note")
DIVERGED = "diverged"


@dataclass(frozen=True, kw_only=True)
class NearestArm:
    """The finished runs that are nearest to a figure; `apart` describes the differences."""

    cells: Sequence[CellResult] = ()
    apart: tuple[str, ...] = ()


def comparison(grid: GridResults) -> "pd.DataFrame":
    """One row for each published figure and each value of the other axes; empty without figures.

    `warmup` and `lr` are those of the paper. `ours` is the mean over seeds of the same metric, in
    the nearest arm of the same variant: a run without warm-up is compared only with runs without
    warm-up; otherwise the nearest warm-up and rate on a logarithmic scale are taken. If a paper
    does not state its warm-up, our reference warm-up is taken; if it does not state its rate, that
    of our lowest validation loss, or of the best own score of the task. A figure with `data` is
    compared only with runs on that corpus. Averages over tasks are only in the table of tasks
    (`task_scores`). `low` and `high` are the t interval (Student 1908), NaN if some seeds stalled
    and others did not. For the figure "diverged", `ours` is the number of our runs that failed, and
    how. A dash is a value that our runs do not have, or that was measured in another way
    (`QualityMetric.published_with`); `differences` gives the reason, or the distance of the arm.
    `setting` is that of the paper; ours, the same for all rows, is `our_settings`.
    """
    import pandas as pd

    rows = [
        _row(grid, figure, group)
        for figure in grid.published
        if not (grid.scored and figure["metric"].startswith(AVERAGE))
        for group in _groups(grid, figure)
    ]
    return pd.DataFrame(rows, columns=list(COLUMNS))


def _groups(grid: GridResults, figure: Mapping[str, Any]) -> list[str]:
    """The groups of runs on the data of a figure; one row says where there are no such runs."""
    data = figure.get("data")
    cells = [cell for cell in grid.cells if data is None or cell.corpus == data]
    return list(dict.fromkeys(cell.group for cell in cells)) or [""] * (data is not None)


def our_settings(grid: GridResults) -> str:
    """The data and settings of our runs."""
    own = facts(grid)
    wanted = [key for key in ("Model", "Schedule", "Optimizer") if key in own]
    return " ".join([in_short(grid), *(f"{key}: {own[key]}." for key in wanted)])


def _row(grid: GridResults, figure: Mapping[str, Any], group: str) -> dict[str, Any]:
    entry = bibliography().get(figure["paper"])
    arm = _nearest(grid, figure, group)
    unlike = _measured_otherwise(grid, arm.cells, figure["metric"])
    found, said = _ours(() if unlike else arm.cells, figure)
    said = [*unlike, *said]
    where = [f"Ours with {group}."] if group not in ("", "all") else []
    warmup, lr = figure.get("warmup"), figure.get("lr")
    return {
        "paper": figure["paper"] if entry is None else entry.short,
        "variant": figure["variant"],
        "warmup": DASH if warmup is None else warmup,
        "lr": math.nan if lr is None else float(lr),
        "metric": figure["metric"],
        "theirs": figure["value"],
        "setting": figure["setting"],
        "differences": " ".join([*where, *arm.apart, *said]),
        "note": figure.get("note") or "",
    } | found


def _nearest(grid: GridResults, figure: Mapping[str, Any], group: str) -> NearestArm:
    name, data = figure["variant"], figure.get("data")
    if not group:
        return NearestArm(apart=(f"No run on {glue_task_of(str(data)) or data} here.",))
    cells = [cell for cell in grid.finished if cell.variant == name and cell.group == group]
    if not cells:
        return NearestArm(apart=(f"No finished run of {name} here.",))
    warmup, notes = _warmup(grid, cells, figure.get("warmup"))
    cells = [cell for cell in cells if cell.warmup == warmup]
    if not cells:
        return NearestArm(apart=(notes,))
    lr, also = _rate(grid, cells, figure.get("lr"))
    apart = tuple(text for text in (notes, also) if text)
    return NearestArm(cells=[cell for cell in cells if cell.lr == lr], apart=apart)


def _warmup(
    grid: GridResults, cells: Sequence[CellResult], theirs: int | None
) -> tuple[int | None, str]:
    """The warm-up of ours to compare with, and a sentence about the difference."""
    warmups = {cell.warmup for cell in cells if cell.warmup is not None}
    if theirs is None:
        ours = grid.reference_warmup
        return ours, "Their warm-up is not stated" + (f", ours is {ours:,}." if ours else ".")
    if theirs == 0:
        return 0, "" if 0 in warmups else "No finished run without warm-up here."
    if not warmups - {0}:
        return None, "No finished run with warm-up here."
    ours = min(warmups - {0}, key=lambda warmup: abs(math.log(warmup / theirs)))
    return ours, "" if ours == theirs else f"Warm-up {ours:,} instead of {theirs:,}."


def _rate(
    grid: GridResults, cells: Sequence[CellResult], theirs: float | None
) -> tuple[float | None, str]:
    """The learning rate of ours to compare with, and a sentence about the difference."""
    rates = sorted({cell.lr for cell in cells if cell.lr})
    if not rates:
        return cells[0].lr, "Our learning rate is not recorded."
    if theirs is None:
        ours = min(rates, key=lambda rate: _cost(grid, [c for c in cells if c.lr == rate]))
        measure = grid.measure(cells[0]).title if cells[0].scores else "validation loss"
        best = f", the best of {len(rates)} by {measure}" if len(rates) > 1 else ""
        return ours, f"Their learning rate is not stated, ours is {label(ours)}{best}."
    ours = min(rates, key=lambda rate: abs(math.log(rate / theirs)))
    same = math.isclose(ours, theirs)
    return ours, "" if same else f"Learning rate {label(ours)} instead of {label(theirs)}."


def _cost(grid: GridResults, cells: Sequence[CellResult]) -> float:
    """What orders rates, the best one lowest: the mean loss, or the own score of the task."""
    if cells[0].scores:
        measure = grid.measure(cells[0])
        scores = [cell.metrics.get(measure.metric) for cell in cells]
        sign = 1.0 if measure.mode == "min" else -1.0
        values = [sign * value for value in scores if value is not None]
    else:
        values = [cell.loss for cell in cells if math.isfinite(cell.loss)]
    return mean(values) if values else math.inf


def _measured_otherwise(grid: GridResults, cells: Sequence[CellResult], metric: str) -> list[str]:
    """Sentences on why our values of a metric cannot be compared with published ones."""
    needs = {
        field: value
        for task in TASKS.values()
        for score in task.scores
        if score.metric == metric
        for field, value in score.published_with
    }
    reasons = {
        f"Not compared: {field} is {ours} in ours, and {'null' if value is None else value} is "
        "needed."
        for cell in cells
        for field, value in needs.items()
        if (ours := cell.axes.get(field, lookup(grid.config, field))) not in (None, value)
    }
    return sorted(reasons)


def _ours(
    cells: Sequence[CellResult], figure: Mapping[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    """The values of our runs for a figure, and sentences about them."""
    nothing = {"ours": DASH, "low": math.nan, "high": math.nan, "seeds": 0}
    if not cells:
        return nothing, []
    scored = any(cell.scores for cell in cells)
    lost = share_of(sum(map(failed, cells)), len(cells))
    how = "failed" if scored else failures(cells) or "stalled"
    if figure["value"] == DIVERGED:
        return nothing | {"ours": f"{lost} {how}", "seeds": len(cells)}, []
    metric = figure["metric"]
    known = [cell for cell in cells if cell.metrics.get(metric) is not None]
    if not known:
        return nothing, [f"Our runs have no finite {metric}."]
    found = over_seeds(cells, metric)
    said = [f"{lost} of ours {how}."] if any(map(failed, known)) else []
    if early := sum(cell.outcome == "not_yet_learned" for cell in known):
        said.append(f"{early} of ours not yet learned.")
    if found.lacking:
        said.append(f"{found.lacking} of {len(cells)} of ours without a finite {metric}.")
    return {"ours": found.mean, "low": found.low, "high": found.high, "seeds": found.runs}, said
