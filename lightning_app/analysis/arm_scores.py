"""Scores of one variant at one rate: shares of stalled runs, and the loss over warm-ups.

The symbols are those of `sensitivity`.
"""

from collections.abc import Sequence

from lightning_app.analysis.grid_results import CellResult, outcomes
from lightning_app.analysis.pairing import (
    Arm,
    Paired,
    score_identity,
    undefined,
    unfinished,
    why_never_learned,
    why_nothing,
)
from lightning_app.analysis.score import Score, join_notes
from lightning_app.analysis.statistics import mean, wilson_interval
from lightning_app.records import OUTCOMES


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


def flatness(arm: Arm, lr: float) -> Score:
    """`R_w = (mean_w l_bar - min_w l_bar) / (H_uni - min_w l_bar)`: 0 is flat over the warm-ups.

    Undefined ("never learned") if the denominator is under 0.1 nats. It has no interval, since the
    minimum of noisy means is biased and is not defined for a single seed.
    """
    reason, pairs = _over_warmups(arm, lr)
    if not reason:
        best = min(pairs.points, key=pairs.mean)
        reason = why_never_learned(pairs, best)
    if reason:
        return undefined(arm, lr, "R_w", reason, pairs)
    means = [pairs.mean(point) for point in pairs.points]
    ratio = (mean(means) - min(means)) / (pairs.entropy - min(means))
    return Score(
        **score_identity(arm, lr, "R_w"), estimate=ratio, **pairs.counts, note=pairs.missing
    )


def _over_warmups(arm: Arm, lr: float) -> tuple[str, Paired]:
    points = {(warmup, rate) for warmup, rate, _ in arm.planned if rate == lr}
    pairs = arm.at(points)
    return ("one warm-up only" if len(points) < 2 else why_nothing(pairs)), pairs
