"""What a reader judges runs by, at each value of an axis, compared with the axis' baseline.

For an axis with baseline `b`, a value `v` and a slice, that is one combination of all other axes
but the seed and those that follow from this one: `C = mean_s [m(v, s) - m(b, s)]`, `m` the metric
of the grid, or the own score of its task (`GridResults.measure`), as the runs report it, in its own
unit, over the seeds that finished with a finite value at both. Student's t interval; p is the
larger of Student's t and the same with the spread pooled over the comparisons of the axis by one
metric (`statistics.guarded_ps`), corrected by Holm over all comparisons; one whose p is withheld
counts as 1. There is no interval where some seeds of an arm failed and others did not, and no p
value from fewer than 5 seeds where the two arms differ in failures (`failed_runs.failed`).

Where `m` counts other things at the two values (`rulers`), bits per byte or BLEU takes its place if
every run has it; otherwise, and for an axis that changes only the evaluation, the two are *not
comparable*. Values at which runs have read more or trained longer say how much (`_budget`).
"""

import math
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from lightning_app.analysis.failed_runs import failed
from lightning_app.analysis.formatting import p_value
from lightning_app.analysis.grid_results import (
    CellResult,
    GridResults,
    as_number,
    scales,
    unlike,
)
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
    SEED,
    WARMUP,
    group_name,
    key_of,
    value_name,
)
from lightning_app.mixtures import made_by
from lightning_app.rulers import EVALUATION
from lightning_app.task_facts import TASKS, QualityMetric, task_facts

if TYPE_CHECKING:
    import pandas as pd

BETTER, WORSE, SAME, UNLIKE = "better", "worse", "no difference shown", "not comparable"
EQUAL = "changes nothing"

MORE = 1.05
"""From this factor on, other numbers of tokens are said: fewer come from the ends of batches."""
LONGER = 1.25
"""From this factor on, another time of training is said, if every run of one arm took longer than
every run of the other. Two runs of one config that share a machine differ by up to a fifth."""
_SPEED = "train/tokens_per_second"  # counts the tokens that are read
FREE, OPTIMIZER = ("model.schedule.", "model.optimizer."), "model.optimizer.kind"
"""The axes that cannot change the time of a step, except for the kind of the optimizer."""

Place = tuple[tuple[str, Hashable], ...]  # the values of the other axes


@dataclass(frozen=True, kw_only=True)
class MetricDifference:
    """One row of `comparisons.csv`: `value` of an `axis` less its `baseline`, in one slice.

    `where` names the values of the other axes that vary, `all` if none does. `values` holds seed
    and difference. `reading` is `better`, `worse`, `no difference shown`, `not comparable`, or
    `changes nothing` where every run ends with the very numbers of the one at the baseline, and
    empty without a p value; the metric's `mode` decides the direction. `note` says what is missing,
    and `withheld` whether the seeds are too few for a p value. `why_unlike` says why the metric of
    the grid cannot compare the two, and `comparable` whether `metric` can. `tokens_ratio` and
    `seconds_ratio` are what runs have read and how long they have trained, less than or more than
    those at the baseline; `budget` says it in words, empty where both are about equal.
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
    comparable: bool = True
    equal: bool = False
    why_unlike: str = ""
    tokens_ratio: float = math.nan
    seconds_ratio: float = math.nan
    budget: str = ""
    values: tuple[tuple[int, float], ...] = ()

    @property
    def value_with_p(self) -> str:
        return self.value if math.isnan(self.p_holm) else f"{self.value} (p {p_value(self.p_holm)})"

    @property
    def reading(self) -> str:
        if not self.comparable:
            return UNLIKE
        if self.equal:
            return EQUAL
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
    several = [axis for axis in grid.axes if axis != SEED and grid.varies(axis)]
    axis = PRESET if PRESET in several else next(iter(several), None)
    if axis is None:
        return {}
    given = grid.baseline if axis == PRESET and grid.baseline in grid.axes[axis] else None
    return {axis: grid.axes[axis][0] if given is None else given}


def comparisons(grid: GridResults, axes: Mapping[str, Any] | None = None) -> list[MetricDifference]:
    """Every comparison of a grid, or of the grids that it joins; none where a pruner ended runs.

    Args:
        grid: The grid.
        axes: The axes to compare with the baseline of each; None for `compared_axes`.
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
    del tree["values"], tree["withheld"], tree["equal"]
    return tree


def _of(grid: GridResults, axis: str, base: Any) -> list[MetricDifference]:
    """The comparisons of one axis; p values by the spread pooled over them."""
    runs: dict[Place, dict[Hashable, dict[int, CellResult]]] = {}
    words: dict[Place, str] = {}
    for cell in grid.cells:
        others = grid.apart_from(axis, cell.axes)
        place = tuple((key, key_of(value)) for key, value in others.items())
        shown = [key for key in others if grid.varies(key)]
        words[place] = group_name(others, shown, grid.labels)
        if cell.finished:
            arm = runs.setdefault(place, {}).setdefault(key_of(cell.axes[axis]), {})
            arm[cell.seed or 0] = cell
    pairs = [
        (place, value)
        for place in words
        for value in grid.axes[axis]
        if key_of(value) != key_of(base)
    ]
    rows = [
        _compared(grid, axis, value, base, words[place], runs.get(place, {}))
        for place, value in pairs
    ]
    # Scores of several tasks differ in unit and in spread, as do losses that count other tokens:
    # only those of one metric and one ruler are pooled.
    cells = [
        next(iter(runs.get(place, {}).get(key_of(base), {}).values()), None) for place, _ in pairs
    ]
    kinds = _kinds(rows, cells)
    spreads = {
        kind: pooled_spread(
            [[v for _, v in row.values] for row, of in zip(rows, kinds, strict=True) if of == kind]
        )
        for kind in set(kinds)
    }
    return [
        replace(row, p=float(guarded_ps([value for _, value in row.values], *spreads[kind])))
        if not math.isnan(row.low) and not row.withheld
        else row
        for row, kind in zip(rows, kinds, strict=True)
    ]


