"""The sensitivity to warm-up, at one rate and over rates.

Symbols: `l(w, lr, s)` is the loss of one run in nats per token, where a failure counts as `H_uni`
(`CellResult.loss`); `w` is the warm-up in updates, `ref` the reference warm-up of the grid, `s` the
seed, `H_uni` the unigram entropy of the validation targets. Runs are compared seed by seed: a seed
counts if every run that a score needs has finished, and the note reports those left out. Intervals
are two-sided at 95 %. An undefined score is NaN, with the reason in its note.

With `b(w, s) = min_lr l(w, lr, s)`, the best loss of a seed among the rates tried:

- `delta`: `Delta = mean_s [l(0, s) - l(ref, s)]` at one rate, the measure of a grid with one rate;
- `tuned`: `T = mean_s [b(0, s) - b(ref, s)]`, the measure of a grid with several rates;
- `interaction`, `tuned_interaction`: Delta or T less that of the baseline;
- `against_baseline w=...`: `mean_s [b(w, s) - b_baseline(w, s)]`, below zero if better;
- `mean_over_rates`: `M`, the mean of `l(0) - l(ref)` over ln(lr), at the rates that both have;
- `rate_shift`: octaves from the best rate without warm-up to that with it;
- `tuned_steps_saved`: the steps that warm-up saves between the best runs (`pairs.tau`);
- `pooled`, `family`, `family_difference`: the measure averaged over all arms, or over families.

A failure is nats away from other losses, so an interval and a p value need seeds with the same
ending (`Paired.mixed`), over rates those of their best runs; otherwise the failures themselves are
compared (`stall_difference`). Two seeds have no p value. `benchmarks/false_labels.py` measures how
often a label is false and how often one is found.
"""

import math
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import median_low
from typing import Any

import numpy as np

from lightning_app.config.tree import PRESET, label, value_name
from lightning_app.report.pairs import (
    IS_BASELINE,
    LEARNED,
    NEVER,
    NOT_YET,
    Arm,
    Paired,
    Score,
    arms,
    bound_of,
    join_notes,
    score_identity,
    stall_difference,
    stalls,
    steps_saved,
    tau,
    undefined,
    why_never_learned,
    why_nothing,
)
from lightning_app.report.results import CellResult, GridResults, scales
from lightning_app.report.statistics import (
    FEW_SEEDS,
    LEAST_SEEDS,
    Sides,
    corrected,
    mean,
    no_less_than_failures,
    of_seeds,
)

Span = tuple[float, float]  # of rates
BEST = 0.0  # in place of a rate: the best one of each seed
OCTAVE = 1.001  # rates have four digits
ALL = "all variants"
Values = Mapping[int, float]  # of each seed


