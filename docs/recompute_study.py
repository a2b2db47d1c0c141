"""Recompute the numbers of a study or a report from the records of its runs, and compare.

    python docs/recompute_study.py STUDY                    # a published study
    python recompute_study.py . [GRID]                      # beside a report, in its folder
    python docs/recompute_study.py --former STUDY           # N and O, which reports had before

A study has the records of its runs in `runs.tar.xz`; those of a report lie in the folder of its
grid, by default that of the report. The program computes every score from the losses and
curves of the runs, and compares them with `sensitivity.csv` and `effects.csv`, and the mean losses
with `tables/loss_by_warmup.md` where that is. It has the definitions of the package and none of its
code, and prefers plain loops and enumeration. The exit code is 0 if all numbers agree to a relative
1e-9 (near zero: an absolute 1e-12; a printed table: its digits), else 1.

N is the loss that warm-up saves at the best rates, and O the octaves by which it raises the largest
tolerated rate, both between the bounds that hold if loss is convex in ln(rate). Predictions of some
studies are judged by them.

Not recomputed: p values over test sentences, which need the translations; the tables of other
questions than warm-up.
"""

import csv
import io
import json
import math
import re
import sys
import tarfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, combinations, pairwise, product
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np
import pandas as pd
import yaml
from scipy import stats

NAN = math.nan
LEARNED = 0.1  # nats under the unigram entropy from which on a variant has learned
ESCAPED = 1 / 3  # of what the best seed learned: a run that learned less has half escaped
TOLERATED = 0.1  # of what the best rate learns may be lost at a tolerated rate
FEW = 5  # with fewer planned seeds, an arm that always fails has a bound of its own
LEAST = 3  # with fewer seeds there is no p value
CORRECTED = (  # by Holm, those of one name and ruler together
    *("delta", "interaction", "tuned", "tuned_interaction", "against_baseline"),
    *("stall_difference", "pooled", "family", "family_difference"),
)
DECIDING = ("tuned", "delta")  # measures whose effects have p values
IN_NATS = (*DECIDING, "mean_over_rates")  # of groups with one ruler only
MEASURES = (*IN_NATS, "rate_shift", "tuned_steps_saved", "steps_saved")  # with effects
COUNTED = (  # axes that change what a loss counts, whatever the unigram entropy is
    *("model.objective.kind", "model.objective.next_sentence", "trainer.overfit_batches"),
    *("trainer.limit_val_batches", "data.name", "data.class_path", "data.train_from_dev"),
    *("data.source_language", "data.target_language", "data.document_separator", "data.tokenizer"),
    *("data.vocab_size", "data.splits.train", "data.splits.valid", "data.window", "data.order"),
    *("data.context_stride", "data.evaluation_stride", "data.evaluation_streams"),
    *("data.intra_document_masking", "data.mask_probability", "data.whole_word"),
)
BLOCK = "model.block."
SPECIAL = ("seed_everything", "model.schedule.warmup_steps", "model.optimizer.lr")
NUMBERS = ("estimate", "low", "high", "p", "p_holm", "p_sign", "holm_low", "holm_high", "seeds")
ALL = "all variants"

Curve = list[tuple[int, float]]  # step, value
Who = tuple[str, str]  # group, variant
Key = tuple[str, float | None, str, str]  # group, rate (None: all), variant or factors, score


@dataclass
class Run:
    """A finished run: the loss of every score, the unigram entropy, its ending, its curves."""

    loss: float
    top: float
    failed: bool
    validations: Curve
    rates: Curve
    bleu: float = NAN  # of the test split


@dataclass
class Arm:
    """The runs of a variant in a group, by warm-up, rate and seed; the words for its families."""

    baseline: str | None
    words: set[str]
    planned: set[tuple[int, float, int]] = field(default_factory=set)
    runs: dict[tuple[int, float, int], Run] = field(default_factory=dict)
    rate_of: dict[tuple[int, float, int], float] = field(default_factory=dict)  # of numbered trials

    def numbered(self) -> "Arm":
        """The same with the number of a trial in place of its rate, where each seed has its own."""
        found, trials = Arm(self.baseline, self.words), dict[tuple[int, int], list[float]]()
        for warmup, rate, seed in sorted(self.planned):
            trials.setdefault((warmup, seed), []).append(rate)
        for (warmup, seed), rates in trials.items():
            for number, rate in enumerate(rates):
                key = warmup, float(number), seed
                found.planned.add(key)
                found.rate_of[key] = rate
                if (warmup, rate, seed) in self.runs:
                    found.runs[key] = self.runs[warmup, rate, seed]
        return found

    @property
    def rates(self) -> list[float]:
        return sorted({rate for _, rate, _ in self.planned})

    @property
    def warmups(self) -> list[int]:
        return sorted({warmup for warmup, _, _ in self.planned})

    def rates_at(self, warmup: int) -> list[float]:
        return sorted({rate for other, rate, _ in self.planned if other == warmup})


@dataclass
class Row:
    """A row of a table; `values` are those by seed of which the estimate is the mean."""

    estimate: float = NAN
    low: float = NAN
    high: float = NAN
    p: float = NAN
    p_holm: float = NAN
    p_sign: float = NAN
    holm_low: float = NAN
    holm_high: float = NAN
    bound: str = ""
    seeds: int = 0
    cells: int = 0
    diverged: int = 0
    least: float = 0.0  # the least p value that failures allow
    values: dict[int, float] = field(default_factory=dict)
    never: bool = False  # undefined, since no run learned
    mixed: bool = False  # some seeds of an arm failed and others did not
    ends: dict[int, tuple[float, float]] = field(default_factory=dict)  # of N and O, by seed

    def fill(self, values: Mapping[int, float], *, interval: bool = True) -> list[float]:
        """Put in the values, their mean and its interval; return the values."""
        self.values, found = dict(values), [*values.values()]
        self.estimate = fmean(found)
        self.low, self.high = t_test(found)[:2] if interval else (NAN, NAN)
        return found

    def between(self, ends: Mapping[int, tuple[float, float]]) -> None:
        """Put in the bounds of each seed, and the interval from the one to the other."""
        self.ends = dict(ends)
        lows, highs = zip(*ends.values(), strict=True)
        self.low = self.high = NAN
        if all(map(math.isfinite, [*lows, *highs])):
            low, high = t_test(lows)[0], t_test(highs)[1]
            if not (math.isnan(low) and math.isnan(high)):
                self.low = fmean(lows) if math.isnan(low) else low
                self.high = fmean(highs) if math.isnan(high) else high
        self.p_sign = self.of_bounds(sign_flips)

    def p_between(self) -> float:
        """Student's p value of the bounds; none of two seeds."""
        return self.of_bounds(seeds_p)

    def of_bounds(self, test: Callable[[Sequence[float]], float]) -> float:
        """The p value of the bound nearer to zero, 1 where zero lies between; of two seeds none."""
        if len(self.ends) < LEAST:
            return NAN
        lows, highs = zip(*self.ends.values(), strict=True)
        if all(map(math.isfinite, lows)) and fmean(lows) > 1e-12:
            return test(lows)
        if all(map(math.isfinite, highs)) and fmean(highs) < -1e-12:
            return test(highs)
        return 1.0