def _kinds(
    rows: Sequence[MetricDifference], cells: Sequence[CellResult | None]
) -> list[tuple[str, str]]:
    """The metric and the ruler of each row, from a run at its baseline."""
    found = [(row.metric, "") for row in rows]
    for metric in {row.metric for row in rows}:
        own = [n for n, row in enumerate(rows) if row.metric == metric and cells[n] is not None]
        names = scales([cell for n in own if (cell := cells[n]) is not None], metric)
        for place, name in zip(own, names, strict=True):
            found[place] = metric, name
    return found


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
    if axis in EVALUATION:
        return _not_comparable(row, f"{axis} changes only the evaluation, not what is trained")
    instead = ""
    if own and other:
        compared = [*own.values(), *other.values()]
        common, why = grid.common_measure(compared)
        row = replace(row, why_unlike=why, **_budget(axis, own.values(), other.values()))
        if common is None:
            return _not_comparable(row, why)
        if why:
            instead = f"by {common.metric}, as {measure.metric} counts other things: {why}"
        measure = common
        row = replace(row, metric=measure.metric, mode=measure.mode)
    both = sorted(own.keys() & other.keys())
    seeds = [s for s in both if _known(own[s], measure) and _known(other[s], measure)]
    lacking = len(both) - len(seeds)
    note = f"{lacking} of {len(both)} pairs lack a finite {measure.metric}" if lacking else ""
    note = "; ".join(filter(None, [instead, note]))
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
        equal=all(_measured(own[s]) == _measured(other[s]) for s in seeds),
        values=tuple(zip(seeds, values, strict=True)),
    )


def _not_comparable(row: MetricDifference, why: str) -> MetricDifference:
    note = f"{UNLIKE}, because {why}"
    return replace(row, note=note, comparable=False, why_unlike=why)


def _known(cell: CellResult, measure: QualityMetric) -> bool:
    return cell.metrics.get(measure.metric) is not None


def _metric(cell: CellResult, measure: QualityMetric) -> float:
    return float(cell.metrics[measure.metric] or 0.0)


def _measured(cell: CellResult) -> tuple[Any, dict[str, float | None]]:
    """What a run has read, and all that was measured of it but its speed."""
    metrics = {tag: v for tag, v in cell.metrics.items() if not tag.startswith("train/")}
    return cell.record.get("tokens"), metrics


def _budget(
    axis: str, own: Collection[CellResult], other: Collection[CellResult]
) -> dict[str, Any]:
    """What runs at a value have read and how long they have trained, over those at the baseline.

    Runs that became non-finite ended early, whatever their budget, and do not count. Tokens of two
    tokenizers are counted in the bytes that they spell in the validation text, where that is known.
    """
    own, other = ([c for c in cells if c.outcome != "non_finite"] for cells in (own, other))
    every = [*own, *other]
    if not own or not other:
        return {}
    facts = task_facts(own[0].setting(TASKS.field))
    read, what = _tokens, "examples" if facts.labelled else "tokens"
    if unlike(every, own[0].monitored.loss) and all(math.isfinite(_bytes(c)) for c in every):
        read, what = _bytes, "bytes"
    tokens, longer = _ratio(own, other, read), math.nan
    first, second = ([_seconds(cell) for cell in cells] for cells in (own, other))
    apart = min(first) > max(second) or max(first) < min(second)
    machines = {made_by(cell.record)["device"] for cell in every}
    if apart and len(machines) == 1 and (axis == OPTIMIZER or not axis.startswith(FREE)):
        longer = _ratio(own, other, _seconds)
    said = []
    if read is _tokens and unlike(every, _SPEED):
        said.append(f"has read {_times(tokens)} the {what}, which are those of another tokenizer")
    elif _differs(tokens, MORE):
        said.append(f"has {'predicted' if facts.masks else 'read'} {_times(tokens)} the {what}")
    if _differs(longer, LONGER):
        said.append(f"has trained {_times(longer)} as long")
    return {"tokens_ratio": tokens, "seconds_ratio": longer, "budget": " and ".join(said)}


def _differs(ratio: float, least: float) -> bool:
    return ratio >= least or 0 < ratio <= 1 / least


def _ratio(
    own: Collection[CellResult],
    other: Collection[CellResult],
    quantity: Callable[[CellResult], float],
) -> float:
    """The means over runs of a quantity, one over the other; NaN where it is not recorded."""
    first, second = (mean([quantity(cell) for cell in cells]) for cells in (own, other))
    return first / second if second else math.nan


def _tokens(cell: CellResult) -> float:
    return as_number(cell.record.get("tokens"))


def _bytes(cell: CellResult) -> float:
    """The tokens of a run in bytes, as many a token as in the validation text."""
    nats, bits = (as_number(cell.metrics.get(f"val/{name}")) for name in ("nll", "bits_per_byte"))
    return _tokens(cell) * nats / (math.log(2) * bits) if bits else math.nan


def _seconds(cell: CellResult) -> float:
    """The seconds of the training steps alone, without evaluations."""
    speed = as_number(cell.metrics.get(_SPEED))
    return _tokens(cell) / speed if speed else math.nan


def _times(ratio: float) -> str:
    return f"{ratio:.3g} times" if ratio >= 10 else f"{ratio:.2g} times"