@dataclass(frozen=True)
class TunedArm:
    """An arm at several rates, without warm-up and with the reference: each seed at its best."""

    arm: Arm
    reference: int

    @cached_property
    def counts(self) -> dict[int, int]:
        """The number of rates of each warm-up."""
        return {
            warmup: max(len(self.rates(warmup, seed)) for seed in self.arm.seeds)
            for warmup in (0, self.reference)
        }

    def rates(self, warmup: int, seed: int) -> list[float]:
        """The rates of a seed; refined arms and seeds that are studies have their own."""
        return self.arm.rates_of(warmup, seed)

    @cached_property
    def every(self) -> Paired:
        """Every run of the seeds that have finished; in place of a rate is its number."""
        cells = {
            (warmup, float(place), seed): self.arm.cells[warmup, lr, seed]
            for warmup in self.counts
            for seed in self.arm.seeds
            for place, lr in enumerate(self.rates(warmup, seed))
            if (warmup, lr, seed) in self.arm.cells
        }
        points = [(w, float(place)) for w, count in self.counts.items() for place in range(count)]
        planned = sorted(self.planned)
        seeds = [s for s in planned if all((*point, s) in cells for point in points)]
        return Paired(cells, points, seeds, len(planned))

    @property
    def planned(self) -> set[int]:
        """The seeds that are planned with every rate."""
        return {
            seed
            for seed in self.arm.seeds
            if all(len(self.rates(w, seed)) == count for w, count in self.counts.items())
        }

    @cached_property
    def why(self) -> str:
        """Why nothing can be compared; empty if something can."""
        if missing := [warmup for warmup, count in self.counts.items() if not count]:
            return f"no arm with warm-up {missing[0]}"
        if min(self.counts.values()) < 2:
            return "one rate only"
        if reason := why_nothing(self.every):
            return reason
        runs = self.every.runs.values()
        if any(cell.entropy - cell.loss >= LEARNED for cell in runs):
            return ""
        return NEVER if all(cell.failed for cell in runs) else NOT_YET

    def runs(self, warmup: int, seed: int) -> list[CellResult]:
        """The runs of a seed, by rate."""
        places = range(self.counts[warmup])
        return [self.every.runs[(warmup, float(place)), seed] for place in places]

    def place(self, warmup: int, seed: int) -> int:
        """The place of the best rate of a seed; not that of a failed run if any trained."""
        runs = self.runs(warmup, seed)
        return min(range(len(runs)), key=lambda n: (runs[n].failed, runs[n].loss))

    @cached_property
    def best(self) -> Paired:
        """The best run of each seed and warm-up; the rate of all points is `BEST`."""
        cells = {
            (warmup, BEST, seed): self.runs(warmup, seed)[self.place(warmup, seed)]
            for warmup in self.counts
            for seed in self.every.seeds
        }
        points = [(warmup, BEST) for warmup in self.counts]
        return Paired(cells, points, self.every.seeds, self.every.planned)

    def losses(self, warmup: int) -> Values:
        return dict(zip(self.best.seeds, self.best.losses((warmup, BEST)), strict=True))

    @property
    def saved(self) -> Values:
        """T of each seed."""
        bare, warm = self.losses(0), self.losses(self.reference)
        return {seed: bare[seed] - warm[seed] for seed in bare}

    @cached_property
    def middle(self) -> tuple[float, float]:
        """The median over seeds of the best rate, without warm-up and with it."""
        bare, warm = (
            median_low(self.rates(warmup, s)[self.place(warmup, s)] for s in self.every.seeds)
            for warmup in self.counts
        )
        return bare, warm

    def ends(self, warmup: int) -> tuple[int, int, int]:
        """The number of seeds whose best rate is the smallest, the largest, or between others.

        Between: with a rate at most an octave away on both sides.
        """
        last, seeds = self.counts[warmup] - 1, self.every.seeds
        places = {seed: self.place(warmup, seed) for seed in seeds}
        inner = [
            0 < n < last and _gap(self.rates(warmup, seed), n) <= OCTAVE
            for seed, n in places.items()
        ]
        ends = [*places.values()]
        return ends.count(0), ends.count(last), sum(inner)

    @property
    def inner(self) -> bool:
        """Whether at both warm-ups the best rates of most seeds lie between others."""
        return all(2 * self.ends(w)[2] > len(self.every.seeds) for w in self.counts)

    @property
    def note(self) -> str:
        """Seeds with fewer rates, and a range that ends at the best rate of most seeds."""
        cut = []
        for words, warmup in (("without", 0), ("with", self.reference)):
            low, high, _ = self.ends(warmup)
            for count, which in ((low, "smallest"), (high, "largest")):
                if 2 * count > len(self.every.seeds):
                    cut.append(f"the {which} rate is the best one in most seeds {words} warm-up")
        if fewer := len(self.arm.seeds) - len(self.planned):
            cut.append(f"{fewer} of {len(self.arm.seeds)} seeds have fewer rates and do not count")
        return join_notes(*cut)

    def row(
        self,
        name: str,
        values: Values,
        *others: "TunedArm",
        decides: bool = False,
        note: str = "",
        points: Sequence[tuple[int, float]] = (),
    ) -> Score:
        """A score with its interval, which needs seeds that all trained or all failed.

        `others`: another arm that it needs; `points`: those of the best runs, all by default.
        """
        if not values:
            reason = "no seed finished here and in the baseline"
            return undefined(self.arm, math.nan, name, reason, self.every)
        at, seeds = list(points) or self.best.points, [*values]
        planned = len(self.planned.intersection(*(other.planned for other in others)))
        each = [Paired(of.best.cells, at, seeds, planned) for of in (self, *others)]
        mixed = join_notes(*dict.fromkeys(of.mixed for of in each))
        floor = 0.0
        if decides and not mixed:
            failed = [[of.failed(point) for point in at] for of in each]
            sides = [*zip(*failed, strict=True)] if others else failed
            pairs = [(first, second) for first, second in sides]
            floor = no_less_than_failures(0.0, planned, *pairs)
        few = "2 seeds are too few for a p value" if decides and len(values) == 2 else ""
        return Score(
            **score_identity(self.arm, math.nan, name),
            **of_seeds(values, sure=not mixed, decides=decides, floor=floor),
            floor=floor,
            cells=sum(of.every.counts["cells"] for of in (self, *others)),
            diverged=sum(of.every.counts["diverged"] for of in (self, *others)),
            note=join_notes(self.every.missing, mixed, note, few),
            mixed=bool(mixed),
            each=tuple(values.items()) if len(values) < FEW_SEEDS or mixed else (),
        )

    def ended(self, warmup: int) -> list[bool]:
        """Whether the best run of each seed failed."""
        return self.best.failed((warmup, BEST))


