"""Scores of each variant's sensitivity to learning-rate warm-up.

Symbols: `l(w, lr, s)` is the loss of one run in nats per token, where a failure counts as `H_uni`
(`CellResult.loss`); `w` is the warm-up in updates, `ref` the reference warm-up of the grid, `s` the
seed, `H_uni` the unigram entropy of the validation targets. A bar is the mean over seeds. Runs are
compared seed by seed: a score leaves out a seed if one of the runs that it needs has not finished,
and the note reports it. Intervals are two-sided at 95 %. An undefined score is NaN, with the reason
in its note.

A failure is nats away from other losses, so an interval needs seeds with the same ending: there is
no interval if some seeds of an arm failed and others did not, and with fewer than 5 seeds no p
value if the compared arms differ in failures. `stalls` has intervals for the share of failures.
`benchmarks/coverage.py` measures how well these rules work.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from lightning_app.analysis.arm_scores import flatness, largest_rate, retuned, stalls, wortsman
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
from lightning_app.analysis.score import Score, join_notes
from lightning_app.analysis.statistics import (
    FEW_SEEDS,
    POWER,
    bootstrap_interval,
    detectable,
    ended_alike,
    fieller_interval,
    holm_values,
    mean,
    t_interval,
    t_quantile,
)


def sensitivity_scores(grid: GridResults) -> list[Score]:
    """Every score of every variant, in the order of the plan; none where bad runs were pruned.

    Of a grid that joins several: those of each, with its own reference.
    """
    if grid.parts:
        return [score for part in grid.parts for score in sensitivity_scores(part)]
    if grid.pruner is not None:
        return []
    found = arms(grid)
    several_rates = len(grid.rates) > 1
    rows: list[Score] = []
    for group in dict.fromkeys(arm.group for arm in found):
        members = {arm.variant: arm for arm in found if arm.group == group}
        for lr in sorted({lr for arm in members.values() for lr in arm.rates}):
            present = [arm for arm in members.values() if lr in arm.rates]
            compared = holm(
                [interaction(a, members.get(a.baseline or ""), lr, grid) for a in present]
            )
            for arm, versus in zip(present, compared, strict=True):
                rows += [delta(arm, lr, grid), relative_delta(arm, lr, grid), versus]
                rows += [smallest_found(arm, lr, versus, compared)]
                rows += [stalls(arm, lr, warmup) for warmup in arm.warmups]
                rows += [flatness(arm, lr), wortsman(arm, lr)]
        if several_rates:
            for arm in members.values():
                rows += [retuned(arm), *(largest_rate(arm, warmup) for warmup in arm.warmups)]
    return rows


def delta(arm: Arm, lr: float, grid: GridResults) -> Score:
    """`Delta = mean_s [l(0, s) - l(ref, s)]`, nats per token; Student's t interval over seeds.

    Undefined where the variant never learned, with the reference warm-up either.
    """
    reason, pairs, ref = _against_reference(arm, lr, grid)
    reason = reason or why_never_learned(pairs, (ref, lr))
    if reason:
        return undefined(arm, lr, "delta", reason, pairs)
    differences = _differences(pairs, (0, lr), (ref, lr))
    return Score(
        **score_identity(arm, lr, "delta"),
        estimate=mean(differences),
        **pairs.counts,
        **_over_seeds(pairs.seeds, differences, pairs.mixed, pairs.missing),
    )


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
        low=low,
        high=high,
        **pairs.counts,
        note=join_notes(pairs.missing, pairs.mixed or _no_interval(ratios, low)),
        each=_each(pairs.seeds, ratios, pairs.mixed),
    )


def interaction(arm: Arm, baseline: Arm | None, lr: float, grid: GridResults) -> Score:
    """`Delta_v - Delta_baseline` over the same seeds: does it need warm-up more than the baseline?

    `mean_s [(l_v(0, s) - l_v(ref, s)) - (l_b(0, s) - l_b(ref, s))]`, nats per token; t interval,
    and the p value of the two-sided t test of zero (`holm` corrects it over the variants).
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
    alike = all(ended_alike(own.failed(point) + other.failed(point)) for point in points)
    counts = {name: own.counts[name] + other.counts[name] for name in ("cells", "diverged")}
    rest = _over_seeds(seeds, differences, mixed, own.missing)
    if alike or len(seeds) >= FEW_SEEDS:
        rest["p"] = t_interval(differences)[2]
    elif len(seeds) > 1:
        chance = f"{len(seeds)} seeds are too few to tell stalls from chance, so no p value"
        rest["note"] = join_notes(rest["note"], chance)
    return Score(
        **score_identity(arm, lr, "interaction"),
        estimate=mean(differences),
        seeds=len(seeds),
        **counts,
        **rest,
    )


def smallest_found(arm: Arm, lr: float, versus: Score, family: Sequence[Score]) -> Score:
    """`detectable`: the smallest true interaction that its test finds with 80 % power, in nats.

    Two-sided at 5 %, uncorrected; the note has Holm's strictest step. The standard deviation of
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
