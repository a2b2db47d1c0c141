"""How often a report's intervals contain the true value.

    python benchmarks/coverage.py
    python benchmarks/coverage.py --grids 2000 --json coverage.json

Simulated grids: variants x warm-up {0, reference} x seeds. The loss of a run is `level +
shared(seed) + own(run)`, in nats: pairing removes the shared part (sd 0.1); a run's own noise has
sd 0.06 without warm-up and 0.03 with it. Both are normal, heavy-tailed (Student's t with 4 degrees
of freedom) or skewed (lognormal, log-sd 0.5: skewness 1.75), scaled to the same sd. The functions
are those of the report (`lightning_app/report/statistics.py`). `false_labels.py` measures false
labels.

Where the loss depends on the rate, with its best one between those tried: N, O and steps saved at
the best rates (`over_rates`), also where a refinement or a search has chosen the rates (`adapted`).
These intervals lie between two bounds and may cover more.

Coverage: the share of intervals that contain the true value, over all variants of all grids;
nominal 95 %, it holds from 93 to 97 %. `+-`: one Monte-Carlo standard error, from the spread
between grids. `width`: the median, in nats. Rows that are "not shown" are methods that the report
does not use: Welch's interval, intervals over seeds of which some stall.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import special

from lightning_app.config.grid import GridSpec, read_spec
from lightning_app.config.tree import RATE, SEED, WARMUP, canonical
from lightning_app.grids.plan import combinations
from lightning_app.grids.search import TrialScore, search_arms, wanted
from lightning_app.report.statistics import (
    LEVEL,
    Floats,
    best_by_seed,
    ended_alike,
    steps_by_seed,
    t_intervals,
    tolerated_by_seed,
    wilson_intervals,
)

KINDS = ("normal", "heavy-tailed", "skewed")
SEEDS = (3, 5, 10)
ARMS = 5  # variants for which coverage is measured
ENTROPY, LEVELS = 4.5, (2.5, 2.2)  # nats: H_uni; the loss without warm-up and with it
SHARED, OWN = 0.1, (0.06, 0.03)
RATES, CLEARLY = 6, 0.3  # rates of N; nats between the best one and the others
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
    *,
    least_only: bool = False,
) -> Row:
    """The row of intervals [grid, variant]; NaN is no interval and does not count.

    Intervals between bounds (`least_only`) may cover more than they promise.
    """
    low, high = bounds
    there = ~np.isnan(low)
    hits, count = ((low <= truth) & (truth <= high) & there).sum(axis=1), there.sum(axis=1)
    if not there.any():
        return Row(what, kind, seeds, shown, np.nan, np.nan, LEVEL, holds=True, width=np.nan)
    rate = float(hits.sum() / count.sum())
    error = float(np.std(hits - rate * count) / count.mean() / np.sqrt(len(low)))
    width = float(np.median((high - low)[there]))
    holds = rate >= LOW and (least_only or rate <= HIGH)
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


def needs(kind: str, seeds: int, grids: int, rng: np.random.Generator) -> Iterator[Row]:
    """Coverage of N, the need at the best rates, where all rates are alike or one is best."""
    for what, behind in (("rates alike", 0.0), ("one rate best", CLEARLY)):
        runs = losses(kind, grids, RATES * ARMS, seeds, rng)
        runs = runs.reshape(grids, RATES, ARMS, 2, seeds)
        runs[:, np.arange(RATES) != 2] += behind
        rates = np.moveaxis(runs, 1, -2)  # [grid, variant, warm-up, rate, seed]
        sound = np.ones(rates.shape[:-1], dtype=bool)
        bounds = between(apart(best_by_seed(rates, np.arange(RATES), sound), 0, 1))
        yield covered(f"N, {what}", kind, seeds, bounds, LEVELS[0] - LEVELS[1], least_only=True)


RISEN: dict[str, Callable[[Floats], Floats]] = {
    "parabola": lambda away: 0.7 * away**2,
    "V": lambda away: np.maximum(-0.8 * away, 2.2 * away),
    "flat": lambda away: 0.02 * away**2,
}
"""By how many nats the loss is above its smallest, by octaves from there."""


def over_rates(
    kind: str, shift: float, scale: float, seeds: int, grids: int, rng: np.random.Generator
) -> Iterator[Row]:
    """Coverage of N, O and steps saved where the best rate lies between those tried.

    The loss after t of T steps is `best + risen(log2 rate) + decay(t)`, the same decay in both
    arms; `risen` as in `RISEN`, `shift` octaves higher with warm-up. Six rates an octave
    apart, eleven half an octave and twenty-one a quarter.
    """
    steps = np.arange(20.0, 401.0, 20.0)
    decay = 2.0 * (np.exp(-steps / 120) - np.exp(-steps[-1] / 120))
    for spacing in (1.0, 0.5, 0.25):
        places = np.arange(-2.5, 2.5 + spacing / 2, spacing)
        best = rng.uniform(-0.5, 0.5, (grids, 1, 1)) * spacing
        best = best + shift * (np.arange(2)[:, None] - 0.5)
        away = places - best
        risen = RISEN[kind](away)
        ends = LEVELS[1] + risen[..., None] + scale * rng.standard_normal((*risen.shape, seeds))
        curves = np.minimum(ends[..., None, :] + decay[:, None], ENTROPY)
        final = curves[..., -1, :]
        sound = (final < ENTROPY).all(axis=-1)
        what = f"{kind}, shift {shift:g}, sd {scale:g}, spacing {spacing:g}"
        halves, good = ([each[:, arm] for arm in (0, 1)] for each in (curves, sound))
        found = {
            "N": (between(apart(best_by_seed(final, places, sound), 0, 1)), 0.0),
            "O": (between(apart(tolerated_by_seed(final, places, sound, ENTROPY), 1, 0)), shift),
            "steps saved": (between(steps_by_seed(halves, [places] * 2, good, steps)), 0.0),
        }
        for name, (bounds, truth) in found.items():
            yield covered(f"{name}, {what}", "normal", seeds, bounds, truth, least_only=True)


ADAPTED: dict[str, dict[str, Any]] = {
    "refined, until 0.03": {"refine": {"until": 0.03}},
    "refined, until 0.003": {"refine": {"until": 0.003}},
    "tpe": {"search": {"sampler": "tpe", "together": 4}},
    "random": {"search": {"sampler": "random", "together": 4}},
}
TRIALS = 12  # rates of an arm, at most


def adapting_grid(parts: Mapping[str, Any], seeds: int) -> GridSpec:
    """A grid file of one variant whose rates are refined, from 1/4, 1 and 4, or searched."""
    tree = {"name": "simulated", "axes": {WARMUP: [0, 1], SEED: [*range(1, seeds + 1)]}}
    tree["base_config"] = {"model": {"optimizer": {"kind": "adam"}}, "data": {"name": "synthetic"}}
    for key, settings in parts.items():
        tree[key] = {**settings, "budget": TRIALS * seeds}
        if key == "refine":
            tree["axes"][RATE] = [0.25, 1.0, 4.0]
        else:
            tree[key]["fields"] = {RATE: {"low": 0.125, "high": 8.0, "log": True}}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "grid.yaml")
        path.write_text(json.dumps(tree))
        return read_spec(path)


def chosen_by_results(
    spec: GridSpec, risen: Callable[[Floats], Floats], best: Floats, rng: np.random.Generator
) -> list[tuple[Floats, Floats]]:
    """The losses [rate, seed] of each arm of a grid that chooses its rates, and their octaves."""
    if spec.search is not None:  # no two grids begin at the same rates
        search = replace(spec.search, seed=int(rng.integers(2**31)))
        spec = replace(spec, search=search)
    listed, known = list(combinations(spec)), dict[str, TrialScore]()
    runs: dict[int, dict[float, dict[int, float]]] = {0: {}, 1: {}}
    while True:
        new = {canonical(cell): cell for cell in wanted(search_arms(spec, listed, known))}
        new = {key: cell for key, cell in new.items() if key not in known}
        if not new:
            break
        for key, cell in new.items():
            place, arm = np.log2(cell[RATE]), cell[WARMUP]
            own = LEVELS[1] + float(risen(place - best[arm])) + 0.06 * rng.standard_normal()
            runs[arm].setdefault(place, {})[cell[SEED]] = min(own, ENTROPY)
            known[key] = TrialScore(min(own, ENTROPY), sound=own < ENTROPY)
    return [
        (np.array([[*of[place].values()] for place in sorted(of)]), np.array(sorted(of)))
        for of in runs.values()
    ]


def adapted(
    name: str, kind: str, shift: float, seeds: int, grids: int, rng: np.random.Generator
) -> Iterator[Row]:
    """Coverage of N, O and steps saved where results chose the rates.

    The curves are those of `over_rates`, sd 0.06, their best rate up to an octave from the middle;
    `lightning_app.grids.search` chooses, each arm for itself. The row names the mean number of
    rates of an arm.
    """
    steps = np.arange(20.0, 401.0, 20.0)
    decay = 2.0 * (np.exp(-steps / 120) - np.exp(-steps[-1] / 120))
    spec, counts = adapting_grid(ADAPTED[name], seeds), list[int]()
    found: dict[str, list[Bounds]] = {"N": [], "O": [], "steps saved": []}
    for _ in range(grids):
        best = rng.uniform(-1.0, 1.0) + shift * np.array([-0.5, 0.5])
        arms = chosen_by_results(spec, RISEN[kind], best, rng)
        counts += [len(at) for _, at in arms]
        sound = [np.asarray((final < ENTROPY).all(axis=-1)) for final, _ in arms]
        curves = [np.minimum(final[:, None] + decay[:, None], ENTROPY) for final, _ in arms]
        bare, warm = (best_by_seed(*arm, ok) for arm, ok in zip(arms, sound, strict=True))
        found["N"].append((bare[0] - warm[1], bare[1] - warm[0]))
        first, last = (
            tolerated_by_seed(*arm, ok, ENTROPY) for arm, ok in zip(arms, sound, strict=True)
        )
        found["O"].append((last[0] - first[1], last[1] - first[0]))
        found["steps saved"].append(steps_by_seed(curves, [at for _, at in arms], sound, steps))
    what = f"{kind}, shift {shift:g}, {name}, {np.mean(counts):.1f} rates"
    for score, ends in found.items():
        if score == "O" and kind == "flat":
            continue  # every rate is tolerated
        low, high = (np.stack([each[side] for each in ends]) for side in (0, 1))
        truth = shift if score == "O" else 0.0
        bounds = between((low, high))
        yield covered(f"{score}, {what}", "normal", seeds, bounds, truth, least_only=True)


def between(ends: Bounds) -> Bounds:
    """The interval of values per seed between two bounds; NaN where one of them is open."""
    low, high = ends
    closed = np.asarray(np.isfinite(low).all(axis=-1) & np.isfinite(high).all(axis=-1))
    low, high = (np.where(closed[..., None], end, 0.0) for end in (low, high))
    found = [t_intervals(end)[side] for side, end in enumerate((low, high))]
    shown = [
        np.where(np.isnan(of), end.mean(axis=-1), of)
        for of, end in zip(found, (low, high), strict=True)
    ]
    shown = [np.where(closed, of, np.nan) for of in shown]
    return (shown[0], shown[1]) if shown[0].ndim > 1 else (shown[0][:, None], shown[1][:, None])


def apart(ends: Bounds, first: int, second: int) -> Bounds:
    """The bounds of the first arm's value less the second's; `ends` are [.., arm, seed]."""
    low, high = ends
    return (
        low[..., first, :] - high[..., second, :],
        high[..., first, :] - low[..., second, :],
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


def share_of(
    what: str,
    kind: str,
    seeds: int,
    found: NDArray[np.bool_],
    nominal: float,
    holds: bool,
    shown: bool = True,
) -> Row:
    rate = float(found.mean())
    error = float(np.sqrt(rate * (1 - rate) / len(found)))
    return Row(what, kind, seeds, shown, rate, error, nominal, holds)


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
            yield from needs(kind, seeds, grids, rng)
    for kind in ("parabola", "V"):
        for shift in (0.0, 0.25, 0.5, 0.75, 1.0):
            for scale in (0.03, 0.06, 0.15):
                for seeds in SEEDS:
                    yield from over_rates(kind, shift, scale, seeds, min(grids, 4000), rng)
    for name in ADAPTED:
        for kind in RISEN:
            for shift in (0.0, 0.5, 1.0):
                for seeds in SEEDS:
                    yield from adapted(name, kind, shift, seeds, min(grids, 500), rng)
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
