"""Scores of one variant alone: shares of stalled runs, and the loss over warm-ups and rates.

The symbols are those of `sensitivity`.
"""

import math
from collections.abc import Sequence
from typing import Any

from lightning_app.analysis.grid_results import CellResult, failures, outcomes
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


def wortsman(arm: Arm, lr: float) -> Score:
    """`S_w = mean_w l_bar - min_w l_bar`, nats per token (Wortsman et al. 2023, over warm-ups).

    Only for comparison with that paper: it ranks a variant that stalls everywhere as insensitive.
    """
    reason, pairs = _over_warmups(arm, lr)
    if reason:
        return undefined(arm, lr, "S_w", reason, pairs)
    means = [pairs.mean(point) for point in pairs.points]
    never = why_never_learned(pairs, min(pairs.points, key=pairs.mean))
    return Score(
        **score_identity(arm, lr, "S_w"),
        estimate=mean(means) - min(means),
        **pairs.counts,
        note=join_notes(never, pairs.missing),
    )


def retuned(arm: Arm) -> Score:
    """`D = min_lr l_bar(0, lr) - min_{lr, w} l_bar(w, lr)`, nats per token.

    The cost of no warm-up when the rate is tuned again without it.
    """
    pairs = arm.at((warmup, lr) for warmup, lr, _ in arm.planned)
    bare = [point for point in pairs.points if point[0] == 0]
    reason = "" if bare else "no arm without warm-up"
    reason = reason or why_nothing(pairs)
    best = pairs.points[0] if reason else min(pairs.points, key=pairs.mean)
    reason = reason or why_never_learned(pairs, best)
    if reason:
        return undefined(arm, math.nan, "D", reason, pairs)
    cost = min(pairs.mean(point) for point in bare) - pairs.mean(best)
    return Score(
        **score_identity(arm, math.nan, "D"), estimate=cost, **pairs.counts, note=pairs.missing
    )


def largest_rate(arm: Arm, warmup: int) -> Score:
    """`eta_max w=...`: the largest rate of the grid at which no finished run failed."""
    name = f"eta_max w={warmup}"
    runs: dict[float, list[CellResult]] = {}
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
        return Score(**score_identity(arm, math.nan, name), **counts, note=reason)
    best = max(sound)
    note = join_notes(
        "the largest rate of the grid: a lower bound" if best == max(arm.rates) else "",
        _smaller([cell for lr, cells in runs.items() if lr < best for cell in cells]),
        unfinished("runs", planned, len(finished)),
    )
    return Score(**score_identity(arm, math.nan, name), estimate=best, **counts, note=note)


def _smaller(cells: Sequence[CellResult]) -> str:
    failed = failures(cells)
    return f"a smaller rate {failed}" if failed else ""


def _over_warmups(arm: Arm, lr: float) -> tuple[str, Paired]:
    points = {(warmup, rate) for warmup, rate, _ in arm.planned if rate == lr}
    pairs = arm.at(points)
    return ("one warm-up only" if len(points) < 2 else why_nothing(pairs)), pairs
