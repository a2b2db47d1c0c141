"""How often a report's intervals contain the true value.

    python benchmarks/coverage.py
    python benchmarks/coverage.py --grids 2000 --json coverage.json

Simulated grids: variants x warm-up {0, reference} x seeds. The loss of a run is `level +
shared(seed) + own(run)`, in nats: pairing removes the shared part (sd 0.1); a run's own noise has
sd 0.06 without warm-up and 0.03 with it. Both are normal, heavy-tailed (Student's t with 4 degrees
of freedom) or skewed (lognormal, log-sd 0.5: skewness 1.75), scaled to the same sd. The functions
are those of the report (`lightning_app/report/statistics.py`). `false_labels.py` measures false
labels.

T and M, over curves through the losses of the published study `joint_fine`: splines, and the
sharpest convex ones (`Curves`). The true value is that of many seeds at as many rates.
`no_needs`: how often "no need" is false (nominal: at most 5 %).

Coverage: the share of intervals that contain the true value, over all variants of all grids;
nominal 95 %, it holds from 93 to 97 %. `+-`: one Monte-Carlo standard error, from the spread
between grids. `width`: the median, in nats. Rows that are "not shown" are methods that the report
does not use: Welch's interval, intervals over seeds of which some stall.
"""

import argparse
import json
import time
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pandas as pd
from scipy import special
from scipy.interpolate import PchipInterpolator

from lightning_app.config.search import LOOKED_AT
from lightning_app.grids.search import GOLDEN
from lightning_app.report.statistics import (
    LEVEL,
    Estimate,
    Floats,
    corrected,
    ended_alike,
    t_intervals,
    wilson_intervals,
    within,
)

STUDY = Path(__file__).parent.parent / "ablations/results/joint_fine"
KINDS = ("normal", "heavy-tailed", "skewed")
SEEDS = (3, 5, 10)
ARMS = 5  # variants for which coverage is measured
ENTROPY, LEVELS = 4.5, (2.5, 2.2)  # nats: H_uni; the loss without warm-up and with it
SHARED, OWN = 0.1, (0.06, 0.03)
STALLED = (0.1, 0.3, 0.5)  # chances of a stall without warm-up
LOW, HIGH = 0.93, 0.97  # the limits of coverage

Bounds = tuple[Floats, Floats]


@dataclass(frozen=True)
class Row:
    """One line of the table. `rate` is a coverage, an error or a power; `width` in nats, median."""

    what: str
    noise: str
    seeds: int
    shown: bool
    rate: float
    error: float
    nominal: float
    holds: bool
    width: float | None = None


def noise(kind: str, shape: tuple[int, ...], rng: np.random.Generator) -> Floats:
    """Draws of mean 0 and standard deviation 1."""
    if kind == "normal":
        return rng.standard_normal(shape)
    if kind == "heavy-tailed":
        return rng.standard_t(4, shape) / np.sqrt(2)
    spread = 0.5
    centre, variance = np.exp(spread**2 / 2), np.exp(spread**2) * np.expm1(spread**2)
    return (rng.lognormal(0.0, spread, shape) - centre) / np.sqrt(variance)


def losses(kind: str, grids: int, arms: int, seeds: int, rng: np.random.Generator) -> Floats:
    """Losses of [grid, variant, warm-up 0 and reference, seed]."""
    shared = SHARED * noise(kind, (grids, 1, 1, seeds), rng)
    own = np.array(OWN)[:, None] * noise(kind, (grids, arms, 2, seeds), rng)
    return np.array(LEVELS)[:, None] + shared + own


def with_stalls(runs: Floats, share: float, rng: np.random.Generator) -> Floats:
    """The same runs; those without warm-up stall with this chance and then count as `H_uni`."""
    stalled = rng.random(runs[:, :, 0].shape) < share
    found = runs.copy()
    found[:, :, 0] = np.where(stalled, ENTROPY, found[:, :, 0])
    return found


def lost(runs: Floats) -> Floats:
    """Delta, seed by seed: [grid, variant, seed]."""
    return runs[:, :, 0] - runs[:, :, 1]


