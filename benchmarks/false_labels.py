"""How often does a report label a difference that does not exist, and how often does it find one?

    python benchmarks/false_labels.py
    python benchmarks/false_labels.py --grids 4000 --json false_labels.json

A rule of labels is bounded on both sides, so each row of the table has both shares. Simulated are
grids of some variants and seeds. A label is a paired test over the seeds (`statistics.t_intervals`)
with a p value under 5 % after Holm's correction over the variants, as for Δ, T, their differences
from the baseline and a metric. The differences of a variant have a spread of their own (log-sd 0.7
over variants) and noise

- `normal`, `t4` (Student's, 4 degrees of freedom), `uniform`;
- `lognormal 0.25` and `0.5`, by the log-sd (skewness 0.8 and 1.8);
- `one skewed arm`: lognormal 1 in the first variant, normal in the others;
- `30 % stall`: normal, and each run of both arms stalls by chance at a loss far above: where the
  seeds of an arm end differently there is no t test, and whole seeds are permuted instead. Δ and
  failures are two families, of which the worse one is shown.

`false` is the share of grids with any label although no variant has a difference. `power` is that
of grids in which the first variant gets its label, whose mean differs from zero by 2.5 standard
deviations of a pair, while the others do not differ: the strictest step of the correction. With
stalls it is NaN.

Failures (`statistics.failures_p`): arms of nine rates, in which a run fails above a largest rate of
its seed; `spread` is its standard deviation over seeds in steps of the axis. `power`: without
warm-up the largest rate is 1.8 steps lower, as 17 against 8 failures of 45.
"""

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from lightning_app.report.statistics import (
    LEVEL,
    Floats,
    ended_alike,
    failures_p,
    holm_values,
    t_intervals,
)

VARIANTS, SEEDS = (1, 4, 8, 41), (3, 5, 8, 10)
EFFECT = 2.5  # standard deviations of a pair
STALLED = 8.0  # what a stall costs, in standard deviations of a run
NOISE = ("normal", "t4", "uniform", "lognormal 0.25", "lognormal 0.5", "one skewed arm")
RATES, SPREADS, SHIFT = (
    9,
    (0.25, 0.5, 1.0, 2.0),
    1.8,
)  # of failures: rates, spread and effect in steps
PART = 500  # grids drawn at a time


@dataclass(frozen=True)
class Rates:
    """A line of the table: shares of grids."""

    noise: str
    variants: int
    seeds: int
    false: float
    power: float = np.nan


def standard(kind: str, shape: tuple[int, ...], rng: np.random.Generator) -> Floats:
    """Draws with mean 0 and standard deviation 1."""
    if kind == "normal":
        return rng.standard_normal(shape)
    if kind == "t4":
        return rng.standard_t(4, shape) / np.sqrt(2)
    if kind == "uniform":
        return rng.uniform(-np.sqrt(3), np.sqrt(3), shape)
    log_sd = float(kind.rpartition(" ")[2])
    centre, variance = np.exp(log_sd**2 / 2), np.exp(log_sd**2) * np.expm1(log_sd**2)
    return (rng.lognormal(0.0, log_sd, shape) - centre) / np.sqrt(variance)


def differences(
    kind: str, shape: tuple[int, int, int], effect: float, rng: np.random.Generator
) -> Floats:
    """Differences [grid, variant, seed]; the first variant has an effect."""
    found = standard("normal" if kind == "one skewed arm" else kind, shape, rng)
    if kind == "one skewed arm":
        found[:, 0] = standard("lognormal 1", (shape[0], shape[2]), rng)
    found[:, 0] += effect
    return found * rng.lognormal(0.0, 0.7, (*shape[:2], 1))


def labels(values: Floats) -> np.ndarray:
    """Whether each variant gets a label; `values` is [grid, variant, seed]."""
    return holm_values(t_intervals(values)[2]) < 1 - LEVEL


def stall_labels(shape: tuple[int, int, int], rng: np.random.Generator) -> np.ndarray:
    """Labels of Δ and of failures where 30 % of all runs stall: [grid, 2, variant]."""
    stalled = rng.random((2, *shape)) < 0.3
    losses = np.where(stalled, STALLED, rng.standard_normal((2, *shape)))
    return np.stack(labels_of(losses, stalled), axis=1)


