"""How often does a report label a difference that does not exist, and how often does it find one?

    python benchmarks/false_labels.py
    python benchmarks/false_labels.py --grids 2000 --json false_labels.json
    python benchmarks/false_labels.py --grids 2000 --rule simple

Simulated grids: slices (learning rates) x variants x warm-up {0, reference} x seeds, where no
variant differs from the baseline. The labels are those of a report
(`lightning_app/report/warmup.py`). One grid counts once: if it has any label "more" or
"less" than the baseline (`versus`), if it has any label "helps" or "costs" where the true mean of
Delta is zero or has the other sign (`own`), and, with several rates, the same of N, the need at the
best rates (`need`), or any label "better" or "worse" of a metric (`compare`). N counts by its p
value alone: in a report a best rate at the edge of those tried withholds some of these labels. A
rule holds up to 6 %. The noise:

- `normal`, `heavy-tailed` (Student's t, 3 degrees of freedom) and `skewed` (lognormal, log-sd 1),
  sd 0.06 without warm-up and 0.03 with it, and the last two growing to 4 times the baseline's;
- `plateau`: a run ends at 4.4, or by chance (30 %) still at 5.1, with H_uni = 5.38; in both arms,
  or without warm-up alone;
- `stall`: 10, 30 or 50 % of the runs without warm-up end at H_uni, or 30 % of all runs;
- `our spreads`: the sd of Delta of each variant is that of our 24 wirings in `placements`
  (`ablations/README.md`), which differ 40-fold; normal and skewed (log-sd 0.5).

N where the loss depends on the rate: `parabola` (0.7 nats per octave squared), `V` (0.8 nats per
octave below the best rate, 2.2 above it) and `flat` (0.02 per octave squared), six rates one octave
apart, the best one at a random place between them, and with the reference warm-up some octaves
higher (shift); the best mean losses are equal, so that every label is false. With skewed noise, 8
times as large, in the runs without warm-up as well.

Small families (`FEW`): up to three variants, of which two, one or none are compared with the
baseline, so that few other arms guard the spread. The runs without warm-up of one of them, the
baseline, have skewed noise of 8 times the sd, or end in two groups 0.6 nats apart by chance
(`modes`: with noise of a sixth, so that runs that agree agree closely); or runs of both arms stall
by chance. Families of one or two comparisons hold. In larger ones a single odd arm does NOT: runs
of two modes agree in 2 / 2^n of cases, whatever the rule.

A metric with two modes (`compare`): runs end at 0 or at 1 by chance (30 or 50 %), with a noise of
0.05, while their losses do not tell them apart. 1, 2, 3 and 23 values of one axis.

Stopping: a user looks at 3 seeds, then at each further one, and stops at the first label or with 10
seeds. A report has no label before the planned seeds have finished (`planned`).

The rule `simple`, to compare with: Student's t over the seeds alone, corrected within each slice.

Power: how often a variant whose Delta is 0.5 nats above the baseline's gets the label "more".
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_app.report.pairs import ESCAPED, LEARNED
from lightning_app.report.statistics import (
    FEW_SEEDS,
    LEAST_SEEDS,
    LEVEL,
    SMALL_FAMILY,
    Floats,
    best_by_seed,
    best_on_others,
    ended_alike,
    guarded_ps,
    holm_values,
    label_values,
    sign_flip_ps,
    t_intervals,
)

SEEDS, FAMILIES, SLICES = (3, 5, 10), (3, 23), (1, 6)
HOLDS = 0.06
ENTROPY, LOSS = 5.38, 4.4  # nats: H_uni, and the loss of every run without noise
OWN = np.array([0.06, 0.03])[:, None]  # sd of a run without warm-up and with it
EFFECT = 0.5  # nats
PART = 4_000_000  # numbers drawn at a time
# Half widths of the 95 % t intervals of Delta, 3 seeds, in `placements`: 4.303 sd / sqrt(3).
HALVES = (0.345, 0.908, 0.637, 0.975, 0.384, 0.204, 0.183, 0.485, 0.461, 0.385, 0.065, 0.345)
HALVES += (0.100, 0.151, 0.213, 0.085, 0.073, 0.095, 0.068, 0.025, 0.213, 0.113, 0.247, 0.252)
SPREADS = np.array(HALVES) * np.sqrt(3) / 4.303

# Here runs are worse without warm-up on average, so only the label "costs" is false.
HELPING = ("plateau, without warm-up", "10 % stall", "30 % stall", "50 % stall")

Shape = tuple[int, int, int, int, int]  # grid, slice, variant, warm-up, seed
Draw = Callable[[Shape, np.random.Generator], Floats]
Bounds = tuple[Floats, Floats]


@dataclass(frozen=True)
class Rates:
    """One line of the table, in shares of grids.

    NaN where a kind of grid has no such label; `need` with one rate, `compare` for losses.
    """

    noise: str
    seeds: int
    comparisons: int
    slices: int
    versus: float = np.nan
    own: float = np.nan
    need: float = np.nan
    power: float = np.nan
    compare: float = np.nan

    @property
    def holds(self) -> bool:
        """Whether no kind of false label is too frequent."""
        return not any(each > HOLDS for each in (self.versus, self.own, self.need, self.compare))


class Labels(NamedTuple):
    """The sign of each label or 0, [grid, slice, variant]; `versus` is without the baseline.

    `need` is [grid, variant], without variants for one slice.
    """

    versus: NDArray[np.int_]
    own: NDArray[np.int_]
    need: NDArray[np.int_]


def spread_out(
    kind: str, shape: tuple[int, ...], rng: np.random.Generator, log_sd: float = 1.0
) -> Floats:
    """Draws of mean 0 and standard deviation 1."""
    if kind == "normal":
        return rng.standard_normal(shape)
    if kind == "heavy-tailed":
        return rng.standard_t(3, shape) / np.sqrt(3)
    centre, variance = np.exp(log_sd**2 / 2), np.exp(log_sd**2) * np.expm1(log_sd**2)
    return (rng.lognormal(0.0, log_sd, shape) - centre) / np.sqrt(variance)


def plain(kind: str, scale: float = 1.0) -> Draw:
    """Noise that grows from the baseline to `scale` times as much in the last variant."""

    def draw(shape: Shape, rng: np.random.Generator) -> Floats:
        factors = np.linspace(1.0, scale, shape[2])[:, None, None]
        return LOSS + factors * OWN * spread_out(kind, shape, rng)

    return draw


def plateau(arms: int) -> Draw:
    """Runs of the first `arms` warm-ups leave the plateau late by chance."""

    def draw(shape: Shape, rng: np.random.Generator) -> Floats:
        late = rng.random(shape) < 0.3
        late[..., arms:, :] = False
        return np.where(late, 5.1, LOSS) + OWN * rng.standard_normal(shape)

    return draw


def stalls(share: float, arms: int = 1) -> Draw:
    """Runs of the first `arms` warm-ups stall with this chance."""

    def draw(shape: Shape, rng: np.random.Generator) -> Floats:
        stalled = rng.random(shape) < share
        stalled[..., arms:, :] = False
        return np.where(stalled, ENTROPY, LOSS - 1.0 + OWN * rng.standard_normal(shape))

    return draw


def ours(kind: str) -> Draw:
    """The spreads of Delta of our own 24 wirings, all of it in the runs without warm-up."""

    def draw(shape: Shape, rng: np.random.Generator) -> Floats:
        found = np.full(shape, LOSS - 1.5)
        noise = spread_out(kind, (*shape[:3], shape[4]), rng, log_sd=0.5)
        found[..., 0, :] += np.resize(SPREADS, shape[2])[:, None] * noise
        return np.minimum(found, ENTROPY)

    return draw


NOISE: dict[str, Draw] = {
    "normal": plain("normal"),
    "heavy-tailed": plain("heavy-tailed"),
    "skewed": plain("skewed"),
    "heavy-tailed, to 4 times": plain("heavy-tailed", 4.0),
    "skewed, to 4 times": plain("skewed", 4.0),
    "plateau, both arms": plateau(2),
    "plateau, without warm-up": plateau(1),
    "10 % stall": stalls(0.1),
    "30 % stall": stalls(0.3),
    "50 % stall": stalls(0.5),
    "30 % stall, both arms": stalls(0.3, arms=2),
    "our spreads, normal": ours("normal"),
    "our spreads, skewed": ours("skewed"),
}


SHIFTS, SPREAD = (0.0, 0.25, 0.5, 0.75, 1.0), (0.03, 0.06, 0.15)  # octaves; nats
CURVE_RATES = 6  # one octave apart


RISEN: dict[str, Callable[[Floats], Floats]] = {
    "parabola": lambda away: 0.7 * away**2,
    "V": lambda away: np.maximum(-0.8 * away, 2.2 * away),
    "flat": lambda away: 0.02 * away**2,
}
"""By how many nats the loss is above its smallest, by octaves from there."""


def over_rates(kind: str, shift: float, scale: float, noise: str = "normal") -> Draw:
    """Losses whose smallest mean is `LOSS` in both arms, at a rate that need not be tried.

    Skewed noise is that of the runs without warm-up alone, of 8 times the sd.
    """

    def draw(shape: Shape, rng: np.random.Generator) -> Floats:
        grids, rates, variants, warmups, _ = shape
        best = (rates - 1) / 2 + rng.uniform(-0.5, 0.5, (grids, 1, variants, 1, 1))
        best = best + shift * (np.arange(warmups)[:, None] - 0.5)
        away = np.arange(rates)[:, None, None, None] - best
        own = scale * rng.standard_normal(shape)
        if noise != "normal":
            own[:, :, :, 0] = 8 * scale * spread_out(noise, own[:, :, :, 0].shape, rng)
        return np.minimum(LOSS + RISEN[kind](away) + own, ENTROPY)

    return draw


def one_arm(kind: str) -> Draw:
    """Normal noise, except in the first arm without warm-up."""

    def draw(shape: Shape, rng: np.random.Generator) -> Floats:
        found = LOSS + OWN * rng.standard_normal(shape)
        odd = found[:, :, 0, 0]
        if kind == "modes":
            found = LOSS + (found - LOSS) / 6
            odd = found[:, :, 0, 0]
        if kind == "skewed":
            found[:, :, 0, 0] = LOSS + 8 * OWN[0] * spread_out(kind, odd.shape, rng)
        else:
            found[:, :, 0, 0] = odd + np.where(rng.random(odd.shape) < 0.5, -0.3, 0.3)
        return np.minimum(found, ENTROPY)

    return draw


FEW = {
    "one skewed arm": one_arm("skewed"),
    "one arm of two groups": one_arm("groups"),
    "one arm of two modes": one_arm("modes"),
    "30 % stall by luck": stalls(0.3, arms=2),
    "50 % stall by luck": stalls(0.5, arms=2),
}
MODES = {"metric, 30 % in a mode": 0.3, "metric, 50 % in a mode": 0.5}
PLANNED = 10  # seeds of a grid that may be stopped
CURVES = {
    f"{kind}, shift {shift:g}, sd {scale:g}": over_rates(kind, shift, scale)
    for kind in RISEN
    for shift in SHIFTS
    for scale in SPREAD
}
CURVES |= {
    f"{kind}, shift {shift:g}, one arm skewed": over_rates(kind, shift, 0.03, "skewed")
    for kind in RISEN
    for shift in (0.0, 0.5)
}


def labels(losses: Floats, *, need: bool = True) -> Labels:
    """The labels of a report; `losses` is [grid, slice, variant, warm-up, seed]."""
    seeds = losses.shape[-1]
    failed = losses >= ENTROPY
    late = _late(losses, failed)
    lost = losses[..., 0, :] - losses[..., 1, :]
    pooled = np.sqrt(lost.var(axis=-1, ddof=1).mean(axis=-1, keepdims=True))
    freedom = lost.shape[2] * (seeds - 1)
    versus = lost[:, :, 1:] - lost[:, :, :1]
    p_versus = guarded_ps(versus, np.sqrt(2) * pooled, freedom)
    p_own = guarded_ps(lost, pooled, freedom)
    if seeds < FEW_SEEDS:
        both = np.concatenate(
            [failed[:, :, 1:], np.broadcast_to(failed[:, :, :1], failed[:, :, 1:].shape)], axis=-1
        )
        ended = ended_alike(both).all(axis=-1)
        sound = np.asarray(~late.any(axis=(-2, -1)))
        p_versus = np.where(ended & sound[:, :, 1:] & sound[:, :, :1], p_versus, 1.0)
        alike = ended_alike(failed.reshape(*failed.shape[:-2], -1))
        p_own = np.where(alike & sound, p_own, 1.0)
    return Labels(
        *(_signs(p, values) for p, values in ((p_versus, versus), (p_own, lost))),
        need=need_labels(losses if need else losses[:, :1]),
    )


def need_labels(losses: Floats) -> NDArray[np.int_]:
    """The labels of N where both arms of a variant have the same rates, one octave apart."""
    if losses.shape[1] < 2:
        return np.zeros((len(losses), 0), dtype=int)
    rates = np.moveaxis(losses, 1, -2)  # [grid, variant, warm-up, rate, seed]
    places = np.arange(losses.shape[1], dtype=float)
    return need_of([rates[:, :, arm] for arm in (0, 1)], [places, places])


def need_of(arms: Sequence[Floats], places: Sequence[Floats]) -> NDArray[np.int_]:
    """The labels of N, by the bounds of the best losses (`report.warmup.needs`).

    Args:
        arms: The losses without warm-up and with it, each [grid, variant, rate, seed].
        places: The rates of each, in octaves.
    """
    found: list[Bounds] = []
    chosen: list[Floats] = []
    for losses, at in zip(arms, places, strict=True):
        failed = losses >= ENTROPY
        sound = np.asarray(~(failed | _late(losses, failed)).any(axis=-1))
        found.append(best_by_seed(losses, at, sound))
        best = best_on_others(losses)[..., None, :]
        chosen.append(np.take_along_axis(losses, best, axis=-2)[..., 0, :])
    lows, highs = found[0][0] - found[1][1], found[0][1] - found[1][0]
    ends = np.stack(chosen, axis=-2)  # [grid, variant, warm-up, seed]
    failed, seeds = ends >= ENTROPY, ends.shape[-1]
    pooled = (chosen[0] - chosen[1]).var(axis=-1, ddof=1)
    spread, freedom = np.sqrt(pooled.mean(axis=-1, keepdims=True)), lows.shape[1] * (seeds - 1)
    p, nearest = np.ones(lows.shape[:-1]), np.zeros(lows.shape)
    for values, sign in ((highs, -1), (lows, 1)):
        clear = np.isfinite(values).all(axis=-1)
        clear &= sign * np.where(clear, values.mean(axis=-1), 0.0) > 0
        risk = guarded_ps(np.where(clear[..., None], values, 0.0), spread, freedom)
        nearest = np.where(clear[..., None], values, nearest)
        p = np.where(clear, risk, p)
    alike = ended_alike(failed).all(axis=-1)
    if seeds < FEW_SEEDS:
        alike = ended_alike(failed.reshape(*failed.shape[:-2], -1))
    p = np.where(alike & ~_late(ends, failed).any(axis=(-2, -1)), p, 1.0)
    return _signs(p, nearest)


def at_best(losses: Floats) -> Floats:
    """The loss at the rate that is best for the other seeds, [grid, variant, warm-up, seed]."""
    rates = np.moveaxis(losses, 1, -2)
    chosen = best_on_others(rates)[..., None, :]
    return np.take_along_axis(rates, chosen, axis=-2)[..., 0, :]


def _late(losses: Floats, failed: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """The runs that half escaped, along the last axis."""
    gain = np.where(failed, 0.0, ENTROPY - losses)
    best = gain.max(axis=-1, keepdims=True)
    return (best >= LEARNED) & (gain < ESCAPED * best) & ~failed


def simple_labels(losses: Floats, *, need: bool = True) -> Labels:
    """The labels by Student's t alone, with Holm's correction within each slice."""
    lost = losses[..., 0, :] - losses[..., 1, :]
    versus = lost[:, :, 1:] - lost[:, :, :1]
    found = []
    for values in (versus, lost):
        p = np.nan_to_num(t_intervals(values)[2], nan=1.0)
        corrected = holm_values(p.reshape(-1, p.shape[-1])).reshape(p.shape)
        found.append(np.where(corrected < 1 - LEVEL, np.sign(values.mean(axis=-1)), 0).astype(int))
    if losses.shape[1] < 2 or not need:
        return Labels(*found, need=need_labels(losses[:, :1]))
    chosen = at_best(losses)
    values = chosen[..., 0, :] - chosen[..., 1, :]
    p = np.nan_to_num(t_intervals(values)[2], nan=1.0)
    corrected = holm_values(p.reshape(len(p), -1)).reshape(p.shape)
    signs = np.where(corrected < 1 - LEVEL, np.sign(values.mean(axis=-1)), 0).astype(int)
    return Labels(*found, need=signs)


def compare_labels(metric: Floats) -> NDArray[np.int_]:
    """The labels of `report.comparisons`; `metric` is [grid, value, seed], the baseline first."""
    values = metric[:, 1:] - metric[:, :1]
    spread = np.sqrt(values.var(axis=-1, ddof=1).mean(axis=-1, keepdims=True))
    if metric.shape[2] < FEW_SEEDS:
        within = metric.var(axis=-1, ddof=1).mean(axis=-1, keepdims=True)
        spread = np.maximum(spread, np.sqrt(2 * within))
    return _signs(guarded_ps(values, spread, values.shape[1] * (values.shape[2] - 1)), values)


RULES = {"report": labels, "simple": simple_labels}


def _signs(p: Floats, values: Floats) -> NDArray[np.int_]:
    """The sign of each label or 0, corrected over all slices and variants of a grid."""
    found = np.nan_to_num(p, nan=1.0).reshape(len(p), -1)
    flips = np.zeros_like(found)
    if found.shape[1] < SMALL_FAMILY:  # a larger one does not need them
        flips = sign_flip_ps(values).reshape(found.shape)
    corrected = label_values(found, flips).reshape(p.shape)
    return np.where(corrected < 1 - LEVEL, np.sign(values.mean(axis=-1)), 0).astype(int)


def rates(
    noise: str,
    seeds: int,
    comparisons: int,
    slices: int,
    grids: int,
    rng: np.random.Generator,
    rule: str = "report",
) -> Rates:
    """Draw the grids in parts, and count those with a false label and those with a true one."""
    shape = (slices, comparisons + 1, 2, seeds)
    part = max(1, min(grids, PART // int(np.prod(shape))))
    draw = NOISE[noise]
    wrong = [-1] if noise in HELPING else [-1, 1]
    false_versus = false_own = false_need = found = drawn = 0
    while drawn < grids:
        count = min(part, grids - drawn)
        losses = draw((count, *shape), rng)
        given = RULES[rule](losses)
        false_versus += int(given.versus.any(axis=(1, 2)).sum())
        false_own += int(np.isin(given.own, wrong).any(axis=(1, 2)).sum())
        false_need += int(np.isin(given.need, wrong).any(axis=1).sum())
        losses[:, 0, 1, 1] -= EFFECT  # warm-up helps the first variant at the first rate
        found += int((RULES[rule](losses, need=False).versus[:, 0, 0] > 0).sum())
        drawn += count
    shares = [count / grids for count in (false_versus, false_own, false_need, found)]
    if slices < 2:
        shares[2] = np.nan
    return Rates(noise, seeds, comparisons, slices, *shares)


def of_need(noise: str, seeds: int, grids: int, rng: np.random.Generator) -> Rates:
    """The labels of N of one variant whose losses depend on the rate."""
    shape, part, found, drawn = (CURVE_RATES, 1, 2, seeds), 500, 0, 0
    while drawn < grids:
        count = min(part, grids - drawn)
        found += int(need_labels(CURVES[noise]((count, *shape), rng)).any(axis=1).sum())
        drawn += count
    return Rates(noise, seeds, 0, CURVE_RATES, need=found / grids)


def of_few(noise: str, seeds: int, comparisons: int, grids: int, rng: np.random.Generator) -> Rates:
    """The labels of Delta and of the interaction of few variants."""
    found = labels(FEW[noise]((grids, 1, comparisons + 1, 2, seeds), rng))
    versus = _share(found.versus) if comparisons else np.nan
    return Rates(noise, seeds, comparisons, 1, versus, _share(found.own))


def of_metric(
    noise: str, seeds: int, comparisons: int, grids: int, rng: np.random.Generator
) -> Rates:
    """The labels of a metric with two modes."""
    shape = (grids, comparisons + 1, seeds)
    modes = rng.random(shape) < MODES[noise]
    found = compare_labels(modes + 0.05 * rng.standard_normal(shape))
    return Rates(noise, seeds, comparisons, 1, compare=_share(found))


def of_stopping(planned: bool, comparisons: int, grids: int, rng: np.random.Generator) -> Rates:
    """The labels of a user who stops at the first one, with normal noise."""
    losses = NOISE["normal"]((grids, 1, comparisons + 1, 2, PLANNED), rng)
    versus, own = np.zeros(grids, dtype=bool), np.zeros(grids, dtype=bool)
    for seeds in range(PLANNED if planned else LEAST_SEEDS, PLANNED + 1):
        found = labels(losses[..., :seeds])
        versus |= found.versus.any(axis=(1, 2))
        own |= found.own.any(axis=(1, 2))
    share = float(versus.mean()) if comparisons else np.nan
    noise = "planned seeds" if planned else "stopped at the first label"
    return Rates(noise, PLANNED, comparisons, 1, share, float(own.mean()))


def _share(found: NDArray[np.int_]) -> float:
    """The share of grids with any label."""
    return float(found.reshape(len(found), -1).any(axis=1).mean())


def simulate(grids: int, seed: int, rule: str) -> Iterator[Rates]:
    """Every row, in the order of the table."""
    rng = np.random.default_rng(seed)
    if rule == "report":
        for noise in FEW:
            for comparisons in (0, 1, 2, *FAMILIES):
                for seeds in (2, *SEEDS):
                    yield of_few(noise, seeds, comparisons, grids, rng)
        for noise in MODES:
            for comparisons in (1, 2, *FAMILIES):
                for seeds in (2, *SEEDS):
                    yield of_metric(noise, seeds, comparisons, grids, rng)
        for planned in (False, True):
            for comparisons in (0, 1, *FAMILIES):
                yield of_stopping(planned, comparisons, grids, rng)
    for noise in CURVES if rule == "report" else ():
        for seeds in SEEDS:
            yield of_need(noise, seeds, grids, rng)
    for noise in NOISE:
        for slices in SLICES:
            for comparisons in FAMILIES:
                for seeds in SEEDS:
                    yield rates(noise, seeds, comparisons, slices, grids, rng, rule)


def main() -> None:
    """Print the table, and write it to the given file."""
    parser = argparse.ArgumentParser(description="False labels of a report, and power.")
    parser.add_argument("--grids", type=int, default=20_000, help="of each kind (default: 20000)")
    parser.add_argument("--seed", type=int, default=1, help="of the simulation (default: 1)")
    parser.add_argument("--rule", choices=RULES, default="report", help="default: report")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    args = parser.parse_args()
    started, rows = time.perf_counter(), []
    print(f"{args.grids} grids of each kind, seed {args.seed}, rule {args.rule}; shares in %")
    print(f"{'noise':<27}{'rates':>6}{'compared':>9}{'seeds':>6}", end="")
    print(f"{'versus':>8}{'own':>6}{'need':>6}{'compare':>8}{'power':>7}  holds")
    for row in simulate(args.grids, args.seed, args.rule):
        rows.append(row)
        print(
            f"{row.noise:<27}{row.slices:>6}{row.comparisons:>9}{row.seeds:>6}"
            f"{100 * row.versus:>8.1f}{100 * row.own:>6.1f}{100 * row.need:>6.1f}"
            f"{100 * row.compare:>8.1f}{100 * row.power:>7.1f}"
            f"  {'yes' if row.holds else 'NO'}",
            flush=True,
        )
    print(f"{time.perf_counter() - started:.0f} s")
    if args.json:
        args.json.write_text(
            json.dumps([asdict(row) | {"holds": row.holds} for row in rows], indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