def _gap(rates: Sequence[float], place: int) -> float:
    """Octaves from a rate to the farther one of its neighbours."""
    return max(abs(math.log2(rates[place + side] / rates[place])) for side in (-1, 1))


def over_rates(arm: Arm, baseline: Arm | None, grid: GridResults, span: Span) -> list[Score]:
    """The scores over all rates of one arm."""
    ref = grid.reference_warmup
    names = ("tuned", "tuned_interaction", "mean_over_rates", "rate_shift", "tuned_steps_saved")
    if not ref:
        reason = "no reference warm-up to compare with"
        return [undefined(arm, math.nan, name, reason) for name in names]
    own = TunedArm(arm, ref)
    tried = own.counts[0], own.counts[ref]
    if own.why:
        rows = [undefined(arm, math.nan, name, own.why, own.every) for name in names]
        never = own.why in (NEVER, NOT_YET)
        return [replace(row, tried=tried, never=never) for row in rows]
    censored = bound_of(at_most=any(own.ended(ref)), at_least=all(own.ended(0)))
    tuned = own.row("tuned", own.saved, decides=True, note=own.note)
    tuned = replace(tuned, bound=censored, inner=own.inner, tried=tried, best=own.middle)
    return [
        tuned,
        *_against(own, baseline, ref),
        _mean_over_rates(own, span),
        _rate_shift(own),
        _tuned_steps(own),
    ]


def _against(own: TunedArm, baseline: Arm | None, ref: int) -> list[Score]:
    """T less that of the baseline, and the best losses of both at each warm-up."""
    arm, names = own.arm, ("tuned_interaction", *(f"against_baseline w={w}" for w in own.counts))
    other, reason = TunedArm(baseline, ref) if baseline else None, _why_alone(arm, baseline)
    if other is not None and other.why:
        reason = reason or f"baseline: {other.why}"
    if reason or other is None:
        return [undefined(arm, math.nan, name, reason, own.every) for name in names]
    both = [seed for seed in own.saved if seed in other.saved]
    more = {seed: own.saved[seed] - other.saved[seed] for seed in both}
    censored = bound_of(
        at_most=all(other.ended(0)) or any(own.ended(ref)),
        at_least=all(own.ended(0)) or any(other.ended(ref)),
    )
    rows = [replace(own.row(names[0], more, other, decides=True), bound=censored)]
    for name, warmup in zip(names[1:], own.counts, strict=True):
        ours, theirs = own.losses(warmup), other.losses(warmup)
        values, at = {seed: ours[seed] - theirs[seed] for seed in both}, [(warmup, BEST)]
        row = own.row(name, values, other, decides=True, points=at)
        failed = any(own.ended(warmup)), any(other.ended(warmup))
        rows.append(replace(row, bound=bound_of(at_most=failed[1], at_least=failed[0])))
    return rows


def _why_alone(arm: Arm, baseline: Arm | None) -> str:
    """Why an arm is not compared with its baseline; empty if it is."""
    if arm.baseline is None:
        return "the grid file names no baseline"
    if arm.baseline == arm.variant:
        return IS_BASELINE
    return "" if baseline else f"no arm of the baseline {arm.baseline}"