def covered(
    what: str,
    kind: str,
    seeds: int,
    bounds: Bounds,
    truth: float | Floats,
    shown: bool = True,
) -> Row:
    """The row of intervals [grid, variant]; NaN is no interval and does not count."""
    low, high = bounds
    there = ~np.isnan(low)
    hits, count = ((low <= truth) & (truth <= high) & there).sum(axis=1), there.sum(axis=1)
    if not there.any():
        return Row(what, kind, seeds, shown, np.nan, np.nan, LEVEL, holds=True, width=np.nan)
    rate = float(hits.sum() / count.sum())
    error = float(np.std(hits - rate * count) / count.mean() / np.sqrt(len(low)))
    width = float(np.median((high - low)[there]))
    holds = LOW <= rate <= HIGH
    return Row(what, kind, seeds, shown, rate, error, LEVEL, holds, width)


def intervals(
    kind: str, seeds: int, grids: int, rng: np.random.Generator, rest: bool = True
) -> Iterator[Row]:
    """Coverage of every interval over seeds; with the `rest` also of those not in the report."""
    runs = losses(kind, grids, ARMS, seeds, rng)
    differences = lost(runs)
    truth = LEVELS[0] - LEVELS[1]
    versus = differences[:, 1:] - differences[:, :1]
    yield covered("Delta, t", kind, seeds, t_intervals(differences)[:2], truth)
    yield covered("interaction, t", kind, seeds, t_intervals(versus)[:2], 0.0)
    yield covered("loss of one arm, t", kind, seeds, t_intervals(runs[:, :, 1])[:2], LEVELS[1])
    if rest:
        yield covered("Delta, unpaired t", kind, seeds, unpaired(runs), truth, shown=False)


def mixtures(seeds: int, share: float, grids: int, rng: np.random.Generator) -> Iterator[Row]:
    """Coverage of the t interval of Delta if this share of runs stalls without warm-up."""
    runs = with_stalls(losses("normal", grids, ARMS, seeds, rng), share, rng)
    low, high, _ = t_intervals(lost(runs))
    alive, dead = LEVELS[0] - LEVELS[1], ENTROPY - LEVELS[1]
    truth, what = share * dead + (1 - share) * alive, f"{share:.0%} stall"
    yield covered(f"Delta, t, {what}", "normal", seeds, (low, high), truth, shown=False)
    stalled = runs[:, :, 0] == ENTROPY
    kept = ended_alike(stalled)
    bounds = np.where(kept, low, np.nan), np.where(kept, high, np.nan)
    ends = np.where(stalled.any(axis=-1), dead, alive)
    if kept.sum() >= 1000:
        yield covered(f"Delta, t, {what}, seeds alike", "normal", seeds, bounds, ends)


@dataclass(frozen=True)
class Curves:
    """Mean losses of two warm-ups over the rates, and the spread of runs; from a published study.

    `kind`: `spline` through the means of every second rate or `V`, the sharpest curve that is
    convex in the logarithm of the rate and agrees with them.
    """

    octaves: Floats  # log2 of the rates
    means: Floats  # [warm-up, rate]
    spread: float
    kind: str

    def at(self, warmup: int, places: Floats) -> Floats:
        known = self.means[warmup]
        if self.kind == "spline":
            return PchipInterpolator(self.octaves, known)(places)
        slopes = np.diff(known) / np.diff(self.octaves)
        found = np.interp(places, self.octaves, known)
        for gap in range(1, len(slopes) - 1):  # lines through the neighbours meet below the chord
            inside = (places >= self.octaves[gap]) & (places <= self.octaves[gap + 1])
            left = known[gap] + slopes[gap - 1] * (places - self.octaves[gap])
            right = known[gap + 1] - slopes[gap + 1] * (self.octaves[gap + 1] - places)
            found = np.where(inside, np.minimum(found, np.maximum(left, right)), found)
        return found


def of_study(study: Path, kind: str) -> dict[str, Curves]:
    """The curves of each wiring of a published study, in the mean over its seeds."""
    table: Any = pd.read_parquet(study / "results.parquet")
    found = {}
    for variant, runs in table.groupby("variant"):
        of_rate = runs.groupby(["warmup", "lr"])["loss"]
        means, spreads = of_rate.mean().unstack(), of_rate.std().unstack()
        octaves = np.log2(means.columns.to_numpy(float))
        alive = means.to_numpy() < table["unigram_entropy"].mean() - 1.0
        spread = float(np.median(spreads.to_numpy()[alive]))
        found[str(variant)] = Curves(octaves, means.to_numpy(), spread, kind)
    return found


