"""The cells that a search or a refinement asks for, as a function of the results so far.

Nothing else is stored: the same grid file and the same finished runs give the same cells on any
host, after any interruption, and in whatever order runs have ended. The trials of a round are asked
together, and the next round only when all of their results exist. The sampler gets these in the
order in which it asked.
"""

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from itertools import chain, islice
from statistics import stdev
from typing import TYPE_CHECKING, Any

from lightning_app.config.grid import GridSpec
from lightning_app.config.search import LOOKED_AT, Range, Refine, Search
from lightning_app.config.tree import RATE, SEED, WARMUP, canonical
from lightning_app.core.errors import UserError

if TYPE_CHECKING:
    import optuna

Values = dict[str, Any]


@dataclass(frozen=True)
class TrialScore:
    """What came of one cell, or of the cells of all seeds: then their mean score.

    Attributes:
        score: The metric of the grid; that of a model without context if the run failed.
        sound: Whether the run learned.
        pruned: The step at which a pruner ended it, else None.
    """

    score: float
    sound: bool = True
    pruned: int | None = None


Outcome = Callable[[Values], TrialScore | None]
Known = Mapping[str, TrialScore]
"""The outcomes of finished cells, by `canonical` of their axes."""


@dataclass(frozen=True)
class SearchArm:
    """An arm of a search, with all that it has asked for.

    Attributes:
        cells: The axes of its cells without the searched fields: one per seed; one if the study
            is of a seed.
        rounds: The values that it has asked for, by rounds.
        more: The number of trials that may follow.
    """

    cells: Sequence[Mapping[str, Any]]
    rounds: Sequence[Sequence[Values]]
    more: int
    of_seed: bool = False

    @property
    def name(self) -> Mapping[str, Any]:
        """The axes that set it apart."""
        first = self.cells[0].items()
        return {axis: value for axis, value in first if axis != SEED or self.of_seed}

    def outcome(self, values: Values, known: Known) -> TrialScore | None:
        """The mean over seeds, None if a cell has not ended."""
        found = [known.get(canonical({**cell, **values})) for cell in self.cells]
        ended = [each for each in found if each is not None]
        if len(ended) < len(found):
            return None
        pruned = [each.pruned for each in ended if each.pruned is not None]
        return TrialScore(
            math.fsum(each.score for each in ended) / len(ended),
            all(each.sound for each in ended),
            min(pruned, default=None),
        )


def search_arms(
    spec: GridSpec, listed: Sequence[Mapping[str, Any]], known: Known
) -> list[SearchArm]:
    """Return the arms of a grid with a search or a refinement.

    `listed` are the cells of the axes in its file, `known` the outcomes of finished ones. With
    `until` all arms get one more seed at a time, once all cells of the former ones have ended.
    """
    arms, until = _arms(spec, listed, known), spec.until
    if until is None:
        return arms
    seeds = list(dict.fromkeys(cell[SEED] for cell in listed))
    others = list({canonical(own := _without(cell, SEED)): own for cell in listed}.values())
    while len(seeds) < until.most_seeds:
        width = largest_half_width(spec, arms, known)
        if width is None:  # runs are missing
            more = (until.most_seeds - len(seeds)) * ((spec.search and spec.search.trials) or 0)
            return [replace(a, more=a.more + more * (a.name[SEED] == seeds[-1])) for a in arms]
        if width <= until.half_width:
            break
        seeds.append(max(seeds) + 1)
        arms += _arms(spec, [{**cell, SEED: seeds[-1]} for cell in others], known)
    return arms


def _without(cell: Mapping[str, Any], *axes: str) -> dict[str, Any]:
    return {axis: value for axis, value in cell.items() if axis not in axes}


