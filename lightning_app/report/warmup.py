"""The sensitivity to warm-up, at one rate and over rates.

Symbols: `l(w, lr, s)` is the loss of one run in nats per token, where a failure counts as `H_uni`
(`CellResult.loss`); `w` is the warm-up in updates, `ref` the reference warm-up of the grid, `s` the
seed, `H_uni` the unigram entropy of the validation targets. A bar is the mean over seeds. Runs are
compared seed by seed: a score leaves out a seed if one of the runs that it needs has not finished,
and the note reports it. Intervals are two-sided at 95 %. An undefined score is NaN, with the reason
in its note.

A failure is nats away from other losses, so an interval and a p value need seeds with the same
ending (`Paired.mixed`); otherwise the failures themselves are compared (`stall_difference`). Two
seeds have no p value. A label needs a `p_holm` under 5 %: Student's t over the seeds, corrected by
Holm over all variants, rates and other axes of the grid that ask the same question.
`benchmarks/coverage.py` measures how often the intervals hold the true value,
`benchmarks/false_labels.py` how often a label is false and how often one is found.

In scores over all rates `lr` is NaN. The best rate of an arm need not be one of those tried, so
these scores have two bounds, within which every value agrees with the losses at the rates tried if
the loss is convex in log2 of the rate around its minimum (`statistics.lowest`, `bounds_interval`).
A label needs a bound that differs from zero. The estimate compares the best rates of those tried,
each chosen on other seeds than the one whose loss is taken, since the smallest of noisy losses is
too small.
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_app.config.tree import label
from lightning_app.report.pairs import (
    IS_BASELINE,
    LEARNED,
    NEVER,
    Arm,
    Paired,
    Score,
    arms,
    bound_of,
    bounds_interval,
    bounds_p,
    join_notes,
    score_identity,
    stall_difference,
    stalls,
    steps_saved,
    tau,
    undefined,
    why_never_learned,
    why_not_learned,
    why_nothing,
)
from lightning_app.report.results import CellResult, GridResults
from lightning_app.report.statistics import (
    FEW_SEEDS,
    LEAST_SEEDS,
    TOLERATED,
    Floats,
    Sides,
    best_by_seed,
    best_on_others,
    holm_values,
    mean,
    no_less_than_failures,
    seeds_p,
    sign_flip_p,
    steps_by_seed,
    t_interval,
    tolerated_by_seed,
)

Span = tuple[float, float]  # of rates
BEST = 0.0  # in place of a rate: the best one of each seed


@dataclass(frozen=True)
class RateCurve:
    """The losses of the runs of one warm-up over the rates at which it was run.

    Attributes:
        rates: The rates, ascending.
        losses: [seed, rate].
        sound: Whether all runs at a rate trained.
    """

    rates: list[float]
    losses: Floats
    sound: NDArray[np.bool_]

    @property
    def place(self) -> int:
        """The place of the rate with the smallest mean loss over all seeds."""
        return int(self.losses.mean(axis=0).argmin())

    @cached_property
    def chosen(self) -> list[int]:
        """The place of the best rate by seed, chosen on the other seeds."""
        return best_on_others(self.losses.T).tolist()

    @property
    def at_chosen(self) -> Floats:
        """The loss of each seed at the rate chosen on the others."""
        return self.losses[np.arange(len(self.losses)), self.chosen]

    @property
    def at_edge(self) -> bool:
        """Whether a chosen rate is the smallest or the largest."""
        return not {0, len(self.rates) - 1}.isdisjoint(self.chosen)

    @property
    def named(self) -> str:
        return "/".join(label(self.rates[place]) for place in dict.fromkeys(self.chosen))

    @property
    def points(self) -> tuple[Floats, Floats, NDArray[np.bool_]]:
        """The losses [rate, seed], log2 of the rates, and `sound`."""
        return np.ascontiguousarray(self.losses.T), np.log2(self.rates), self.sound

    @cached_property
    def best(self) -> tuple[Floats, Floats]:
        """The bounds of the smallest loss, as values per seed."""
        return best_by_seed(*self.points)


def need_at_best_rates(arm: Arm, reference: int | None) -> Score:
    """`need`: `N = min_r l_bar(0, r) - min_r l_bar(ref, r)`, nats per token, with its sign.

    The estimate is `mean_s [l(0, r_0(s), s) - l(ref, r_ref(s), s)]`, `r_w(s)` the rate tried with
    the smallest mean loss at warm-up w over the *other* seeds; the interval is that of the bounds,
    the p value that of the bound nearer to zero, and 1 where zero lies between them. None where
    some runs of a warm-up, chosen or at the rate with the smallest mean loss, failed and others did
    not. `<=` where a best rate without warm-up is the smallest or largest of the grid, so that a
    better one may lie outside; `>=` where one with the reference is, or where no run without
    warm-up trained; `?` where both hold.
    """
    reason, pairs, table = _complete(arm, (0, reference), seeds=2)
    if reason or reference is None:
        return undefined(arm, math.nan, "need", reason, pairs)
    if pairs.entropy - table[reference].losses.mean(axis=0).min() < LEARNED:
        points = [(reference, rate) for rate in arm.rates_at(reference)]
        return undefined(arm, math.nan, "need", why_not_learned(pairs, points, arm.rates), pairs)
    bare, warm = table[0], table[reference]
    values = bare.at_chosen - warm.at_chosen
    runs, by_mean = best_runs(pairs, table)
    mixed = runs.mixed or by_mean.mixed
    sides = _sides(runs), _sides(by_mean)
    capped = all(all(pairs.failed(point)) for point in pairs.points if point[0] == 0)
    lows, highs = bare.best[0] - warm.best[1], bare.best[1] - warm.best[0]
    gap = float(highs.mean() - lows.mean())
    between = {} if mixed else _between(pairs, lows, highs)
    edges = {"at_most": bare.at_edge, "at_least": warm.at_edge or capped}
    return Score(
        **score_identity(arm, math.nan, "need"),
        estimate=float(values.mean()),
        **between,
        p=no_less_than_failures(_p_between(between), pairs.planned, *sides),
        bound=bound_of(**edges),
        **pairs.counts,
        note=join_notes(
            runs.missing,
            mixed,
            NOT_CONVEX if not (mixed or any(edges.values()) or math.isfinite(gap)) else "",
            "no run without warm-up trained at any rate" if capped else "",
            f"best rates {bare.named} without warm-up, {warm.named} with it",
            f"by the rates only N may lie anywhere in {gap:.3f} nats"
            if between and math.isfinite(gap)
            else "",
            f"rates {', '.join(_rates_to_try(table.values()))} would tell more",
        ),
        values=_by_seed(pairs, values),
    )


NOT_CONVEX = "no interval, since the losses beside a best rate are not convex or not known"


def _rates_to_try(curves: Iterable[RateCurve]) -> list[str]:
    """The rates halfway, in the logarithm, between the best one of each warm-up and its neighbours.

    As far outside where the best one is the smallest or largest.
    """
    wanted: set[float] = set()
    for curve in curves:
        rates, best = curve.rates, curve.place
        for other in (best - 1, best + 1):
            if 0 <= other < len(rates):
                wanted.add(math.sqrt(rates[best] * rates[other]))
            else:
                wanted.add(rates[best] * math.sqrt(rates[best] / rates[2 * best - other]))
    return [f"{rate:.2g}" for rate in sorted(wanted)]


def _between(pairs: Paired, lows: Floats, highs: Floats) -> dict[str, Any]:
    """The fields of a score between two bounds, seed by seed; no interval if one is open."""
    ends = tuple(zip(pairs.seeds, lows.tolist(), highs.tolist(), strict=True))
    low, high = bounds_interval(ends)
    nearest = bounds_p(ends, sign_flip_p)
    return {"low": low, "high": high, "p_sign": nearest, "ends": ends}


def best_runs(pairs: Paired, table: Mapping[int, RateCurve]) -> tuple[Paired, Paired]:
    """The runs of each warm-up at the rate that is best on the other seeds, and on all of them.

    The rate of all points is `BEST`.
    """

    def at(places: Callable[[RateCurve], Sequence[int]]) -> Paired:
        cells = {
            (warmup, BEST, seed): pairs.runs[(warmup, curve.rates[place]), seed]
            for warmup, curve in table.items()
            for seed, place in zip(pairs.seeds, places(curve), strict=True)
        }
        return Paired(cells, [(warmup, BEST) for warmup in table], pairs.seeds, pairs.planned)

    return at(lambda curve: curve.chosen), at(lambda curve: [curve.place] * len(pairs.seeds))


def octaves(arm: Arm, reference: int | None) -> Score:
    """`octaves`: `O = log2(theta_ref / theta_0)`, octaves of rate that warm-up buys.

    `theta_w` is the largest rate, going up from the best one, at which the loss is at most
    `l* + 0.1 (H_uni - l*)`, with `l*` the smallest loss over the rates. The estimate is the mean
    over seeds with the smallest loss of those tried, interpolated, linear in the loss and in log2
    of the rate; the bounds are those of `statistics.lowest` and `crossing`. A failed run has the
    loss `H_uni`. `>=` where a rate with the reference warm-up is tolerated up to the largest of
    the grid, `<=` where one without is, `?` where both are.
    """
    reason, pairs, table = _complete(arm, (0, reference))
    if reason or reference is None:
        return undefined(arm, math.nan, "octaves", reason, pairs)
    entropies = _entropies(pairs).tolist()
    found: dict[int, list[tuple[float, bool]]] = {}
    for warmup, curve in table.items():
        rows = zip(curve.losses.tolist(), entropies, strict=True)
        found[warmup] = [tolerated(curve.rates, row, top) for row, top in rows]
    if any(math.isnan(theta) for of in found.values() for theta, _ in of):
        return undefined(arm, math.nan, "octaves", f"a seed {NEVER} at some warm-up", pairs)
    pairs_of = list(zip(found[reference], found[0], strict=True))
    values = np.array([ref - bare for (ref, _), (bare, _) in pairs_of])
    censored = (any(open_ for _, open_ in found[0]), any(open_ for _, open_ in found[reference]))
    at = {w: ", ".join(f"{2**theta:.3g}" for theta, _ in of) for w, of in found.items()}
    (first, last), (warm_first, warm_last) = (
        tolerated_by_seed(*curve.points, pairs.entropy) for curve in table.values()
    )
    between = _between(pairs, warm_first - last, warm_last - first)
    mixed = any(runs.mixed for runs in best_runs(pairs, table))
    return Score(
        **score_identity(arm, math.nan, "octaves"),
        estimate=float(values.mean()),
        **between,
        p=math.nan if mixed else _p_between(between),
        bound=bound_of(*censored),
        **pairs.counts,
        note=join_notes(
            pairs.missing,
            f"tolerated to {at[0]} without, {at[reference]} with it",
            "no interval, since the losses at these rates do not bound it"
            if math.isnan(between["low"])
            else "",
        ),
        values=_by_seed(pairs, values),
    )


def _p_between(between: Mapping[str, Any]) -> float:
    """The p value of a score between bounds (`_between`); NaN without an interval."""
    return bounds_p(between["ends"], seeds_p) if between else math.nan


def steps_at_best_rates(arm: Arm, reference: int | None, need: Score) -> Score:
    """`steps_at_best_rates`: the steps that warm-up saves if each arm has its best rate.

    When does the arm with the reference warm-up, at its best rate, reach the final loss of the one
    without, at its own (`statistics.steps_between`)? The estimate is the mean over seeds of the
    steps saved between the runs of `need`, with the bound of `need`: what a better rate would add
    to N, or take from it, it adds to the steps saved or takes from them.
    """
    reason, pairs, table = _complete(arm, (0, reference), seeds=2)
    if not reason and math.isnan(need.estimate):
        reason = "N is not defined"
    runs = by_mean = pairs
    found: list[tuple[float, bool] | None] = []
    if not reason:
        runs, by_mean = best_runs(pairs, table)
        found = [tau(*(runs.runs[point, seed] for point in runs.points)) for seed in runs.seeds]
    steps = [] if reason else _common_steps(pairs)
    if len(steps) < 2 or None in found:
        reason = reason or "no common steps of validation"
    if reason:
        return undefined(arm, math.nan, "steps_at_best_rates", reason, pairs)
    curves = []  # of each warm-up [rate, step, seed]
    for warmup, curve in table.items():
        at = [[pairs.runs[(warmup, lr), s] for s in pairs.seeds] for lr in curve.rates]
        curves.append(np.array([_over_steps(runs, steps) for runs in at]))
        curves[-1][:, -1] = curve.losses.T
    _, places, sound = zip(*(curve.points for curve in table.values()), strict=True)
    lows, highs = steps_by_seed(curves, places, sound, steps)
    values = np.array([saved for saved, _ in filter(None, found)])
    mixed = runs.mixed or by_mean.mixed
    return Score(
        **score_identity(arm, math.nan, "steps_at_best_rates"),
        estimate=float(values.mean()),
        **({} if mixed else _between(pairs, lows, highs)),
        bound=need.bound,
        **pairs.counts,
        note=join_notes(pairs.missing, mixed),
        values=_by_seed(pairs, values),
    )


def _common_steps(pairs: Paired) -> list[int]:
    """The steps at which every run was validated, if the last one is the end of each."""
    curves = [run.run.curve(run.monitored.loss) for run in pairs.runs.values() if not run.failed]
    common = sorted(set.intersection(*map(set, curves))) if curves else []
    return common if common and all(max(of) == common[-1] for of in curves) else []


def _over_steps(runs: Sequence[CellResult], steps: Sequence[int]) -> Floats:
    """The losses of some runs [step, seed], none above `H_uni`; that of a failed run is `H_uni`."""

    def loss(run: CellResult, step: int) -> float:
        value = run.run.curve(run.monitored.loss).get(step, math.nan)
        return min(value, run.entropy) if math.isfinite(value) else run.entropy

    return np.array([[run.entropy if run.failed else loss(run, t) for run in runs] for t in steps])


def tolerated(
    rates: Sequence[float], losses: Sequence[float], entropy: float
) -> tuple[float, bool]:
    """log2 of the largest tolerated rate, and whether it is the largest tried.

    NaN where the best loss is not `LEARNED` under the entropy.
    """
    best = min(range(len(losses)), key=losses.__getitem__)
    if entropy - losses[best] < LEARNED:
        return math.nan, False
    limit = losses[best] + TOLERATED * (entropy - losses[best])
    for low, high in zip(range(best, len(rates)), range(best + 1, len(rates)), strict=False):
        if losses[high] > limit:
            share = (limit - losses[low]) / (losses[high] - losses[low])
            return math.log2(rates[low]) + share * math.log2(rates[high] / rates[low]), False
    return math.log2(rates[-1]), True


def rate_sensitivity(
    arm: Arm, reference: int | None, warmup: int | None = None, span: Span | None = None
) -> Score:
    """`rate_sensitivity w=...`: how much the loss rises over the rates (Wortsman et al. 2023).

    `S(w) = mean over ln(rate) of min(l, H_uni) - min_r l_bar(w, r)`, nats per token, the mean by
    trapezoids over the `span`, the rates between which all compared arms were run (default: those
    of this arm); estimate and bounds of the smallest loss as in `need`. Without a `warmup`:
    `rate_sensitivity`, `S(0) - S(ref)`, both means over the rates that both warm-ups have.
    Undefined where a seed never learned: there no rate loses anything against the best one.
    """
    name = "rate_sensitivity" if warmup is None else f"rate_sensitivity w={warmup}"
    wanted = (0, reference) if warmup is None else (warmup,)
    reason, pairs, table = _complete(arm, wanted, seeds=2)
    span = span or shared_span([arm])
    if not reason and not all({*span} <= {*curve.rates} for curve in table.values()):
        reason = f"no runs at the rates {label(span[0])} and {label(span[1])} of the other arms"
    if reason:
        return undefined(arm, math.nan, name, reason, pairs)
    tops = _entropies(pairs)
    if any((tops - curve.losses.min(axis=1) < LEARNED).any() for curve in table.values()):
        return undefined(arm, math.nan, name, f"a seed {NEVER} at some warm-up", pairs)
    curves = [*table.values()]
    averages = [_average(curve, span, shared_rates(curves)) for curve in curves]
    values = averages[0] - curves[0].at_chosen
    lows, highs = averages[0] - curves[0].best[1], averages[0] - curves[0].best[0]
    if warmup is None:
        values = values - (averages[1] - curves[1].at_chosen)
        lows = lows - (averages[1] - curves[1].best[0])
        highs = highs - (averages[1] - curves[1].best[1])
    runs, by_mean = best_runs(pairs, table)
    mixed = runs.mixed or by_mean.mixed
    between = {} if mixed else _between(pairs, lows, highs)
    return Score(
        **score_identity(arm, math.nan, name),
        estimate=float(values.mean()),
        **{**between, "p_sign": math.nan},
        p=_p_between(between) if warmup is None else math.nan,
        **pairs.counts,
        note=join_notes(pairs.missing, mixed),
        values=_by_seed(pairs, values),
    )


def shared_span(members: Sequence[Arm]) -> Span:
    """The rates between which all arms were run that have more than one."""
    runs = [arm.rates_at(warmup) for arm in members for warmup in arm.warmups]
    several = [rates for rates in runs if len(rates) > 1]
    return (
        max((rates[0] for rates in several), default=math.nan),
        min((rates[-1] for rates in several), default=math.nan),
    )


def shared_rates(curves: Iterable[RateCurve]) -> set[float]:
    """The rates that all of the curves have."""
    return set.intersection(*({*curve.rates} for curve in curves))


def _average(curve: RateCurve, span: Span, rates: Collection[float]) -> Floats:
    """The mean loss over ln(rate) in a span, by seed; between those of the `rates`."""
    low, high = span
    inside = [n for n, rate in enumerate(curve.rates) if low <= rate <= high and rate in rates]
    logs = np.log(np.array(curve.rates)[inside])
    return np.trapezoid(curve.losses[:, inside], logs, axis=1) / (logs[-1] - logs[0])


def _complete(
    arm: Arm, warmups: Sequence[int | None], seeds: int = 1
) -> tuple[str, Paired, Mapping[int, RateCurve]]:
    """Why a score over rates is undefined, the seeds with every run, and the curves by warm-up.

    A warm-up has the rates at which it was planned, which need not be those of another one. With 2
    `seeds` at least, the rate of each is chosen on the others.
    """
    known = [warmup for warmup in warmups if warmup is not None]
    rates = {warmup: arm.rates_at(warmup) for warmup in known}
    pairs = arm.at([(warmup, lr) for warmup in known for lr in rates[warmup]])
    reason = ""
    if None in warmups or len(rates) < len(known):
        reason = "no reference warm-up to compare with"
    elif missing := [warmup for warmup in known if not rates[warmup]]:
        reason = f"no arm with warm-up {missing[0]}"
    elif min(map(len, rates.values())) < 2:
        reason = "one rate only"
    if not reason and len(pairs.seeds) < seeds:
        reason = why_nothing(pairs) or "one seed: no other seed to choose the rate on"
    if reason:
        return reason, pairs, {}

    def curve(warmup: int) -> RateCurve:
        points = [(warmup, lr) for lr in rates[warmup]]
        sound = [not any(pairs.failed(at)) and not any(pairs.half_escaped(at)) for at in points]
        losses = [[pairs.runs[at, seed].loss for at in points] for seed in pairs.seeds]
        return RateCurve(rates[warmup], np.array(losses), np.array(sound))

    return "", pairs, {warmup: curve(warmup) for warmup in known}


def _entropies(pairs: Paired) -> Floats:
    """The unigram entropy of each seed."""
    return np.array([mean([pairs.runs[p, s].entropy for p in pairs.points]) for s in pairs.seeds])


def _by_seed(pairs: Paired, values: Floats) -> tuple[tuple[int, float], ...]:
    return tuple(zip(pairs.seeds, values.tolist(), strict=True))


CORRECTED = ("delta", "interaction", "stall_difference", "need")  # a family of tests each


def sensitivity_scores(grid: GridResults) -> list[Score]:
    """Every score of every variant, in the order of the plan; none where bad runs were pruned."""
    rows = _uncorrected(grid)
    for name in CORRECTED:
        family = [number for number, row in enumerate(rows) if row.score == name]
        ps = [rows[number].p for number in family]
        untested = sum(math.isnan(p) and rows[n].compared for n, p in zip(family, ps, strict=True))
        corrected = holm_values(ps, untested).tolist()
        for number, p in zip(family, corrected, strict=True):
            rows[number] = replace(rows[number], p_holm=p)
    return rows


def _uncorrected(grid: GridResults) -> list[Score]:
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
    rows = []
    for arm in present:
        rows += [delta(arm, lr, grid), interaction(arm, members.get(arm.baseline or ""), lr, grid)]
        rows += steps_saved(arm, lr, grid.reference_warmup)
        rows += [stalls(arm, lr, warmup) for warmup in arm.warmups]
    return rows


def _over_rates(members: Sequence[Arm], grid: GridResults) -> list[Score]:
    """The scores over all rates of the variants of one group."""
    ref, span = grid.reference_warmup, shared_span(members)
    found = [need_at_best_rates(arm, ref) for arm in members]
    rows = [*found]
    for arm, need in zip(members, found, strict=True):
        rows += [octaves(arm, ref), steps_at_best_rates(arm, ref, need)]
        rows += [rate_sensitivity(arm, ref, span=span)]
        rows += [rate_sensitivity(arm, None, warmup, span) for warmup in arm.warmups]
    return rows


def delta(arm: Arm, lr: float, grid: GridResults) -> Score:
    """`Delta = mean_s [l(0, s) - l(ref, s)]`, nats per token; Student's t interval over seeds.

    Undefined where the variant never learned, with the reference
    warm-up either. A lower bound where every run without warm-up failed, and an upper one where any
    with it did: they count as `H_uni`.
    """
    reason, pairs, ref = _against_reference(arm, lr, grid)
    if reason:
        return undefined(arm, lr, "delta", reason, pairs)
    differences = _differences(pairs, (0, lr), (ref, lr))
    return Score(
        **score_identity(arm, lr, "delta"),
        estimate=mean(differences),
        bound=bound_of(at_most=any(pairs.failed((ref, lr))), at_least=_capped(pairs, lr)),
        **pairs.counts,
        **_over_seeds(pairs, differences, pairs.mixed, _sides(pairs)),
    )


def _capped(pairs: Paired, lr: float) -> bool:
    """Whether Delta is a lower bound, because no run without warm-up trained."""
    return all(pairs.failed((0, lr)))


def interaction(arm: Arm, baseline: Arm | None, lr: float, grid: GridResults) -> Score:
    """`Delta_v - Delta_baseline` over the same seeds: does warm-up help it more than the baseline?

    `mean_s [(l_v(0, s) - l_v(ref, s)) - (l_b(0, s) - l_b(ref, s))]`, nats per token; t interval.
    `>=` where no run of the variant without warm-up trained, or one of the baseline with it failed;
    `<=` the other way round.
    """
    reason, own, ref = _against_reference(arm, lr, grid)
    never = ""
    if arm.baseline is None:
        never = "the grid file names no baseline"
    elif arm.baseline == arm.variant:
        never = IS_BASELINE
    elif baseline is None or lr not in baseline.rates:
        never = f"no arm of the baseline {arm.baseline}"
    if never:
        return undefined(arm, lr, "interaction", never, own)
    if reason or baseline is None:
        return undefined(arm, lr, "interaction", reason, own)
    reason, other, _ = _against_reference(baseline, lr, grid)
    seeds = [seed for seed in own.seeds if seed in other.seeds]
    if reason or not seeds:
        reason = f"baseline: {reason}" if reason else "no seed finished here and in the baseline"
        return undefined(arm, lr, "interaction", reason, own)
    points = [(0, lr), (ref, lr)]
    planned = len({*arm.planned_at(points)} & {*baseline.planned_at(points)})
    own = Paired(arm.cells, points, seeds, planned)
    other = Paired(baseline.cells, points, seeds, planned)
    differences = [
        ours - theirs
        for ours, theirs in zip(
            _differences(own, *points), _differences(other, *points), strict=True
        )
    ]
    mixed = join_notes(own.mixed, other.mixed and f"baseline {other.mixed}")
    counts = {name: own.counts[name] + other.counts[name] for name in ("cells", "diverged")}
    return Score(
        **score_identity(arm, lr, "interaction"),
        estimate=mean(differences),
        bound=bound_of(
            at_most=_capped(other, lr) or any(own.failed((ref, lr))),
            at_least=_capped(own, lr) or any(other.failed((ref, lr))),
        ),
        seeds=len(seeds),
        **counts,
        **_over_seeds(
            own, differences, mixed, *((own.failed(at), other.failed(at)) for at in points)
        ),
    )


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
    return why_nothing(pairs) or why_never_learned(pairs, (ref, lr)), pairs, ref


def _differences(pairs: Paired, first: tuple[int, float], second: tuple[int, float]) -> list[float]:
    return [a - b for a, b in zip(pairs.losses(first), pairs.losses(second), strict=True)]


def _sides(pairs: Paired) -> Sides:
    """Which runs failed at the first and at the last of the points."""
    return pairs.failed(pairs.points[0]), pairs.failed(pairs.points[-1])


def _over_seeds(
    pairs: Paired, values: Sequence[float], mixed: str, *sides: Sides
) -> dict[str, Any]:
    """Interval, p values, note and values of a mean over seeds; only values where it is mixed."""
    seeds, p = pairs.seeds, math.nan if mixed else seeds_p(values)
    low, high, _ = (math.nan,) * 3 if mixed else t_interval(values)
    few = len(values) == LEAST_SEEDS - 1 and not mixed
    return {
        "low": low,
        "high": high,
        "p": no_less_than_failures(p, pairs.planned, *sides),
        "p_sign": math.nan if mixed else sign_flip_p(values),
        "note": join_notes(
            pairs.missing,
            mixed or _no_interval(values, low),
            f"{len(values)} seeds are too few for a p value" * few,
        ),
        "each": _each(seeds, values, mixed),
        "values": tuple(zip(seeds, values, strict=True)),
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
