"""Scores of each variant's sensitivity to learning-rate warm-up.

Symbols: `l(w, lr, s)` is the loss of one run in nats per token, where a failure counts as `H_uni`
(`CellResult.loss`); `w` is the warm-up in updates, `ref` the reference warm-up of the grid, `s` the
seed, `H_uni` the unigram entropy of the validation targets. A bar is the mean over seeds. Runs are
compared seed by seed: a score leaves out a seed if one of the runs that it needs has not finished,
and the note reports it. Intervals are two-sided at 95 %. An undefined score is NaN, with the reason
in its note.

A failure is nats away from other losses, so an interval needs seeds with the same ending: there is
no interval if some seeds of an arm failed and others did not, and with fewer than 5 seeds no p
value if the compared arms differ in failures, or some runs half escaped (`Paired.half_escaped`).

A label needs a `p_holm` under 5 %. The p value is the larger of two (`statistics.guarded_ps`), and
Holm's correction covers all variants, rates and other axes of the grid that ask the same question.
`benchmarks/coverage.py` measures how often the intervals hold the true value,
`benchmarks/false_labels.py` how often a label is false.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from lightning_app.analysis.arm_scores import flatness, stalls
from lightning_app.analysis.grid_results import GridResults
from lightning_app.analysis.pairing import (
    IS_BASELINE,
    Arm,
    Paired,
    arms,
    score_identity,
    undefined,
    why_never_learned,
    why_nothing,
)
from lightning_app.analysis.rate_scores import largest_rate, needs, octaves, rate_sensitivity
from lightning_app.analysis.score import Score, bound_of, join_notes
from lightning_app.analysis.stall_test import stall_difference
from lightning_app.analysis.statistics import (
    FEW_SEEDS,
    POWER,
    bootstrap_interval,
    detectable,
    ended_alike,
    fieller_interval,
    guarded_ps,
    holm_values,
    mean,
    pooled_spread,
    sign_flip_p,
    t_interval,
    t_quantile,
)
from lightning_app.analysis.steps_saved import steps_saved

CORRECTED = ("delta", "interaction", "stall_difference", "need")  # a family of tests each


def sensitivity_scores(grid: GridResults) -> list[Score]:
    """Every score of every variant, in the order of the plan; none where bad runs were pruned.

    Of a grid that joins several: those of each, with its own reference; p values are corrected
    over all of them.
    """
    rows = [row for part in grid.parts or (grid,) for row in _of_grid(part)]
    for name in CORRECTED:
        family = [number for number, row in enumerate(rows) if row.score == name]
        if name == "stall_difference":  # without any failure no test can find one (Tarone 1990)
            family = [number for number in family if not math.isnan(rows[number].p)]
        for number, row in zip(family, holm([rows[i] for i in family]), strict=True):
            rows[number] = row
    return rows


def _of_grid(grid: GridResults) -> list[Score]:
    """The scores of one grid before Holm's correction."""
    if grid.pruner is not None:
        return []
    found = arms(grid)
    rows: list[Score] = []
    for group in dict.fromkeys(arm.group for arm in found):
        members = {arm.variant: arm for arm in found if arm.group == group}
        for lr in sorted({lr for arm in members.values() for lr in arm.rates}):
            rows += _of_slice(members, lr, grid)
        rows += [stall_difference(arm, grid.reference_warmup) for arm in members.values()]
        if len(grid.rates) > 1:
            rows += _over_rates(list(members.values()), grid)
    return rows


def _of_slice(members: Mapping[str, Arm], lr: float, grid: GridResults) -> list[Score]:
    """The scores at one rate of the variants of one group."""
    present = [arm for arm in members.values() if lr in arm.rates]
    spread = pooled_spread([_deltas(arm, lr, grid) for arm in present])
    compared = [interaction(a, members.get(a.baseline or ""), lr, grid, spread) for a in present]
    rows = []
    for arm, versus in zip(present, compared, strict=True):
        rows += [delta(arm, lr, grid, spread), relative_delta(arm, lr, grid), versus]
        rows += [smallest_found(arm, lr, versus, compared)]
        rows += steps_saved(arm, lr, grid.reference_warmup)
        rows += [stalls(arm, lr, warmup) for warmup in arm.warmups]
        rows += [flatness(arm, lr)]
    return rows


def _over_rates(members: Sequence[Arm], grid: GridResults) -> list[Score]:
    """The scores over all rates of the variants of one group."""
    ref = grid.reference_warmup
    rows: list[Score] = list(needs(members, ref))
    for arm in members:
        rows += [octaves(arm, ref), rate_sensitivity(arm, ref)]
        for warmup in arm.warmups:
            rows += [rate_sensitivity(arm, None, warmup), largest_rate(arm, warmup)]
    return rows


def _deltas(arm: Arm, lr: float, grid: GridResults) -> list[float]:
    """Delta seed by seed, where it is defined."""
    reason, pairs, ref = _against_reference(arm, lr, grid)
    if reason or why_never_learned(pairs, (ref, lr)):
        return []
    return _differences(pairs, (0, lr), (ref, lr))


