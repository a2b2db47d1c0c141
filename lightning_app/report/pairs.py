"""Pairs of runs with equal seeds: scores of arms, steps saved, and stalls.

The symbols are those of `lightning_app.report.warmup`."""

import itertools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from lightning_app.config.tree import label
from lightning_app.core.errors import UserError
from lightning_app.report.results import LEARNING_RATE, CellResult, GridResults, failures, outcomes
from lightning_app.report.statistics import (
    LEVEL,
    Estimate,
    ended_alike,
    failures_p,
    mean,
    of_seeds,
    wilson_interval,
)
from lightning_app.runs.records import OUTCOMES

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, kw_only=True)
class Score(Estimate):
    """One row of `sensitivity.csv`. `lr` is NaN for a score over all rates.

    `bound` is ">=" or "<=" where the estimate is censored, and "?" where it is on both sides.
    `each` holds the values of the seeds if they are shown: with fewer than 5 seeds, or without an
    interval because some seeds failed; the table has them in the note. `inner`: whether the best
    rates of most seeds lie between others, at most an octave away. Of a score over rates, `tried`
    is the number of rates without warm-up and with it, and `best` the median of the best ones.
    `floor` is the least p value that failures allow (`no_less_than_failures`), `mixed` whether
    some seeds of an arm failed and others did not, `never` whether no run of either warm-up
    learned. Of a score over several arms, `stalled` is the largest `stall_difference` of them.
    """

    group: str
    lr: float
    variant: str
    score: str
    bound: str = ""
    cells: int = 0
    diverged: int = 0
    each: tuple[tuple[int, float], ...] = ()
    inner: bool = False
    tried: tuple[int, int] = (0, 0)
    floor: float = 0.0
    mixed: bool = False
    never: bool = False
    stalled: float = 0.0
    best: tuple[float, float] = (math.nan, math.nan)


COLUMNS = (
    *("group", "lr", "variant", "score", "estimate", "low", "high", "p", "p_holm", "p_sign"),
    *("holm_low", "holm_high", "bound", "seeds", "cells", "diverged", "note"),
)
"""The columns of `sensitivity.csv`."""


def bound_of(at_most: bool, at_least: bool) -> str:
    """`Score.bound` of an estimate that is censored above, below, on both sides or not at all."""
    return "?" if at_most and at_least else "<=" * at_most + ">=" * at_least


def scores_frame(rows: Sequence[Score]) -> "pd.DataFrame":
    """The scores as a table, one row per group, rate, variant and score."""
    import pandas as pd

    table = []
    for row in rows:
        listed = ", ".join(f"{seed}: {_shown(value)}" for seed, value in row.each)
        note = join_notes(row.note, listed and f"per seed {listed}")
        table.append(asdict(row) | {"note": note})
    return pd.DataFrame(table, columns=list(COLUMNS))


def _shown(value: float) -> str:
    return "undefined" if math.isnan(value) else f"{value:.4f}"


def join_notes(*parts: str) -> str:
    return "; ".join(part for part in parts if part)


NEVER = "never learned"
ELSEWHERE = "learned only without the reference warm-up"
IS_BASELINE = "is the baseline"
NOT_YET = "not yet learned within this budget"
UNFINISHED = "not finished"
LEARNED = 0.1  # a variant has learned if its mean loss is this many nats under `H_uni`
Key = tuple[int, float, int]  # warm-up, rate, seed


@dataclass(frozen=True, kw_only=True)
class Arm:
    """The planned cells of one variant within one group of the other axes.

    `cells` holds the finished ones. `of_seed`: each seed is a study with trials of its own.
    """

    group: str
    variant: str
    baseline: str | None
    planned: frozenset[Key]
    cells: Mapping[Key, CellResult] = field(repr=False)
    of_seed: bool = False

    @property
    def rates(self) -> list[float]:
        return sorted({lr for _, lr, _ in self.planned})

    def rates_at(self, warmup: int) -> list[float]:
        """The rates planned with a warm-up; refined arms have rates of their own."""
        return sorted({lr for other, lr, _ in self.planned if other == warmup})

    def rates_of(self, warmup: int, seed: int) -> list[float]:
        """The rates planned with a warm-up and a seed, which may be a study of its own."""
        return sorted({lr for other, lr, s in self.planned if (other, s) == (warmup, seed)})

    @property
    def warmups(self) -> list[int]:
        return sorted({warmup for warmup, _, _ in self.planned})

    @property
    def seeds(self) -> list[int]:
        return sorted({seed for _, _, seed in self.planned})

    def at(self, points: Iterable[tuple[int, float]]) -> "Paired":
        """The seeds that finished at every one of the (warm-up, rate) points."""
        points = sorted(set(points))
        planned = self.planned_at(points)
        seeds = [s for s in planned if all((*point, s) in self.cells for point in points)]
        return Paired(self.cells, points, seeds, len(planned))

    def planned_at(self, points: Collection[tuple[int, float]]) -> list[int]:
        """The seeds that are planned at every one of the points."""
        return [s for s in self.seeds if all((*point, s) in self.planned for point in points)]