class Paired:
    """The runs of the seeds that have finished at each (warm-up, rate) point."""

    def __init__(
        self,
        arm: Arm,
        warmups: Sequence[int],
        rates: Sequence[float] = (),
        seeds: Sequence[int] = (),
    ) -> None:
        """`rates`: those of every warm-up; by default each has those at which it was planned."""
        warmups = [*dict.fromkeys(warmups)]
        self.rates = {w: list(rates) or arm.rates_at(w) for w in warmups}
        points = [(w, rate) for w in warmups for rate in self.rates[w]]
        every = seeds or sorted({seed for _, _, seed in arm.planned})
        self.seeds = [s for s in every if all((*point, s) in arm.runs for point in points)]
        self.planned = {s for s in every if all((*point, s) in arm.planned for point in points)}
        self.of = {point: [arm.runs[*point, s] for s in self.seeds] for point in points}
        self.at = [*self.of.values()]
        self.runs = [run for runs in self.at for run in runs]
        self.tops = {
            s: fmean(arm.runs[*point, s].top for point in points) for s in self.seeds if points
        }
        of = product(warmups, self.seeds)
        self.losses = {(w, s): [arm.runs[w, r, s].loss for r in self.rates[w]] for w, s in of}

    def trained(self, warmup: int) -> list[bool]:
        """At which rates no run failed or half escaped."""
        runs = [self.of[warmup, rate] for rate in self.rates[warmup]]
        return [not failures(of) and not any(late(of)) for of in runs]

    @property
    def several(self) -> bool:
        """Whether every warm-up has several rates, and a seed all of its runs."""
        return min(map(len, self.rates.values())) > 1 and bool(self.seeds)

    def row(self) -> Row:
        """A row with the numbers of seeds and runs alone."""
        row = Row(seeds=len(self.seeds), cells=len(self.runs), diverged=failures(self.runs))
        return row

    def learned(self, losses: Iterable[float]) -> float:
        """How far the mean of some losses is under the unigram entropy."""
        return fmean(self.tops.values()) - fmean(losses)


def failures(runs: Iterable[Run]) -> int:
    return sum(run.failed for run in runs)


def t_test(values: Sequence[float], level: float = 0.95) -> tuple[float, float, float]:
    """Student's interval and p value; NaN for one value, and for values that do not differ."""
    if len(values) < 2 or max(values) - min(values) <= 1e-12 * max(1, *map(abs, values)):
        return NAN, NAN, NAN
    free, centre = len(values) - 1, fmean(values)
    error = stdev(values) / math.sqrt(len(values))
    half = float(stats.t.ppf((1 + level) / 2, free)) * error
    return centre - half, centre + half, 2 * float(stats.t.sf(abs(centre) / error, free))


def sign_flips(values: Sequence[float]) -> float:
    """The share of all choices of signs whose sum is at least as far from zero."""
    if not 6 <= len(values) <= 16:
        return NAN
    sums = [abs(math.fsum(signed)) for signed in product(*((x, -x) for x in values))]
    return fmean(found >= sums[0] * (1 - 1e-12) for found in sums)


def seeds_p(values: Sequence[float]) -> float:
    """Student's p value of mean zero; none of two seeds."""
    return t_test(values)[2] if len(values) >= LEAST else NAN


def stalls(runs: Sequence[Run]) -> Row:
    """`stalls w=...`: the share `k/n`, Wilson's `p` with `(k/n - p)^2 = z^2 p (1 - p) / n`."""
    k, n = failures(runs), len(runs)
    if not runs:
        return Row()
    weight = float(stats.norm.ppf(0.975)) ** 2 / n
    low, high = sorted(np.roots([1 + weight, -2 * k / n - weight, (k / n) ** 2]).real.tolist())
    ends = low if k else 0.0, high if k < n else 1.0
    return Row(k / n, *ends, seeds=n, cells=n, diverged=k)


LOOKED_AT = 0.03  # the error of the intervals of a grid with `until`, which adds seeds by results


def widened(rows: Iterable[Row], grid: "Grid") -> float:
    """Put in the wider intervals and larger p values of a grid with `until`; return its error."""
    if not grid.file.get("until"):
        return 0.05
    for row in rows:
        row.p = min(1.0, row.p * 0.05 / LOOKED_AT) if row.p == row.p else row.p
        if not math.isnan(row.low):
            row.low, row.high, _ = t_test([*row.values.values()], 1 - LOOKED_AT)
    return LOOKED_AT


def holm(family: Iterable[Row], alpha: float = 0.05) -> None:
    """Put in Holm's p values, step by step; a row whose runs ended differently counts too.

    And the interval that decides: of a p value under 5 % that of the level of its step, which rows
    with equal p values share, else that of the level of the whole family.
    """
    rows = [row for row in family if not math.isnan(row.p) or len(row.values) >= LEAST]
    ordered = sorted((row for row in rows if not math.isnan(row.p)), key=lambda row: row.p)
    places, reached = [row.p for row in ordered], 0.0
    for place, row in enumerate(ordered):
        reached = max(reached, min(1.0, (len(rows) - place) * row.p))
        row.p_holm = reached
        left = len(rows) - (places.index(row.p) if reached < 0.05 else 0)
        low, high, _ = t_test([*row.values.values()], 1 - alpha / left)
        alike = reached < 0.05 or low <= 0 <= high  # else p is that of failures
        if alike and not math.isnan(row.low):
            row.holm_low, row.holm_high = low, high


def dealt_p(bare: Sequence[int], warm: Sequence[int], runs: int, planned: int) -> float:
    """The share of all ways to deal the seeds to two arms that are at least as far apart.

    `bare` and `warm` are the failed runs of each seed. Of fewer than five planned seeds, all of
    which fail in all `runs` of one arm only: at most `2 / 4^n`.
    """
    if min(len(bare), len(warm)) < LEAST:
        return NAN
    every, n, m, far, ways = [*bare, *warm], len(bare), len(warm), 0, 0
    gap = abs(
        sum(bare) * m - sum(warm) * n
    )  # the difference of the means times n m, in whole numbers
    for chosen in map(sum, combinations(every, n)):
        far += abs(chosen * m - (sum(every) - chosen) * n) >= gap
        ways += 1
    if planned < FEW and len(bare) == len(warm):
        for all_, some in ((bare, warm), (warm, bare)):
            if {*all_} == {runs} and max(some) < runs:
                return min(far / ways, 2 / 4 ** len(bare))
    return far / ways


def floor(p: float, planned: int, *sides: Sequence[Sequence[Run]]) -> float:
    """No less than the p value of failures, where all of one side failed and none of the other."""
    for side in sides:
        bare, warm = ([int(run.failed) for run in runs] for runs in side)
        if one(bare) and one(warm) and bare[:1] != warm[:1] and len(bare) >= LEAST:
            p = max(p, dealt_p(bare, warm, 1, planned))
    return p


def one(values: Iterable[Any]) -> bool:
    return len({*values}) == 1


def endings(*arms: Paired) -> bool:
    """Whether no point of an arm has failed runs beside others: an interval over the seeds."""
    return all(one(run.failed for run in runs) for arm in arms for runs in arm.at)


def bound(least: bool, most: bool = False) -> str:
    return "?" if least and most else ">=" * least + "<=" * most