def largest_half_width(spec: GridSpec, arms: Sequence[SearchArm], known: Known) -> float | None:
    """The largest half width of T over the arms, None while a run of theirs is missing.

    T is the best score of a seed without warm-up minus that with the reference. Where some seeds
    have no sound run with a warm-up and others do, seeds would narrow nothing, so that the arm has
    no say. 0 if none has one.
    """
    from scipy import special

    bare, reference = 0, spec.sensitivity["reference_warmup"]
    best: dict[str, dict[Any, dict[int, TrialScore]]] = {}
    for arm in arms:
        found = [arm.outcome(values, known) for values in chain.from_iterable(arm.rounds)]
        ended = [each for each in found if each is not None]
        if arm.more or len(ended) < len(found):
            return None
        cell = arm.cells[0]
        if cell[WARMUP] in (bare, reference):
            of = best.setdefault(canonical(_without(cell, WARMUP, SEED)), {})
            lowest = min(ended, key=lambda each: each.score)
            sound = any(each.sound for each in ended)
            of.setdefault(cell[SEED], {})[cell[WARMUP]] = replace(lowest, sound=sound)
    widths = [0.0]
    for seeds in best.values():
        pairs = [(of[bare], of[reference]) for of in seeds.values() if len(of) > 1]
        alike = all(len({each.sound for each in side}) == 1 for side in zip(*pairs, strict=True))
        if len(pairs) > 1 and alike:
            spread = stdev(first.score - second.score for first, second in pairs)
            quantile = float(special.stdtrit(len(pairs) - 1, 1 - LOOKED_AT / 2))
            widths.append(quantile * spread / math.sqrt(len(pairs)))
    return max(widths)


def _arms(spec: GridSpec, listed: Sequence[Mapping[str, Any]], known: Known) -> list[SearchArm]:
    grouped: dict[str, list[Mapping[str, Any]]] = {}
    rates: dict[str, list[Any]] = {}
    of_seed = spec.search is not None and spec.search.per == "seed"
    for cell in listed:
        axes = {axis: value for axis, value in cell.items() if spec.refine is None or axis != RATE}
        own = {axis: value for axis, value in axes.items() if axis != SEED or of_seed}
        key = canonical(own)
        if axes not in grouped.setdefault(key, []):
            grouped[key].append(axes)
        if spec.refine is not None and cell[RATE] not in rates.setdefault(key, []):
            rates[key].append(cell[RATE])
    made: list[SearchArm] = []
    # An arm that lacks a seed has as many trials as the others: the best of more would be better.
    seeds = max(map(len, grouped.values()), default=1)
    for key, cells in grouped.items():
        arm = SearchArm(cells, (), 0, of_seed)
        outcome = partial(arm.outcome, known=known)
        if spec.refine is not None:
            rounds, more = _refined(spec.refine, spec.mode, sorted(rates[key]), seeds, outcome)
        else:
            assert spec.search is not None
            seed = int(cells[0].get(SEED, spec.base_config.get(SEED) or 0))
            if spec.search.kind == "stratified":
                rounds, more = [stratified(spec.search, seed)], 0
            else:
                rounds, more = _searched(spec.search, spec.mode, seeds, outcome, seed)
        made.append(SearchArm(cells, rounds, more, of_seed))
    return made


def wanted(asked: Sequence[SearchArm]) -> Iterator[dict[str, Any]]:
    """Yield the cells of all arms: by rounds, and seeds vary slowest within a round."""
    seen = set()
    for number in range(max((len(arm.rounds) for arm in asked), default=0)):
        for seed in range(max(len(arm.cells) for arm in asked)):
            for arm in asked:
                if number >= len(arm.rounds) or seed >= len(arm.cells):
                    continue
                for values in arm.rounds[number]:
                    cell = {**arm.cells[seed], **values}
                    if (key := canonical(cell)) not in seen:  # a sampler may ask twice
                        seen.add(key)
                        yield cell


GOLDEN = 0.6180339887498949


def stratified(search: Search, seed: int) -> list[Values]:
    """The trials of one seed: one in each of K equal parts of the range, the same in every arm.

    `low (high / low)^((k + u) / K)`, `k = 0..K-1`, `u = frac(0.618... seed)`; equal parts of the
    range itself without `log`. The shares u of consecutive seeds cover a part evenly (Weyl 1916).
    """
    ((field, values),) = search.fields.items()
    count, share = search.trials or 1, GOLDEN * seed % 1.0
    points = _points(values, [k + share for k in range(count)], count)
    return [_readable({field: point}, search) for point in points]


def _points(values: Range, parts: Iterable[float], of: int) -> list[float]:
    """The values at these of `of` equal parts of a range, or of its logarithm."""
    log = math.log if values.log else float
    low, high = log(values.low), log(values.last)
    places = [low + (high - low) * part / of for part in parts]
    return [math.exp(place) if values.log else place for place in places]