class Paired:
    """Losses of the same seeds at several (warm-up, rate) points."""

    def __init__(
        self,
        cells: Mapping[Key, CellResult],
        points: Sequence[tuple[int, float]],
        seeds: Sequence[int],
        planned: int,
    ) -> None:
        self.points, self.seeds, self.planned = points, seeds, planned
        self.cells = cells
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
        return join_notes(unfinished("seeds", self.planned, len(self.seeds)), self.early)

    @property
    def early(self) -> str:
        """A note on runs that have not yet learned and so count as the unigram entropy."""
        counted = [
            f"{capped} of {len(self.seeds)} at warm-up {point[0]}"
            for point in self.points
            if (capped := sum(self.runs[point, seed].capped for seed in self.seeds))
        ]
        if not counted:
            return ""
        return f"not yet learned {' and '.join(counted)}, counted as the unigram entropy"

    def learned_with_another_warmup(self, rate: float) -> bool:
        """Whether the finished runs at a rate learned with any warm-up, in the mean over seeds."""
        margins: dict[int, list[float]] = {}
        for (warmup, lr, _), cell in self.cells.items():
            if lr == rate:
                margins.setdefault(warmup, []).append(cell.entropy - cell.loss)
        return any(mean(each) >= LEARNED for each in margins.values())

    def failed(self, point: tuple[int, float]) -> list[bool]:
        return [self.runs[point, seed].state == "diverged" for seed in self.seeds]

    @property
    def mixed(self) -> str:
        """Why there is no interval over these seeds, if some failed and others did not."""
        counted = " and ".join(
            f"{sum(self.failed(point))} of {len(self.seeds)} at warm-up {point[0]}"
            for point in self.points
            if not ended_alike(self.failed(point))
        )
        kinds = failures(self.runs.values())
        return f"{kinds} {counted}, so no interval over seeds" if counted else ""


def arms(grid: GridResults) -> list[Arm]:
    """The cells by group and variant."""
    planned: dict[tuple[str, str], dict[Key, CellResult]] = {}
    for cell in grid.cells:
        key = (cell.warmup or 0, cell.lr or 0.0, cell.seed or 0)
        known = planned.setdefault((cell.group, cell.variant), {})
        if key in known:
            raise UserError(
                f"{grid.folder}: '{cell.variant}' in '{cell.group}' names two settings, of "
                f"{known[key].name} and {cell.name}; change `labels` in the grid file"
            )
        known[key] = cell
    return [
        Arm(
            group=group,
            variant=variant,
            baseline=next(iter(cells.values())).baseline,
            planned=frozenset(cells),
            cells={key: cell for key, cell in cells.items() if cell.finished},
            of_seed=grid.trials > 0,
        )
        for (group, variant), cells in planned.items()
    ]


def unfinished(what: str, planned: int, finished: int) -> str:
    """A note on the planned runs or seeds that have not finished."""
    missing = planned - finished
    return f"{missing} of {planned} {what} {UNFINISHED}" if missing else ""


def why_nothing(pairs: Paired) -> str:
    """Why there is no score; empty if there is one."""
    return "" if pairs.seeds else "no seed has finished every run that it needs"


def why_never_learned(pairs: Paired, point: tuple[int, float]) -> str:
    """Why no score is defined, if the variant did not learn at this point; else empty."""
    if pairs.entropy - pairs.mean(point) >= LEARNED:
        return ""
    outcomes = {pairs.runs[point, seed].outcome for seed in pairs.seeds}
    if not outcomes.isdisjoint({"not_yet_learned", "trained"}):
        return NOT_YET
    return ELSEWHERE if pairs.learned_with_another_warmup(point[1]) else NEVER


def score_identity(arm: Arm, lr: float, score: str) -> dict[str, Any]:
    """The fields that identify a score."""
    return {"group": arm.group, "lr": lr, "variant": arm.variant, "score": score}


def undefined(arm: Arm, lr: float, score: str, reason: str, pairs: Paired | None = None) -> Score:
    """A score without a value, with the reason in its note."""
    counts: dict[str, Any] = pairs.counts if pairs else {}
    return Score(**score_identity(arm, lr, score), **counts, note=reason)