def saved(pairs: Paired) -> dict[int, float]:
    """Delta by seed; empty for a variant that learned neither without warm-up nor with it."""
    if not pairs.seeds or len(pairs.at) < 2:
        return {}
    bare, warm = ([run.loss for run in runs] for runs in pairs.at)
    if max(pairs.learned(bare), pairs.learned(warm)) < LEARNED:
        return {}
    return {s: a - b for s, a, b in zip(pairs.seeds, bare, warm, strict=True)}


def ends(ref: int | None) -> tuple[int, ...]:
    """The warm-ups that are compared; none without a reference."""
    return () if ref is None else (0, ref)


def contrast(arms: Sequence[Arm], rate: float, ref: int | None) -> Row:
    """`delta` of one arm; `interaction` of two: Delta less that of the baseline, by seed."""
    alone = [Paired(arm, ends(ref), [rate]) for arm in arms]
    own, *others = map(saved, alone)
    seeds = [seed for seed in own if all(seed in other for other in others)]
    if not seeds:
        row = alone[0].row()
        runs = alone[0].runs if not own else []
        row.never = bool(runs) and all(run.top - run.loss < LEARNED for run in runs)
        return row
    pairs = [Paired(arm, ends(ref), [rate], seeds) for arm in arms]
    runs = [run for each in pairs for run in each.runs]
    row = Row(seeds=len(seeds), cells=len(runs), diverged=failures(runs))
    sure = endings(*pairs)
    values = {s: own[s] - sum(other[s] for other in others) for s in seeds}
    found = row.fill(values, interval=sure)
    row.p, row.p_sign = (seeds_p(found), sign_flips(found)) if sure else (NAN, NAN)
    planned = len(set.intersection(*(each.planned for each in alone)))
    sides = [[each.at[k] for each in pairs] for k in (0, 1)] if others else [pairs[0].at]
    row.mixed, row.least = not sure, floor(0.0, planned, *sides) if sure else 0.0
    row.p = floor(row.p, planned, *sides)
    bare = [all(run.failed for run in each.at[0]) for each in pairs]
    warm = [any(run.failed for run in each.at[1]) for each in pairs]
    row.bound = bound(bare[0] or any(warm[1:]), warm[0] or any(bare[1:]))
    return row


def first_step(curve: Curve, loss: float) -> float:
    """The first step at a loss or under it, linear between validations; the last if none is."""
    for (before, high), (step, low) in pairwise([curve[0], *curve]):
        if low <= loss:
            return float(np.interp(loss, [low, high], [step, before]))
    return curve[-1][0]


def ahead(bare: Run, warm: Run) -> float:
    """tau: by how many steps the run that ends ahead reached the last loss of the other before."""
    if bare.failed and warm.failed:
        return 0.0
    if warm.loss <= bare.loss:
        return warm.validations[-1][0] - first_step(warm.validations, bare.loss)
    return first_step(bare.validations, warm.loss) - bare.validations[-1][0]


def steps_saved(pairs: Paired) -> Row:
    """The mean of tau; a bound where runs of one side failed, which would take longer."""
    row = pairs.row()
    learned = saved(pairs) and pairs.learned(run.loss for run in pairs.at[1]) >= LEARNED
    if learned and all(len(run.validations) > 1 for run in pairs.runs):
        values = dict(zip(pairs.seeds, map(ahead, *pairs.at), strict=True))
        row.fill(values, interval=endings(pairs))
        row.bound = bound(*(failures(runs) > 0 for runs in pairs.at))
    return row


def lost_steps(pairs: Paired) -> Row:
    """How much earlier a run without warm-up has the summed rates of the other at its end."""

    def sums(rates: Curve) -> list[float]:  # by trapezoids between the logged rates
        parts = [(t1 - t0) * (r0 + r1) / 2 for (t0, r0), (t1, r1) in pairwise(rates)]
        return [*accumulate(parts, initial=rates[0][0] * rates[0][1])]

    row, found = pairs.row(), []
    for bare, warm in zip(*pairs.at, strict=True):
        if min(len(bare.rates), len(warm.rates)) < 2 or bare.rates[-1][0] != warm.rates[-1][0]:
            return row  # not defined for runs that ended at different steps
        steps = [step for step, _ in bare.rates]
        found.append(steps[-1] - np.interp(sums(warm.rates)[-1], sums(bare.rates), steps))
    row.estimate = fmean(found) if found else NAN
    return row


def stall_difference(arm: Arm, ref: int | None) -> Row:
    """The share of failed runs without warm-up less that with it, over the rates of both.

    A seed counts at a warm-up once all of its runs there have finished.
    """
    rates = [rate for rate in arm.rates_at(0) if ref and rate in arm.rates_at(ref)]
    seeds = sorted({seed for _, _, seed in arm.planned})
    sides = []
    for warmup in ends(ref) if rates else ():
        keys = [[(warmup, rate, seed) for rate in rates] for seed in seeds]
        whole = [[arm.runs[key] for key in of] for of in keys if {*of} <= {*arm.runs}]
        sides.append([failures(runs) for runs in whole])
    if not sides or not all(sides):
        return Row()
    count, failed = sum(map(len, sides)), sum(map(sum, sides))
    bare, warm = sides
    p = dealt_p(bare, warm, len(rates), len(seeds)) if failed else NAN
    gap, least = (fmean(bare) - fmean(warm)) / len(rates), min(len(bare), len(warm))
    return Row(gap, p=p, seeds=least, cells=count * len(rates), diverged=failed)


def best_rates(pairs: Paired, warmup: int) -> dict[int, int]:
    """For each seed, the place of the rate with the smallest mean loss over the other seeds."""
    found = {}
    for seed in pairs.seeds:
        others = [pairs.losses[warmup, other] for other in pairs.seeds if other != seed]
        means = [fmean(losses) for losses in zip(*others, strict=True)]
        found[seed] = means.index(min(means))
    return found


def tolerated(rates: Sequence[float], losses: list[float], top: float) -> tuple[float, bool]:
    """log2 of the largest rate, up from the best, of a small loss; and if it is the last."""
    best = losses.index(min(losses))
    limit = losses[best] + TOLERATED * (top - losses[best])
    if top - losses[best] < LEARNED:
        return NAN, False
    for k in range(best, len(losses) - 1):
        if losses[k + 1] > limit:
            logs = np.log2(rates[k : k + 2])
            return float(np.interp(limit, losses[k : k + 2], logs)), False
    return math.log2(rates[-1]), True


def bends(pairs: Paired, warmup: int) -> set[int]:
    """The places where the slope falls, in the mean over seeds by more than its standard error."""
    xs, good, found = np.log2(pairs.rates[warmup]).tolist(), pairs.trained(warmup), set()
    for k in range(1, len(xs) - 1):
        falls = [
            (y[k] - y[k - 1]) / (xs[k] - xs[k - 1]) - (y[k + 1] - y[k]) / (xs[k + 1] - xs[k])
            for y in (pairs.losses[warmup, seed] for seed in pairs.seeds)
        ]
        error = stdev(falls) / math.sqrt(len(falls)) if len(falls) > 1 else 0.0
        if all(good[k - 1 : k + 2]) and fmean(falls) > error:
            found.add(k)
    return found


