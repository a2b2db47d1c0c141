"""How much each variant needs learning-rate warm-up.

Symbols: `l(w, lr, s)` is the loss of one run in nats per token, a failure counted as `H_uni`
(`Cell.loss`); `w` the warm-up in updates, `ref` the grid's reference warm-up, `s` the seed, `H_uni`
the unigram entropy of the validation targets. A bar is the mean over seeds. Runs are compared seed
by seed: a seed that has not finished every run that a score needs is left out of it, and the note
says so. Intervals are two-sided at 95 %. What is not defined is NaN with the reason in the note.

A failure lies nats away from the rest, so an interval is of seeds that end alike: there is none
where some seeds of an arm failed and others did not, and from fewer than 5 seeds no p value where
the arms that it compares differ in failures either. `stalls` has the intervals of that.
`benchmarks/coverage.py` measures what these rules are worth.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

from lightning_app.analysis.runs import Cell, Grid, failures, outcomes
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
    wilson_interval,
)
from lightning_app.records import OUTCOMES

if TYPE_CHECKING:
    import pandas as pd

NEVER = "never learned"
NOT_YET = "not yet learned within this budget"
LEARNED = 0.1  # nats under `H_uni` that a mean loss must reach to count as having learned anything

Key = tuple[int, float, int]  # warm-up, rate, seed


@dataclass(frozen=True, kw_only=True)
class Score:
    """One row of `sensitivity.csv`. `lr` is NaN for a score over all rates.

    `each` holds seed and value where there are fewer than 5 seeds, or no interval as some seeds
    failed; `bootstrap` the ends of the bootstrap-t interval, from 5 seeds. The table has both in
    the note.
    """

    group: str
    lr: float
    variant: str
    score: str
    estimate: float = math.nan
    low: float = math.nan
    high: float = math.nan
    p: float = math.nan
    p_holm: float = math.nan
    seeds: int = 0
    cells: int = 0
    diverged: int = 0
    note: str = ""
    each: tuple[tuple[int, float], ...] = ()
    bootstrap: tuple[float, float] | None = None


@dataclass(frozen=True, kw_only=True)
class Arm:
    """The planned cells of one variant within one group of the other axes.

    `cells` are those with a loss; `lossless` have finished without a finite one.
    """

    group: str
    variant: str
    baseline: str | None
    planned: frozenset[Key]
    cells: Mapping[Key, Cell] = field(repr=False)
    lossless: frozenset[Key] = frozenset()

    @property
    def rates(self) -> list[float]:
        return sorted({lr for _, lr, _ in self.planned})

    @property
    def warmups(self) -> list[int]:
        return sorted({warmup for warmup, _, _ in self.planned})

    @property
    def seeds(self) -> list[int]:
        return sorted({seed for _, _, seed in self.planned})

    def at(self, points: Iterable[tuple[int, float]]) -> "Paired":
        """The seeds that finished at every one of the (warm-up, rate) points."""
        points = sorted(set(points))
        planned = [s for s in self.seeds if all((*point, s) in self.planned for point in points)]
        seeds = [s for s in planned if all((*point, s) in self.cells for point in points)]
        lossless = [s for s in planned if any((*point, s) in self.lossless for point in points)]
        return Paired(self.cells, points, seeds, len(planned), len(lossless))


class Paired:
    """Losses of the same seeds at several (warm-up, rate) points."""

    def __init__(
        self,
        cells: Mapping[Key, Cell],
        points: Sequence[tuple[int, float]],
        seeds: Sequence[int],
        planned: int,
        lossless: int,
    ) -> None:
        self.points, self.seeds, self.planned, self.lossless = points, seeds, planned, lossless
        self.runs = {(point, s): cells[(*point, s)] for point in points for s in seeds}

    def losses(self, point: tuple[int, float]) -> list[float]:
        return [self.runs[point, seed].loss for seed in self.seeds]

    def mean(self, point: tuple[int, float]) -> float:
        return mean(self.losses(point))

    @property
    def entropy(self) -> float:
        return mean([cell.entropy for cell in self.runs.values()])

    @property
    def counts(self) -> dict[str, Any]:
        diverged = sum(cell.state == "diverged" for cell in self.runs.values())
        return {"seeds": len(self.seeds), "cells": len(self.runs), "diverged": diverged}

    @property
    def missing(self) -> str:
        return _notes(_absent("seeds", self.planned, len(self.seeds), self.lossless), self.early)

    @property
    def early(self) -> str:
        """Which runs have not yet learned and so count as the unigram entropy."""
        counted = [
            f"{capped} of {len(self.seeds)} at warm-up {point[0]}"
            for point in self.points
            if (capped := sum(self.runs[point, seed].capped for seed in self.seeds))
        ]
        if not counted:
            return ""
        return f"not yet learned {' and '.join(counted)}, counted as the unigram entropy"

    def failed(self, point: tuple[int, float]) -> list[bool]:
        return [self.runs[point, seed].state == "diverged" for seed in self.seeds]

    @property
    def mixed(self) -> str:
        """Why there is no interval over these seeds, where some failed and others did not."""
        counted = [
            f"{sum(self.failed(point))} of {len(self.seeds)} at warm-up {point[0]}"
            for point in self.points
            if not ended_alike(self.failed(point))
        ]
        if not counted:
            return ""
        return f"{failures(self.runs.values())} {' and '.join(counted)}, so no interval over seeds"


def scores_frame(rows: Sequence[Score]) -> "pd.DataFrame":
    """The scores as a table, one row per group, rate, variant and score."""
    import pandas as pd

    columns = [column.name for column in fields(Score)][:-2]
    table = []
    for row in rows:
        listed = ", ".join(f"{seed}: {value:.4f}" for seed, value in row.each)
        ends = ", ".join(f"{end:.4f}" for end in row.bootstrap or ())
        note = _notes(row.note, listed and f"per seed {listed}", ends and f"bootstrap-t [{ends}]")
        table.append(asdict(row) | {"note": note})
    return pd.DataFrame(table, columns=columns)


def scores(grid: Grid) -> list[Score]:
    """Every score of every variant, in the order of the plan; none where bad runs were pruned.

    Of a grid that joins several: those of each, with its own reference.
    """
    if grid.parts:
        return [score for part in grid.parts for score in scores(part)]
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


def arms(grid: Grid) -> list[Arm]:
    """The cells by group and variant. A finished run without a finite loss counts as absent."""
    planned: dict[tuple[str, str], dict[Key, Cell]] = {}
    for cell in grid.cells:
        key = (cell.warmup or 0, cell.lr or 0.0, cell.seed or 0)
        planned.setdefault((cell.group, cell.variant), {})[key] = cell
    return [
        Arm(
            group=group,
            variant=variant,
            baseline=next(iter(cells.values())).baseline,
            planned=frozenset(cells),
            cells={key: cell for key, cell in cells.items() if _has_loss(cell)},
            lossless=frozenset(k for k, c in cells.items() if c.finished and not _has_loss(c)),
        )
        for (group, variant), cells in planned.items()
    ]


def delta(arm: Arm, lr: float, grid: Grid) -> Score:
    """`Delta = mean_s [l(0, s) - l(ref, s)]`, nats per token; Student's t interval over seeds.

    Undefined where the variant never learned, with the reference warm-up either.
    """
    reason, pairs, ref = _against_reference(arm, lr, grid)
    reason = reason or _never(pairs, (ref, lr))
    if reason:
        return _undefined(arm, lr, "delta", reason, pairs)
    differences = _differences(pairs, (0, lr), (ref, lr))
    return Score(
        **_who(arm, lr, "delta"),
        estimate=mean(differences),
        **pairs.counts,
        **_over_seeds(pairs.seeds, differences, pairs.mixed, pairs.missing),
    )


def relative_delta(arm: Arm, lr: float, grid: Grid) -> Score:
    """`Delta / (H_uni - l_bar(ref))`: the share of what is learned that is lost without warm-up.

    A ratio of two means over the same seeds; the interval is Fieller's (1954). Undefined where the
    denominator is under 0.1 nats: the variant never learned, with warm-up either.
    """
    reason, pairs, ref = _against_reference(arm, lr, grid)
    reason = reason or _never(pairs, (ref, lr))
    if reason:
        return _undefined(arm, lr, "relative_delta", reason, pairs)
    lost = _differences(pairs, (0, lr), (ref, lr))
    learned = [
        pairs.runs[(ref, lr), s].entropy - pairs.runs[(ref, lr), s].loss for s in pairs.seeds
    ]
    low, high = (math.nan, math.nan) if pairs.mixed else fieller_interval(lost, learned)
    ratios = [a / b if b else math.nan for a, b in zip(lost, learned, strict=True)]
    return Score(
        **_who(arm, lr, "relative_delta"),
        estimate=mean(lost) / mean(learned),
        low=low,
        high=high,
        **pairs.counts,
        note=_notes(pairs.missing, pairs.mixed or _no_interval(ratios, low)),
        each=_each(pairs.seeds, ratios, pairs.mixed),
    )


def interaction(arm: Arm, baseline: Arm | None, lr: float, grid: Grid) -> Score:
    """`Delta_v - Delta_baseline` over the same seeds: does it need warm-up more than the baseline?

    `mean_s [(l_v(0, s) - l_v(ref, s)) - (l_b(0, s) - l_b(ref, s))]`, nats per token; t interval,
    and the p value of the two-sided t test of zero (`holm` corrects it over the variants).
    """
    reason, own, ref = _against_reference(arm, lr, grid)
    reason = reason or _never(own, (ref, lr))
    if arm.baseline is None:
        reason = "the grid file names no baseline"
    elif arm.baseline == arm.variant:
        reason = "is the baseline"
    elif baseline is None or lr not in baseline.rates:
        reason = f"no arm of the baseline {arm.baseline}"
    if reason or baseline is None:
        return _undefined(arm, lr, "interaction", reason, own)
    reason, other, _ = _against_reference(baseline, lr, grid)
    reason = reason or _never(other, (ref, lr))
    seeds = [seed for seed in own.seeds if seed in other.seeds]
    if reason or not seeds:
        reason = f"baseline: {reason}" if reason else "no seed finished here and in the baseline"
        return _undefined(arm, lr, "interaction", reason, own)
    points = [(0, lr), (ref, lr)]
    own = Paired(arm.cells, points, seeds, own.planned, own.lossless)
    other = Paired(baseline.cells, points, seeds, own.planned, other.lossless)
    differences = [
        ours - theirs
        for ours, theirs in zip(
            _differences(own, *points), _differences(other, *points), strict=True
        )
    ]
    mixed = _notes(own.mixed, other.mixed and f"baseline {other.mixed}")
    alike = all(ended_alike(own.failed(point) + other.failed(point)) for point in points)
    counts = {name: own.counts[name] + other.counts[name] for name in ("cells", "diverged")}
    rest = _over_seeds(seeds, differences, mixed, own.missing)
    if alike or len(seeds) >= FEW_SEEDS:
        rest["p"] = t_interval(differences)[2]
    elif len(seeds) > 1:
        chance = f"{len(seeds)} seeds are too few to tell stalls from chance, so no p value"
        rest["note"] = _notes(rest["note"], chance)
    return Score(
        **_who(arm, lr, "interaction"),
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
        return _undefined(arm, lr, "detectable", reason)
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
        **_who(arm, lr, "detectable"),
        estimate=detectable(spread, versus.seeds),
        seeds=versus.seeds,
        cells=versus.cells,
        diverged=versus.diverged,
        note=_notes(
            f"{POWER:.0%} power, sd {spread:.4f} with {freedom} degrees of freedom",
            "" if math.isnan(strict) else f"{strict:.4f} at Holm's strictest step of {tested}",
        ),
    )


def stalls(arm: Arm, lr: float, warmup: int) -> Score:
    """`stalls w=...`: failed runs / all finished runs at one warm-up; Wilson's interval."""
    name = f"stalls w={warmup}"
    runs = [
        arm.cells[key]
        for key in sorted(arm.planned)
        if key in arm.cells and key[:2] == (warmup, lr)
    ]
    planned = sum(key[:2] == (warmup, lr) for key in arm.planned)
    if not planned:
        return _undefined(arm, lr, name, "not in the grid")
    if not runs:
        return _undefined(arm, lr, name, "no finished run")
    failed = sum(cell.state == "diverged" for cell in runs)
    low, high = wilson_interval(failed, len(runs))
    lossless = sum(key[:2] == (warmup, lr) for key in arm.lossless)
    return Score(
        **_who(arm, lr, name),
        estimate=failed / len(runs),
        low=low,
        high=high,
        seeds=len(runs),
        cells=len(runs),
        diverged=failed,
        note=_notes(_absent("runs", planned, len(runs), lossless), _ends(runs)),
    )


