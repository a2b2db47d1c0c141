"""Intervals, tests and power, as plain functions on arrays; no file is read here.

Functions with plural names take arrays whose last axis is the seeds; the others take one list.
Intervals are two-sided at 95 %; undefined values are NaN. `benchmarks/coverage.py` measures how
often each interval contains the true value, and the rate of false findings.
"""

import math
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import special

from lightning_app.config.search import ALPHA

LEVEL = 1 - ALPHA
FEW_SEEDS = 5  # with fewer: the value of each seed is shown
LEAST_SEEDS = 3  # with fewer: no p value, since two seeds agree by chance too often
FLIPPED = range(6, 17)  # seeds whose signs are all flipped: fewer cannot come under 5 %
MOST_SEEDS = 40  # with more: "more than 40 seeds would decide"
Floats = NDArray[np.float64]


def mean(values: Sequence[float]) -> float:
    try:
        return math.fsum(values) / len(values)
    except OverflowError:  # the sum of perplexities can exceed the largest float
        return math.fsum(value / len(values) for value in values)


def t_interval(values: Sequence[float], level: float = LEVEL) -> tuple[float, float, float]:
    """`t_intervals` of one list: low, high, p."""
    low, high, p = t_intervals(values, level)
    return float(low), float(high), float(p)


def t_intervals(values: ArrayLike, level: float = LEVEL) -> tuple[Floats, Floats, Floats]:
    """Student's t interval of the mean (Student 1908), and the two-sided p value of mean zero.

    `mean +- t_{n-1} * sd / sqrt(n)`. NaN for one value, and if the values do not differ.
    Paired arms are compared by giving the differences, seed by seed.
    """
    found = np.asarray(values, dtype=float)
    count, centre = found.shape[-1], found.mean(axis=-1)
    if count < 2:
        nothing = np.full_like(centre, math.nan)
        return nothing, nothing, nothing
    alike = np.ptp(found, axis=-1) <= 1e-12 * np.maximum(1.0, np.abs(found).max(axis=-1))
    error = np.where(alike, math.nan, found.std(axis=-1, ddof=1)) / math.sqrt(count)
    half = t_quantile(count, level) * error
    p = 2 * special.stdtr(count - 1, -np.abs(centre) / error)
    return centre - half, centre + half, p


def seeds_interval(values: Sequence[float], *failed: Sequence[bool]) -> tuple[float, float, float]:
    """`t_interval` of one value per seed; NaN unless the runs of each arm ended alike.

    `failed` says for each arm whether its runs failed (`ended_alike`).
    """
    if values and all(ended_alike(arm) for arm in failed):
        return t_interval(values)
    return math.nan, math.nan, math.nan