def lines(
    xs: Sequence[float], ys: Sequence[float], good: Sequence[bool], k: int, bent: set[int]
) -> list[Any]:
    """The lines through the two points before and after the gap k, k + 1, where all are good.

    Not those that end at a bent place.
    """
    found = []
    for a, b, end in ((k - 1, k, k), (k + 1, k + 2, k + 1)):
        if a >= 0 and b < len(xs) and good[a] and good[b] and end not in bent:
            slope = (ys[b] - ys[a]) / (xs[b] - xs[a])
            found.append((slope, ys[a] - slope * xs[a]))
    return found


def smallest(
    xs: Sequence[float], ys: Sequence[float], good: Sequence[bool], bent: set[int]
) -> tuple[float, float, int]:
    """Between what the least value of a convex curve lies, and the place of the least point."""
    kept = [k for k in range(len(xs)) if good[k]] or [*range(len(xs))]
    best = min(kept, key=lambda k: ys[k])
    if best in (0, len(xs) - 1):
        return -math.inf, ys[best], best
    low = ys[best]
    for k in range(len(xs) - 1):
        if not good[k] and not good[k + 1]:
            continue
        of = lines(xs, ys, good, k, bent if best in (k, k + 1) else set())
        places = [xs[k], xs[k + 1]]
        if len(of) == 2 and of[0][0] != of[1][0]:
            meet = (of[1][1] - of[0][1]) / (of[0][0] - of[1][0])
            places.append(min(max(meet, xs[k]), xs[k + 1]))
        for x in places:
            low = min(low, max((slope * x + rest for slope, rest in of), default=-math.inf))
    return low, ys[best], best


def passes(
    xs: Sequence[float],
    ys: Sequence[float],
    good: Sequence[bool],
    bent: set[int],
    best: int,
    limit: float,
) -> tuple[float, float]:
    """Between what a convex curve rises over the limit, up from its least point."""
    shown = [y if ok or not any(good) else math.inf for y, ok in zip(ys, good, strict=True)]
    over = next((k for k in range(best, len(xs) - 1) if shown[k + 1] > limit), None)
    if over is None:
        return xs[-1] if shown[best] <= limit else xs[max(best - 1, 0)], math.inf
    first, last = xs[over], xs[over + 1]
    if math.isfinite(shown[over + 1]):
        first += (limit - shown[over]) / (shown[over + 1] - shown[over]) * (last - first)
        first = min(max(first, xs[over]), last)
    of = lines(xs, ys, good, over, bent)
    ends = [(limit - rest) / slope for slope, rest in of if slope > 0]
    latest = min([last, *ends])
    return first if shown[best] <= limit else xs[max(best - 1, 0)], max(latest, xs[over])


def jackknife(found: Callable[[Sequence[int]], float], seeds: Sequence[int]) -> list[float]:
    """A value for each seed: their mean is that of all seeds, their spread the jackknife's."""
    count, whole = len(seeds), found(seeds)
    if count < 2:
        return [whole]
    without = [found([other for other in seeds if other != seed]) for seed in seeds]
    for value in (whole, *without):
        if math.isinf(value):
            return [value] * count
    return [whole + (count - 1) * (fmean(without) - value) for value in without]


def means_of(pairs: Paired, warmup: int, seeds: Sequence[int]) -> list[float]:
    return [fmean(each) for each in zip(*(pairs.losses[warmup, s] for s in seeds), strict=True)]


def bounds_of(
    pairs: Paired, seeds: Sequence[int], warmup: int, *, theta: bool = False
) -> tuple[float, float]:
    """The bounds of the best loss of some seeds at a warm-up, or of the largest tolerated rate."""
    xs, ys = np.log2(pairs.rates[warmup]).tolist(), means_of(pairs, warmup, seeds)
    bent = bends(pairs, warmup)
    low, high, best = smallest(xs, ys, pairs.trained(warmup), bent)
    if not theta:
        return low, high
    top, found = fmean(pairs.tops.values()), []
    for end, loss in enumerate((low if math.isfinite(low) else high, high)):
        limit = loss + TOLERATED * (top - loss)
        found.append(passes(xs, ys, pairs.trained(warmup), bent, best, limit)[end])
    return found[0] if math.isfinite(low) else -math.inf, found[1]


def apart(
    pairs: Paired, first: int, second: int, *, theta: bool = False
) -> dict[int, tuple[float, float]]:
    """The bounds, by seed, of the value of the first warm-up less that of the second."""

    def end(which: int) -> list[list[float]]:
        return [
            jackknife(lambda s, w=w: bounds_of(pairs, s, w, theta=theta)[which], pairs.seeds)
            for w in (first, second)
        ]

    (low, other_low), (high, other_high) = end(0), end(1)
    lows = [a - b for a, b in zip(low, other_high, strict=True)]
    highs = [a - b for a, b in zip(high, other_low, strict=True)]
    return dict(zip(pairs.seeds, zip(lows, highs, strict=True), strict=True))


def need(pairs: Paired, ref: int) -> Row:
    """N, the need at the best rates; its p value comes later."""
    row, edges = pairs.row(), {w: {0, len(of) - 1} for w, of in pairs.rates.items()}
    if pairs.several and len(pairs.seeds) > 1:
        lowest = min(fmean(run.loss for run in pairs.of[ref, r]) for r in pairs.rates[ref])
        if pairs.learned([lowest]) >= LEARNED:
            bare, warm = best_rates(pairs, 0), best_rates(pairs, ref)
            at = {s: (pairs.losses[0, s][bare[s]], pairs.losses[ref, s][warm[s]]) for s in bare}
            picked = [chosen(pairs, 0, ref), at_mean(pairs, 0, ref)]
            row.fill({s: a - b for s, (a, b) in at.items()}, interval=False)
            if has_interval(picked):
                row.between(apart(pairs, 0, ref))
                row.p = floor(row.p_between(), len(pairs.planned), *picked)
            ends = [not edges[w].isdisjoint(of.values()) for w, of in ((ref, warm), (0, bare))]
            never = all(run.failed for r in pairs.rates[0] for run in pairs.of[0, r])
            row.bound = bound(ends[0] or never, ends[1])
    return row


def chosen(pairs: Paired, *warmups: int) -> list[list[Run]]:
    """The runs at the best rate of each warm-up, a run for each seed."""
    found = []
    for warmup in warmups:
        rates, places = pairs.rates[warmup], best_rates(pairs, warmup)
        found.append([pairs.of[warmup, rates[places[s]]][k] for k, s in enumerate(pairs.seeds)])
    return found


def at_mean(pairs: Paired, *warmups: int) -> list[list[Run]]:
    """The runs of each warm-up at the rate with the smallest mean loss."""
    found = []
    for warmup in warmups:
        means = means_of(pairs, warmup, pairs.seeds)
        found.append(pairs.of[warmup, pairs.rates[warmup][means.index(min(means))]])
    return found


def has_interval(picked: Iterable[Sequence[Sequence[Run]]]) -> bool:
    """Whether the runs of each arm ended alike."""
    return all(one(run.failed for run in runs) for of in picked for runs in of)


def late(runs: Sequence[Run]) -> list[bool]:
    """Which runs learned under a third of what the best of them learned, and did not fail."""
    gains = [run.top - run.loss for run in runs]
    most = max(gains)
    return [
        most >= LEARNED and gain < ESCAPED * most and not run.failed
        for run, gain in zip(runs, gains, strict=True)
    ]


