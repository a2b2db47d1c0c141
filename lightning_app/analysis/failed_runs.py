"""Runs of fine-tuning that failed: how many, by which definition, and medians over seeds.

A run *failed* if it is non-finite, or if its score is not above that of a constant answer (Mosbach
et al. 2021, 2006.04884): Matthews correlation 0, the accuracy of the most frequent class,
correlation 0. Where F1 is the own score, accuracy decides, since F1 rewards a constant answer.

Two narrower descriptions are counted beside it. *One class*: the scores are exactly those of a
constant answer. *Loss at the floor*: the outcome `stalled`, where the loss ends within 0.05 nats of
the best constant output or above. The loss does not decide what failed, since it errs both ways: a
run that overfits has a high loss and right answers, and a score of 60 % on a task of two classes
can go with a loss within 0.05 nats of the floor.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import TYPE_CHECKING, Any

from lightning_app.analysis.grid_results import CellResult, GridResults
from lightning_app.analysis.stall_test import StallTable, stratified_p
from lightning_app.analysis.statistics import holm_values, mean, seeds_interval, wilson_interval
from lightning_app.grid_axes import BLOCK, WARMUP, key_of, value_name
from lightning_app.rulers import EVALUATION
from lightning_app.scores.glue import GLUE_TASKS
from lightning_app.task_facts import QualityMetric, glue_task_of

if TYPE_CHECKING:
    import pandas as pd

ACCURACY, MAJORITY = "val/accuracy", "val/majority_accuracy"
CONSTANT: Mapping[str, str | float] = {"val/matthews": 0.0, ACCURACY: MAJORITY, "val/pearson": 0.0}
"""The score of a constant answer, or the metric that holds it; the first score that a task has
decides whether a run failed."""

NEAR = 1e-6
"""How far numbers may be apart that are equal: results have scores in single precision."""


@dataclass(frozen=True, kw_only=True)
class FailedRuns:
    """One arm: `failed` of its `runs` with Wilson's interval, and its score over seeds.

    `non_finite`, `one_class` and `loss_at_floor` count runs by the descriptions above, `by_loss`
    those that were judged by the loss, because their results do not have the score. `constant` is
    the score of a constant answer. In the median a run without a finite score is the worst one; the
    mean and its t interval leave out such runs, of which there are `lacking`. The median is NaN
    if it falls on such a run. There is no interval if some runs failed and others did not.
    """

    grid: str
    group: str
    lr: float | None
    variant: str
    warmup: int | None
    runs: int
    failed: int
    low: float
    high: float
    non_finite: int
    one_class: int
    loss_at_floor: int
    by_loss: int
    metric: str
    mode: str
    constant: float
    median: float
    mean: float
    mean_low: float
    mean_high: float
    lacking: int


@dataclass(frozen=True, kw_only=True)
class FailureTest:
    """Failed runs of one variant at a `value` of an axis and at the `baseline` of the axis.

    All other axes are strata: `difference` is the mean of the differences of the shares, weighted
    as by Mantel and Haenszel (1959), and `p` is exact (`stall_test.stratified_p`), corrected by
    Holm over all tests with a failed run.
    """

    grid: str
    axis: str
    value: str
    baseline: str
    variant: str
    failed: int
    runs: int
    low: float
    high: float
    baseline_failed: int
    baseline_runs: int
    baseline_low: float
    baseline_high: float
    difference: float
    p: float
    p_holm: float = math.nan
    strata: int = 0


def failed(cell: CellResult) -> bool:
    """Whether a finished run failed: by its score, or by its loss where there is no such score."""
    above = above_constant(cell)
    return cell.failed if above is None else not above


def above_constant(cell: CellResult) -> bool | None:
    """Whether the score of a run is above that of a constant answer.

    False for a non-finite run; None for a task without published scores, and where the result does
    not have the score.
    """
    if not cell.scores:
        return None
    if cell.outcome == "non_finite":
        return False
    found = _deciding(cell)
    if found is None:
        return None
    score, constant = found
    return score > constant and not math.isclose(score, constant, rel_tol=1e-9, abs_tol=1e-12)


def _deciding(cell: CellResult) -> tuple[float, float] | None:
    """The score that decides, and that of a constant answer, as the run reports them."""
    own = {score.metric for score in cell.scores}
    for metric, floor in CONSTANT.items():
        if metric in own:
            score = cell.metrics.get(metric)
            constant = cell.metrics.get(floor) if isinstance(floor, str) else floor
            return None if score is None or constant is None else (float(score), float(constant))
    return None


def one_class(cell: CellResult) -> bool:
    """Whether the scores of a run are exactly those of a constant answer.

    Where accuracy is the only score of the task, other answers can have it by chance.
    """
    values = {name: cell.metrics.get(f"val/{name}") for name in ("matthews", "f1", "pearson")}
    task = GLUE_TASKS.get(glue_task_of(cell.corpus or "") or "")
    if task is None or not cell.scores:
        return False
    if task.classes is None:
        return values["pearson"] == 0.0
    accuracy, majority = cell.metrics.get(ACCURACY), cell.metrics.get(MAJORITY)
    if accuracy is None or majority is None:
        return False
    shares = (majority, 1.0 - majority) if task.classes == 2 else (majority,)
    if not any(math.isclose(accuracy, share, abs_tol=NEAR) for share in shares):
        return False
    if values["matthews"] is not None and values["matthews"] != 0.0:
        return False
    always = 2 * accuracy / (1 + accuracy)  # F1 if every answer is 1, which accuracy says how often
    f1 = values["f1"]
    return f1 is None or f1 == 0.0 or math.isclose(f1, always, abs_tol=NEAR)


def constant_score(cell: CellResult, measure: QualityMetric) -> float:
    """What a constant answer gets by the measure; NaN if it is not known, as for F1."""
    floor = CONSTANT.get(measure.metric)
    found = cell.metrics.get(floor) if isinstance(floor, str) else floor
    return math.nan if found is None or not cell.scores else float(found)


def failed_runs(grid: GridResults) -> list[FailedRuns]:
    """Every arm of a task with published scores, in the order of the plan."""
    arms: dict[tuple[Any, ...], list[CellResult]] = {}
    parts = [(part, cell) for part in grid.parts or (grid,) for cell in part.scored]
    owner = {}
    for part, cell in parts:
        key = (part.name, cell.group, cell.lr, cell.variant, cell.warmup)
        arms.setdefault(key, []).append(cell)
        owner[key] = part
    return [_arm(owner[key], cells) for key, cells in arms.items()]


def _arm(grid: GridResults, cells: Sequence[CellResult]) -> FailedRuns:
    first, measure = cells[0], grid.measure(cells[0])
    flags = list(map(failed, cells))
    known = [cell for cell in cells if cell.metrics.get(measure.metric) is not None]
    values = [float(cell.metrics[measure.metric] or 0.0) for cell in known]
    mean_low, mean_high, _ = seeds_interval(values, list(map(failed, known)))
    low, high = wilson_interval(sum(flags), len(flags))
    return FailedRuns(
        grid=grid.name,
        group=first.group,
        lr=first.lr,
        variant=first.variant,
        warmup=first.warmup,
        runs=len(cells),
        failed=sum(flags),
        low=low,
        high=high,
        non_finite=sum(cell.outcome == "non_finite" for cell in cells),
        one_class=sum(map(one_class, cells)),
        loss_at_floor=sum(cell.outcome == "stalled" for cell in cells),
        by_loss=sum(above_constant(cell) is None for cell in cells),
        metric=measure.metric,
        mode=measure.mode,
        constant=constant_score(first, measure),
        median=median_score(cells, measure),
        mean=mean(values) if values else math.nan,
        mean_low=mean_low,
        mean_high=mean_high,
        lacking=len(cells) - len(known),
    )


def median_score(cells: Iterable[CellResult], measure: QualityMetric) -> float:
    """The median over runs; one without a finite score is the worst. NaN if it is such a run."""
    worst = -math.inf if measure.mode == "max" else math.inf
    found = (cell.metrics.get(measure.metric) for cell in cells)
    middle = median(worst if value is None else float(value) for value in found)
    return middle if math.isfinite(middle) else math.nan


def failure_tests(grid: GridResults) -> list[FailureTest]:
    """Each value of the warm-up, and of the axes of `compare:`, against its baseline, by variant.

    Axes of the block are left out, as their values are the variants, and those that change only
    the evaluation, as they train nothing else.
    """
    found = []
    for part in grid.parts or (grid,):
        if not part.scored or part.pruner is not None:
            continue
        axes = {WARMUP: 0} if part.varies(WARMUP) and 0 in part.warmups else {}
        others = (axis for axis in part.compare if not axis.startswith(BLOCK))
        axes |= {axis: part.compare[axis] for axis in others if axis not in EVALUATION}
        found += [row for axis, base in axes.items() for row in _tests(part, axis, base)]
    corrected = holm_values([row.p for row in found]).tolist() if found else []
    return [replace(row, p_holm=p) for row, p in zip(found, corrected, strict=True)]


def _tests(grid: GridResults, axis: str, base: Any) -> list[FailureTest]:
    runs: dict[tuple[Any, ...], dict[Any, list[CellResult]]] = {}
    for cell in grid.scored:
        others = ((k, key_of(v)) for k, v in grid.apart_from(axis, cell.axes).items())
        at = runs.setdefault((cell.variant, *others), {})
        at.setdefault(key_of(cell.axes[axis]), []).append(cell)
    variants = dict.fromkeys(cell.variant for cell in grid.scored)
    found = []
    for value in grid.axes[axis]:
        if key_of(value) == key_of(base):
            continue
        for name in variants:
            pairs = [
                (at[key_of(value)], at[key_of(base)])
                for (variant, *_), at in runs.items()
                if variant == name and key_of(value) in at and key_of(base) in at
            ]
            if pairs:
                tables = [_table(own, other) for own, other in pairs]
                names = [value_name(axis, each, grid.labels) for each in (value, base)]
                found.append(_test(grid, axis, names, name, tables))
    return found


def _table(own: Sequence[CellResult], other: Sequence[CellResult]) -> StallTable:
    counts = (sum(map(failed, own)), len(own), sum(map(failed, other)), len(other))
    return StallTable(math.nan, *counts)


def _test(
    grid: GridResults, axis: str, names: Sequence[str], variant: str, tables: Sequence[StallTable]
) -> FailureTest:
    _, of, runs, base_of, base_runs = (sum(column) for column in zip(*tables, strict=True))
    low, high = wilson_interval(int(of), int(runs))
    base_low, base_high = wilson_interval(int(base_of), int(base_runs))
    weights = sum(table.weight for table in tables)
    return FailureTest(
        grid=grid.name,
        axis=axis,
        value=names[0],
        baseline=names[1],
        variant=variant,
        failed=int(of),
        runs=int(runs),
        low=low,
        high=high,
        baseline_failed=int(base_of),
        baseline_runs=int(base_runs),
        baseline_low=base_low,
        baseline_high=base_high,
        difference=sum(table.weight * table.difference for table in tables) / weights,
        p=stratified_p(tables) if of + base_of else math.nan,
        strata=len(tables),
    )


def failures_table(rows: Sequence[FailedRuns | FailureTest]) -> "pd.DataFrame":
    """The rows as a table."""
    import pandas as pd

    return pd.DataFrame([asdict(row) for row in rows])