def stalls(arm: Arm, lr: float, warmup: int) -> Score:
    """`stalls w=...`: failed runs / all finished runs at one warm-up; Wilson's interval."""
    name = f"stalls w={warmup}"
    runs = [arm.cells[key] for key in sorted(arm.cells) if key[:2] == (warmup, lr)]
    planned = sum(key[:2] == (warmup, lr) for key in arm.planned)
    if not planned:
        return undefined(arm, lr, name, "not in the grid")
    if not runs:
        return undefined(arm, lr, name, "no finished run")
    failed = sum(cell.state == "diverged" for cell in runs)
    low, high = wilson_interval(failed, len(runs))
    return Score(
        **score_identity(arm, lr, name),
        estimate=failed / len(runs),
        low=low,
        high=high,
        seeds=len(runs),
        cells=len(runs),
        diverged=failed,
        note=join_notes(unfinished("runs", planned, len(runs)), _ends(runs)),
    )


def _ends(runs: Sequence[CellResult]) -> str:
    """How runs ended, if some have an outcome other than trained or stalled."""
    words = {cell.word for cell in runs} - {OUTCOMES["trained"], OUTCOMES["stalled"]}
    return outcomes(runs) if words else ""


def steps_saved(arm: Arm, lr: float, reference: int | None) -> list[Score]:
    """`steps_saved`, tau as a mean over seeds, and `lost_steps`, what warm-up costs by its rates.

    With `l_w(t)` the validation loss after `t` of `T` steps and `t_w(x)` the first step with
    `l_w <= x`, linear between validations: `tau = T - t_ref(l_0(T))` where warm-up ends ahead, else
    `-(T - t_0(l_ref(T)))`. Student's t interval over seeds. `>=` where runs without warm-up failed,
    which would take longer to catch up.

    `lost_steps = T - S_0^-1(S_ref(T))`, `S_w(t)` the sum of the learning rates to step `t`: the
    number of steps by which a run without warm-up reaches the same area under the rate earlier.
    """
    names = ("steps_saved", "lost_steps")
    if not reference:
        reason = "no reference warm-up to compare with"
        return [undefined(arm, lr, name, reason) for name in names]
    pairs = arm.at([(0, lr), (reference, lr)])
    reason = why_nothing(pairs) or why_never_learned(pairs, (reference, lr))
    runs = [(pairs.runs[(0, lr), s], pairs.runs[(reference, lr), s]) for s in pairs.seeds]
    lost = _lost_steps(arm, lr, pairs, [_lost(bare, ref) for bare, ref in runs])
    found = [] if reason else [tau(bare, ref) for bare, ref in runs]
    if None in found:
        reason = "fewer than two validations"
    if reason:
        return [undefined(arm, lr, "steps_saved", reason, pairs), lost]
    return [_saved(arm, lr, pairs, [tau for tau in found if tau is not None]), lost]


def _saved(arm: Arm, lr: float, pairs: Paired, found: Sequence[tuple[float, bool]]) -> Score:
    values = dict(zip(pairs.seeds, (tau for tau, _ in found), strict=True))
    early = any(first for _, first in found)
    bare, ref = (any(pairs.failed(point)) for point in pairs.points)
    return Score(
        **score_identity(arm, lr, "steps_saved"),
        **(pairs.counts | of_seeds(values, sure=not pairs.mixed, decides=False)),
        bound=bound_of(at_most=ref, at_least=bare),
        note=join_notes(
            "a loss was reached before the first validation" if early else "",
            pairs.missing,
            pairs.mixed,
        ),
    )


def _lost_steps(arm: Arm, lr: float, pairs: Paired, lost: Sequence[float]) -> Score:
    if not lost or not all(map(math.isfinite, lost)):
        reason = "no logged learning rates, or runs that ended at different steps"
        return undefined(arm, lr, "lost_steps", reason, pairs)
    identity = score_identity(arm, lr, "lost_steps")
    return Score(**identity, estimate=mean(lost), **pairs.counts, note=pairs.missing)


def tau(bare: CellResult, ref: CellResult) -> tuple[float, bool] | None:
    """tau of one seed, and whether a loss was reached before the first validation.

    Zero where both runs failed: their losses are ties at `H_uni`.
    """
    tag = bare.monitored.loss
    without, with_warmup = bare.run.curve(tag), ref.run.curve(tag)
    if len(without) < 2 or len(with_warmup) < 2:
        return None
    if bare.failed and ref.failed:
        return 0.0, False
    if ref.loss <= bare.loss:
        reached, first = first_step(with_warmup, bare.loss)
        return max(with_warmup) - reached, first
    reached, first = first_step(without, ref.loss)
    return -(max(without) - reached), first


def first_step(curve: Mapping[int, float], loss: float) -> tuple[float, bool]:
    """The first step at which the curve is at `loss` or below, linear between its finite points,
    and whether that is its first point; the last step if it stays above."""
    steps = sorted(curve)
    before = None
    for step in steps:
        if curve[step] <= loss:
            if before is None or not math.isfinite(curve[before]):
                return float(step), before is None
            share = (curve[before] - loss) / (curve[before] - curve[step])
            return before + share * (step - before), False
        before = step
    return float(steps[-1]), False


