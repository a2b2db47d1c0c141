"""Compare the values of any axis of a grid with a baseline, on any metric that its runs report."""

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from lightning_app.ablation.grid_checks import check_compare, check_metric
from lightning_app.analysis.comparison import MetricDifference, comparisons, comparisons_frame
from lightning_app.analysis.grid_results import GridResults
from lightning_app.errors import UserError, nearest

if TYPE_CHECKING:
    import pandas as pd


def compare_axis(
    grid: GridResults,
    axis: str,
    baseline: Any,
    *,
    metric: str | None = None,
    mode: str | None = None,
) -> "pd.DataFrame":
    """Return the table of `comparisons` of one axis, with the difference of each seed.

    Args:
        grid: The results of a grid.
        axis: The dotted key of one of its axes.
        baseline: The value of the axis that the others are compared with.
        metric: A metric of the runs; None for what the report judges them by: the own score of a
            task that has published ones, else the metric of the grid.
        mode: Whether `min` or `max` is best; None for that of the metric.

    Raises:
        UserError: for an unknown axis, value or metric, for a grid with a pruner, and for a mode
            without a metric where tasks have scores of their own.
    """
    compare = check_compare({axis: baseline}, grid.axes)
    if not grid.varies(axis):
        raise UserError(f"compare: {axis}: has one value in {grid.name}; a comparison needs two")
    if grid.pruner is not None:
        raise UserError(
            f"{grid.folder}: pruner: {grid.pruner}: cells that were ended early have no final "
            "metric, so that the rest is no fair comparison; a grid without a pruner has"
        )
    asked: dict[str, Any] = {"name": metric or grid.metric}
    if mode is not None:
        asked["mode"] = mode
    elif metric in (None, grid.metric):
        asked["mode"] = grid.mode
    name, best = check_metric(asked, grid.config, grid.axes)
    _check_reported(grid, name)
    if metric is None and mode is not None and grid.scored:
        raise UserError(f"mode: needs a metric; {grid.name} is judged by the scores of its task")
    asked_for = replace(grid, metric=name, mode=best, asked=metric is not None)
    return _with_seeds(comparisons(asked_for, compare))


def _check_reported(grid: GridResults, metric: str) -> None:
    """Refuse a metric that no finished run has: every comparison would be empty."""
    reported = dict.fromkeys(name for cell in grid.finished for name in cell.metrics)
    if reported and metric not in reported:
        known = ", ".join(sorted(reported))
        raise UserError(
            f"metric: no run of {grid.name} reports '{metric}' ({known}){nearest(metric, reported)}"
        )


def _with_seeds(rows: Iterable[MetricDifference]) -> "pd.DataFrame":
    """The table of comparisons; a column `seed N` has the difference of that seed."""
    rows = list(rows)
    frame = comparisons_frame(rows)
    for seed in sorted({seed for row in rows for seed, _ in row.values}):
        frame[f"seed {seed}"] = [dict(row.values).get(seed, float("nan")) for row in rows]
    return frame
