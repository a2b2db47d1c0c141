"""The scores at the best rates, against plain loops over a dict of losses."""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median_low
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from scipy import stats

from benchmarks import steps_to_loss
from lightning_app.report.comparisons import effects
from lightning_app.report.pairs import Score, tau
from lightning_app.report.results import read_results
from lightning_app.report.warmup import sensitivity_scores
from tests.report.conftest import PRESET, RATE, SEED, WARMUP, change, keep

H, REF, BASELINE = 4.5, 60, "pre_ln"
BATCH = "data.tokens_per_batch"
VARIANTS = (BASELINE, "post_ln", "sas", "keel")
RATES = (0.0005, 0.001, 0.0014, 0.002, 0.0028, 0.004, 0.008)
EVEN = (0.001, 0.002, 0.004, 0.008)
FAMILIES = {"pre": [BASELINE], "others": ["post_ln", "sas"], "nobody": ["admin"]}
KINDS = ("noise", "stalls of some", "stalls at all rates", "refined", "missing", "groups")

Point = tuple[int, str, int, float, int]  # group, variant, warm-up, rate, seed
Values = dict[int, float]  # of each seed


def drawn(kind: str, number: int) -> dict[Point, float | str | None]:
    """How each planned run ended: parabolas over the octaves, and noise."""
    rng = np.random.default_rng([KINDS.index(kind), number])
    groups = (512, 1024) if kind == "groups" else (512,)
    seeds = range(1, 4 if kind == "groups" else 7 if kind == "noise" else 6)
    found: dict[Point, float | str | None] = {}
    for group, variant, warmup in itertools.product(groups, VARIANTS, (0, REF)):
        best, gain = rng.uniform(-9, -7.5), rng.uniform(-0.1, 0.5) * (warmup == 0)
        own = EVEN
        if kind == "refined":
            own = tuple(sorted(rng.choice(RATES, rng.integers(3, 7), replace=False).tolist()))
        for rate, seed in itertools.product(own, seeds):
            loss = 2.0 + gain + 0.3 * (math.log2(rate) - best) ** 2 + rng.normal(0, 0.1)
            stalled = {"stalls of some": rng.random() < 0.4 + 0.2 * (seed == 1)}.get(kind, False)
            if kind == "stalls at all rates":  # keel never learns
                stalled = variant == "keel" or (variant, warmup) in (("post_ln", 0), ("sas", REF))
            end = rng.choice([np.nan, 4.47, 4.6]) if stalled else min(loss, 4.3)
            late = kind == "missing" and rng.random() < 0.03
            found[group, variant, warmup, rate, seed] = (
                "waiting" if late else None if math.isnan(end) else float(end)
            )
    return found


