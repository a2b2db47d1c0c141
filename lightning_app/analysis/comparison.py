"""What a reader judges runs by, at each value of an axis, compared with the axis' baseline.

For an axis with baseline `b`, a value `v` and a slice, that is one combination of all other axes
but the seed: `C = mean_s [m(v, s) - m(b, s)]`, `m` the metric of the grid, or the own score of its
task (`GridResults.measure`), as the runs report it, in its own unit, over the seeds that finished
with a finite value at both. Student's t interval; p is the larger of Student's t and the same with
the spread pooled over the comparisons of the axis by one metric (`statistics.guarded_ps`),
corrected by Holm over all comparisons; one whose p is withheld counts as 1. There is no interval
where some seeds of an arm failed and others did not, and no p value from fewer than 5 seeds where
the two arms differ in failures (`failed_runs.failed`).
"""

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from lightning_app.analysis.failed_runs import failed
from lightning_app.analysis.grid_results import CellResult, GridResults
from lightning_app.analysis.statistics import (
    FEW_SEEDS,
    LEVEL,
    ended_alike,
    guarded_ps,
    holm_values,
    mean,
    pooled_spread,
    seeds_interval,
    sign_flip_p,
)
from lightning_app.grid_axes import (
    CORPUS,
    PRESET,
    ROUNDING,
    SEED,
    WARMUP,
    group_name,
    key_of,
    value_name,
)
from lightning_app.task_facts import QualityMetric

if TYPE_CHECKING:
    import pandas as pd

BETTER, WORSE, SAME = "better", "worse", "no difference shown"

Place = tuple[tuple[str, Hashable], ...]  # the values of the other axes


@dataclass(frozen=True, kw_only=True)
class MetricDifference:
    """One row of `comparisons.csv`: `value` of an `axis` less its `baseline`, in one slice.

    `where` names the values of the other axes that vary, `all` if none does. `values` holds seed
    and difference. `reading` is `better`, `worse` or `no difference shown`, and empty without a p
    value; the metric's `mode` decides the direction. `note` says what is missing, and `withheld`
    whether the seeds are too few for a p value.
    """

    grid: str
    axis: str
    value: str
    baseline: str
    where: str
    metric: str
    mode: str
    estimate: float = math.nan
    low: float = math.nan
    high: float = math.nan
    p: float = math.nan
    p_holm: float = math.nan
    p_sign: float = math.nan
    seeds: int = 0
    note: str = ""
    withheld: bool = False
    values: tuple[tuple[int, float], ...] = ()

    @property
    def reading(self) -> str:
        if math.isnan(self.p_holm):
            return ""
        if self.p_holm >= 1 - LEVEL:
            return SAME
        return BETTER if (self.estimate < 0) == (self.mode == "min") else WORSE


def compared_axes(grid: GridResults) -> dict[str, Any]:
    """The axes to compare with the baseline of each: those of `compare:` in the grid file.

    Of a task with published scores also the warm-up, with none as the baseline. Without that key
    and without a question about warm-up it is the preset, or else the first axis but the seed, with
    the baseline of the grid or the first value.
    """
    if grid.scored and grid.varies(WARMUP) and 0 in grid.warmups:
        return {WARMUP: 0, **grid.compare}
    if grid.compare or grid.asks_warmup:
        return dict(grid.compare)
    several = [axis for axis in grid.axes if axis not in (SEED, ROUNDING) and grid.varies(axis)]
    axis = PRESET if PRESET in several else next(iter(several), None)
    if axis is None:
        return {}
    given = grid.baseline if axis == PRESET and grid.baseline in grid.axes[axis] else None
    return {axis: grid.axes[axis][0] if given is None else given}


def comparisons(grid: GridResults, axes: Mapping[str, Any] | None = None) -> list[MetricDifference]:
    """Every comparison of a grid, or of the grids that it joins; none where a pruner ended runs.

    With `axes` only theirs, each with its baseline, in place of `compared_axes`.
    """
    found = [
        row
        for part in grid.parts or (grid,)
        if part.pruner is None
        for axis, base in (compared_axes(part) if axes is None else axes).items()
        for row in _of(part, axis, base)
    ]
    family = [1.0 if row.seeds > 1 and math.isnan(row.p) else row.p for row in found]
    corrected = zip(found, holm_values(family).tolist(), strict=True)
    return [row if math.isnan(row.p) else replace(row, p_holm=p) for row, p in corrected]