def _mean_over_rates(own: TunedArm, span: Span) -> Score:
    """M over the rates that both warm-ups have, within those of all arms."""
    ref, seeds = own.reference, own.every.seeds
    if own.arm.of_seed:
        gaps = {
            s: [a.loss - b.loss for a, b in zip(own.runs(0, s), own.runs(ref, s), strict=True)]
            for s in seeds
        }
        note = f"over {own.counts[0]} rates of each seed"
        if any(cell.failed for cell in own.every.runs.values()):
            # Where learning ends at a cliff, 5 seeds cover 65 % (`benchmarks/coverage.py`).
            note = join_notes(note, "some of its runs failed: the interval may be too narrow")
        return own.row("mean_over_rates", {s: mean(of) for s, of in gaps.items()}, note=note)
    shared = set.intersection(*({*own.rates(w, s)} for w in own.counts for s in seeds))
    rates = [lr for lr in sorted(shared) if span[0] <= lr <= span[1]]
    if len(rates) < 2:
        reason = "fewer than two rates that both warm-ups and all arms have"
        return undefined(own.arm, math.nan, "mean_over_rates", reason, own.every)
    logs = np.log(rates)

    def average(warmup: int, seed: int) -> float:
        losses = [own.arm.cells[warmup, lr, seed].loss for lr in rates]
        return float(np.trapezoid(losses, logs) / (logs[-1] - logs[0]))

    values = {s: average(0, s) - average(ref, s) for s in seeds}
    note = f"over {len(rates)} rates, {label(rates[0])} to {label(rates[-1])}"
    return own.row("mean_over_rates", values, note=note)


def _rate_shift(own: TunedArm) -> Score:
    """Octaves between the best rates, of the seeds that learned at both warm-ups."""
    values = {}
    for seed in own.every.seeds:
        bare, warm = (
            None
            if own.best.runs[(w, BEST), seed].failed
            else own.rates(w, seed)[own.place(w, seed)]
            for w in own.counts
        )
        if bare and warm:
            values[seed] = math.log2(warm / bare)
    if not values:
        reason = "no seed learned at both warm-ups"
        return undefined(own.arm, math.nan, "rate_shift", reason, own.every)
    up, down = (sum(sign * value > 0 for value in values.values()) for sign in (1, -1))
    note = f"higher in {up} of {len(values)} seeds, lower in {down}"
    return own.row("rate_shift", values, note=note)


def _tuned_steps(own: TunedArm) -> Score:
    """Steps saved between the best runs of each seed."""
    found = {
        seed: tau(*(own.best.runs[point, seed] for point in own.best.points))
        for seed in own.best.seeds
    }
    values = {seed: each[0] for seed, each in found.items() if each is not None}
    if len(values) < len(found):
        reason = "fewer than two validations"
        return undefined(own.arm, math.nan, "tuned_steps_saved", reason, own.every)
    row = own.row("tuned_steps_saved", values)
    bound = bound_of(at_most=any(own.ended(own.reference)), at_least=any(own.ended(0)))
    return replace(row, bound=bound)


def shared_span(members: Sequence[Arm]) -> Span:
    """The rates between which all arms were run that have more than one."""
    runs = [arm.rates_at(warmup) for arm in members for warmup in arm.warmups]
    several = [rates for rates in runs if len(rates) > 1]
    return (
        max((rates[0] for rates in several), default=math.nan),
        min((rates[-1] for rates in several), default=math.nan),
    )


def pooled(grid: GridResults, rows: Sequence[Score]) -> list[Score]:
    """The measure of a group averaged over its arms, over each family, and their differences."""
    found: list[Score] = []
    for group in dict.fromkeys(row.group for row in rows):
        own = [row for row in measured_by(rows, group) if row.values]
        arms_in = [row for row in measured_by(rows, group) if not row.never]
        stalls = [r for r in rows if (r.group, r.score) == (group, "stall_difference")]
        most = {row.variant: row.estimate for row in stalls if row.estimate > 0}
        if own and len(arms_in) > 1:
            found.append(_averaged(own, "pooled", ALL, group, len(arms_in), most))
        families = [
            _averaged(of, "family", name, group, len(of), most)
            for name, values in grid.families.items()
            if (of := [row for row in own if _belongs(grid, row, values)])
        ]
        found += families
        for other in families[1:]:
            first, second = dict(families[0].values), dict(other.values)
            values = {s: first[s] - second[s] for s in first if s in second}
            sure = not (families[0].mixed or other.mixed)
            name = f"{families[0].variant} − {other.variant}"
            least = max(families[0].floor, other.floor)
            row = _over_arms("family_difference", name, group, values, sure=sure, floor=least)
            found.append(replace(row, stalled=max(families[0].stalled, other.stalled)))
    return found


def measured_by(rows: Sequence[Score], group: str) -> list[Score]:
    """The measure of each arm of a group: T if any has several rates, else Delta at its own one."""
    tuned = [row for row in rows if row.group == group and row.score == "tuned"]
    if any(min(filter(None, row.tried), default=0) > 1 for row in tuned):
        return tuned
    deltas = [row for row in rows if row.group == group and row.score == "delta"]
    return deltas if len({row.variant for row in deltas}) == len(deltas) else []


