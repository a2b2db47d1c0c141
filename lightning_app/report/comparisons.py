"""Comparisons by a metric: between variants, between the factors of a design, and of repeated runs.

Runs are judged by the metric that the grid file names, or by the task's own score if that metric
is the loss and the task has published scores (`GridResults.measure`).

Effects of factors. A factor is an axis of two values, low and high, in the order of the grid file.
With `y` the score of a variant and seed, the effect of factors `F` is the mean, over the levels of
all other factors, of `y` contrasted by each factor of `F`: for one factor `y(high) - y(low)`, for
two `(y(high, high) - y(high, low)) - (y(low, high) - y(low, low))`, and so on. It is computed seed
by seed, with Student's t interval over the seeds (Yates 1937, for a full 2^k factorial). An effect
has an interval and a p value only if each of its variants has.

Comparisons. For an axis with baseline `b`, a value `v` and a slice, that is one combination of all
other axes but the seed and those that follow from this one: `C = mean_s [m(v, s) - m(b, s)]`, `m`
the metric of the grid, or the own score of its task (`GridResults.measure`), as the runs report it,
in its own unit, over the seeds that finished with a finite value at both. Student's t interval and
p, corrected by Holm over all comparisons. They are missing for the reasons in `report.warmup`, by
the failures of `tasks.failed`.

Where `m` counts different things at the two values (`rulers`), bits per byte or BLEU takes its
place if every run has it; otherwise, and for an axis that changes only the evaluation, the two are
*not comparable*. `_budget` states how much more the runs at a value have read.
"""

import itertools
import math
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from lightning_app.config.rulers import EVALUATION, MetricChoice, check_metric
from lightning_app.config.rules import COMPARE, GridSubject, check_rules
from lightning_app.config.tree import (
    CORPUS,
    PRESET,
    RATE,
    SEED,
    WARMUP,
    group_name,
    key_of,
    label,
    value_name,
)
from lightning_app.core.errors import UserError, nearest
from lightning_app.core.schema import read
from lightning_app.report.facts import direction
from lightning_app.report.pairs import Score, join_notes, unfinished
from lightning_app.report.results import (
    ARM,
    CellResult,
    GridResults,
    as_number,
    best_trials,
    grouped,
    scales,
    unlike,
)
from lightning_app.report.statistics import (
    LEAST_SEEDS,
    Estimate,
    corrected,
    ended_alike,
    mean,
    no_less_than_failures,
    of_seeds,
    row_document,
    within,
)
from lightning_app.report.tasks import failed, over_seeds
from lightning_app.scores.task_facts import TASKS, task_facts

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, kw_only=True)
class MetricMean:
    """One arm: mean and t interval over the `runs` finished runs that have its `metric`.

    The values are as reported, without the cap of the scores. `lacking` runs finished without a
    finite value. There is no interval if some seeds failed and others did not. If the metric does
    not count the same thing in all arms, `ruler` names what it counts in this one: only arms with
    the same ruler can be compared.
    """

    group: str
    lr: float | None
    variant: str
    warmup: int | None
    metric: str
    mode: str
    mean: float
    low: float
    high: float
    runs: int
    lacking: int
    ruler: str = ""


def by_metric(grid: GridResults) -> list[MetricMean]:
    """Every arm with finished runs, the best mean first, then those of which some runs have no
    value, and those without any last.

    Arms with different rulers are not ranked against each other; those of the first one lead.
    """
    grid = best_trials(grid)
    arms = grouped(grid.finished, ARM)
    means = []
    for (group, lr, variant, warmup), cells in arms.items():
        metric, mode = grid.measure(cells[0]).metric, grid.measure(cells[0]).mode
        who = {"group": group, "lr": lr, "variant": variant, "warmup": warmup}
        values = over_seeds(cells, metric)._asdict()
        means.append(MetricMean(**who, metric=metric, mode=mode, **values))
    firsts = [cells[0] for cells in arms.values()]
    names = _rulers([arm.metric for arm in means], firsts)
    means = [replace(arm, ruler=name) for arm, name in zip(means, names, strict=True)]
    order = list(dict.fromkeys((arm.metric, arm.ruler) for arm in means))
    return sorted(means, key=lambda arm: (order.index((arm.metric, arm.ruler)), _rank(arm)))