def drawn(
    curves: Curves, count: int, shape: tuple[int, int], rng: np.random.Generator, own: bool = False
) -> tuple[Floats, Floats]:
    """T and M of each seed, [grid, seed], at `count` rates an equal step apart.

    With `own`, seeds are tuning studies with rates of their own (`grids.search.stratified`), from
    any seed on.
    """
    low, high = curves.octaves[0], curves.octaves[-1]
    places = np.linspace(low, high, count)
    if own:
        shares = GOLDEN * (rng.integers(1, 10**6) + np.arange(shape[1])) % 1.0
        places = low + (high - low) * (np.arange(count) + shares[:, None]) / count
    runs = [
        curves.at(w, places) + curves.spread * rng.standard_normal((*shape, count)) for w in (0, 1)
    ]
    apart = np.asarray(np.trapezoid(runs[0] - runs[1], dx=1.0, axis=-1)) / (count - 1)
    if own:
        apart = (runs[0] - runs[1]).mean(axis=-1)
    return runs[0].min(axis=-1) - runs[1].min(axis=-1), apart


def tuned(study: Path, grids: int, rng: np.random.Generator) -> Iterator[Row]:
    """Coverage of T and M at five and nine rates, over the wirings of a study."""
    for kind, count, seeds in product(("spline", "V"), (5, 9), SEEDS):
        wirings = of_study(study, kind).values()
        found = [drawn(curves, count, (grids, seeds), rng) for curves in wirings]
        truths = [drawn(curves, count, (20_000, 50), rng) for curves in wirings]
        for which, name in enumerate("TM"):
            ends = [t_intervals(each[which]) for each in found]
            low, high = (np.stack([each[side] for each in ends], axis=1) for side in (0, 1))
            truth = np.array([each[which].mean() for each in truths])
            yield covered(f"{name}, {kind}, {count} rates", "normal", seeds, (low, high), truth)


def studies(study: Path, grids: int, rng: np.random.Generator) -> Iterator[Row]:
    """Coverage of T and M where each seed is a study of five or four trials."""
    for kind, (count, seeds) in product(("spline", "V"), ((5, 5), (5, 8), (4, 10))):
        wirings = of_study(study, kind).values()
        for which, name in enumerate("TM"):
            ends, truths = [], []
            for curves in wirings:
                draws = [
                    drawn(curves, count, (1, seeds), rng, own=True)[which] for _ in range(grids)
                ]
                many = [drawn(curves, count, (1, 5000), rng, own=True)[which] for _ in range(20)]
                ends.append(t_intervals(np.concatenate(draws)))
                truths.append(np.mean(many))
            low, high = (np.stack([each[side] for each in ends], axis=1) for side in (0, 1))
            what = f"{name}, {kind}, {count} trials a seed"
            yield covered(what, "normal", seeds, (low, high), np.array(truths))


@dataclass(frozen=True)
class Made:
    """Mean losses that no study has, over four octaves: a curve without a slope, one with a flat
    floor, one that ends at the largest rate that learns, and one beyond whose middle runs stall by
    chance."""

    kind: str
    spread: float = 0.05
    octaves: Floats = field(default_factory=lambda: np.array([0.0, 4.0]))

    def at(self, warmup: int, places: Floats) -> Floats:
        best = 1.8 + 0.9 * warmup
        if self.kind == "flat":
            return np.full_like(places, 2.0)
        if self.kind == "cliff":
            return np.where(places > best, ENTROPY, 2.0 + 0.3 * (best - places))
        return 2.0 + 0.5 * np.maximum(0.0, np.abs(places - best) - 1.0)

    def stalled(self, warmup: int, places: Floats, rng: np.random.Generator) -> Floats:
        chance = special.expit((places - 2.5 - 0.9 * warmup) / 0.4)
        return (self.kind == "stalls") & (rng.random(places.shape) < chance)


MADE = ("flat", "plateau", "cliff", "stalls")


def made(kind: str, count: int, seeds: int, grids: int, rng: np.random.Generator) -> list[Floats]:
    """T and M of each seed, [grid, seed], of tuning studies over a made curve."""
    curve, low, high = Made(kind), 0.0, 4.0
    shares = GOLDEN * (rng.integers(1, 10**6, (grids, 1)) + np.arange(seeds)) % 1.0
    places = low + (high - low) * (np.arange(count) + shares[..., None]) / count
    runs = []
    for w in (0, 1):
        ends = curve.at(w, places) + curve.spread * rng.standard_normal(places.shape)
        runs.append(np.minimum(ENTROPY, np.where(curve.stalled(w, places, rng), ENTROPY, ends)))
    return [runs[0].min(axis=-1) - runs[1].min(axis=-1), (runs[0] - runs[1]).mean(axis=-1)]