@dataclass
class Naive:
    """The runs of one variant in one group: the loss by warm-up, rate and seed, NaN if missing."""

    ends: Mapping[tuple[int, float, int], Any]

    def __post_init__(self) -> None:
        self.rates = {w: sorted({r for u, r, _ in self.ends if u == w}) for w in (0, REF)}
        every = {seed for *_, seed in self.ends}
        self.planned = len(every)
        lacking = {seed for (*_, seed), end in self.ends.items() if end == "waiting"}
        self.seeds = sorted(every - lacking)

    def failed(self, warmup: int, rate: float, seed: int) -> bool:
        end = self.ends[warmup, rate, seed]
        return end is None or end >= H - 0.05

    def loss(self, warmup: int, rate: float, seed: int) -> float:
        return H if self.failed(warmup, rate, seed) else self.ends[warmup, rate, seed]

    def best(self, warmup: int, seed: int) -> float:
        found = self.rates[warmup][0]
        for rate in self.rates[warmup]:
            better = self.loss(warmup, rate, seed) < self.loss(warmup, found, seed)
            trained = self.failed(warmup, found, seed) > self.failed(warmup, rate, seed)
            if better or trained:
                found = rate
        return found

    def lowest(self, warmup: int, seed: int) -> float:
        return self.loss(warmup, self.best(warmup, seed), seed)

    def ended(self, warmup: int, seeds: Iterable[int]) -> list[bool]:
        return [self.failed(warmup, self.best(warmup, seed), seed) for seed in seeds]

    @property
    def learned(self) -> bool:
        points = [key for key in self.ends if key[2] in self.seeds]
        return any(H - self.loss(*key) >= 0.1 for key in points)

    @property
    def saved(self) -> Values:
        return {s: self.lowest(0, s) - self.lowest(REF, s) for s in self.seeds}

    def inner(self, warmup: int) -> bool:
        """Whether the best rates of most seeds have neighbours within an octave."""
        count, rates = 0, self.rates[warmup]
        for seed in self.seeds:
            best = self.best(warmup, seed)
            below = any(best / 2.001 < rate < best for rate in rates)
            count += below and any(best < rate < best * 2.001 for rate in rates)
        return count > len(self.seeds) / 2

    def area(self, warmup: int, seed: int, rates: Sequence[float]) -> float:
        total = 0.0
        for one, other in itertools.pairwise(rates):
            height = self.loss(warmup, one, seed) + self.loss(warmup, other, seed)
            total += (math.log(other) - math.log(one)) * height / 2
        return total / (math.log(rates[-1]) - math.log(rates[0]))

    def steps(self, seed: int) -> float:
        """The steps saved between the best runs, whose curves fall at 50, 100, 150 and 200."""
        if all(self.ended(warmup, [seed]) == [True] for warmup in (0, REF)):
            return 0.0

        def reached(warmup: int, loss: float) -> float:
            end = self.ends[warmup, self.best(warmup, seed), seed]
            end = H if end is None else end
            curve = [end, *(end + (7 - end) * 0.97**step for step in (150, 100, 50))]
            return float(np.interp(loss, curve, [200, 150, 100, 50]))

        bare, warm = self.lowest(0, seed), self.lowest(REF, seed)
        return 200 - reached(REF, bare) if warm <= bare else reached(0, warm) - 200


def estimated(
    values: Values,
    sides: Sequence[tuple[list[bool], list[bool]]] | None,
    planned: int = 99,
    floor: float = 0.0,
) -> dict[str, Any]:
    """Mean, interval and p values: none where seeds of one arm ended differently (no sides).

    `floor`: the least p value that failures allow, the larger one of the arms for a mean over arms.
    """
    found, count = list(values.values()), len(values)
    row = {"values": values, "estimate": fmean(found), "floor": floor}
    row |= dict.fromkeys(("low", "high", "p", "p_sign"), math.nan)
    arms = [arm for side in sides or () for arm in side]
    if sides is None or any(any(arm) != all(arm) for arm in arms):
        return row
    if 6 <= count <= 16:
        sums = [abs(np.dot(signs, found)) for signs in itertools.product((1, -1), repeat=count)]
        row["p_sign"] = fmean(total >= sums[0] * (1 - 1e-12) for total in sums)
    if count < 2 or np.ptp(found) < 1e-12:
        return row
    test: Any = stats.ttest_1samp(found, 0)
    row["low"], row["high"] = test.confidence_interval(0.95)
    if count > 2:
        if any(all(first) != all(second) for first, second in sides):
            least = 2 / math.comb(2 * count, count)
            row["floor"] = least if planned > 4 else min(least, 2 / 4**count)
        row["p"] = max(float(test.pvalue), row["floor"])
    return row


def check(row: Score, wanted: Mapping[str, Any], *but: str) -> None:
    values = wanted.get("values", {})
    assert dict(row.values) == pytest.approx(values), row
    for name in ("estimate", "low", "high", "p", "p_sign"):
        if name not in but:
            found = getattr(row, name)
            assert found == pytest.approx(wanted.get(name, math.nan), nan_ok=True), (name, row)
    assert not values or row.seeds == len(values)