def _ends(runs: Sequence[Cell]) -> str:
    """How runs ended, where it is more than that some of them stalled."""
    words = {cell.word for cell in runs} - {OUTCOMES["trained"], OUTCOMES["stalled"]}
    return outcomes(runs) if words else ""


def flatness(arm: Arm, lr: float) -> Score:
    """`R_w = (mean_w l_bar - min_w l_bar) / (H_uni - min_w l_bar)`: 0 is flat over the warm-ups.

    Undefined ("never learned") where the denominator is under 0.1 nats. No interval: the minimum of
    noisy means is biased, and no seed alone has it.
    """
    reason, pairs = _over_warmups(arm, lr)
    if not reason:
        best = min(pairs.points, key=pairs.mean)
        reason = _never(pairs, best)
    if reason:
        return _undefined(arm, lr, "R_w", reason, pairs)
    means = [pairs.mean(point) for point in pairs.points]
    ratio = (mean(means) - min(means)) / (pairs.entropy - min(means))
    return Score(**_who(arm, lr, "R_w"), estimate=ratio, **pairs.counts, note=pairs.missing)


def wortsman(arm: Arm, lr: float) -> Score:
    """`S_w = mean_w l_bar - min_w l_bar`, nats per token (Wortsman et al. 2023, over warm-ups).

    Only for comparison with that paper: a variant that stalls everywhere comes out as insensitive.
    """
    reason, pairs = _over_warmups(arm, lr)
    if reason:
        return _undefined(arm, lr, "S_w", reason, pairs)
    means = [pairs.mean(point) for point in pairs.points]
    never = _never(pairs, min(pairs.points, key=pairs.mean))
    return Score(
        **_who(arm, lr, "S_w"),
        estimate=mean(means) - min(means),
        **pairs.counts,
        note=_notes(never, pairs.missing),
    )