def _lost(bare: CellResult, ref: CellResult) -> float:
    rates = [cell.run.curve(LEARNING_RATE) for cell in (bare, ref)]
    if any(len(curve) < 2 for curve in rates) or max(rates[0]) != max(rates[1]):
        return math.nan
    without, with_warmup = map(_falling_area, rates)
    return max(without) - first_step(without, with_warmup[max(with_warmup)])[0]


def _falling_area(curve: Mapping[int, float]) -> dict[int, float]:
    """Minus the sum of the rates to each logged step, by trapezoids between the logged ones."""
    steps = sorted(curve)
    found = {steps[0]: -curve[steps[0]] * steps[0]}
    for before, step in itertools.pairwise(steps):
        found[step] = found[before] - (curve[before] + curve[step]) / 2 * (step - before)
    return found


def stall_counts(arms: Iterable[Arm], reference: int | None) -> tuple[str, str]:
    """Failed runs of all complete seeds, without warm-up and with the reference: `6 of 9`."""
    failed, runs = [0, 0], [0, 0]
    for arm in arms:
        for side, of in enumerate(counted_runs(arm, reference)):
            failed[side] += sum(cell.failed for cells in of.values() for cell in cells)
            runs[side] += sum(map(len, of.values()))
    return f"{failed[0]} of {runs[0]}", f"{failed[1]} of {runs[1]}"


def counted_runs(arm: Arm, reference: int | None) -> list[dict[int, list[CellResult]]]:
    """The runs of each seed that finished all of them, without warm-up and with the reference.

    At the rates planned with both, or at all of a seed that is a study of its own.
    """
    found: list[dict[int, list[CellResult]]] = []
    for warmup in (0, reference) if reference else ():
        of: dict[int, list[CellResult]] = {}
        for seed in arm.seeds:
            rates = [arm.rates_of(each, seed) for each in (0, reference or 0)]
            own = arm.rates_of(warmup, seed)
            shared = own if arm.of_seed else [lr for lr in rates[0] if lr in rates[1]]
            cells = [arm.cells.get((warmup, lr, seed)) for lr in shared]
            ended = [cell for cell in cells if cell is not None]
            if cells and len(ended) == len(cells):
                of[seed] = ended
        found.append(of)
    return found


def stall_difference(arm: Arm, reference: int | None) -> Score:
    """`stall_difference`: the share of failed runs without warm-up less that with the reference.

    Over the rates that both have. p permutes whole seeds (`statistics.failures_p`). `lr` is NaN if
    the variant has several.
    """
    lr = arm.rates[0] if len(arm.rates) == 1 else math.nan
    sides = counted_runs(arm, reference)
    if not sides or not all(sides):
        reason = "no seed has finished at all rates, without warm-up and with the reference"
        return undefined(arm, lr, "stall_difference", reason)
    runs = [cell for of in sides for cells in of.values() for cell in cells]
    bare, ref = ([sum(cell.failed for cell in cells) for cells in of.values()] for of in sides)
    each = max(len(cells) for of in sides for cells in of.values())
    shares = [
        sum(of) / sum(map(len, side.values())) for of, side in zip((bare, ref), sides, strict=True)
    ]
    planned, seeds = len(arm.seeds), min(len(bare), len(ref))
    p = failures_p(bare, ref, each, planned) if sum(bare) + sum(ref) else math.nan
    least = 2 / math.comb(len(bare) + len(ref), len(bare))
    few = f"{seeds} seeds are too few for a label" if not min(p, least) <= 1 - LEVEL else ""
    rates = dict.fromkeys(cell.lr or 0.0 for cell in runs)
    notes = failures(runs), "" if arm.of_seed else _by_rate(arm, rates, reference), few
    return Score(
        **score_identity(arm, lr, "stall_difference"),
        estimate=shares[0] - shares[1],
        p=p,
        seeds=seeds,
        cells=len(runs),
        diverged=sum(bare) + sum(ref),
        note=join_notes(*notes, unfinished("seeds", planned, seeds)) if any(bare + ref) else "",
    )


def _by_rate(arm: Arm, rates: Iterable[float], reference: int | None) -> str:
    """The failed runs at each rate where any failed: `2/3 against 0/3 at 0.004`."""
    said = []
    for rate in rates:
        sides = [
            [cell.failed for key, cell in arm.cells.items() if key[:2] == (warmup, rate)]
            for warmup in (0, reference)
        ]
        if any(map(any, sides)):
            counts = " against ".join(f"{sum(side)}/{len(side)}" for side in sides)
            said.append(f"{counts} at {label(rate)}")
    return "; ".join(said)