@pytest.mark.parametrize("number", range(2))
@pytest.mark.parametrize("kind", KINDS)
def test_scores_over_rates_are_those_of_plain_loops(make_grid: Any, kind: str, number: int) -> None:
    ends = drawn(kind, number)
    by = [sorted({key[place] for key in ends}) for place in range(5)]
    axes = dict(zip((BATCH, PRESET, WARMUP, RATE, SEED), by, strict=True))

    def key(at: Mapping[str, Any]) -> Point:
        return at[BATCH], at[PRESET], at[WARMUP], at[RATE], at[SEED]

    fake = make_grid(lambda at: ends.get(key(at), "waiting"), axes)
    keep(fake, lambda at: key(at) in ends)
    change(fake, families=FAMILIES)
    scores = sensitivity_scores(read_results(fake.folder))
    every = {
        (row.group, row.variant, row.score): row for row in scores if row.score[:6] != "stalls"
    }
    seen = set[str]()
    for batch in by[0]:
        group = f"{BATCH}={batch}" if len(by[0]) > 1 else "all"
        arms = {
            variant: Naive({k[2:]: end for k, end in ends.items() if k[:2] == (batch, variant)})
            for variant in VARIANTS
        }
        spans = [rates for arm in arms.values() for rates in arm.rates.values()]
        span = max(rates[0] for rates in spans), min(rates[-1] for rates in spans)
        tuned = {name: wanted_of(arm, span, arms[BASELINE]) for name, arm in arms.items()}
        for name, wanted in tuned.items():
            for score, row in wanted.items():
                found = every.get((group, name, score))
                if found is None:  # of an arm without T
                    assert not row
                    assert score.startswith("against_baseline")
                    continue
                # One run of a seed that failed at any rate leaves M without an interval.
                check(found, row, *(("low", "high") if "unlike" in row else ()))
                for field in ("tried", "best", "inner", "bound"):
                    if field in row:
                        assert getattr(found, field) == row[field], field
                seen |= {score} if row else set()
        ts = {name: of["tuned"] for name, of in tuned.items() if of["tuned"]}
        learned = [name for name, arm in arms.items() if arm.learned or not arm.seeds]
        pools = {("all variants", "pooled"): [*ts]} if len(learned) > 1 else {}
        pools |= {
            (name, "family"): own
            for name, members in FAMILIES.items()
            if (own := [member for member in members if member in ts])
        }
        means = {}
        for (name, score), members in pools.items():
            means[name] = averaged([ts[member] for member in members])
            check(every[group, name, score], means[name])
        if {"pre", "others"} <= means.keys():
            first, other = means["pre"], means["others"]
            both = first.get("values", {}).keys() & other.get("values", {}).keys()
            apart = {s: first["values"][s] - other["values"][s] for s in sorted(both)}
            sure = not math.isnan(first["low"]) and not math.isnan(other["low"])
            floor = max(first["floor"], other["floor"])
            row = estimated(apart, [] if sure else None, floor=floor) if apart else {}
            check(every[group, "pre − others", "family_difference"], row)
        over = {(r.variant, r.score) for r in scores if r.group == group and r.score in OVER}
        assert over == {*pools} | (
            {("pre − others", OVER[-1])} if {"pre", "others"} <= means.keys() else set()
        )
    assert seen >= {*NAMES} - ({"rate_shift"} if kind == "stalls at all rates" else set())
    for name in ("tuned", "tuned_interaction", "against_baseline", "pooled", "family"):
        rows = [row for row in scores if row.score.split(" w=")[0] == name]
        assert [row.p_holm for row in rows] == pytest.approx(holm(rows), nan_ok=True)


NAMES = ("tuned", "mean_over_rates", "rate_shift", "tuned_steps_saved", "tuned_interaction")
NAMES += ("against_baseline w=0", f"against_baseline w={REF}")
OVER = ("pooled", "family", "family_difference")


