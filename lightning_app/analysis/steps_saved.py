"""How many steps of training does warm-up save, and how many does it cost by its small rates?"""

import itertools
import math
from collections.abc import Mapping, Sequence

from lightning_app.analysis.grid_results import LEARNING_RATE, CellResult
from lightning_app.analysis.pairing import (
    Arm,
    Paired,
    score_identity,
    undefined,
    why_never_learned,
    why_nothing,
)
from lightning_app.analysis.score import Score, bound_of, join_notes
from lightning_app.analysis.statistics import mean, t_interval


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
    found = [] if reason else [_tau(bare, ref) for bare, ref in runs]
    if None in found:
        reason = "fewer than two validations"
    if reason:
        return [undefined(arm, lr, "steps_saved", reason, pairs), lost]
    return [_saved(arm, lr, pairs, [tau for tau in found if tau is not None]), lost]


def _saved(arm: Arm, lr: float, pairs: Paired, found: Sequence[tuple[float, bool]]) -> Score:
    values = [tau for tau, _ in found]
    early = any(first for _, first in found)
    low, high, _ = (math.nan,) * 3 if pairs.mixed else t_interval(values)
    bare, ref = (any(pairs.failed(point)) for point in pairs.points)
    return Score(
        **score_identity(arm, lr, "steps_saved"),
        estimate=mean(values),
        low=low,
        high=high,
        bound=bound_of(at_most=ref, at_least=bare),
        values=tuple(zip(pairs.seeds, values, strict=True)),
        **pairs.counts,
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


def _tau(bare: CellResult, ref: CellResult) -> tuple[float, bool] | None:
    """tau of one seed, and whether a loss was reached before the first validation."""
    tag = bare.monitored.loss
    without, with_warmup = bare.curve(tag), ref.curve(tag)
    if len(without) < 2 or len(with_warmup) < 2:
        return None
    if ref.loss <= bare.loss:
        reached, first = _first_step(with_warmup, bare.loss)
        return max(with_warmup) - reached, first
    reached, first = _first_step(without, ref.loss)
    return -(max(without) - reached), first


def _first_step(curve: Mapping[int, float], loss: float) -> tuple[float, bool]:
    """The first step at which the curve is at `loss` or below, linear between its points."""
    steps = sorted(curve)
    before = None
    for step in steps:
        if curve[step] <= loss:
            if before is None:
                return float(step), True
            share = (curve[before] - loss) / (curve[before] - curve[step])
            return before + share * (step - before), False
        before = step
    return float(steps[-1]), False


def _lost(bare: CellResult, ref: CellResult) -> float:
    rates = [cell.curve(LEARNING_RATE) for cell in (bare, ref)]
    if any(len(curve) < 2 for curve in rates) or max(rates[0]) != max(rates[1]):
        return math.nan
    without, with_warmup = (_area(curve) for curve in rates)
    target, last = with_warmup[max(with_warmup)], max(without)
    before = min(without)
    for step in sorted(without):
        if without[step] >= target:
            if step == before:
                return float(last - step)
            share = (target - without[before]) / (without[step] - without[before])
            return last - (before + share * (step - before))
        before = step
    return 0.0


def _area(curve: Mapping[int, float]) -> dict[int, float]:
    """The sum of the rates to each logged step, by trapezoids between the logged ones."""
    steps = sorted(curve)
    found = {steps[0]: curve[steps[0]] * steps[0]}
    for before, step in itertools.pairwise(steps):
        found[step] = found[before] + (curve[before] + curve[step]) / 2 * (step - before)
    return found