def octaves(pairs: Paired, ref: int) -> Row:
    """O, the octaves of learning rate that warm-up buys."""
    row, ends = pairs.row(), {}
    if not pairs.several:
        return row
    for seed, top in pairs.tops.items():
        ends[seed] = [tolerated(pairs.rates[w], pairs.losses[w, seed], top) for w in (ref, 0)]
    values = {seed: warm[0] - bare[0] for seed, (warm, bare) in ends.items()}
    if not any(map(math.isnan, values.values())):
        row.fill(values)
        row.between(apart(pairs, ref, 0, theta=True))
        picked = [chosen(pairs, 0, ref), at_mean(pairs, 0, ref)] if len(values) > 1 else []
        row.p = row.p_between() if has_interval(picked) else NAN
        row.bound = bound(*(any(of[k][1] for of in ends.values()) for k in (0, 1)))
    return row


def slice_rows(
    arms: Mapping[str, Arm], rate: float, ref: int | None
) -> Iterator[tuple[str, str, Row]]:
    """The scores of the variants of a group at one rate: variant, score, row."""
    pairs = {name: Paired(arm, ends(ref), [rate]) for name, arm in arms.items()}
    for name, arm in arms.items():
        base = arms.get(arm.baseline or "", arm)
        versus = pairs[name].row() if base is arm else contrast([arm, base], rate, ref)
        rows = {"delta": contrast([arm], rate, ref), "interaction": versus}
        rows["steps_saved"] = steps_saved(pairs[name]) if ref else Row()
        rows["lost_steps"] = lost_steps(pairs[name]) if ref else Row()
        for warmup in arm.warmups:
            runs = [run for (w, r, _), run in arm.runs.items() if (w, r) == (warmup, rate)]
            rows[f"stalls w={warmup}"] = stalls(runs)
        yield from ((name, score, row) for score, row in rows.items())


def bleu_gain(arm: Arm, rate: float, ref: int | None) -> Row | None:
    """`bleu`: test BLEU with the reference warm-up less that without, by seed."""
    if not ref:
        return None
    pairs = Paired(arm, (0, ref), [rate])
    both = zip(pairs.seeds, *pairs.at, strict=True)
    kept = [(s, a, b) for s, a, b in both if not math.isnan(a.bleu - b.bleu)]
    if not kept:
        return None
    sides = [[a for _, a, _ in kept], [b for _, _, b in kept]]
    sure = all(one(run.failed for run in runs) for runs in sides)
    row = Row(seeds=len(kept), cells=2 * len(kept), diverged=sum(map(failures, sides)))
    found = row.fill({s: b.bleu - a.bleu for s, a, b in kept}, interval=sure)
    row.p = seeds_p(found) if sure else NAN
    return row


def compared(
    pairs: Paired,
    values: Mapping[int, float],
    sides: Sequence[tuple[Mapping[int, Run], Mapping[int, Run]]],
    planned: Iterable[int] | None = None,
) -> Row:
    """A mean over seeds of the best runs of two sides; p values only with the `planned` seeds.

    It has an interval if the runs of each side ended alike.
    """
    row = pairs.row()
    if not values:
        return row
    both = [[[of[s] for s in values] for of in side] for side in sides]
    sure = all(one(run.failed for run in runs) for side in both for runs in side)
    found = row.fill(values, interval=sure)
    row.seeds, row.mixed = len(found), not sure
    if sure and planned is not None:
        row.least = floor(0.0, len({*planned}), *both)
        row.p = max(seeds_p(found), row.least)
        row.p_sign = sign_flips(found)
    return row


def tuned_rows(
    arm: Arm, base: Arm | None, ref: int | None, span: tuple[float, float]
) -> dict[str, Row]:
    """The scores of a variant over all rates, each seed at its best rate."""
    names = ("tuned", "tuned_interaction", "mean_over_rates", "rate_shift", "tuned_steps_saved")
    if not ref:
        return {name: Row() for name in names}
    pairs = Paired(arm, (0, ref))
    rows = {name: pairs.row() for name in names}
    if not tunable(pairs):
        rows["tuned"].never = pairs.several
        return rows
    best, run = best_at(pairs), best_runs(pairs)
    bare, warm = run[0], run[ref]
    own, sides = {s: bare[s].loss - warm[s].loss for s in bare}, [(bare, warm)]
    rows["tuned"] = compared(pairs, own, sides, pairs.planned)
    some, every = any(of.failed for of in warm.values()), all(of.failed for of in bare.values())
    rows["tuned"].bound = bound(every, some)
    both = {s for s in bare if not (bare[s].failed or warm[s].failed)}
    at = {(w, s): arm.rate_of.get((w, best[w][s], s), best[w][s]) for w in (0, ref) for s in both}
    shift = {s: math.log2(at[ref, s] / at[0, s]) for s in bare if s in both}
    rows["rate_shift"] = compared(pairs, shift, sides)
    if all(len(of.validations) > 1 for of in (*bare.values(), *warm.values())):
        steps = {s: ahead(bare[s], warm[s]) for s in bare}
        rows["tuned_steps_saved"] = row = compared(pairs, steps, sides)
        row.bound = bound(any(of.failed for of in bare.values()), some)
    kept = [x for x in pairs.rates[0] if x in pairs.rates[ref] and span[0] <= x <= span[1]]
    if arm.rate_of:
        means = {s: fmean(pairs.losses[0, s]) - fmean(pairs.losses[ref, s]) for s in bare}
        rows["mean_over_rates"] = compared(pairs, means, sides)
    elif len(kept) > 1:
        means = {s: average(pairs, 0, s, kept) - average(pairs, ref, s, kept) for s in bare}
        rows["mean_over_rates"] = compared(pairs, means, sides)
    return rows | against(pairs, base if base is not arm else None, ref, own)


def against(pairs: Paired, base: Arm | None, ref: int, own: Mapping[int, float]) -> dict[str, Row]:
    """T less that of the baseline, and the best losses of both at each warm-up."""
    names = {warmup: f"against_baseline w={warmup}" for warmup in (0, ref)}
    rows = {name: pairs.row() for name in ("tuned_interaction", *names.values())}
    other = Paired(base, (0, ref)) if base else None
    if other is None or not tunable(other):
        return rows
    ours, theirs = best_runs(pairs), best_runs(other)
    both = [seed for seed in pairs.seeds if seed in other.seeds]
    planned = pairs.planned & other.planned
    less = {s: own[s] - (theirs[0][s].loss - theirs[ref][s].loss) for s in both}
    sides = {w: (ours[w], theirs[w]) for w in (0, ref)}
    rows["tuned_interaction"] = compared(pairs, less, [*sides.values()], planned)
    for warmup, name in names.items():
        apart = {s: ours[warmup][s].loss - theirs[warmup][s].loss for s in both}
        rows[name] = compared(pairs, apart, [sides[warmup]], planned)
    fail = [[[run.failed for run in of[w].values()] for w in (0, ref)] for of in (ours, theirs)]
    (bare, warm), (other_bare, other_warm) = fail
    if both:
        least, most = all(bare) or any(other_warm), all(other_bare) or any(warm)
        rows["tuned_interaction"].bound = bound(least, most)
        rows[names[0]].bound = bound(any(bare), any(other_bare))
        rows[names[ref]].bound = bound(any(warm), any(other_warm))
        for row in rows.values():
            row.cells += len(other.runs)
            row.diverged += failures(other.runs)
    return rows