def _searched(
    search: Search, mode: str, seeds: int, outcome: Outcome, seed: int
) -> tuple[list[list[Values]], int]:
    """Ask a new sampler of Optuna, and report the outcomes of the rounds that have ended.

    The studies of the same `seed` in different arms begin alike.
    """
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    left = search.trials or (search.budget or 0) // seeds
    if search.trials:
        search = replace(search, seed=search.seed + seed)
    choices = {field: distribution(values) for field, values in search.fields.items()}
    rounds: list[list[Values]] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        study = optuna.create_study(
            direction="minimize" if mode == "min" else "maximize", sampler=_sampler(search, left)
        )
        while left:
            trials = [study.ask(choices) for _ in range(min(search.together, left))]
            left -= len(trials)
            rounds.append([_readable(trial.params, search) for trial in trials])
            found = [outcome(values) for values in rounds[-1]]
            ended = [each for each in found if each is not None]
            if len(ended) < len(found):
                break
            if search.kind == "grid":
                continue  # it learns nothing, and would stop the study at its last point
            for trial, each in zip(trials, ended, strict=True):
                if each.pruned is None:
                    study.tell(trial, each.score)
                else:
                    trial.report(each.score, each.pruned)
                    study.tell(trial, state=optuna.trial.TrialState.PRUNED)
    return rounds, left


def with_floats(spec: GridSpec, is_float: Callable[[str], bool]) -> GridSpec:
    """Return a grid whose searched fields have floats as bounds where `is_float` says so.

    Whole numbers between whole numbers are searched only in a field of that type.
    """
    if spec.search is None:
        return spec
    fields = {
        field: replace(values, low=float(values.low), high=float(values.high))
        if is_float(field)
        else values
        for field, values in spec.search.fields.items()
    }
    return replace(spec, search=replace(spec.search, fields=fields))


def distribution(values: Range) -> "optuna.distributions.BaseDistribution":
    """Return Optuna's distribution of a searched field."""
    import optuna

    low, high, step = values.low, values.last, values.step
    if isinstance(low, int) and isinstance(high, int) and not isinstance(step, float):
        return optuna.distributions.IntDistribution(low, high, log=values.log, step=step or 1)
    return optuna.distributions.FloatDistribution(low, high, log=values.log, step=step)


def distributions(
    spec: GridSpec, values: Values
) -> "dict[str, optuna.distributions.BaseDistribution]":
    """Return the distributions of the values of a trial; those of a refined rate include it."""
    if spec.search is not None:
        typed = with_floats(spec, lambda field: isinstance(values[field], float)).search
        assert typed is not None
        return {field: distribution(each) for field, each in typed.fields.items()}
    rate = float(values[RATE])
    return {RATE: distribution(Range(low=rate / 2, high=rate * 2, log=True))}


def _readable(params: Mapping[str, Any], search: Search) -> Values:
    """Four digits of every continuous value, so that names of runs stay short."""
    return {
        field: min(max(float(f"{value:.4g}"), search.fields[field].low), search.fields[field].high)
        if isinstance(value, float) and search.fields[field].step is None
        else value
        for field, value in params.items()
    }


def _sampler(search: Search, trials: int) -> "optuna.samplers.BaseSampler":
    import optuna

    samplers, seed = optuna.samplers, search.seed
    match search.kind:
        case "tpe":
            return samplers.TPESampler(
                seed=seed, n_startup_trials=search.together, constant_liar=True
            )
        case "gp":
            return samplers.GPSampler(seed=seed, n_startup_trials=search.together)
        case "cmaes":
            if find_spec("cmaes") is None:  # Optuna imports it after the first round
                raise UserError("search.sampler: cmaes needs `pip install cmaes`")
            if len(search.fields) < 2:
                raise UserError(
                    "search.sampler: cmaes searches at least two fields, found one; tpe or gp is "
                    "right for one"
                )
            return samplers.CmaEsSampler(seed=seed)
        case "qmc":
            return samplers.QMCSampler(seed=seed, scramble=True)
        case "random":
            return samplers.RandomSampler(seed=seed)
        case _:  # grid
            count = math.ceil(trials ** (1 / len(search.fields)) - 1e-9)
            points = {field: grid_points(values, count) for field, values in search.fields.items()}
            return samplers.GridSampler(points, seed=seed)


def grid_points(values: Range, count: int) -> list[Any]:
    """Return `count` values of a range at equal distances, its ends included.

    Whole numbers and multiples of a step are rounded, so that there may be fewer.
    """
    import optuna

    points = _points(values, range(count), max(1, count - 1))
    whole = isinstance(distribution(values), optuna.distributions.IntDistribution)
    if step := values.step or (1 if whole else None):
        points = [values.low + round((point - values.low) / step) * step for point in points]
    return list(dict.fromkeys(min(max(point, values.low), values.last) for point in points))