def _rulers(metrics: Sequence[str], cells: Sequence[CellResult | None]) -> list[str]:
    """The ruler of each metric in the run beside it, "" where none is; see `scales`."""
    found = [""] * len(metrics)
    for metric in {*metrics}:
        own = {n: cell for n, cell in enumerate(cells) if metrics[n] == metric and cell is not None}
        for place, name in zip(own, scales([*own.values()], metric), strict=True):
            found[place] = name
    return found


def _rank(arm: MetricMean) -> tuple[bool, bool, float]:
    sign = 1 if arm.mode == "min" else -1
    return math.isnan(arm.mean), arm.lacking > 0, sign * arm.mean if arm.runs else 0


def titled(grid: GridResults) -> str:
    """The metric and which way is better: `val/bleu, higher is better`; of several, all."""
    return "; ".join(f"{each.metric}, {direction(each.mode)}" for each in grid.measures)


def why_apart(grid: GridResults) -> str:
    """Why arms of several groups cannot be compared by their metric; empty where they can."""
    reasons = (
        unlike([cell for cell in grid.finished if grid.measure(cell) == measure], measure.metric)
        for measure in grid.measures
    )
    return "; ".join(filter(None, reasons))


def slices(grid: GridResults, arms: Sequence[MetricMean]) -> dict[str, dict[str, list[MetricMean]]]:
    """The arms by rate and group in words, and by variant, in the same order."""
    several = len({(arm.group, arm.lr) for arm in arms}) > 1
    by_slice: dict[str, dict[str, list[MetricMean]]] = {}
    for arm in arms:
        rate = f"learning rate {label(arm.lr)}" if several and arm.lr is not None else ""
        where = ", ".join(part for part in (rate, arm.group) if part and part != "all")
        by_slice.setdefault(where, {}).setdefault(arm.variant, []).append(arm)
    return by_slice


def metrics_document(grid: GridResults) -> list[dict[str, Any]]:
    """The means for scripts."""
    arms = [asdict(arm) for arm in by_metric(grid)]
    return [{"grid": grid.name, "metric": grid.metric, "mode": grid.mode, "arms": arms}]


MEASURES = (
    *("tuned", "mean_over_rates", "rate_shift", "tuned_steps_saved", "delta", "steps_saved"),
)
IN_NATS = ("tuned", "mean_over_rates", "delta")  # have no effect between unlike tokens
DECIDING = ("tuned", "delta")  # have p values
TIMES = " x "

Levels = tuple[int, ...]  # 0 is the low level of a factor, 1 the high one


@dataclass(frozen=True, kw_only=True)
class Effect(Estimate):
    """One row of `effects.csv`: the effect of `factors` on a `measure`.

    `group` names the values of the axes that are no factor, `lr` is NaN for a score over all rates.
    `p_holm` is corrected over all effects on the measure. `note` says what is missing or censored.
    """

    measure: str
    group: str
    lr: float
    factors: str


def effects(grid: GridResults, scores: Sequence[Score]) -> list[Effect]:
    """The effects of all factors on each measure; none for a grid without factors."""
    rows = _uncorrected(grid, scores) if grid.factors else []
    return corrected(rows, lambda row: row.measure, grid.alpha)


def _uncorrected(grid: GridResults, scores: Sequence[Score]) -> list[Effect]:
    places = _places(grid)
    tables: dict[tuple[str, str, float], dict[Levels, Score]] = {}
    for score in scores:
        if score.score in MEASURES and (score.group, score.variant) in places:
            rest, levels = places[score.group, score.variant]
            rate = math.inf if math.isnan(score.lr) else score.lr  # NaN is no key
            tables.setdefault((score.score, rest, rate), {})[levels] = score
    order = {name: place for place, name in enumerate(MEASURES)}
    rows: list[Effect] = []
    for (measure, rest, rate), table in sorted(tables.items(), key=lambda of: order[of[0][0]]):
        lr = math.nan if math.isinf(rate) else rate
        arms = {(score.group, score.variant) for score in table.values()}
        cells = [cell for cell in grid.finished if (cell.group, cell.variant) in arms]
        why = unlike(cells, grid.monitored.loss) if measure in IN_NATS else ""
        rows += _of_table(list(grid.factors), measure, rest, lr, {} if why else table, why)
    return rows