def tunable(pairs: Paired) -> bool:
    """Whether both warm-ups have several rates, and any run of a finished seed learned."""
    return pairs.several and any(run.top - run.loss >= LEARNED for run in pairs.runs)


def best_at(pairs: Paired) -> dict[int, dict[int, float]]:
    """The best rate of each warm-up and seed; that of a failed run only if all failed."""
    return {
        w: {
            s: min(rates, key=lambda r: (pairs.of[w, r][k].failed, pairs.of[w, r][k].loss))
            for k, s in enumerate(pairs.seeds)
        }
        for w, rates in pairs.rates.items()
    }


def best_runs(pairs: Paired) -> dict[int, dict[int, Run]]:
    """The run at the best rate of each warm-up and seed."""
    return {
        w: {s: pairs.of[w, rate][k] for k, (s, rate) in enumerate(best.items())}
        for w, best in best_at(pairs).items()
    }


def average(pairs: Paired, warmup: int, seed: int, rates: Sequence[float]) -> float:
    """The mean loss of a seed over ln(rate), by trapezoids between these rates."""
    found = zip(pairs.rates[warmup], pairs.losses[warmup, seed], strict=True)
    kept = [(math.log(x), loss) for x, loss in found if x in rates]
    area = math.fsum((b - a) * (y + z) / 2 for (a, y), (b, z) in pairwise(kept))
    return area / (kept[-1][0] - kept[0][0])


def common_span(arms: Iterable[Arm]) -> tuple[float, float]:
    """The smallest and the largest rate between which every arm with several was run."""
    each = [rates for arm in arms for w in arm.warmups if len(rates := arm.rates_at(w)) > 1]
    return max((of[0] for of in each), default=NAN), min((of[-1] for of in each), default=NAN)


def sensitivity(grid: "Grid", arms: Mapping[Who, Arm]) -> dict[Key, Row]:
    """Every row of `sensitivity.csv` of one grid, before Holm's correction."""
    rows: dict[Key, Row] = {}
    ref = grid.reference
    several = len({rate for arm in arms.values() for rate in arm.rates}) > 1
    of_seed = (grid.file.get("search") or {}).get("per") == "seed"
    for group in {group for group, _ in arms}:
        members = {name: arm for (of, name), arm in arms.items() if of == group}
        for rate in {rate for arm in members.values() for rate in arm.rates}:
            here = {name: arm for name, arm in members.items() if rate in arm.rates}
            for name, score, row in () if of_seed else slice_rows(here, rate, ref):
                rows[group, rate, name, score] = row
            for name, arm in here.items():
                if row := bleu_gain(arm, rate, ref):
                    rows[group, rate, name, "bleu"] = row
        span = common_span(members.values())
        if of_seed:
            members = {name: arm.numbered() for name, arm in members.items()}
        for name, arm in members.items():
            only = arm.rates[0] if len(arm.rates) == 1 else None
            rows[group, only, name, "stall_difference"] = stall_difference(arm, ref)
            if several and (of_seed or not grid.file.get("search")):
                found = tuned_rows(arm, members.get(arm.baseline or ""), ref, span)
                rows |= {(group, None, name, score): row for score, row in found.items()}
        rows |= over_arms(group, members, measure_of(rows, group, members, ref), grid)
    return rows


def measure_of(
    rows: Mapping[Key, Row], group: str, members: Mapping[str, Arm], ref: int | None
) -> dict[str, Row]:
    """T of the arms of a group if any has several rates, else Delta at the one rate of each."""
    found = {k[2]: row for k, row in rows.items() if (k[0], k[3]) == (group, "tuned")}
    counts = [[len(arm.rates_at(w)) for w in (0, ref or 0)] for arm in members.values()]
    if found and any(min(filter(None, of), default=0) > 1 for of in counts):
        return found
    keys = [key for key in rows if (key[0], key[3]) == (group, "delta")]
    return {key[2]: rows[key] for key in keys} if len(keys) == len(members) else {}


def over_arms(
    group: str, members: Mapping[str, Arm], measures: Mapping[str, Row], grid: "Grid"
) -> dict[Key, Row]:
    """The measure averaged over all arms of a group and over families, and their differences."""
    rows: dict[Key, Row] = {}
    own = {name: row for name, row in measures.items() if row.values}
    if own and sum(not row.never for row in measures.values()) > 1:
        rows[group, None, ALL, "pooled"] = averaged([*own.values()])
    families: dict[str, Row] = {}
    for family, of in (grid.file.get("families") or {}).items():
        wanted = {*map(short, of)}
        if found := [row for name, row in own.items() if wanted & members[name].words]:
            families[family] = rows[group, None, family, "family"] = averaged(found)
    for other in [*families][1:]:
        first = next(iter(families))
        one, two = families[first], families[other]
        less = {s: one.values[s] - two.values[s] for s in one.values if s in two.values}
        sure, least = not (one.mixed or two.mixed), max(one.least, two.least)
        name = f"{first} \N{MINUS SIGN} {other}"
        rows[group, None, name, "family_difference"] = decided(less, sure, least)
    return rows


def averaged(rows: Sequence[Row]) -> Row:
    """The mean over arms of the values of the seeds that all of them have."""
    seeds = [s for s in rows[0].values if all(s in row.values for row in rows)] if rows else []
    sure = not any(row.mixed for row in rows)
    least = max((row.least for row in rows), default=0.0)
    row = decided({s: fmean(row.values[s] for row in rows) for s in seeds}, sure, least)
    row.cells = len(rows) if seeds else 0
    return row


def decided(values: Mapping[int, float], sure: bool, least: float = 0.0, *, p: bool = True) -> Row:
    """The mean of some values, with interval and p values, of at least `least`, if it is `sure`."""
    row = Row(seeds=len(values), least=least, mixed=not sure)
    if values:
        found = row.fill(values, interval=sure)
        if sure and p:
            row.p, row.p_sign = max(seeds_p(found), least), sign_flips(found)
    return row


def correct(scores: Mapping[Key, Row], rulers: Mapping[str, int], grid: "Grid") -> None:
    """Put in Holm's p values, over the tests of each kind in groups that count the same.

    With a control, it and the baseline are families apart from the others.
    """
    families: dict[tuple[str, int, bool], list[Row]] = {}
    alpha = widened(scores.values(), grid)
    given = grid.file.get("sensitivity") or {}
    presets = (given["control"], given.get("baseline")) if given.get("control") else ()
    at = {cell["id"]: cell["axes"].get(f"{BLOCK}preset") for cell in grid.plan["cells"]}
    checks = {row["variant"] for row in grid.rows if at[row["id"]] in presets}
    for (group, _, variant, score), row in scores.items():
        name = score.split(" w=")[0]
        place = name, rulers.get(group, -1), variant in checks
        families.setdefault(place, []).append(row)
    for (name, *_), rows in families.items():
        if name in CORRECTED:
            holm(rows, alpha)