def delta(arm: Arm, lr: float, grid: GridResults, spread: tuple[float, int]) -> Score:
    """`Delta = mean_s [l(0, s) - l(ref, s)]`, nats per token; Student's t interval over seeds.

    `spread` is the standard deviation of Delta over seeds, pooled over the variants of the slice,
    and its degrees of freedom. Undefined where the variant never learned, with the reference
    warm-up either. A lower bound where every run without warm-up failed: all count as `H_uni`.
    """
    reason, pairs, ref = _against_reference(arm, lr, grid)
    reason = reason or why_never_learned(pairs, (ref, lr))
    if reason:
        return undefined(arm, lr, "delta", reason, pairs)
    differences = _differences(pairs, (0, lr), (ref, lr))
    return Score(
        **score_identity(arm, lr, "delta"),
        estimate=mean(differences),
        bound=bound_of(at_most=False, at_least=_capped(pairs, lr)),
        **pairs.counts,
        **_tested(
            differences,
            spread,
            alike=pairs.all_alike,
            over_seeds=_over_seeds(pairs.seeds, differences, pairs.mixed, pairs.missing),
        ),
    )


def _capped(pairs: Paired, lr: float) -> bool:
    """Whether Delta is a lower bound, because no run without warm-up trained."""
    return all(pairs.failed((0, lr)))


def _tested(
    differences: Sequence[float],
    spread: tuple[float, int],
    *,
    alike: bool,
    over_seeds: Mapping[str, Any],
) -> dict[str, Any]:
    """`over_seeds` with the p values of mean zero; none from few seeds that did not end alike."""
    found: dict[str, Any] = {**over_seeds, "p_sign": sign_flip_p(differences)}
    if alike or len(differences) >= FEW_SEEDS:
        found["p"] = float(guarded_ps(differences, *spread))
    elif len(differences) > 1:
        few = f"{len(differences)} seeds are too few to tell stalls from chance, so no p value"
        found["note"] = join_notes(found["note"], few)
    return found


def relative_delta(arm: Arm, lr: float, grid: GridResults) -> Score:
    """`Delta / (H_uni - l_bar(ref))`: the share of what is learned that is lost without warm-up.

    A ratio of two means over the same seeds; the interval is Fieller's (1954). Undefined where the
    denominator is under 0.1 nats: the variant never learned, with warm-up either.
    """
    reason, pairs, ref = _against_reference(arm, lr, grid)
    reason = reason or why_never_learned(pairs, (ref, lr))
    if reason:
        return undefined(arm, lr, "relative_delta", reason, pairs)
    lost = _differences(pairs, (0, lr), (ref, lr))
    learned = [
        pairs.runs[(ref, lr), s].entropy - pairs.runs[(ref, lr), s].loss for s in pairs.seeds
    ]
    low, high = (math.nan, math.nan) if pairs.mixed else fieller_interval(lost, learned)
    ratios = [a / b if b else math.nan for a, b in zip(lost, learned, strict=True)]
    return Score(
        **score_identity(arm, lr, "relative_delta"),
        estimate=mean(lost) / mean(learned),
        bound=bound_of(at_most=False, at_least=_capped(pairs, lr)),
        low=low,
        high=high,
        **pairs.counts,
        note=join_notes(pairs.missing, pairs.mixed or _no_interval(ratios, low)),
        each=_each(pairs.seeds, ratios, pairs.mixed),
    )


def interaction(
    arm: Arm, baseline: Arm | None, lr: float, grid: GridResults, spread: tuple[float, int]
) -> Score:
    """`Delta_v - Delta_baseline` over the same seeds: does warm-up help it more than the baseline?

    `mean_s [(l_v(0, s) - l_v(ref, s)) - (l_b(0, s) - l_b(ref, s))]`, nats per token; t interval.
    `spread` as in `delta`: the difference of two Deltas has sqrt(2) times their spread. `>=` where
    no run of the variant without warm-up trained, `<=` where none of the baseline did.
    """
    reason, own, ref = _against_reference(arm, lr, grid)
    reason = reason or why_never_learned(own, (ref, lr))
    if arm.baseline is None:
        reason = "the grid file names no baseline"
    elif arm.baseline == arm.variant:
        reason = IS_BASELINE
    elif baseline is None or lr not in baseline.rates:
        reason = f"no arm of the baseline {arm.baseline}"
    if reason or baseline is None:
        return undefined(arm, lr, "interaction", reason, own)
    reason, other, _ = _against_reference(baseline, lr, grid)
    reason = reason or why_never_learned(other, (ref, lr))
    seeds = [seed for seed in own.seeds if seed in other.seeds]
    if reason or not seeds:
        reason = f"baseline: {reason}" if reason else "no seed finished here and in the baseline"
        return undefined(arm, lr, "interaction", reason, own)
    points = [(0, lr), (ref, lr)]
    own = Paired(arm.cells, points, seeds, own.planned)
    other = Paired(baseline.cells, points, seeds, own.planned)
    differences = [
        ours - theirs
        for ours, theirs in zip(
            _differences(own, *points), _differences(other, *points), strict=True
        )
    ]
    mixed = join_notes(own.mixed, other.mixed and f"baseline {other.mixed}")
    alike = all(
        ended_alike(own.failed(point) + other.failed(point)).item()
        and own.alike(point)
        and other.alike(point)
        for point in points
    )
    counts = {name: own.counts[name] + other.counts[name] for name in ("cells", "diverged")}
    return Score(
        **score_identity(arm, lr, "interaction"),
        estimate=mean(differences),
        bound=bound_of(at_most=_capped(other, lr), at_least=_capped(own, lr)),
        seeds=len(seeds),
        **counts,
        **_tested(
            differences,
            (math.sqrt(2) * spread[0], spread[1]),
            alike=alike,
            over_seeds=_over_seeds(seeds, differences, mixed, own.missing),
        ),
    )