def retuned(arm: Arm) -> Score:
    """`D = min_lr l_bar(0, lr) - min_{lr, w} l_bar(w, lr)`, nats per token.

    What no warm-up costs when the rate is tuned again without it.
    """
    pairs = arm.at((warmup, lr) for warmup, lr, _ in arm.planned)
    bare = [point for point in pairs.points if point[0] == 0]
    reason = "" if bare else "no arm without warm-up"
    reason = reason or _nothing(pairs)
    best = pairs.points[0] if reason else min(pairs.points, key=pairs.mean)
    reason = reason or _never(pairs, best)
    if reason:
        return _undefined(arm, math.nan, "D", reason, pairs)
    cost = min(pairs.mean(point) for point in bare) - pairs.mean(best)
    return Score(**_who(arm, math.nan, "D"), estimate=cost, **pairs.counts, note=pairs.missing)


def largest_rate(arm: Arm, warmup: int) -> Score:
    """`eta_max w=...`: the largest rate of the grid at which no finished run failed."""
    name = f"eta_max w={warmup}"
    runs: dict[float, list[Cell]] = {}
    for key in sorted(arm.planned):
        if key[0] == warmup and key in arm.cells:
            runs.setdefault(key[1], []).append(arm.cells[key])
    finished = [cell for cells in runs.values() for cell in cells]
    failed = {lr: sum(cell.state == "diverged" for cell in cells) for lr, cells in runs.items()}
    sound = [lr for lr, count in failed.items() if count == 0]
    counts: dict[str, Any] = {
        "seeds": len({key[2] for key in arm.planned if key[0] == warmup and key in arm.cells}),
        "cells": len(finished),
        "diverged": sum(failed.values()),
    }
    planned = sum(key[0] == warmup for key in arm.planned)
    if not sound:
        reason = f"{failures(finished)} at every rate" if runs else "no finished run"
        return Score(**_who(arm, math.nan, name), **counts, note=reason)
    best = max(sound)
    lossless = sum(key[0] == warmup for key in arm.lossless)
    note = _notes(
        "the largest rate of the grid: a lower bound" if best == max(arm.rates) else "",
        _smaller([cell for lr, cells in runs.items() if lr < best for cell in cells]),
        _absent("runs", planned, len(finished), lossless),
    )
    return Score(**_who(arm, math.nan, name), estimate=best, **counts, note=note)