def _belongs(grid: GridResults, row: Score, members: Collection[Any]) -> bool:
    """Whether an arm is of a family: by its name, or by a value of an axis of the variants."""
    wanted = {label(member) for member in members}
    for cell in grid.cells:
        if (cell.group, cell.variant) == (row.group, row.variant):
            axes = {k: v for k, v in cell.axes.items() if k.startswith(grid.wiring)}
            names = [value_name(key, value, grid.labels) for key, value in axes.items()]
            return not wanted.isdisjoint((row.variant, *map(label, axes.values()), *names))
    return False


def _averaged(
    rows: Sequence[Score],
    name: str,
    variant: str,
    group: str,
    planned: int,
    stalled: Mapping[str, float],
) -> Score:
    """The mean over arms of the values of each seed that all of them have."""
    each = [dict(row.values) for row in rows]
    seeds = [s for s in each[0] if all(s in of for of in each)]
    values = {seed: mean([of[seed] for of in each]) for seed in seeds}
    sure = not any(row.mixed for row in rows)
    note = f"{len(rows)} of {planned} arms have a value" if len(rows) < planned else ""
    least = max(row.floor for row in rows)
    found = _over_arms(
        name, variant, group, values, sure=sure, note=note, arms=len(rows), floor=least
    )
    most = max(stalled.get(row.variant, 0.0) for row in rows)
    return replace(found, inner=2 * sum(row.inner for row in rows) > len(rows), stalled=most)


def _over_arms(
    name: str,
    variant: str,
    group: str,
    values: Values,
    *,
    sure: bool,
    note: str = "",
    arms: int = 0,
    floor: float = 0.0,
) -> Score:
    identity = {"group": group, "lr": math.nan, "variant": variant, "score": name}
    if not values:
        return Score(**identity, note=join_notes(note, "no seed finished in all arms"))
    return Score(
        **identity,
        **of_seeds(values, sure=sure, floor=floor),
        floor=floor,
        mixed=not sure,
        cells=arms,
        note=join_notes(note, "" if sure else "some seeds of an arm failed and others did not"),
    )


CORRECTED = (
    *("delta", "interaction", "tuned", "tuned_interaction", "against_baseline"),
    *("stall_difference", "pooled", "family", "family_difference"),
)
"""The scores with p values: those of one name and ruler are a family of Holm's correction."""


def sensitivity_scores(grid: GridResults) -> list[Score]:
    """Every score of every variant, in the order of the plan; none where bad runs were pruned."""
    rows = _uncorrected(grid)
    rows += pooled(grid, rows)
    first = {cell.group: cell for cell in reversed(grid.finished)}
    rulers = scales([*first.values()], grid.monitored.loss)
    ruler_of = dict(zip(first, rulers, strict=True))

    presets = (grid.control, grid.baseline) if grid.control else ()
    checks = {cell.variant for cell in grid.cells if cell.axes.get(PRESET) in presets}

    def family(row: Score) -> Hashable:
        name = row.score.split(" w=")[0]
        place = name, ruler_of.get(row.group, ""), row.variant in checks
        return place if name in CORRECTED else None

    return corrected(rows, family, grid.alpha)


def _uncorrected(grid: GridResults) -> list[Score]:
    if grid.pruner is not None:
        return []
    found = arms(grid)
    rows: list[Score] = []
    for group in dict.fromkeys(arm.group for arm in found):
        members = {arm.variant: arm for arm in found if arm.group == group}
        rates = {lr for arm in members.values() for lr in arm.rates}
        for lr in () if grid.trials else sorted(rates):
            rows += _of_slice(members, lr, grid)
        rows += [stall_difference(arm, grid.reference_warmup) for arm in members.values()]
        if len(grid.rates) > 1 and not grid.searched:
            span = shared_span([*members.values()])
            for arm in members.values():
                rows += over_rates(arm, members.get(arm.baseline or ""), grid, span)
    return rows


def _of_slice(members: Mapping[str, Arm], lr: float, grid: GridResults) -> list[Score]:
    present = [arm for arm in members.values() if lr in arm.rates]
    rows = []
    for arm in present:
        rows += [delta(arm, lr, grid), interaction(arm, members.get(arm.baseline or ""), lr, grid)]
        rows += steps_saved(arm, lr, grid.reference_warmup)
        rows += [stalls(arm, lr, warmup) for warmup in arm.warmups]
    return rows