def t_quantile(count: int, level: float = LEVEL) -> float:
    """The half width of a t interval of `count` values in standard errors."""
    return float(special.stdtrit(count - 1, (1 + level) / 2))


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
    """The exact two-sided p value of mean zero by sign flips (Fisher 1935), at least `2 / 2^n`.

    The share of the `2^n` choices of signs whose sum is at least as far from zero. It needs no form
    of the noise, only symmetry about zero. NaN for fewer than 6 values, and for more than 16.
    """
    count = len(values)
    if count not in FLIPPED:
        return math.nan
    signs = 1.0 - 2.0 * ((np.arange(2**count)[:, None] >> np.arange(count)) & 1)
    sums = np.abs(np.asarray(values, dtype=float) @ signs.T)
    return float((sums >= sums[0] * (1 - 1e-12)).mean())


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


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A mean over seeds.

    `low` and `high`: Student's t interval at 95 %. `p` is the p value of zero, `p_holm` corrects it
    over the family of the comparison, and `p_sign` is the exact one by sign flips, from 6 seeds on.
    `holm_low` and `holm_high`: the interval that decides. Its `level` is `1 - 0.05 / m`, where `m`
    is the number of comparisons left at this step of Holm's correction if `p_holm` is under 5 %,
    else that of the whole `family`; it leaves out zero exactly where `p_holm` is under 5 %.
    `values` holds seed and value. With an `alpha` under 5 % (`corrected`) the intervals are those
    of `1 - alpha` and `1 - alpha / m`, and p values are multiplied by `0.05 / alpha`.
    """

    estimate: float = math.nan
    low: float = math.nan
    high: float = math.nan
    p: float = math.nan
    p_holm: float = math.nan
    p_sign: float = math.nan
    holm_low: float = math.nan
    holm_high: float = math.nan
    seeds: int = 0
    note: str = ""
    values: tuple[tuple[int, float], ...] = ()
    level: float = LEVEL
    family: int = 1
    alpha: float = ALPHA

    @property
    def significant(self) -> bool:
        return self.p_holm < ALPHA


def of_seeds(
    values: Mapping[int, float], *, sure: bool = True, decides: bool = True, floor: float = 0.0
) -> dict[str, Any]:
    """The fields of an `Estimate` from one value per seed, uncorrected.

    It has an interval if `sure`, and p values, of at least `floor`, if it also `decides`.
    """
    found, decides = [*values.values()], decides and sure
    low, high, _ = t_interval(found) if sure else (math.nan,) * 3
    return {
        "estimate": mean(found),
        "low": low,
        "high": high,
        "p": max(seeds_p(found), floor) if decides else math.nan,
        "p_sign": sign_flip_p(found) if decides else math.nan,
        "seeds": len(found),
        "values": tuple(values.items()),
    }


_HIDDEN = ("values", "level", "family", "alpha")


def row_document(row: Estimate) -> dict[str, Any]:
    """The fields of a row for tables and scripts: those of its own kind first, no values."""
    shared = [each.name for each in fields(Estimate) if each.name not in _HIDDEN]
    own = [each.name for each in fields(row) if each.name not in {*shared, *_HIDDEN}]
    return {name: getattr(row, name) for name in (*own, *shared)}


Row = TypeVar("Row", bound=Estimate)


def corrected(
    rows: Sequence[Row], family: Callable[[Row], Hashable], alpha: float = ALPHA
) -> list[Row]:
    """The rows with Holm's p values and intervals; those of the family None have none.

    A comparison without a p value counts in its family if it has enough seeds (`holm_values`).
    `alpha`: under 5 % if seeds were added by results, so that all intervals are wider and all p
    values larger.
    """
    rows = [widened(row, alpha) for row in rows]
    found, places = list(rows), dict[Hashable, list[int]]()
    for place, row in enumerate(rows):
        places.setdefault(family(row), []).append(place)
    places.pop(None, None)
    for members in places.values():
        untested = sum(
            math.isnan(rows[n].p) and len(rows[n].values) >= LEAST_SEEDS for n in members
        )
        ps = holm_values([rows[n].p for n in members], untested).tolist()
        tested = sorted((rows[n].p, n) for n in members if not math.isnan(rows[n].p))
        left = max(1, len(tested) + untested)
        firsts: dict[float, int] = {}  # equal p values are of one step
        steps = {n: left - firsts.setdefault(p, step) for step, (p, n) in enumerate(tested)}
        for n, p in zip(members, ps, strict=True):
            level = 1 - alpha / (steps[n] if p < ALPHA else left)
            low, high = math.nan, math.nan
            if not (math.isnan(p) or math.isnan(rows[n].low)):
                low, high, _ = t_interval([value for _, value in rows[n].values], level)
                if p >= ALPHA and low * high > 0:  # the p value is that of failures
                    low, high = math.nan, math.nan
            found[n] = replace(
                rows[n], p_holm=p, holm_low=low, holm_high=high, level=level, family=left
            )
    return found


def widened(row: Row, alpha: float) -> Row:
    """The row with the interval and the p value of an error of `alpha` (`Estimate`)."""
    if alpha == ALPHA:
        return row
    low, high = row.low, row.high
    if not math.isnan(low):
        low, high, _ = t_interval([value for _, value in row.values], 1 - alpha)
    return replace(row, low=low, high=high, p=widened_p(row.p, alpha), alpha=alpha)


def widened_p(p: float, alpha: float) -> float:
    """`min(1, 0.05 p / alpha)`: under 5 % where `p` is under `alpha`."""
    return float(np.minimum(1.0, p * ALPHA / alpha))  # NaN stays NaN


def within(row: Estimate, limit: float) -> bool:
    """Whether the mean is within `+-limit`, at the level of the whole family.

    If all means of a family are at the limit, the chance that any is found within is 2.5 %.
    """
    if math.isnan(row.holm_low):
        return False
    values = [value for _, value in row.values]
    low, high, _ = t_interval(values, 1 - row.alpha / row.family)
    return -limit <= low and high <= limit


def seeds_to_decide(row: Estimate, matters: float) -> int:
    """The fewest seeds, up to `MOST_SEEDS`, at which this mean and spread would decide.

    That is, at which the interval at the level of the row would leave out zero or lie within
    `+-matters`. `MOST_SEEDS + 1` if no number does.
    """
    spread = float(np.std([value for _, value in row.values], ddof=1))
    for count in range(max(len(row.values) + 1, LEAST_SEEDS), MOST_SEEDS + 1):
        half = t_quantile(count, row.level) * spread / math.sqrt(count)
        if abs(row.estimate) > half or abs(row.estimate) + half <= matters:
            return count
    return MOST_SEEDS + 1


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
