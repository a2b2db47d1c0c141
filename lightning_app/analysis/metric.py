"""What a reader judges runs by: means by arm, the best first.

It is the metric that the grid file names, or the task's own score where that is the loss and the
task has published scores (`GridResults.measure`).
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from lightning_app.analysis.failed_runs import failed
from lightning_app.analysis.grid_results import CellResult, GridResults, scales, unlike
from lightning_app.analysis.run_summary import direction
from lightning_app.analysis.statistics import mean, seeds_interval
from lightning_app.grid_axes import label
from lightning_app.task_facts import QualityMetric


@dataclass(frozen=True, kw_only=True)
class MetricMean:
    """One arm: mean and t interval over the `runs` finished runs that have its `metric`.

    The values are those of the results, without the cap of the scores. `lacking` runs finished
    without a finite value. There is no interval if some seeds failed and others did not. `ruler`
    names what the metric counts in this arm, where it counts other things in others: only arms
    of one ruler can be compared by it.
    """

    group: str
    lr: float | None
    variant: str
    warmup: int | None
    metric: str
    mode: str
    mean: float
    low: float
    high: float
    runs: int
    lacking: int
    ruler: str = ""


def by_metric(grid: GridResults) -> list[MetricMean]:
    """Every arm with finished runs, the best mean first, arms without a value last.

    Arms of several rulers are not ranked against each other: those of the first one come first.
    """
    arms: dict[tuple[Any, ...], list[CellResult]] = {}
    for cell in grid.finished:
        arms.setdefault((cell.group, cell.lr, cell.variant, cell.warmup), []).append(cell)
    found = [
        MetricMean(group=group, lr=lr, variant=variant, warmup=warmup, **_over_seeds(grid, cells))
        for (group, lr, variant, warmup), cells in arms.items()
    ]
    firsts = [cells[0] for cells in arms.values()]
    for metric in {arm.metric for arm in found}:
        own = [place for place, arm in enumerate(found) if arm.metric == metric]
        names = scales([firsts[place] for place in own], metric)
        for place, name in zip(own, names, strict=True):
            found[place] = replace(found[place], ruler=name)
    order = list(dict.fromkeys((arm.metric, arm.ruler) for arm in found))
    return sorted(found, key=lambda arm: (order.index((arm.metric, arm.ruler)), _rank(arm)))


def _rank(arm: MetricMean) -> tuple[bool, float]:
    sign = 1 if arm.mode == "min" else -1
    return math.isnan(arm.mean), sign * arm.mean if arm.runs else 0


def titled(grid: GridResults) -> str:
    """The metric and which way is better: `val/bleu, higher is better`; of several, all."""
    return "; ".join(f"{each.metric}, {direction(each.mode)}" for each in grid.measures)


def why_apart(grid: GridResults) -> str:
    """Why arms of several groups cannot be compared by their metric; empty where they can."""
    found = (
        unlike([cell for cell in grid.finished if grid.measure(cell) == measure], measure.metric)
        for measure in grid.measures
    )
    return "; ".join(filter(None, found))


def judged_by(grid: GridResults) -> dict[str, QualityMetric]:
    """The measure of each group of runs."""
    return {cell.group: grid.measure(cell) for cell in grid.finished}


def slices(grid: GridResults, arms: Sequence[MetricMean]) -> dict[str, dict[str, list[MetricMean]]]:
    """The arms by rate and group in words, and by variant, in the same order."""
    several = len({(arm.group, arm.lr) for arm in arms}) > 1
    found: dict[str, dict[str, list[MetricMean]]] = {}
    for arm in arms:
        rate = f"learning rate {label(arm.lr)}" if several and arm.lr is not None else ""
        where = ", ".join(part for part in (rate, arm.group) if part and part != "all")
        found.setdefault(where, {}).setdefault(arm.variant, []).append(arm)
    return found


def metrics_document(grid: GridResults) -> list[dict[str, Any]]:
    """The means for scripts: of each grid that this one joins, or of this one."""
    return [
        {
            "grid": part.name,
            "metric": part.metric,
            "mode": part.mode,
            "arms": [asdict(arm) for arm in by_metric(part)],
        }
        for part in grid.parts or (grid,)
    ]


def _over_seeds(grid: GridResults, cells: Sequence[CellResult]) -> dict[str, Any]:
    measure = grid.measure(cells[0])
    known = [cell for cell in cells if cell.metrics.get(measure.metric) is not None]
    values = [float(cell.metrics[measure.metric] or 0.0) for cell in known]
    low, high, _ = seeds_interval(values, list(map(failed, known)))
    return {
        "metric": measure.metric,
        "mode": measure.mode,
        "mean": mean(values) if values else math.nan,
        "low": low,
        "high": high,
        "runs": len(known),
        "lacking": len(cells) - len(known),
    }
