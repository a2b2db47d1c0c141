"""Intervals, tests and power, as plain functions on arrays; no file is read here.

Functions with plural names take arrays whose last axis is the seeds; the others take one list.
Intervals are two-sided at 95 %; undefined values are NaN. `benchmarks/coverage.py` measures how
often each interval contains the true value, and the rate of false findings.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import special

LEVEL = 0.95
FEW_SEEDS = 5  # with fewer: the value of each seed is shown
LEAST_SEEDS = 3  # with fewer: no p value, since two seeds agree by chance too often
FLIPPED = range(6, 17)  # seeds whose signs are all flipped: fewer cannot come under 5 %
TOLERATED = 0.1  # of what the best rate learns may be lost at a tolerated rate
Floats = NDArray[np.float64]


def mean(values: Sequence[float]) -> float:
    try:
        return math.fsum(values) / len(values)
    except OverflowError:  # the sum of perplexities can exceed the largest float
        return math.fsum(value / len(values) for value in values)


def t_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """`t_intervals` of one list: low, high, p."""
    low, high, p = t_intervals(values)
    return float(low), float(high), float(p)


def t_intervals(values: ArrayLike) -> tuple[Floats, Floats, Floats]:
    """Student's t interval of the mean (Student 1908), and the two-sided p value of mean zero.

    `mean +- t_{n-1} * sd / sqrt(n)`. NaN for one value, and if the values do not differ.
    Paired arms are compared by giving the differences, seed by seed.
    """
    found = np.asarray(values, dtype=float)
    count, centre = found.shape[-1], found.mean(axis=-1)
    if count < 2:
        nothing = np.full_like(centre, math.nan)
        return nothing, nothing, nothing
    error = np.where(_spread(found), found.std(axis=-1, ddof=1), math.nan)
    error /= math.sqrt(count)
    half = t_quantile(count) * error
    p = 2 * special.stdtr(count - 1, -np.abs(centre) / error)
    return centre - half, centre + half, p


def best_on_others(losses: ArrayLike) -> NDArray[np.int_]:
    """The choice that is best on all other seeds, for each seed; `losses` is [.., choice, seed]."""
    found = np.asarray(losses, dtype=float)
    return (found.sum(axis=-1, keepdims=True) - found).argmin(axis=-2)


def concave(losses: ArrayLike, places: ArrayLike, sound: ArrayLike) -> NDArray[np.bool_]:
    """The places at which a curve is not convex; `losses` is [.., place, seed].

    There the mean slope on the left exceeds that on the right, by more than its standard error if
    there are several seeds, so that noise alone rarely bends a line.
    """
    y, x, usable = np.asarray(losses, float), np.asarray(places, float), np.asarray(sound, bool)
    seeds = np.moveaxis(y, -1, 0)
    bends = -np.diff(_slopes(seeds, x, np.broadcast_to(usable, seeds.shape)), axis=-1)
    count = len(bends)
    error = bends.std(axis=0, ddof=1) / math.sqrt(count) if count > 1 else 0.0
    return bends.mean(axis=0) > error


def lowest(
    losses: ArrayLike, places: ArrayLike, sound: ArrayLike, bent: ArrayLike | None = None
) -> tuple[Floats, Floats]:
    """Bounds of the smallest value of a curve that is known at a few places (last axis).

    `low` holds for every curve that is convex around its minimum: between two neighbouring places
    it lies above the lines through the two points on the left and through the two on the right. A
    line needs two `sound` points: a run that failed says only that its loss is at least `H_uni`,
    and beyond the first rate with failures none is expected to learn more. Beside the smallest
    value a line ends at a place that is `bent` (default: `concave` of these losses). `low` is -inf
    where no line bounds it, and where the smallest value lies at the first or the last place, since
    a smaller one may lie outside. `high` is the smallest sound value, or the smallest one where
    none is sound.
    """
    y, x, usable = np.asarray(losses, float), np.asarray(places, float), np.asarray(sound, bool)
    slopes = _slopes(y, x, usable)
    ended = concave(y[..., None], x, usable) if bent is None else np.asarray(bent, bool)
    shown = np.where(usable | ~usable.any(axis=-1, keepdims=True), y, math.inf)
    high, best, last = shown.min(axis=-1), shown.argmin(axis=-1), y.shape[-1] - 1
    low = high.copy()
    for place in range(last):
        width = x[place + 1] - x[place]
        beside = (best == place) | (best == place + 1)
        left = np.where(beside & ended[..., place], math.nan, slopes[..., place])
        right = np.where(beside & ended[..., place + 1], math.nan, slopes[..., place + 2])
        with np.errstate(divide="ignore", invalid="ignore"):
            meet = (y[..., place + 1] - right * width - y[..., place]) / (left - right)
        meet = np.where(np.isfinite(meet), np.clip(meet, 0.0, width), 0.0)
        values = []
        for at in (0.0, width, meet):
            rising = np.where(np.isnan(left), -math.inf, y[..., place] + left * at)
            falling = np.where(np.isnan(right), -math.inf, y[..., place + 1] - right * (width - at))
            values.append(np.maximum(rising, falling))
        either = usable[..., place] | usable[..., place + 1]
        low = np.where(either, np.minimum(low, np.minimum.reduce(values)), low)
    return np.where((best == 0) | (best == last), -math.inf, low), high


def crossing(
    losses: ArrayLike,
    places: ArrayLike,
    sound: ArrayLike,
    limit: ArrayLike,
    bent: ArrayLike | None = None,
    *,
    at_most: bool,
) -> Floats:
    """A bound of the place at which a convex curve rises over `limit`, going up from its minimum.

    The smallest possible place is on the line between the last point under the limit and the first
    one over it, or the place before the smallest point if that is over it; the largest (`at_most`)
    is where the lines through the points beside these two meet the limit (`lowest`), unless they
    end at a `bent` place. Where no point beyond the minimum is over the limit, they are the last
    place and inf.
    """
    y, x, usable = np.asarray(losses, float), np.asarray(places, float), np.asarray(sound, bool)
    limit = np.asarray(limit, float)
    slopes = _slopes(y, x, usable)
    ended = concave(y[..., None], x, usable) if bent is None else np.asarray(bent, bool)
    shown = np.where(usable | ~usable.any(axis=-1, keepdims=True), y, math.inf)
    best = shown.argmin(axis=-1)
    found = np.full(limit.shape, math.inf if at_most else x[-1])
    for place in reversed(range(y.shape[-1] - 1)):
        width, under = x[place + 1] - x[place], shown[..., place]
        over = shown[..., place + 1]
        with np.errstate(divide="ignore", invalid="ignore"):
            if at_most:
                left = np.where(ended[..., place], math.nan, slopes[..., place])
                right = np.where(ended[..., place + 1], math.nan, slopes[..., place + 2])
                first = np.where(left > 0, (limit - under) / left, width)
                second = np.where(right > 0, width - (over - limit) / right, width)
                share = np.fmin(np.fmin(first, second), width)
            else:
                share = np.where(np.isinf(over), 0.0, (limit - under) * width / (over - under))
        at = x[place] + np.clip(np.nan_to_num(share, nan=0.0), 0.0, width)
        found = np.where((place >= best) & (over > limit), at, found)
    if at_most:
        return found
    # Under all points the minimum lies beside the smallest one, and the place beyond it.
    smallest = np.take_along_axis(shown, best[..., None], axis=-1)[..., 0]
    return np.where(smallest > limit, x[np.maximum(best - 1, 0)], found)


def _slopes(y: Floats, x: Floats, usable: NDArray[np.bool_]) -> Floats:
    """The slopes between neighbours, with one NaN before and after; NaN beside an unsound point."""
    inner = np.where(usable[..., 1:] & usable[..., :-1], np.diff(y) / np.diff(x), math.nan)
    return np.pad(inner, [(0, 0)] * (y.ndim - 1) + [(1, 1)], constant_values=math.nan)


def steps_between(
    curves: Sequence[ArrayLike],
    places: Sequence[ArrayLike],
    sound: Sequence[ArrayLike],
    steps: ArrayLike,
    bent: Sequence[ArrayLike | None] = (None, None),
) -> tuple[Floats, Floats]:
    """Bounds of the steps that the second of two arms saves at the best places of both.

    `curves` has for each arm its mean loss [.., place, step] after each of `steps`, whose last is
    `T`. With `l*_a` the smallest final loss of an arm and `t_a(x)` the step at which it reaches `x`
    at its best place: `T - t_1(l*_0)` where the second arm ends lower, else `-(T - t_0(l*_1))`.
    Between the places an arm may end lower by as much as `lowest` allows, and is then taken to be
    lower by as much at every step.
    """
    at = np.asarray(steps, float)

    def best(arm: int) -> tuple[Floats, Floats, Floats, Floats]:
        y, usable = np.asarray(curves[arm], float), np.asarray(sound[arm], bool)
        final = y[..., -1]
        least, most = lowest(final, places[arm], usable, bent[arm])
        shown = np.where(usable | ~usable.any(axis=-1, keepdims=True), final, math.inf)
        place = shown.argmin(axis=-1)[..., None, None]
        own = np.take_along_axis(y, place, axis=-2)[..., 0, :]
        return least, most, own, own - (most - least)[..., None]  # -inf where a bound is open

    def saved(first: Floats, second: Floats, ends: tuple[Floats, Floats]) -> Floats:
        forward = at[-1] - _first(second, at, ends[0])
        back = _first(first, at, ends[1]) - at[-1]
        return np.where(ends[0] >= ends[1], forward, back)

    (least, most, own, lower), (other_least, other_most, other, other_lower) = best(0), best(1)
    low = saved(lower, other, (least, other_most))
    high = saved(own, other_lower, (most, other_least))
    return np.where(np.isinf(least), -math.inf, low), np.where(
        np.isinf(other_least), math.inf, high
    )


def _first(curve: Floats, steps: Floats, value: Floats) -> Floats:
    """The first step at which a curve (last axis) is at the value or below, linear between steps.

    The last step where it never is.
    """
    under = curve <= value[..., None]
    place = np.where(under.any(axis=-1), under.argmax(axis=-1), len(steps) - 1)
    before = np.maximum(place - 1, 0)
    high = np.take_along_axis(curve, before[..., None], axis=-1)[..., 0]
    low = np.take_along_axis(curve, place[..., None], axis=-1)[..., 0]
    with np.errstate(divide="ignore", invalid="ignore"):
        share = np.clip(np.nan_to_num((high - value) / (high - low), nan=1.0), 0.0, 1.0)
    return steps[before] + share * (steps[place] - steps[before])


def influences(function: Callable[[Floats], ArrayLike], values: ArrayLike) -> Floats:
    """A value per seed (last axis) whose mean is `function` of the means over all seeds.

    `f(all) + (n - 1) (mean_s f(without s) - f(without s))` (Efron and Stein 1981): their t interval
    has the jackknife's standard error. Infinite where `function` is, with or without a seed.
    """
    found = np.asarray(values, float)
    count, whole = found.shape[-1], np.asarray(function(found.mean(axis=-1)), float)
    if count < 2:
        return whole[..., None]
    total = found.sum(axis=-1)
    others = ((total - found[..., seed]) / (count - 1) for seed in range(count))
    without = np.stack([np.asarray(function(means), float) for means in others], axis=-1)
    endless = np.where(np.isinf(without), without, 0.0).sum(axis=-1)  # all have the same sign
    with np.errstate(invalid="ignore"):
        each = whole[..., None] + (count - 1) * (without.mean(axis=-1, keepdims=True) - without)
    endless = np.where(np.isinf(whole), whole, endless)
    return np.where(np.isinf(endless)[..., None], endless[..., None], each)


def best_by_seed(losses: ArrayLike, places: ArrayLike, sound: ArrayLike) -> tuple[Floats, Floats]:
    """`lowest` as values per seed; `losses` is [.., place, seed]."""
    bent = concave(losses, places, sound)
    low, high = influences(lambda means: lowest(means, places, sound, bent), losses)
    return low, high


def tolerated_by_seed(
    losses: ArrayLike, places: ArrayLike, sound: ArrayLike, entropy: float
) -> tuple[Floats, Floats]:
    """Bounds of the largest place where the loss is at most `l* + 0.1 (entropy - l*)`, per seed.

    `l*` lies between the bounds of `lowest`; where it may lie outside of the places, the lower
    bound is -inf.
    """

    bent = concave(losses, places, sound)

    def bounds(means: Floats) -> ArrayLike:
        least, most = lowest(means, places, sound, bent)
        closed = np.isfinite(least)
        least = np.where(closed, least, most)
        limits = (best + TOLERATED * (entropy - best) for best in (least, most))
        first, last = (
            crossing(means, places, sound, limit, bent, at_most=at_most)
            for limit, at_most in zip(limits, (False, True), strict=True)
        )
        return np.where(closed, first, -math.inf), last

    low, high = influences(bounds, losses)
    return low, high


def steps_by_seed(
    curves: Sequence[Floats],
    places: Sequence[ArrayLike],
    sound: Sequence[ArrayLike],
    steps: ArrayLike,
) -> tuple[Floats, Floats]:
    """`steps_between` as values per seed; `curves` has for each arm [.., place, step, seed]."""
    split = curves[0].shape[-3]
    ends = zip((curve[..., -1, :] for curve in curves), places, sound, strict=True)
    bent = [concave(*end) for end in ends]

    def bounds(means: Floats) -> ArrayLike:
        arms = (means[..., :split, :], means[..., split:, :])
        return steps_between(arms, places, sound, steps, bent)

    low, high = influences(bounds, np.concatenate(curves, axis=-3))
    return low, high


def seeds_interval(values: Sequence[float], *failed: Sequence[bool]) -> tuple[float, float, float]:
    """`t_interval` of one value per seed; NaN unless the runs of each arm ended alike.

    `failed` says for each arm whether its runs failed (`ended_alike`).
    """
    if values and all(ended_alike(arm) for arm in failed):
        return t_interval(values)
    return math.nan, math.nan, math.nan


def t_quantile(count: int) -> float:
    """The half width of a t interval of `count` values in standard errors."""
    return float(special.stdtrit(count - 1, (1 + LEVEL) / 2))


def seeds_p(values: Sequence[float]) -> float:
    """Student's p value of mean zero, which decides a label; NaN for one or two seeds."""
    return t_interval(values)[2] if len(values) >= LEAST_SEEDS else math.nan