def _places(grid: GridResults) -> dict[tuple[str, str], tuple[str, Levels]]:
    """For each group and variant: the other axes in words, and the level of each factor."""
    values = {axis: [key_of(value) for value in grid.axes[axis]] for axis in grid.factors.values()}
    special = {SEED, WARMUP, RATE, *values, *grid.linked}
    places = {}
    for cell in grid.cells:
        levels = tuple(known.index(key_of(cell.axes[axis])) for axis, known in values.items())
        others = [key for key in cell.axes if key not in special and grid.varies(key)]
        places[cell.group, cell.variant] = group_name(cell.axes, others, grid.labels), levels
    return places


def _of_table(
    names: Sequence[str],
    measure: str,
    rest: str,
    lr: float,
    table: Mapping[Levels, Score],
    why: str = "",
) -> Iterator[Effect]:
    """Every main effect and interaction on one measure, single factors first.

    Of levels whose losses count other tokens there is no table, and the note says `why`.
    """
    corners = list(itertools.product((0, 1), repeat=len(names)))
    missing = [corner for corner in corners if not (corner in table and table[corner].values)]
    values = [] if missing else [dict(table[corner].values) for corner in corners]
    seeds = sorted(set.intersection(*map(set, values))) if values else []
    table_values = np.array([[of[seed] for seed in seeds] for of in values])  # [corner, seed]
    least = max((table[corner].floor for corner in corners if not missing), default=0.0)
    unsure = [corner for corner in corners if not missing and math.isnan(table[corner].low)]
    bounds = {table[corner].bound for corner in corners if corner in table} - {""}
    note = f"censored ({', '.join(sorted(bounds))}) in some variants" if bounds else ""
    if why:
        note = f"not comparable: {why}"
    elif missing:
        note = f"{len(missing)} of {len(corners)} variants have no value"
    elif not seeds:
        note = "no seed has finished every run that it needs"
    elif unsure and len(seeds) > 1:
        note = join_notes(note, f"{len(unsure)} of {len(corners)} variants have no interval")
    for size in range(1, len(names) + 1):
        for chosen in itertools.combinations(range(len(names)), size):
            identity = {"measure": measure, "group": rest, "lr": lr, "note": note}
            text = TIMES.join(names[place] for place in chosen)
            if not seeds:
                yield Effect(factors=text, **identity)
                continue
            signs = np.array(
                [math.prod(1 if corner[place] else -1 for place in chosen) for corner in corners]
            )
            # The mean over the levels of the factors that are not chosen.
            share = 2 ** (len(names) - size)
            each = ((signs[:, None] * table_values).sum(axis=0) / share).tolist()
            by_seed, decides = dict(zip(seeds, each, strict=True)), measure in DECIDING
            found = of_seeds(by_seed, sure=not unsure, decides=decides, floor=least)
            yield Effect(factors=text, **identity, **found)


BETTER, WORSE, SAME = "better", "worse", "no difference that matters"
UNDECIDED, UNLIKE = "undecided", "not comparable"
EQUAL = "changes nothing"

MORE = 1.05
"""From this ratio on, unequal token counts are reported; smaller ones come from batch ends."""
_SPEED = "train/tokens_per_second"  # counts the tokens that are read

Place = tuple[tuple[str, Hashable], ...]  # the values of the other axes


@dataclass(frozen=True, kw_only=True)
class MetricDifference(Estimate):
    """One row of `comparisons.csv`: `value` of an `axis` minus its `baseline`, in one slice.

    `where` names the values of the other axes that vary, `all` if none does. `reading`: `better`,
    `worse`, `no difference that matters` where the deciding interval lies within `+-matters`,
    `undecided`, `not comparable`, `changes nothing` where every run ends with exactly the numbers
    of the one at the baseline, and empty without a p value; `mode` decides the direction.
    `why_unlike` says why the metric of the grid cannot compare the two, and `comparable` whether
    `metric` can. `tokens_ratio` compares the tokens read with those at the baseline; `budget`
    states it in words, and is empty where they are about equal. `follows` names the axes that
    follow from this one and differ too.
    """

    grid: str
    axis: str
    value: str
    baseline: str
    where: str
    metric: str
    mode: str
    matters: float = 0.0
    comparable: bool = True
    equal: bool = False
    why_unlike: str = ""
    tokens_ratio: float = math.nan
    budget: str = ""
    follows: str = ""

    @property
    def beside(self) -> tuple[str, ...]:
        return tuple(filter(None, (self.budget, self.follows))) if self.comparable else ()

    @property
    def reading(self) -> str:
        if not self.comparable:
            return UNLIKE
        if self.equal:
            return EQUAL
        if math.isnan(self.p_holm):
            return ""
        if within(self, self.matters):
            return SAME
        if not self.significant:
            return UNDECIDED
        return BETTER if (self.estimate < 0) == (self.mode == "min") else WORSE