def comparisons_frame(rows: Sequence[MetricDifference]) -> "pd.DataFrame":
    """The comparisons as a table, a row each."""
    import pandas as pd

    return pd.DataFrame([comparison_document(row) for row in rows])


def comparison_document(row: MetricDifference) -> dict[str, Any]:
    """A comparison for scripts."""
    tree = asdict(row) | {"reading": row.reading}
    del tree["values"], tree["withheld"]
    return tree


def _of(grid: GridResults, axis: str, base: Any) -> list[MetricDifference]:
    """The comparisons of one axis; p values by the spread pooled over them."""
    runs: dict[Place, dict[Hashable, dict[int, CellResult]]] = {}
    words: dict[Place, str] = {}
    for cell in grid.cells:
        others = {key: value for key, value in cell.axes.items() if key not in (axis, SEED)}
        place = tuple((key, key_of(value)) for key, value in others.items())
        shown = [key for key in others if key != ROUNDING and grid.varies(key)]
        words[place] = group_name(others, shown, grid.labels)
        if cell.finished:
            arm = runs.setdefault(place, {}).setdefault(key_of(cell.axes[axis]), {})
            arm[cell.seed or 0] = cell
    rows = [
        _compared(grid, axis, value, base, words[place], runs.get(place, {}))
        for place in words
        for value in grid.axes[axis]
        if key_of(value) != key_of(base)
    ]
    # Scores of several tasks differ in unit and in spread: only those of one metric are pooled.
    spreads = {
        metric: pooled_spread([[v for _, v in row.values] for row in rows if row.metric == metric])
        for metric in {row.metric for row in rows}
    }
    return [
        replace(row, p=float(guarded_ps([value for _, value in row.values], *spreads[row.metric])))
        if not math.isnan(row.low) and not row.withheld
        else row
        for row in rows
    ]


def _compared(
    grid: GridResults,
    axis: str,
    value: Any,
    base: Any,
    where: str,
    arms: Mapping[Hashable, Mapping[int, CellResult]],
) -> MetricDifference:
    cells = [cell for arm in arms.values() for cell in arm.values()]
    measure = next(map(grid.measure, cells), grid.measures[0])
    row = MetricDifference(
        grid=grid.name,
        axis=axis,
        value=value_name(axis, value, grid.labels),
        baseline=value_name(axis, base, grid.labels),
        where=where,
        metric=measure.metric,
        mode=measure.mode,
    )
    if axis == CORPUS and any(cell.scores for cell in cells):
        return replace(row, note="scores of two tasks have no difference")
    own, other = (arms.get(key_of(each), {}) for each in (value, base))
    both = sorted(own.keys() & other.keys())
    seeds = [s for s in both if _known(own[s], measure) and _known(other[s], measure)]
    lacking = len(both) - len(seeds)
    note = f"{lacking} of {len(both)} pairs lack a finite {measure.metric}" if lacking else ""
    if not seeds:
        return replace(row, note=note or "no seed has finished with both values")
    values = [_metric(own[s], measure) - _metric(other[s], measure) for s in seeds]
    stopped = [[failed(arm[s]) for s in seeds] for arm in (own, other)]
    low, high, _ = seeds_interval(values, *stopped)
    mixed = not all(map(ended_alike, stopped))
    reason = ""
    if math.isnan(low) and len(seeds) > 1:
        reason = "some seeds of an arm failed and others did not" if mixed else "no spread"
    few = len(seeds) < FEW_SEEDS and not mixed and not ended_alike(stopped[0] + stopped[1])
    if few and len(seeds) > 1:
        reason = f"one arm failed, and {len(seeds)} seeds are too few to tell it from chance"
    note = "; ".join(filter(None, [note, reason]))
    return replace(
        row,
        estimate=mean(values),
        low=low,
        high=high,
        p_sign=math.nan if math.isnan(low) else sign_flip_p(values),
        seeds=len(seeds),
        note=note,
        withheld=few,
        values=tuple(zip(seeds, values, strict=True)),
    )


def _known(cell: CellResult, measure: QualityMetric) -> bool:
    return cell.metrics.get(measure.metric) is not None


def _metric(cell: CellResult, measure: QualityMetric) -> float:
    return float(cell.metrics[measure.metric] or 0.0)