def permutation_p(first: Sequence[int], second: Sequence[int]) -> float:
    """The exact two-sided p value of equal means of two arms, by permuting whole seeds.

    `first` and `second` hold the number of failed runs of each seed. The p value is the share of
    all ways to deal the seeds to two arms of these sizes whose means differ by at least as much
    (Fisher 1935). All runs of a seed stay together, since one that stalls at a rate mostly stalls
    at larger ones.
    """
    counts, own, every = [*first, *second], len(first), len(first) + len(second)
    ways: list[Counter[int]] = [Counter({0: 1}), *(Counter() for _ in range(own))]
    for count in counts:  # the number of ways to choose this number of seeds with this sum
        for chosen in range(own, 0, -1):
            for total, number in ways[chosen - 1].items():
                ways[chosen][total + count] += number

    def apart(total: int) -> int:
        return abs(total * every - sum(counts) * own)

    found = apart(sum(first))
    far = sum(number for total, number in ways[own].items() if apart(total) >= found)
    return far / math.comb(every, own)


def failures_p(first: Sequence[int], second: Sequence[int], runs: int, planned: int) -> float:
    """`permutation_p`, or `2 / 4^n` for fewer than 5 planned seeds if that is smaller.

    The second holds where in each of `n` seeds all `runs` of one arm failed and some of the other
    did not: if arms are alike, the chance of that is at most 1/4 a seed.
    """
    if len(first) < LEAST_SEEDS or len(second) < LEAST_SEEDS:
        return math.nan
    p, sides = permutation_p(first, second), ((first, second), (second, first))
    sure = any(min(all_) == runs > max(some) for all_, some in sides)
    few = planned < FEW_SEEDS and len(first) == len(second)
    return min(p, 2 / 4 ** len(first)) if sure and few else p