def _smaller(cells: Sequence[Cell]) -> str:
    failed = failures(cells)
    return f"a smaller rate {failed}" if failed else ""


def holm(rows: Sequence[Score]) -> list[Score]:
    """The rows with their p values corrected (`holm_values`); they are the family.

    A comparison whose p value is withheld stays in the family, as if it were 1.
    """
    values = [1.0 if _compared(row) and math.isnan(row.p) else row.p for row in rows]
    corrected = zip(rows, holm_values(values), strict=True)
    return [row if math.isnan(row.p) else replace(row, p_holm=float(p)) for row, p in corrected]


def _compared(row: Score) -> bool:
    return not math.isnan(row.estimate) and row.seeds > 1


def _against_reference(arm: Arm, lr: float, grid: Grid) -> tuple[str, Paired, int]:
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
    return _nothing(pairs), pairs, ref


def _over_warmups(arm: Arm, lr: float) -> tuple[str, Paired]:
    points = {(warmup, rate) for warmup, rate, _ in arm.planned if rate == lr}
    pairs = arm.at(points)
    return ("one warm-up only" if len(points) < 2 else _nothing(pairs)), pairs


def _absent(what: str, planned: int, there: int, lossless: int) -> str:
    """What a score goes without, in words."""
    absent = planned - there - lossless
    return _notes(
        f"{absent} of {planned} {what} not finished" if absent else "",
        f"{lossless} of {planned} {what} without a finite loss" if lossless else "",
    )