def delta(arm: Arm, lr: float, grid: GridResults) -> Score:
    """`Delta = mean_s [l(0, s) - l(ref, s)]`, nats per token; Student's t interval over seeds.

    Undefined where the variant learned with neither of them. A lower bound where every run without
    warm-up failed, and an upper one where any with it did: they count as `H_uni`.
    """
    reason, pairs, ref = _against_reference(arm, lr, grid)
    if reason:
        runs = pairs.runs.values()
        never = bool(runs) and all(cell.entropy - cell.loss < LEARNED for cell in runs)
        return replace(undefined(arm, lr, "delta", reason, pairs), never=never)
    differences = _differences(pairs, (0, lr), (ref, lr))
    bare, with_it = pairs.failed((0, lr)), pairs.failed((ref, lr))
    return Score(
        **score_identity(arm, lr, "delta"),
        bound=bound_of(at_most=any(with_it), at_least=all(bare)),
        **(pairs.counts | _over_seeds(pairs, differences, pairs.mixed, (bare, with_it))),
    )


def interaction(arm: Arm, baseline: Arm | None, lr: float, grid: GridResults) -> Score:
    """`Delta_v - Delta_baseline` over the same seeds: does warm-up help it more than the baseline?

    `mean_s [(l_v(0, s) - l_v(ref, s)) - (l_b(0, s) - l_b(ref, s))]`, nats per token; t interval.
    `>=` where no run of the variant without warm-up trained, or one of the baseline with it failed;
    `<=` the other way round.
    """
    reason, own, ref = _against_reference(arm, lr, grid)
    baseline = baseline if baseline and lr in baseline.rates else None
    reason = _why_alone(arm, baseline) or reason
    if reason or baseline is None:
        return undefined(arm, lr, "interaction", reason, own)
    reason, other, _ = _against_reference(baseline, lr, grid)
    seeds = [seed for seed in own.seeds if seed in other.seeds]
    if reason or not seeds:
        reason = f"baseline: {reason}" if reason else "no seed finished here and in the baseline"
        return undefined(arm, lr, "interaction", reason, own)
    points = [(0, lr), (ref, lr)]
    planned = len({*arm.planned_at(points)} & {*baseline.planned_at(points)})
    own = Paired(arm.cells, points, seeds, planned)
    other = Paired(baseline.cells, points, seeds, planned)
    both = zip(_differences(own, *points), _differences(other, *points), strict=True)
    differences = [ours - theirs for ours, theirs in both]
    mixed = join_notes(own.mixed, other.mixed and f"baseline {other.mixed}")
    sides = [(own.failed(at), other.failed(at)) for at in points]
    counts = {name: own.counts[name] + other.counts[name] for name in ("cells", "diverged")}
    return Score(
        **score_identity(arm, lr, "interaction"),
        bound=bound_of(
            at_most=all(other.failed((0, lr))) or any(own.failed((ref, lr))),
            at_least=all(own.failed((0, lr))) or any(other.failed((ref, lr))),
        ),
        **counts,
        **_over_seeds(own, differences, mixed, *sides),
    )


def _against_reference(arm: Arm, lr: float, grid: GridResults) -> tuple[str, Paired, int]:
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
    bare = pairs.seeds and pairs.entropy - pairs.mean((0, lr)) >= LEARNED
    return why_nothing(pairs) or ("" if bare else why_never_learned(pairs, (ref, lr))), pairs, ref


def _differences(pairs: Paired, first: tuple[int, float], second: tuple[int, float]) -> list[float]:
    return [a - b for a, b in zip(pairs.losses(first), pairs.losses(second), strict=True)]


def _over_seeds(
    pairs: Paired, values: Sequence[float], mixed: str, *sides: Sides
) -> dict[str, Any]:
    """The fields of a mean over seeds, with a note; no interval and p values where it is mixed."""
    floor = 0.0 if mixed else no_less_than_failures(0.0, pairs.planned, *sides)
    by_seed = dict(zip(pairs.seeds, values, strict=True))
    found = of_seeds(by_seed, sure=not mixed, floor=floor)
    few = len(values) == LEAST_SEEDS - 1 and not mixed
    why = "one seed" if len(values) == 1 else "no spread between seeds"
    note = join_notes(
        pairs.missing,
        mixed or f"{why}, no interval" * math.isnan(found["low"]),
        f"{len(values)} seeds are too few for a p value" * few,
    )
    each = found["values"] if mixed or len(values) < FEW_SEEDS else ()
    return found | {"mixed": bool(mixed), "floor": floor, "note": note, "each": each}