Sides = tuple[Sequence[bool], Sequence[bool]]
"""Whether the runs of two compared arms failed, seed by seed."""


def no_less_than_failures(p: float, planned: int, *sides: Sides) -> float:
    """A p value of losses where one arm failed in all seeds and another in none: that of failures.

    All failures have the same loss, so that a few seeds that fail by chance would have a tiny p.
    """
    for first, second in sides:
        if all(first) != all(second) and any(first) != any(second):
            counts = [[int(failed) for failed in side] for side in (first, second)]
            p = max(p, failures_p(counts[0], counts[1], 1, planned))  # NaN stays NaN
    return p


def sign_flip_p(values: Sequence[float]) -> float:
    """`sign_flip_ps` of one list."""
    return float(sign_flip_ps(values))


def sign_flip_ps(values: ArrayLike) -> Floats:
    """The exact two-sided p value of mean zero by sign flips (Fisher 1935), at least `2 / 2^n`.

    The share of the `2^n` choices of signs whose sum is at least as far from zero. It needs no form
    of the noise, only symmetry about zero. NaN for fewer than 6 values, and for more than 16.
    """
    found = np.asarray(values, dtype=float)
    count = found.shape[-1]
    if count not in FLIPPED:
        return np.full(found.shape[:-1], math.nan)
    signs = 1.0 - 2.0 * ((np.arange(2**count)[:, None] >> np.arange(count)) & 1)
    sums = np.abs(found @ signs.T)
    return np.asarray((sums >= sums[..., :1] * (1 - 1e-12)).mean(axis=-1))