def wanted_of(arm: Naive, span: tuple[float, float], base: Naive) -> dict[str, dict[str, Any]]:
    """The scores over all rates of one variant by name; empty if undefined."""
    rows: dict[str, dict[str, Any]] = {name: {} for name in NAMES}
    if not (arm.seeds and arm.learned):
        return rows
    seeds, saved = arm.seeds, arm.saved
    ended = {warmup: arm.ended(warmup, seeds) for warmup in (0, REF)}
    sides = [(ended[0], ended[REF])]
    bound = {(0, 1): "<=", (1, 0): ">=", (1, 1): "?"}.get((all(ended[0]), any(ended[REF])), "")
    rows["tuned"] = estimated(saved, sides, arm.planned) | {
        "bound": bound,
        "tried": tuple(len(rates) for rates in arm.rates.values()),
        "best": tuple(median_low([arm.best(w, s) for s in seeds]) for w in (0, REF)),
        "inner": arm.inner(0) and arm.inner(REF),
    }
    shared = [r for r in arm.rates[0] if r in arm.rates[REF] and span[0] <= r <= span[1]]
    if len(shared) > 1:
        apart = {s: arm.area(0, s, shared) - arm.area(REF, s, shared) for s in seeds}
        rows["mean_over_rates"] = estimated(apart, sides) | {"p": math.nan, "p_sign": math.nan}
        runs = [[arm.failed(w, r, s) for s in seeds] for w in (0, REF) for r in shared]
        if any(any(of) != all(of) for of in runs):
            rows["mean_over_rates"]["unlike"] = True
    moved = {s: math.log2(arm.best(REF, s) / arm.best(0, s)) for s in seeds}
    moved = {s: x for s, x in moved.items() if not any(arm.ended(0, [s]) + arm.ended(REF, [s]))}
    if moved:
        rows["rate_shift"] = estimated(moved, []) | {"p": math.nan, "p_sign": math.nan}
    steps = {s: arm.steps(s) for s in seeds}
    rows["tuned_steps_saved"] = estimated(steps, sides) | {"p": math.nan, "p_sign": math.nan}
    both = [s for s in seeds if s in base.seeds]
    if base is arm or not base.learned or not both:
        return rows
    at = {w: (arm.ended(w, both), base.ended(w, both)) for w in (0, REF)}
    more = {s: saved[s] - base.saved[s] for s in both}
    rows["tuned_interaction"] = estimated(more, [*at.values()], arm.planned)
    for w in (0, REF):
        losses = {s: arm.lowest(w, s) - base.lowest(w, s) for s in both}
        rows[f"against_baseline w={w}"] = estimated(losses, [at[w]], arm.planned)
    return rows