def effects(
    scores: Mapping[Key, Row],
    factors: Sequence[str],
    places: Mapping[Who, tuple[str, list[int]]],
    rulers: Mapping[str, int],
    grid: "Grid",
) -> dict[Key, Row]:
    """The effects of one grid: differences along the chosen factors, means along the others."""
    tables: dict[tuple[str, float | None, str], dict[tuple[int, ...], Row]] = {}
    kinds: dict[tuple[str, float | None, str], set[int]] = {}
    for (group, rate, variant, score), row in scores.items():
        if score in MEASURES and (group, variant) in places:
            rest, levels = places[group, variant]
            tables.setdefault((rest, rate, score), {})[*levels] = row
            kinds.setdefault((rest, rate, score), set()).add(rulers.get(group, -1))
    axes, corners = range(len(factors)), [*product((0, 1), repeat=len(factors))]
    rows: dict[Key, Row] = {}
    for (rest, rate, score), table in tables.items():
        cells = [table.get(corner, Row()) for corner in corners]
        seeds = sorted(set.intersection(*({*cell.values} for cell in cells)))
        if score in IN_NATS and len(kinds[rest, rate, score] - {-1}) > 1:
            seeds = []  # of texts that count other tokens there is no effect
        sure = not any(math.isnan(cell.low) for cell in cells)
        for chosen in (c for n in axes for c in combinations(axes, n + 1)):
            values = {}
            for seed in seeds:
                values[seed] = 0.0
                for corner, cell in zip(corners, cells, strict=True):
                    share = (-1) ** sum(not corner[k] for k in chosen)
                    share /= 2 ** (len(factors) - len(chosen))
                    values[seed] += share * cell.values[seed]
            name = " x ".join(factors[k] for k in chosen)
            least = max((cell.least for cell in cells), default=0.0)
            rows[rest, rate, name, score] = decided(values, sure, least, p=score in DECIDING)
    alpha = widened(rows.values(), grid)
    for name in MEASURES:
        holm((row for key, row in rows.items() if key[3] == name), alpha)
    return rows


def text_of(axis: str, value: Any, axes: Mapping[str, list[Any]], names: Mapping[str, Any]) -> str:
    """The value of an axis: its name in the grid file, if that is not empty, or `axis=value`."""
    fit = len(names.get(axis, ())) == len(axes[axis])
    if fit and (name := names[axis][axes[axis].index(value)]):
        return name
    return f"{axis}={short(value)}"


def short(value: Any) -> str:
    """A value as text; of a float six digits, or more if needed."""
    if isinstance(value, float) and float(f"{value:g}") == value:
        return f"{value:g}"
    return (
        value
        if isinstance(value, str)
        else json.dumps(value, separators=(",", ":"), sort_keys=True)
    )


def same(found: float, given: float, rel_tol: float = 1e-9) -> bool:
    both = math.isnan(found) and math.isnan(given)
    return both or math.isclose(found, given, rel_tol=rel_tol, abs_tol=1e-12)


def read_run(row: Mapping[Any, Any], wrong: list[str]) -> Run:
    """A finished run. The loss of the table is compared with that of the run's record."""

    def curve(name: str) -> Curve:
        lines = csv.DictReader(io.StringIO(row.get("metrics.csv") or ""))
        return sorted({int(float(x["step"])): float(x[name]) for x in lines if x.get(name)}.items())

    record, failed = json.loads(row["result.json"]), row["status"] == "diverged"
    top = record["unigram_entropy"]
    loss = top if failed else min(record["metrics"]["val/nll"], top)
    if not (same(row["loss"], loss) and same(row["unigram_entropy"], top)):
        wrong.append(f"{row['name']}: loss {row['loss']} in the table, {loss} in its record")
    if (parts := record.get("validation_parts")) and not failed:
        mean = math.fsum(parts["nll"]) / sum(parts["tokens"])
        if not math.isclose(mean, record["metrics"]["val/nll"], rel_tol=1e-4):
            wrong.append(f"{row['name']}: the losses of its parts do not give its val/nll")
    bleu = record["metrics"].get("test/bleu")
    curves = curve("val/nll"), curve("train/lr")
    run = Run(row["loss"], row["unigram_entropy"], failed, *curves)
    run.bleu = NAN if bleu is None else bleu
    return run


def compare(
    path: Path, names: Sequence[str], rows: Sequence[tuple[Key, Row]], wrong: list[str]
) -> list[Key]:
    """Compare a table with the recomputed rows; its keys. Of equal keys the order decides."""
    count, largest, keys = 0, 0.0, []
    left: dict[Key, list[Row]] = {}
    for key, row in rows:
        left.setdefault(key, []).append(row)
    with path.open(newline="") as file:
        table = csv.DictReader(file)
        given = list(table)
    if unlike := {*(table.fieldnames or ())} ^ {"group", "lr", "note", *names}:
        wrong.append(f"{path}: other columns than are recomputed: {', '.join(sorted(unlike))}")
    for line in given:
        rate = float(line["lr"]) if line["lr"] else None
        key = line["group"], rate, line[names[0]], line[names[1]]
        keys.append(key)
        if not left.get(key):
            wrong.append(f"{key}: {'there twice' if key in left else 'not recomputed'}")
            continue
        row = left[key].pop(0)
        for name in names[2:]:
            found, value = getattr(row, name), line.get(name, "")
            agree = found == value
            if name != "bound":
                found, value, count = float(found), float(value or NAN), count + 1
                agree = same(found, value)
                largest = max(largest, 0.0 if math.isnan(found - value) else abs(found - value))
            if not agree:
                wrong.append(f"{key} {name}: {found!r} recomputed, {value!r} in the table")
    wrong += [f"{key}: not in the table" for key, rest in left.items() for _ in rest]
    print(f"{path}: {len(given)} rows, {count} numbers, largest difference {largest:.2g}")
    return keys


def compare_means(
    path: Path,
    keys: Sequence[Key],
    arms: Mapping[Who, Arm],
    wrong: list[str],
) -> None:
    """Compare the Markdown table of mean losses with their intervals, a row for each Delta.

    `keys` are those of `sensitivity.csv` in its order, which is that of the rows.
    """
    lines = [line for line in path.read_text("utf-8").splitlines() if line.startswith("|")]
    table = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
    warmups = [int(cell.split()[1].replace(",", "")) for cell in table[0][1:]]
    rows, count = [row for row in table[2:] if not row[0].startswith("**")], 0
    several = len({key[:2] for key in keys}) > 1
    slices: dict[tuple[str, float | None], list[Key]] = {}  # in the order of their headings
    for key in (key for key in keys if key[3] == "delta"):
        slices.setdefault(key[:2] if several else ("", None), []).append(key)
    ordered = [key for of in slices.values() for key in of]
    if len(ordered) != len(rows):
        wrong.append(f"{path}: {len(rows)} rows, {len(ordered)} of delta in sensitivity.csv")
        return
    for key, (name, *cells) in zip(ordered, rows, strict=True):
        group, rate, variant, _ = key
        if re.sub(r"\\(.)", r"\1", name) != variant:
            wrong.append(f"{path}: {name} in the place of {variant}")
        for warmup, cell in zip(warmups, cells, strict=True):
            runs = arms[group, variant].runs.items()
            own = [run for (w, lr, _), run in runs if (w, lr) == (warmup, rate)]
            found = [fmean(run.loss for run in own)] if own else []
            if own and one(run.failed for run in own):
                low, high, _ = t_test([run.loss for run in own])
                found += [] if math.isnan(low) else [low, high]
            given = [float(x.replace("−", "-")) for x in re.findall(r"[−\d.]+", cell)]
            count += len(found)
            if len(given) != len(found) or any(
                abs(a - b) > 5e-4 + 1e-9 for a, b in zip(given, found, strict=True)
            ):
                at = f"{variant}, warm-up {warmup}"
                wrong.append(f"{path}: {at}: {found} recomputed, not {cell}")
    print(f"{path}: {len(rows)} rows, {count} numbers")