def wilson_interval(failed: int, count: int) -> tuple[float, float]:
    """`wilson_intervals` of one share: low, high."""
    low, high = wilson_intervals(failed, count)
    return float(low), float(high)


def wilson_intervals(failed: ArrayLike, count: int) -> tuple[Floats, Floats]:
    """Wilson's score interval (1927) of a proportion.

    The `p` with `(k/n - p)^2 <= z^2 p (1 - p) / n`. Counts are integers, so the coverage at a given
    `p` differs from 95 %; its average over all `p` is near 95 %.
    """
    found = np.asarray(failed, dtype=float)
    share, z = found / count, float(special.ndtri((1 + LEVEL) / 2))
    scale = 1 + z**2 / count
    centre = (share + z**2 / (2 * count)) / scale
    half = z * np.sqrt(share * (1 - share) / count + z**2 / (4 * count**2)) / scale
    low, high = np.where(found > 0, centre - half, 0.0), np.where(found < count, centre + half, 1.0)
    return low, high


def holm_values(p: ArrayLike, untested: ArrayLike = 0) -> Floats:
    """Holm's step-down correction (1979) over the last axis; NaN is ignored.

    With `p_(1) <= ... <= p_(m)`: `p_holm_(i) = max_{j <= i} min(1, (m - j + 1) * p_(j))`. It keeps
    the chance of any false finding in the family under 5 %, also for dependent tests. `untested`:
    comparisons of the family without a p value because some runs failed. They count, since chance
    decides which arms have one.
    """
    given = np.asarray(p, dtype=float)
    order = np.argsort(given, axis=-1)  # NaN comes last
    ordered = np.take_along_axis(given, order, axis=-1)
    tested = (~np.isnan(given)).sum(axis=-1, keepdims=True) + np.asarray(untested)[..., None]
    steps = np.minimum(1.0, (tested - np.arange(given.shape[-1])) * ordered)
    corrected = np.empty_like(given)
    np.put_along_axis(corrected, order, np.maximum.accumulate(steps, axis=-1), axis=-1)
    return corrected