def compared_axes(grid: GridResults) -> dict[str, Any]:
    """The axes to compare, each with its baseline: those of `compare:` in the grid file.

    For a task with published scores also the warm-up, with none as the baseline. Without that key
    and without a question about warm-up, the preset or else the first axis except the seed, with
    the baseline of the grid or the first value.
    """
    # The scores of warm-up compare rates; where other fields were searched, the best trials are.
    own = grid.scored or any(field != RATE for field in grid.chosen)
    if own and grid.varies(WARMUP) and 0 in grid.warmups:
        return {WARMUP: 0, **grid.compare}
    if grid.compare or grid.asks_warmup:
        return dict(grid.compare)
    several = [axis for axis in grid.axes if axis not in (SEED, *grid.chosen) and grid.varies(axis)]
    axis = PRESET if PRESET in several else next(iter(several), None)
    if axis is None:
        return {}
    baseline = grid.baseline if axis == PRESET and grid.baseline in grid.axes[axis] else None
    return {axis: grid.axes[axis][0] if baseline is None else baseline}


def comparisons(grid: GridResults, axes: Mapping[str, Any] | None = None) -> list[MetricDifference]:
    """Every comparison of a grid; none where a pruner ended runs.

    `axes`: those to compare, with the baseline of each; None for `compared_axes`.
    """
    if grid.pruner is not None:
        return []
    grid = best_trials(grid)
    asked = compared_axes(grid) if axes is None else axes
    rows = [row for axis, base in asked.items() for row in _of(grid, axis, base)]
    return corrected(rows, lambda row: "all", grid.alpha)


def comparison_document(row: MetricDifference) -> dict[str, Any]:
    """A comparison for scripts."""
    tree = row_document(row) | {"reading": row.reading}
    del tree["equal"]
    return tree


def _of(grid: GridResults, axis: str, base: Any) -> list[MetricDifference]:
    """The comparisons of one axis.

    Where a search or a refinement chose values, the best trial of each arm is compared.
    """
    trials: dict[tuple[Place, Hashable], dict[str, dict[int, CellResult]]] = {}
    words: dict[Place, str] = {}
    for cell in grid.cells:
        others = grid.apart_from(axis, cell.axes)
        tried = {key: others.pop(key) for key in grid.chosen if key in others}
        place = tuple((key, key_of(value)) for key, value in others.items())
        shown = [key for key in others if grid.varies(key)]
        words[place] = group_name(others, shown, grid.labels)
        arm = trials.setdefault((place, key_of(cell.axes[axis])), {})
        arm.setdefault(group_name(tried, list(tried), {}), {})[cell.seed or 0] = cell
    runs: dict[Place, dict[Hashable, dict[int, CellResult]]] = {}
    planned: dict[tuple[Place, Hashable], set[int]] = {}
    best: dict[tuple[Place, Hashable], str] = {}
    for (place, value), arm in trials.items():
        name = min(arm, key=lambda each: _rank_of(grid, arm[each].values()))
        planned[place, value] = {*arm[name]}
        cells = {seed: cell for seed, cell in arm[name].items() if cell.finished}
        if cells:
            runs.setdefault(place, {})[value] = cells
        if {*grid.chosen} - {axis}:
            best[place, value] = f"the best of {len(arm)} trials, {name}"
    others = [value for value in grid.axes[axis] if key_of(value) != key_of(base)]
    rows = []
    for place, value in itertools.product(words, others):
        both = [(place, key_of(each)) for each in (value, base)]
        seeds = set.intersection(*(planned.get(each, set()) for each in both))
        row = _compared(grid, axis, value, base, words[place], runs.get(place, {}), seeds)
        if row.seeds and best:
            trials_of = " against ".join(best[each] for each in both)
            row = replace(row, note=join_notes(trials_of, row.note))
        rows.append(row)
    return rows


def _rank_of(grid: GridResults, cells: Collection[CellResult]) -> tuple[bool, int, float]:
    """The place of a trial among those of its arm: its mean, if all its runs have a value."""
    measures = [grid.measure(cell) for cell in cells]
    values = [cell.metrics.get(own.metric) for cell, own in zip(cells, measures, strict=True)]
    finite = [value for value in values if value is not None]
    centre = mean(finite) if finite else math.inf
    sign = -1 if measures[0].mode == "max" and finite else 1
    return not all(cell.finished for cell in cells), len(values) - len(finite), sign * centre