def averaged(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The mean over arms of the seeds that all of them have."""
    seeds = [s for s in rows[0]["values"] if all(s in row["values"] for row in rows)]
    values = {s: fmean(row["values"][s] for row in rows) for s in seeds}
    sure = not any(math.isnan(row["low"]) for row in rows if len(row["values"]) > 1)
    floor = max(row["floor"] for row in rows)
    return estimated(values, [] if sure else None, floor=floor) if values else {"low": math.nan}


def holm(rows: Sequence[Score]) -> list[float]:
    """Holm's p values step by step; a row without one counts if it has three seeds."""
    left = sum(not math.isnan(row.p) or len(row.values) > 2 for row in rows)
    found, reached = {}, 0.0
    for n in sorted((n for n, row in enumerate(rows) if row.p >= 0), key=lambda n: rows[n].p):
        reached = found[n] = min(1.0, max(reached, left * rows[n].p))
        left -= 1
    return [found.get(n, math.nan) for n in range(len(rows))]


def test_contrasts_of_scores_over_rates(make_grid: Any) -> None:
    """Effects of two factors on T and on the shift; only those of T have p values."""
    norm, rng = "model.block.norm", np.random.default_rng(8)
    presets, norms, seeds = ("pre_ln", "post_ln"), ("layer_norm", "rms_norm"), (1, 2, 3, 4)
    saved = {
        (p, n, s): 0.2 + 0.3 * (p == "post_ln") + 0.1 * (n == "rms_norm") + rng.normal(0, 0.02)
        for p, n, s in itertools.product(presets, norms, seeds)
    }

    def outcome(at: Mapping[str, Any]) -> float:
        p, bare = at[PRESET], at[WARMUP] == 0
        best = 0.002 if bare or p == "pre_ln" else 0.004
        away = abs(math.log2(at[RATE] / best))
        return 2.0 + bare * saved[p, at[norm], at[SEED]] + 0.3 * away

    axes = {PRESET: presets, norm: norms, WARMUP: (0, REF), RATE: EVEN, SEED: seeds}
    fake = make_grid(outcome, axes, curves=False)
    change(fake, factors={"placement": PRESET, "norm": norm})
    grid = read_results(fake.folder)
    rows = {
        (row.measure, row.factors): row
        for row in effects(grid, sensitivity_scores(grid))
        if math.isnan(row.lr)
    }
    halves: dict[str, Values] = {"placement": {}, "norm": {}, "placement x norm": {}}
    for s in seeds:
        a, b, c, d = (saved[p, n, s] for p in presets for n in norms)
        halves["placement"][s] = (c + d) / 2 - (a + b) / 2
        halves["norm"][s] = (b + d) / 2 - (a + c) / 2
        halves["placement x norm"][s] = (d - c) - (b - a)
    for name, values in halves.items():
        wanted: Any = estimated(values, [])
        row = rows["tuned", name]
        found = dict(row.values), row.estimate, row.low, row.high, row.p
        assert found[0] == pytest.approx(values)
        assert found[1:] == pytest.approx([wanted[k] for k in ("estimate", "low", "high", "p")])
        assert math.isnan(rows["rate_shift", name].p)
    assert rows["rate_shift", "placement"].estimate == pytest.approx(1.0)
    assert rows["rate_shift", "norm"].estimate == pytest.approx(0.0)


def test_warm_up_saves_no_steps_where_both_runs_fail() -> None:
    """Their losses tie at the unigram entropy, which one may touch before it stalls again."""

    def run(curve: dict[int, float], failed: bool = True) -> Any:
        found = SimpleNamespace(curve={"val/nll": curve}.__getitem__)
        loss = H if failed else min(curve.values())
        monitored = SimpleNamespace(loss="val/nll")
        return SimpleNamespace(run=found, monitored=monitored, failed=failed, loss=loss)

    stalled, touching = {50: 4.6, 100: 4.6, 200: 4.6}, {50: 4.6, 100: 4.4, 200: 4.6}
    assert tau(run(stalled), run(touching)) == (0.0, False)
    assert tau(run(touching), run(stalled)) == (0.0, False)
    assert tau(run(stalled), run({50: 4.6, 100: 4.4, 200: 3.0}, failed=False)) == (125.0, False)


def test_steps_to_a_loss() -> None:
    def steps(curve: dict[int, float], *targets: float, failed: bool = False) -> list[float | None]:
        run = SimpleNamespace(curve={"val/nll": curve}.__getitem__)
        cell: Any = SimpleNamespace(
            run=run, monitored=SimpleNamespace(loss="val/nll"), failed=failed
        )
        return [steps_to_loss.reached(cell, target) for target in targets]

    curve = {50: 4.0, 100: 3.0, 150: 3.5, 200: 2.0}
    assert steps(curve, 4.5, 3.25, 2.75, 1.9) == [50.0, 87.5, 175.0, None]
    assert steps(curve, 2.75, failed=True) == steps({}, 1.0) == [None]