class BleuDifference(NamedTuple):
    """BLEU of two systems on the same sentences, on the 0-100 scale."""

    first: float
    second: float
    p: float
    signature: str

    @property
    def difference(self) -> float:
        return self.first - self.second


def bleu_difference(
    first: Sequence[str],
    second: Sequence[str],
    references: Sequence[str],
    *,
    tokenize: str = "13a",
    lowercase: bool = True,
    trials: int = 10_000,
) -> BleuDifference:
    """SacreBLEU's paired approximate randomisation (Riezler and Maxwell 2005) of two runs.

    The share of `trials` in which swapping the two outputs of random sentences makes a difference
    of BLEU larger than the one seen. It covers variation over test sentences, not over seeds (Clark
    et al. 2011): for differences over several seeds use `t_interval` too.
    Reproducible: sacreBLEU's own seed (12345, or `SACREBLEU_SEED`). SacreBLEU does not count ties,
    so two equal outputs would have p = 1 / (trials + 1). This function returns at least
    `2^(1 - k)`, with `k` the number of sentences whose outputs differ: the share of swaps that
    change nothing.
    """
    from sacrebleu.metrics.bleu import BLEU
    from sacrebleu.significance import PairedTest, Result

    if not len(first) == len(second) == len(references) > 0:
        counts = f"{len(first)}, {len(second)} and {len(references)}"
        raise ValueError(f"expected equal numbers of hypotheses and references, found {counts}")
    # With `force`, sacreBLEU does not warn about text that is tokenised already.
    metric = BLEU(tokenize=tokenize, lowercase=lowercase, force=tokenize == "none")
    systems: list[tuple[str, Sequence[str]]] = [("second", second), ("first", first)]
    test = PairedTest(systems, {"BLEU": metric}, [list(references)], "ar", n_samples=trials)
    signatures, found = test()
    baseline, system = found["BLEU"]
    assert isinstance(baseline, Result)
    assert isinstance(system, Result)
    assert system.p_value is not None
    differ = sum(one != two for one, two in zip(first, second, strict=True))
    p = max(system.p_value, min(1.0, 2.0 ** (1 - differ)))
    return BleuDifference(system.score, baseline.score, p, str(signatures["BLEU"]))


def ended_alike(failed: ArrayLike) -> NDArray[np.bool_]:
    """Whether all of the runs (last axis) failed, or none of them.

    A failure counts as `H_uni`, nats away from the other losses. If some runs fail, t intervals of
    the mean have too little coverage (64 % at 3 seeds of which 30 % fail); the share of failures
    has Wilson's interval instead.
    """
    found = np.asarray(failed, dtype=bool)
    return np.asarray(found.all(axis=-1) | ~found.any(axis=-1))


def _spread(values: Floats) -> NDArray[np.bool_]:
    """False if values differ by no more than rounding."""
    size = np.maximum(1.0, np.abs(values).max(axis=-1))
    return np.asarray(np.ptp(values, axis=-1) > 1e-12 * size)