def _compared(
    grid: GridResults,
    axis: str,
    value: Any,
    base: Any,
    where: str,
    arms: Mapping[Hashable, Mapping[int, CellResult]],
    planned: Collection[int],
) -> MetricDifference:
    cells = [cell for arm in arms.values() for cell in arm.values()]
    measure = next(map(grid.measure, cells), grid.measures[0])
    row = MetricDifference(
        grid=grid.name,
        axis=axis,
        value=value_name(axis, value, grid.labels),
        baseline=value_name(axis, base, grid.labels),
        where=where,
        metric=measure.metric,
        mode=measure.mode,
        matters=grid.metric_matters if measure.metric == grid.metric else 0.0,
    )
    if axis == CORPUS and any(cell.scores for cell in cells):
        return replace(row, note="scores of two tasks have no difference")
    own, other = (arms.get(key_of(each), {}) for each in (value, base))
    if axis in EVALUATION:
        return _not_comparable(row, f"{axis} changes only the evaluation, not what is trained")
    instead = ""
    if own and other:
        compared = [*own.values(), *other.values()]
        common, why = grid.common_measure(compared)
        row = replace(row, why_unlike=why, **_budget(own.values(), other.values()))
        keys = (key for key, of in grid.linked.items() if of == axis)
        pairs = ((key, label(compared[0].axes[key]), label(compared[-1].axes[key])) for key in keys)
        said = " and ".join(f"{key} {a} instead of {b}" for key, a, b in pairs if a != b)
        row = replace(row, follows=f"has {said}" if said else "")
        if common is None:
            return _not_comparable(row, why)
        if why:
            instead = f"by {common.metric}, as {measure.metric} counts other things: {why}"
        measure = common
        matters = row.matters if measure.metric == row.metric else 0.0
        row = replace(row, metric=measure.metric, mode=measure.mode, matters=matters)
    both, name = sorted(own.keys() & other.keys()), measure.metric
    seeds = [s for s in both if None not in (own[s].metrics.get(name), other[s].metrics.get(name))]
    lacking = len(both) - len(seeds)
    note = f"{lacking} of {len(both)} pairs lack a finite {measure.metric}" if lacking else ""
    missing = unfinished("seeds", len(planned), len(both))
    note = join_notes(instead, note)
    if not seeds:
        none = "no seed has finished with both values"
        return replace(row, note=join_notes(note, missing) or none)
    values = [as_number(own[s].metrics[name]) - as_number(other[s].metrics[name]) for s in seeds]
    stopped = [failed(own[s]) for s in both], [failed(other[s]) for s in both]
    mixed, reason = not all(map(ended_alike, stopped)), ""
    least = no_less_than_failures(0.0, len(planned), stopped)
    found = of_seeds(dict(zip(seeds, values, strict=True)), sure=not mixed, floor=least)
    if math.isnan(found["low"]) and len(seeds) > 1:
        reason = "some seeds of an arm failed and others did not" if mixed else "no spread"
    elif 1 < len(seeds) < LEAST_SEEDS:
        reason = f"{len(seeds)} seeds are too few for a p value"
    equal = all(_measured(own[s]) == _measured(other[s]) for s in seeds)
    return replace(row, **found, note=join_notes(note, missing, reason), equal=equal)


def _not_comparable(row: MetricDifference, why: str) -> MetricDifference:
    note = f"{UNLIKE}, because {why}"
    return replace(row, note=note, comparable=False, why_unlike=why)


def _measured(cell: CellResult) -> tuple[Any, dict[str, float | None]]:
    metrics = {tag: v for tag, v in cell.metrics.items() if not tag.startswith("train/")}
    return cell.record.get("tokens"), metrics


def followers(grid: GridResults, of: Collection[str]) -> str:
    """The axes that follow from one of these, with their values, in words."""
    found: dict[str, dict[str, None]] = {}
    for key in (key for key, other in grid.linked.items() if other in of and grid.varies(key)):
        for cell in grid.cells:
            name = value_name(grid.linked[key], cell.axes[grid.linked[key]], grid.labels)
            found.setdefault(key, {})[f"{label(cell.axes[key])} with {name}"] = None
    return "; ".join(f"{key} {' and '.join(values)}" for key, values in found.items())