def _has_loss(cell: Cell) -> bool:
    return math.isfinite(cell.loss) and math.isfinite(cell.entropy)


def _nothing(pairs: Paired) -> str:
    if pairs.seeds:
        return ""
    lossless = f"; {pairs.missing}" if pairs.lossless else ""
    return f"no seed has finished every run that it needs{lossless}"


def _never(pairs: Paired, point: tuple[int, float]) -> str:
    if pairs.seeds and pairs.entropy - pairs.mean(point) >= LEARNED:
        return ""
    ends = {pairs.runs[point, seed].outcome for seed in pairs.seeds}
    early = "not_yet_learned" in ends and ends <= {"not_yet_learned", "trained"}
    return NOT_YET if early else NEVER


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
        "note": _notes(missing, mixed or _no_interval(values, low)),
        "each": _each(seeds, values, mixed),
        "bootstrap": None if math.isnan(ends[0]) else ends,
    }


def _each(
    seeds: Sequence[int], values: Sequence[float], mixed: str
) -> tuple[tuple[int, float], ...]:
    few = len(seeds) < FEW_SEEDS or mixed
    return tuple(zip(seeds, values, strict=True)) if few else ()


def _no_interval(values: Sequence[float], low: float) -> str:
    """Why there is no interval, if there is none."""
    if not math.isnan(low):
        return ""
    if len(values) == 1:
        return "one seed, no interval"
    spread = not math.isnan(t_interval(values)[0])
    return "unbounded interval" if spread else "no spread between seeds, no interval"


def _notes(*parts: str) -> str:
    return "; ".join(part for part in parts if part)


def _who(arm: Arm, lr: float, score: str) -> dict[str, Any]:
    return {"group": arm.group, "lr": lr, "variant": arm.variant, "score": score}


def _undefined(arm: Arm, lr: float, score: str, reason: str, pairs: Paired | None = None) -> Score:
    counts: dict[str, Any] = pairs.counts if pairs else {}
    return Score(**_who(arm, lr, score), **counts, note=reason)