@dataclass
class Grid:
    """A grid: its plan, its grid file, and the rows of its cells with the records of their runs."""

    plan: Mapping[str, Any]
    file: Mapping[str, Any]
    rows: list[dict[Any, Any]]

    @property
    def reference(self) -> int | None:
        return (self.file.get("sensitivity") or {}).get("reference_warmup")

    @property
    def factors(self) -> dict[str, str]:
        axes = self.plan["axes"]
        return {k: axis for k, axis in (self.file.get("factors") or {}).items() if axis in axes}

    @property
    def pruned(self) -> bool:
        """Whether a pruner ended runs, so that there are no scores."""
        ended = any(row["status"] in ("pruned", "damaged") for row in self.rows)
        return bool(self.file.get("pruner")) and ended


def read_grid(path: Path, folder: Path) -> Grid:
    """The grid of a study, or of a report whose grid lies in `folder`."""
    table = pd.read_parquet(path / "results.parquet").astype(object)
    rows = table.where(table.notna(), None).to_dict("records")
    names = [
        f"runs/{row['name']}/{name}" for row in rows for name in ("result.json", "metrics.csv")
    ]
    wanted = {"plan.json", "grid.yaml", *names}
    texts: dict[str, str] = {}
    if (path / "runs.tar.xz").is_file():
        with tarfile.open(path / "runs.tar.xz") as archive:
            for member in archive:
                if member.name in wanted and (file := archive.extractfile(member)):
                    texts[member.name] = file.read().decode()
    else:
        there = (name for name in wanted if (folder / name).is_file())
        texts = {name: (folder / name).read_text("utf-8") for name in there}
    for row in rows:
        for name in ("result.json", "metrics.csv"):
            row[name] = texts.get(f"runs/{row['name']}/{name}")
    now = path / "reported_grid.yaml"  # the grid file by which the tables were made
    file = now.read_text("utf-8") if now.is_file() else texts["grid.yaml"]
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # five times as fast
    return Grid(json.loads(texts["plan.json"]), yaml.load(file, loader), rows)


def read_arms(
    grid: Grid, wrong: list[str]
) -> tuple[dict[Who, Arm], dict[Who, tuple[str, list[int]]]]:
    """The runs of each variant, and the other axes in words with the levels of its factors."""
    axes, factors = grid.plan["axes"], grid.factors
    known = {*SPECIAL, *factors.values()}
    others = [axis for axis in axes if axis not in known and len(axes[axis]) > 1]
    wiring = (BLOCK, *(grid.file.get("variants") or ()))
    arms: dict[Who, Arm] = {}
    places: dict[Who, tuple[str, list[int]]] = {}
    names = grid.file.get("labels") or {}
    values = {cell["id"]: cell["axes"] for cell in grid.plan["cells"]}
    for row in grid.rows:
        at, who = values[row["id"]], (row["group"], row["variant"])
        words = [text_of(axis, at[axis], axes, names) for axis in others]
        places[who] = ", ".join(words) or "all", [axes[x].index(at[x]) for x in factors.values()]
        of = {axis: value for axis, value in at.items() if axis.startswith(wiring)}
        texts = [text_of(axis, of[axis], axes, names).removeprefix(f"{axis}=") for axis in of]
        called = {row["variant"], *map(short, of.values()), *texts}
        arm = arms.setdefault(who, Arm(row["baseline"], called))
        key = row["warmup"] or 0, row["lr"] or 0.0, row["seed"] or 0
        arm.planned.add(key)
        if row["status"] in ("ok", "diverged"):
            arm.runs[key] = read_run(row, wrong)
    return arms, places


def read_rulers(grid: Grid) -> dict[str, int]:
    """A number for each group with a finished run, the same where losses count the same things."""
    values = {cell["id"]: cell["axes"] for cell in grid.plan["cells"]}
    kinds: list[tuple[Any, float]] = []
    rulers: dict[str, int] = {}
    for row in grid.rows:
        if row["status"] not in ("ok", "diverged") or row["group"] in rulers:
            continue
        at, top = values[row["id"]], row["unigram_entropy"]
        counted = [(axis, short(at[axis])) for axis in COUNTED if axis in at]
        alike = [math.isclose(top, of, rel_tol=1e-5) and counted == kind for kind, of in kinds]
        rulers[row["group"]] = alike.index(True) if any(alike) else len(kinds)
        if not any(alike):
            kinds.append((counted, top))
    return rulers


def check(folder: Path, of: Path | None = None) -> list[str]:
    """Recompute one study, or the report in a folder of the grid `of`; what disagrees."""
    wrong: list[str] = []
    grid = read_grid(folder, of or folder)
    arms, places = read_arms(grid, wrong)
    scores, rulers = {} if grid.pruned else sensitivity(grid, arms), read_rulers(grid)
    changes = effects(scores, [*grid.factors], places, rulers, grid) if grid.factors else {}
    correct(scores, rulers, grid)
    names = ("variant", "score", *NUMBERS, "bound", "cells", "diverged")
    keys = compare(folder / "sensitivity.csv", names, [*scores.items()], wrong)
    if changes or (folder / "effects.csv").exists():
        names = ("factors", "measure", *NUMBERS)
        compare(folder / "effects.csv", names, [*changes.items()], wrong)
    if (means := folder / "tables" / "loss_by_warmup.md").exists():
        compare_means(means, keys, arms, wrong)
    return [f"{folder}: {text}" for text in wrong]


def former(folder: Path) -> dict[Key, Row]:
    """N (`need`) and O (`octaves`) of each group and variant of a study."""
    grid = read_grid(folder, folder)
    arms, _ = read_arms(grid, [])
    rows: dict[Key, Row] = {}
    for (group, name), arm in arms.items():
        if grid.reference and not grid.pruned:
            pairs = Paired(arm, (0, grid.reference))
            rows[group, None, name, "need"] = need(pairs, grid.reference)
            rows[group, None, name, "octaves"] = octaves(pairs, grid.reference)
    holm(row for key, row in rows.items() if key[3] == "need")
    return rows


def shown(rows: Mapping[Key, Row]) -> str:
    """The rows of `former` as lines: bound, estimate, interval and p value after correction."""
    lines = []
    for (group, _, variant, score), row in sorted(rows.items(), key=lambda of: of[0][3]):
        value = f"{row.bound:2} {row.estimate:.4f} ({row.low:.4f} to {row.high:.4f})"
        lines.append(f"{score:8} {value} p_holm {row.p_holm:.3g}  {variant} in {group}")
    return "\n".join(lines)


if __name__ == "__main__":
    words = sys.argv[1:]
    if words[:1] == ["--former"] and len(words) == 2:
        sys.exit(print(shown(former(Path(words[1])))))
    if not words or words[0].startswith("-"):
        sys.exit(__doc__)
    found = check(*map(Path, words[:2]))
    print("\n".join(found) or "everything agrees")
    sys.exit(bool(found))