def of_made(grids: int, rng: np.random.Generator) -> Iterator[Row]:
    """Coverage of T and M of tuning studies over made curves; flat ones have a true T of zero."""
    for kind, (count, seeds) in product(MADE, ((5, 5), (4, 10))):
        found = made(kind, count, seeds, grids, rng)
        truths = made(kind, count, 1000, 2000, rng)
        for name, values, truth in zip("TM", found, truths, strict=True):
            low, high, _ = t_intervals(values)
            what = f"{name}, {kind}, {count} trials a seed"
            yield covered(what, "normal", seeds, (low[:, None], high[:, None]), float(truth.mean()))


def until(study: Path, grids: int, rng: np.random.Generator) -> Iterator[Row]:
    """Coverage of the 97 % intervals of one arm to which seeds are added until T is narrow."""
    for kind, wanted in product(("spline", "V"), (0.1, 0.15, 0.2)):
        ends: dict[str, list[tuple[float, float]]] = {"T": [], "M": []}
        truths: dict[str, list[float]] = {"T": [], "M": []}
        for curves in of_study(study, kind).values():
            many = [drawn(curves, 5, (1, 5000), rng, own=True) for _ in range(20)]
            for _ in range(grids):
                values = [each[0] for each in drawn(curves, 5, (1, 20), rng, own=True)]
                count = next(
                    (n for n in range(5, 20) if half(values[0][:n]) <= wanted),
                    20,
                )
                for name, of, every in zip("TM", values, zip(*many, strict=True), strict=True):
                    low, high, _ = t_intervals(of[:count], 1 - LOOKED_AT)
                    ends[name].append((float(low), float(high)))
                    truths[name].append(float(np.mean(every)))
        for name, of in ends.items():
            low, high = np.array(of).T[:, :, None]
            row = covered(
                f"{name}, {kind}, until {wanted:g}",
                "normal",
                20,
                (low, high),
                np.array(truths[name])[:, None],
            )
            yield replace(row, holds=row.rate >= LEVEL)


def half(values: Floats) -> float:
    """The half width by which seeds are added."""
    low, high, _ = t_intervals(values, 1 - LOOKED_AT)
    return float(high - low) / 2


def by_tpe(study: Path, grids: int, rng: np.random.Generator) -> Iterator[Row]:
    """Coverage of T where Optuna's TPE asks for the five rates of each seed."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
    for name, curves in [*of_study(study, "spline").items()][::4]:
        found = []
        for seed in range(600):
            best = []
            for w in (0, 1):
                sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=4)
                studied = optuna.create_study(sampler=sampler)
                for _ in range(5):
                    trial = studied.ask()
                    place = trial.suggest_float("place", curves.octaves[0], curves.octaves[-1])
                    end = curves.at(w, np.array([place]))[0]
                    studied.tell(trial, float(end + curves.spread * rng.standard_normal()))
                best.append(studied.best_value)
            found.append(best[0] - best[1])
        for seeds in (5, 10):
            low, high, _ = t_intervals(rng.choice(found, (grids, seeds)))
            what = f"T, tpe, {name}"
            bounds = low[:, None], high[:, None]
            yield covered(what, "normal", seeds, bounds, float(np.mean(found)))


def no_needs(grids: int, rng: np.random.Generator) -> Iterator[Row]:
    """False "no need": grids in which any variant has it, although each saves what matters.

    The saving varies between seeds with a standard deviation of `spread` times what matters.
    """
    for spread, variants, seeds in product((0.25, 0.5, 1.0), (1, 4, 8), SEEDS):
        false = 0
        for _ in range(grids):
            values = 1.0 + spread * rng.standard_normal((variants, seeds))
            rows = [estimated(each) for each in values]
            false += any(within(row, 1.0) for row in corrected(rows, lambda _: "arms"))
        what, rate = f"false no need, spread {spread:g}, {variants} variants", false / grids
        error = float(np.sqrt(rate * (1 - rate) / grids))
        yield Row(what, "normal", seeds, True, rate, error, 0.05, rate <= 0.05)


def estimated(values: Floats) -> Estimate:
    """The row of a report with these values of the seeds."""
    low, high, p = (float(each) for each in t_intervals(values))
    shown = {"low": low, "high": high, "p": p, "seeds": len(values)}
    return Estimate(
        estimate=float(values.mean()), **shown, values=tuple(enumerate(values.tolist()))
    )


def shares(seeds: int, grids: int, rng: np.random.Generator) -> Iterator[Row]:
    """Wilson's interval: over true shares drawn from 0 to 1, and at the least and most kind one."""
    truth = rng.random((grids, ARMS))
    bounds = wilson_intervals(rng.binomial(seeds, truth), seeds)
    yield covered("stalls, Wilson, mean over shares", "binomial", seeds, bounds, truth)
    shared, exact = wilson_coverage(seeds)
    for name, place in (("least", exact.argmin()), ("most", exact.argmax())):
        what = f"stalls, Wilson, {name}, at {shared[place]:.2f} (exact)"
        rate = float(exact[place])
        yield Row(what, "binomial", seeds, True, rate, 0.0, LEVEL, LOW <= rate <= HIGH)