def labels_of(losses: Floats, stalled: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Labels of Δ and of failures; both arrays are [warm-up, grid, variant, seed]."""
    shape, values = losses.shape[1:], np.subtract(*losses)
    alike = np.logical_and(*ended_alike(stalled))
    p = np.where(alike, t_intervals(values)[2], np.nan)
    apart = alike & (stalled[0].all(axis=-1) != stalled[1].all(axis=-1))
    least = failures_p([1] * shape[2], [0] * shape[2], 1, shape[2])
    p = np.where(apart, np.maximum(p, least), p)
    counts = stalled.astype(int)
    exact = np.full(shape[:2], np.nan)
    for grid, variant in np.argwhere(stalled.any(axis=(0, 3))):
        bare, warm = counts[:, grid, variant].tolist()
        exact[grid, variant] = failures_p(bare, warm, 1, shape[2])
    return holm_values(p, np.isnan(p).sum(axis=-1)) < 1 - LEVEL, holm_values(exact) < 1 - LEVEL


def rates(noise: str, variants: int, seeds: int, grids: int, rng: np.random.Generator) -> Rates:
    """A line for labels by the t test."""
    false, found = [], []
    for _ in range(0, grids, PART):
        shape = (min(PART, grids), variants, seeds)
        if noise == "30 % stall":
            false.append(stall_labels(shape, rng).any(axis=2))  # [grid, family]
            continue
        false.append(labels(differences(noise, shape, 0.0, rng)).any(axis=1))
        found.append(labels(differences(noise, shape, EFFECT, rng))[:, 0])
    power = float(np.mean(found)) if found else np.nan
    shares = np.mean(np.concatenate(false), axis=0)
    return Rates(noise, variants, seeds, float(np.max(shares)), power)


def failure_rates(
    spread: float, variants: int, seeds: int, grids: int, rng: np.random.Generator
) -> Rates:
    """A line for labels of failures."""

    def label(shift: float) -> np.ndarray:
        edge = RATES / 2 + 0.5 + rng.uniform(-0.5, 0.5, (variants, 1, 1))
        edge = edge + spread * rng.standard_normal((variants, 2, seeds))
        edge[0, 0] -= shift
        failed = (np.arange(RATES) > edge[..., None]).sum(axis=-1)
        p = [
            failures_p(arms[0], arms[1], RATES, seeds) if sum(map(sum, arms)) else np.nan
            for arms in failed.tolist()
        ]
        return holm_values(p) < 1 - LEVEL

    false = [label(0.0).any() for _ in range(grids)]
    found = [label(SHIFT)[0] for _ in range(grids)]
    name = f"failures, spread {spread:g}"
    return Rates(name, variants, seeds, float(np.mean(false)), float(np.mean(found)))


def simulate(grids: int, seed: int) -> Iterator[Rates]:
    """Every line of the table."""
    rng = np.random.default_rng(seed)
    for noise in (*NOISE, "30 % stall"):
        for variants in VARIANTS:
            for seeds in SEEDS:
                few = grids // 4 if noise == "30 % stall" else grids
                yield rates(noise, variants, seeds, few, rng)
    for spread in SPREADS:
        for variants in (1, 4):
            for seeds in SEEDS:
                yield failure_rates(spread, variants, seeds, grids // 4, rng)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--grids", type=int, default=4000, help="grids of each kind")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    args = parser.parse_args()
    started, rows = time.perf_counter(), []
    print(f"{args.grids} grids of each kind, seed {args.seed}; shares in %")
    print(f"{'noise':<24}{'variants':>9}{'seeds':>6}{'false':>7}{'power':>7}")
    for row in simulate(args.grids, args.seed):
        rows.append(row)
        print(
            f"{row.noise:<24}{row.variants:>9}{row.seeds:>6}"
            f"{100 * row.false:>7.1f}{100 * row.power:>7.1f}",
            flush=True,
        )
    print(f"{time.perf_counter() - started:.0f} s")
    if args.json:
        args.json.write_text(json.dumps(list(map(asdict, rows)), indent=1) + "\n")


if __name__ == "__main__":
    main()