def smallest_found(arm: Arm, lr: float, versus: Score, family: Sequence[Score]) -> Score:
    """`detectable`: the smallest true interaction that a t test finds with 80 % power, in nats.

    Two-sided at 5 %, uncorrected; the note has Holm's strictest step among the variants. A label
    needs more: the larger of two p values, corrected over the whole grid. The standard deviation of
    the interaction, seed by seed, is pooled over the variants of the `family` that have intervals:
    `sqrt(sum_v (n_v - 1) sd_v^2 / sum_v (n_v - 1))`.
    """
    if math.isnan(versus.low) or math.isnan(versus.p):
        reason = versus.note if math.isnan(versus.estimate) else "no interval or p value to find it"
        return undefined(arm, lr, "detectable", reason)
    squares, freedom = 0.0, 0
    for score in family:
        if not math.isnan(score.low):
            error = (score.high - score.low) / 2 / t_quantile(score.seeds)
            squares += (score.seeds - 1) * score.seeds * error**2
            freedom += score.seeds - 1
    spread = math.sqrt(squares / freedom)
    tested = sum(_compared(score) for score in family)
    strict = detectable(spread, versus.seeds, tested) if tested > 1 else math.nan
    return Score(
        **score_identity(arm, lr, "detectable"),
        estimate=detectable(spread, versus.seeds),
        seeds=versus.seeds,
        cells=versus.cells,
        diverged=versus.diverged,
        note=join_notes(
            f"{POWER:.0%} power, sd {spread:.4f} with {freedom} degrees of freedom",
            "" if math.isnan(strict) else f"{strict:.4f} at Holm's strictest step of {tested}",
        ),
    )


def holm(rows: Sequence[Score]) -> list[Score]:
    """The rows with their p values corrected (`holm_values`); they are the family.

    A comparison whose p value is withheld stays in the family, as if it were 1.
    """
    values = [1.0 if _compared(row) and math.isnan(row.p) else row.p for row in rows]
    corrected = zip(rows, holm_values(values), strict=True)
    return [row if math.isnan(row.p) else replace(row, p_holm=float(p)) for row, p in corrected]


def _compared(row: Score) -> bool:
    return not math.isnan(row.estimate) and row.seeds > 1


def _against_reference(arm: Arm, lr: float, grid: GridResults) -> tuple[str, Paired, int]:
    """Why a score against the reference is undefined ("" if it is not), pairs, reference."""
    ref = grid.reference_warmup
    if ref is None:
        return "the grid file names no reference warm-up", arm.at([]), 0
    pairs = arm.at([(0, lr), (ref, lr)])
    if ref == 0:
        return "the reference is no warm-up itself", pairs, ref
    points = {key[:2] for key in arm.planned}
    if (0, lr) not in points:
        return "no arm without warm-up", pairs, ref
    if (ref, lr) not in points:
        return f"no arm with the reference warm-up {ref}", pairs, ref
    return why_nothing(pairs), pairs, ref


def _differences(pairs: Paired, first: tuple[int, float], second: tuple[int, float]) -> list[float]:
    return [a - b for a, b in zip(pairs.losses(first), pairs.losses(second), strict=True)]


def _over_seeds(
    seeds: Sequence[int], values: Sequence[float], mixed: str, missing: str
) -> dict[str, Any]:
    """Interval, note and values of a mean over seeds; no interval where there is a reason."""
    low, high, _ = t_interval(values)
    if mixed:
        low = high = math.nan
    ends = (math.nan, math.nan) if mixed else bootstrap_interval(values)
    return {
        "low": low,
        "high": high,
        "note": join_notes(missing, mixed or _no_interval(values, low)),
        "each": _each(seeds, values, mixed),
        "values": tuple(zip(seeds, values, strict=True)),
        "bootstrap": None if math.isnan(ends[0]) else ends,
    }


def _each(
    seeds: Sequence[int], values: Sequence[float], mixed: str
) -> tuple[tuple[int, float], ...]:
    few = len(seeds) < FEW_SEEDS or mixed
    return tuple(zip(seeds, values, strict=True)) if few else ()


def _no_interval(values: Sequence[float], low: float) -> str:
    """The reason why an interval is missing; empty for a defined interval."""
    if not math.isnan(low):
        return ""
    if len(values) == 1:
        return "one seed, no interval"
    spread = not math.isnan(t_interval(values)[0])
    return "unbounded interval" if spread else "no spread between seeds, no interval"