def _refined(
    refine: Refine, mode: str, rates: list[float], seeds: int, outcome: Outcome
) -> tuple[list[list[Values]], int]:
    """Ask for the rates of the axis, then for those that `further` names."""
    rounds, tried = [[{RATE: rate} for rate in rates]], list(rates)
    left = refine.budget // seeds - len(rates)
    while True:
        found = [outcome({RATE: rate}) for rate in tried]
        ended = [each for each in found if each is not None]
        if len(ended) < len(found):
            return rounds, left
        new = list(islice(further(tried, ended, refine, mode), left))
        if not new:
            return rounds, 0
        left -= len(new)
        rounds.append([{RATE: rate} for rate in new])
        tried = sorted([*tried, *new])


def further(
    rates: Sequence[float], outcomes: Sequence[TrialScore], refine: Refine, mode: str
) -> Iterator[float]:
    """Yield the rates that would tell most about the best score of an arm.

    Beyond an edge of the rates tried, one octave further, unless a rate between others is as good.
    Between them, the middle of each gap beside the best rate that is wider than an octave. Then the
    place where a curve through the means around the best one is lowest (`_may_gain`), in steps of
    `finest` from the best rate, or, where that has been tried or a neighbour failed, the middle of
    the wider gap, of equal ones that to a failed rate. None once no more than `until` may be gained
    or the gaps are as small as `finest`, and none if no run learned. `rates` are those tried,
    ascending, and `outcomes` the means over seeds at them.
    """
    scores = [each.score if mode == "min" else -each.score for each in outcomes]
    sound = [each.sound and math.isfinite(each.score) for each in outcomes]
    places = [math.log2(rate) for rate in rates]
    if not any(sound):
        return
    edges = 0, len(rates) - 1
    lowest = min(score for score, learned in zip(scores, sound, strict=True) if learned)
    equal = [k for k in range(len(rates)) if sound[k] and scores[k] == lowest]
    # Of equal scores, as those at a metric's limit, one between others: beyond the edge of a range
    # that is flat there is nothing to find.
    inner = [k for k in equal if k not in edges] or equal
    best = inner[len(inner) // 2]
    if best in edges:
        yield _rate(places[best] + (1 if best else -1))
        return
    near = 1e-3  # rates have four digits
    sides = sorted((best - 1, best + 1), key=lambda k: (-abs(places[k] - places[best]), sound[k]))
    gaps = [(abs(places[k] - places[best]), min(places[k], places[best])) for k in sides]
    if gaps[0][0] > 1 + near:
        yield from (_rate(place + gap / 2) for gap, place in gaps if gap > 1 + near)
        return
    finite = [score if math.isfinite(score) else max(scores[best], 0) for score in scores]
    gain, deepest = _may_gain(places, finite, sound, best)
    if gain <= refine.until:
        return
    if deepest is not None:
        steps = round((deepest - places[best]) / refine.finest)
        at = places[best] + steps * refine.finest
        if min(abs(at - place) for place in places) >= refine.finest - near:
            yield _rate(at)
            return
    gap, place = gaps[0]
    if gap / 2 >= refine.finest - near:
        yield _rate(place + gap / 2)


def _may_gain(
    places: Sequence[float], scores: Sequence[float], sound: Sequence[bool], best: int
) -> tuple[float, float | None]:
    """By how much a score beside the best one may be lower, and where.

    That of the lowest of three curves, if the neighbours of the best place are sound: the parabola
    through these places, and the cubics through one more sound place on either side. Without them
    there is no bound.
    """
    import numpy as np

    three = [best - 1, best, best + 1]
    if not all(sound[k] for k in three):
        return math.inf, None
    more = [k for k in (best - 2, best + 2) if 0 <= k < len(places) and sound[k]]
    smallest = (scores[best], places[best])
    for chosen in (three, *(sorted([*three, k]) for k in more)):
        curve = np.polynomial.Polynomial.fit(
            [places[k] for k in chosen], [scores[k] for k in chosen], len(chosen) - 1
        )
        for root in curve.deriv().roots():
            if not root.imag and places[best - 1] <= root.real <= places[best + 1]:
                smallest = min(smallest, (float(curve(root.real)), float(root.real)))
    return scores[best] - smallest[0], smallest[1]


def _rate(place: float) -> float:
    return float(f"{2.0**place:.4g}")