def _budget(own: Collection[CellResult], other: Collection[CellResult]) -> dict[str, Any]:
    """The tokens that runs at a value have read, relative to those at the baseline.

    Runs that became non-finite ended early, whatever their budget, and do not count. Tokens of
    different tokenizers are counted in bytes of the validation text, where these are known.
    """
    own, other = ([c for c in cells if c.outcome != "non_finite"] for cells in (own, other))
    every = [*own, *other]
    if not own or not other:
        return {}
    facts = task_facts(own[0].setting(TASKS.field))
    read, what = _tokens, "examples" if facts.labelled else "tokens"
    if unlike(every, own[0].monitored.loss) and all(math.isfinite(_bytes(c)) for c in every):
        read, what = _bytes, "bytes"
    first, second = (mean([read(cell) for cell in cells]) for cells in (own, other))
    tokens, budget = (first / second if second else math.nan), ""
    if read is _tokens and (why := unlike(every, _SPEED)):
        of = "tokenizer" if "tokenizer" in why or "vocab" in why else "text"
        budget = f"has read {_times(tokens)} the {what}, which are those of another {of}"
    elif tokens >= MORE or 0 < tokens <= 1 / MORE:
        budget = f"has {'predicted' if facts.masks else 'read'} {_times(tokens)} the {what}"
    return {"tokens_ratio": tokens, "budget": budget}


def _tokens(cell: CellResult) -> float:
    return as_number(cell.record.get("tokens"))


def _bytes(cell: CellResult) -> float:
    nats, bits = (as_number(cell.metrics.get(f"val/{name}")) for name in ("nll", "bits_per_byte"))
    return _tokens(cell) * nats / (math.log(2) * bits) if bits else math.nan


def _times(ratio: float) -> str:
    return f"{ratio:.3g} times" if ratio >= 10 else f"{ratio:.2g} times"


def compare_axis(
    grid: GridResults,
    axis: str,
    baseline: Any,
    *,
    metric: str | None = None,
    mode: str | None = None,
) -> "pd.DataFrame":
    """Return the table of `comparisons` of one axis; column `seed N` has that seed's difference.

    Args:
        grid: The results of a grid.
        axis: The dotted key of one of its axes.
        baseline: The value of the axis that the others are compared with.
        metric: A metric of the runs; None for what the report judges them by: the own score of a
            task that has published ones, else the metric of the grid.
        mode: Whether `min` or `max` is best; None for that of the metric.

    Raises:
        UserError: for an unknown axis, value or metric, for a grid with a pruner, and for a mode
            without a metric where tasks have scores of their own.
    """
    compare = {axis: baseline}
    asked = GridSubject({"compare": compare}, grid.axes, {}, grid.config, grid.metric)
    check_rules([COMPARE], asked)
    if not grid.varies(axis):
        raise UserError(f"compare: {axis}: has one value in {grid.name}; a comparison needs two")
    if axis in grid.chosen and grid.trials:
        raise UserError(f"compare: {axis}: each seed of {grid.name} has values of its own")
    if grid.pruner is not None:
        raise UserError(
            f"{grid.folder}: pruner: {grid.pruner}: cells that were ended early have no final "
            "metric, so the rest are no fair comparison; use a grid without a pruner"
        )
    best = grid.mode if mode is None and metric in (None, grid.metric) else mode
    choice = read(MetricChoice, {"name": metric or grid.metric, "mode": best}, at="metric")
    name, best = check_metric(choice, grid.config, grid.axes)
    reported = dict.fromkeys(name for cell in grid.finished for name in cell.metrics)
    if reported and name not in reported:  # every comparison would be empty
        names = ", ".join(sorted(reported))
        raise UserError(
            f"metric: no run of {grid.name} reports '{name}' ({names}){nearest(name, reported)}"
        )
    if metric is None and mode is not None and grid.scored:
        raise UserError(f"mode: needs a metric; {grid.name} is judged by the scores of its task")
    matters = grid.metric_matters if name == grid.metric else 0.0  # in the unit of the metric
    asked_for = replace(
        grid, metric=name, mode=best, asked=metric is not None, metric_matters=matters
    )
    import pandas as pd

    rows = comparisons(asked_for, compare)
    frame = pd.DataFrame([comparison_document(row) for row in rows])
    for seed in sorted({seed for row in rows for seed, _ in row.values}):
        frame[f"seed {seed}"] = [dict(row.values).get(seed, float("nan")) for row in rows]
    return frame