def wilson_coverage(seeds: int, points: int = 10_000) -> tuple[Floats, Floats]:
    """True shares, and the exact coverage of Wilson's interval at each."""
    share = (np.arange(points) + 0.5) / points
    failed = np.arange(seeds + 1)
    chance = special.binom(seeds, failed)[:, None] * share ** failed[:, None]
    chance *= (1 - share) ** (seeds - failed[:, None])
    low, high = wilson_intervals(failed, seeds)
    return share, (chance * ((low[:, None] <= share) & (share <= high[:, None]))).sum(axis=0)


def unpaired(runs: Floats) -> Bounds:
    """Welch's interval, which ignores that the arms share their seeds."""
    count = runs.shape[-1]
    parts = runs.var(axis=-1, ddof=1) / count
    total = parts.sum(axis=-1)
    freedom = total**2 / (parts**2 / (count - 1)).sum(axis=-1)
    half = special.stdtrit(freedom, (1 + LEVEL) / 2) * np.sqrt(total)
    centre = lost(runs).mean(axis=-1)
    return centre - half, centre + half


def simulate(grids: int, seed: int) -> Iterator[Row]:
    """Every row, in the order of the table."""
    rng = np.random.default_rng(seed)
    for kind in KINDS:
        for seeds in SEEDS:
            yield from intervals(kind, seeds, grids, rng)
    yield from tuned(STUDY, min(grids, 4000), rng)
    yield from studies(STUDY, min(grids, 1000), rng)
    yield from of_made(min(grids, 4000), rng)
    yield from until(STUDY, min(grids, 500), rng)
    yield from by_tpe(STUDY, min(grids, 4000), rng)
    yield from no_needs(min(grids, 2000), rng)
    for seeds in SEEDS:
        for share in STALLED:
            yield from mixtures(seeds, share, grids, rng)
    for seeds in SEEDS:
        yield from shares(seeds, grids, rng)


def main() -> None:
    """Print the table, and write it to the given file."""
    parser = argparse.ArgumentParser(description="Coverage of the intervals of a report.")
    parser.add_argument(
        "--grids", type=int, default=20_000, help="grids of a kind (default: 20000)"
    )
    parser.add_argument("--seed", type=int, default=1, help="of the simulation (default: 1)")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    args = parser.parse_args()
    started, rows = time.perf_counter(), []
    print(f"{args.grids} grids of each kind, simulation seed {args.seed}")
    print(f"{'what':<44}{'noise':<13}{'seeds':>5}{'rate, %':>9}{'+-':>5}{'width':>8}  holds")
    for row in simulate(args.grids, args.seed):
        rows.append(row)
        width = "" if row.width is None else f"{row.width:.3f}"
        says = ("yes" if row.holds else "NO") + ("" if row.shown else ", not shown")
        print(
            f"{row.what:<44}{row.noise:<13}{row.seeds:>5}{100 * row.rate:>9.1f}"
            f"{100 * row.error:>5.1f}{width:>8}  {says}",
            flush=True,
        )
    print(f"{time.perf_counter() - started:.0f} s")
    if args.json:
        args.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


if __name__ == "__main__":
    main()
