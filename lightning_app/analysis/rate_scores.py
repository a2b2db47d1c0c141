"""Scores of one variant over all learning rates: the need at its own best rates, and tolerance.

The symbols are those of `sensitivity`; `lr` is NaN. A best rate is chosen on other seeds than the
one whose loss is taken, since the smallest of noisy losses is too small.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from lightning_app.analysis.grid_results import CellResult, failures
from lightning_app.analysis.pairing import (
    ELSEWHERE,
    LEARNED,
    NEVER,
    Arm,
    Paired,
    score_identity,
    undefined,
    unfinished,
)
from lightning_app.analysis.score import Score, bound_of, join_notes
from lightning_app.analysis.statistics import (
    FEW_SEEDS,
    best_on_others,
    chosen_on_others,
    guarded_ps,
    is_clear,
    mean,
    pooled_spread,
    sign_flip_p,
    t_interval,
)
from lightning_app.grid_axes import label

BEST = 0.0  # in place of a rate: the best one of each seed
TOLERATED = 0.1  # of what the best rate learns may be lost at a tolerated rate


def needs(members: Sequence[Arm], reference: int | None) -> list[Score]:
    """`need` of each variant of a group, with p values by their pooled spread.

    A variant has no p value if the chosen runs of a warm-up did not end alike; with fewer than 5
    seeds those of both warm-ups have to.
    """
    rows = [need_at_best_rates(arm, reference) for arm in members]
    spread = pooled_spread([_values(row) for row in rows])
    return [
        replace(row, p=float(guarded_ps(_values(row), *spread, widen=row.widen)))
        if row.values and _is_tested(best_runs(arm, reference))
        else row
        for arm, row in zip(members, rows, strict=True)
    ]


def _is_tested(runs: Paired) -> bool:
    few = len(runs.seeds) < FEW_SEEDS
    return runs.all_alike if few else all(map(runs.alike, runs.points))


def _values(row: Score) -> list[float]:
    return [value for _, value in row.values]


def _widening(tables: Iterable["np.ndarray[Any, Any]"]) -> tuple[float, str]:
    """The factor of the standard error, and a note; `tables` are [seed, rate], one a warm-up."""
    tables = list(tables)
    if all(is_clear(losses.T) for losses in tables):
        return 1.0, ""
    factor = chosen_on_others(len(tables[0]))
    return factor, f"the best rate is not clear, so standard error x {factor:.2f}"


def need_at_best_rates(arm: Arm, reference: int | None) -> Score:
    """`need`: `N = mean_s [l(0, r_0(s), s) - l(ref, r_ref(s), s)]`, nats per token, with its sign.

    `r_w(s)` is the rate with the smallest mean loss at warm-up w over the *other* seeds. Student's
    t interval, wider by `chosen_on_others` where a best rate is not clear; none where some chosen
    runs of a warm-up failed and others did not. `<=` where a best rate without warm-up is the
    smallest or largest of the grid, so that a better one may lie outside; `>=` where one with the
    reference is, or where no chosen run without warm-up trained; `?` where both hold.
    """
    reason, pairs, table = _complete(arm, (0, reference))
    if not reason and len(pairs.seeds) < 2:
        reason = "one seed: no other seed to choose the rate on"
    if reason or reference is None:
        return undefined(arm, math.nan, "need", reason, pairs)
    entropy = pairs.entropy
    if entropy - table[reference].mean(axis=0).min() < LEARNED:
        reason = ELSEWHERE if pairs.learned_with_another_warmup(arm.rates) else NEVER
        return undefined(arm, math.nan, "need", reason, pairs)
    rows = np.arange(len(pairs.seeds))
    chosen = {warmup: chosen_rates(losses) for warmup, losses in table.items()}
    values = table[0][rows, chosen[0]] - table[reference][rows, chosen[reference]]
    last = len(arm.rates) - 1
    edges = {warmup: bool({0, last} & set(of.tolist())) for warmup, of in chosen.items()}
    runs = best_runs(arm, reference)
    capped = all(runs.failed(runs.points[0]))
    widen, wider = _widening(table.values())
    low, high, _ = t_interval(values.tolist(), widen)
    if runs.mixed:
        low = high = math.nan
    return Score(
        **score_identity(arm, math.nan, "need"),
        estimate=float(values.mean()),
        low=low,
        high=high,
        p_sign=sign_flip_p(values.tolist()),
        bound=bound_of(at_most=edges[0], at_least=edges[reference] or capped),
        **pairs.counts,
        note=join_notes(
            runs.missing,
            runs.mixed,
            "no run without warm-up trained at any rate" if capped else "",
            f"best rates {_listed(arm, chosen[0])} without warm-up, "
            f"{_listed(arm, chosen[reference])} with it",
            wider,
        ),
        values=_by_seed(pairs, values),
        widen=widen,
    )


def best_runs(arm: Arm, reference: int | None) -> Paired:
    """The runs of `need`: of each seed that at its best rate without warm-up, and that with it.

    The rate of both points is `BEST`.
    """
    _, pairs, table = _complete(arm, (0, reference))
    cells = {
        (warmup, BEST, seed): pairs.runs[(warmup, arm.rates[place]), seed]
        for warmup, losses in table.items()
        for seed, place in zip(pairs.seeds, chosen_rates(losses).tolist(), strict=True)
    }
    return Paired(cells, [(warmup, BEST) for warmup in table], pairs.seeds, pairs.planned)


def chosen_rates(losses: "np.ndarray[Any, Any]") -> "np.ndarray[Any, Any]":
    """The best rate by seed, chosen on the other seeds; `losses` is [seed, rate]."""
    return best_on_others(losses.T)


def octaves(arm: Arm, reference: int | None) -> Score:
    """`octaves`: `O = mean_s log2(theta_ref(s) / theta_0(s))`, octaves of rate that warm-up buys.

    `theta_w(s)` is the largest rate, going up from the best one, at which the loss is at most
    `l* + 0.1 (H_uni - l*)`, with `l*` the smallest loss of that seed and warm-up over the rates; it
    is interpolated, linear in the loss and in log2 of the rate. A failed run has the loss `H_uni`.
    `>=` where a rate with the reference warm-up is tolerated up to the largest of the grid, `<=`
    where one without is, `?` where both are.
    """
    reason, pairs, table = _complete(arm, (0, reference))
    if reason or reference is None:
        return undefined(arm, math.nan, "octaves", reason, pairs)
    entropies = _entropies(pairs).tolist()
    found: dict[int, list[tuple[float, bool]]] = {}
    for warmup, losses in table.items():
        rows = zip(losses, entropies, strict=True)
        found[warmup] = [tolerated(arm.rates, row.tolist(), top) for row, top in rows]
    if any(math.isnan(theta) for of in found.values() for theta, _ in of):
        return undefined(arm, math.nan, "octaves", f"a seed {NEVER} at some warm-up", pairs)
    pairs_of = list(zip(found[reference], found[0], strict=True))
    values = np.array([ref - bare for (ref, _), (bare, _) in pairs_of])
    censored = (any(open_ for _, open_ in found[0]), any(open_ for _, open_ in found[reference]))
    low, high, _ = t_interval(values.tolist())
    at = {w: ", ".join(f"{2**theta:.3g}" for theta, _ in of) for w, of in found.items()}
    return Score(
        **score_identity(arm, math.nan, "octaves"),
        estimate=float(values.mean()),
        low=low,
        high=high,
        p=t_interval(values.tolist())[2],
        p_sign=sign_flip_p(values.tolist()),
        bound=bound_of(*censored),
        **pairs.counts,
        note=join_notes(pairs.missing, f"tolerated to {at[0]} without, {at[reference]} with it"),
        values=_by_seed(pairs, values),
    )


def tolerated(
    rates: Sequence[float], losses: Sequence[float], entropy: float
) -> tuple[float, bool]:
    """log2 of the largest tolerated rate, and whether it is the largest tried.

    NaN where the best loss is not `LEARNED` under the entropy.
    """
    best = min(range(len(losses)), key=losses.__getitem__)
    if entropy - losses[best] < LEARNED:
        return math.nan, False
    limit = losses[best] + TOLERATED * (entropy - losses[best])
    for low, high in zip(range(best, len(rates)), range(best + 1, len(rates)), strict=False):
        if losses[high] > limit:
            share = (limit - losses[low]) / (losses[high] - losses[low])
            return math.log2(rates[low]) + share * math.log2(rates[high] / rates[low]), False
    return math.log2(rates[-1]), True


def rate_sensitivity(arm: Arm, reference: int | None, warmup: int | None = None) -> Score:
    """`rate_sensitivity w=...`: how much the loss rises over the rates (Wortsman et al. 2023).

    `S(w) = mean over ln(rate) of min(l, H_uni) - l(r_w)`, nats per token, the mean by trapezoids
    from the smallest to the largest rate, `r_w(s)` the best rate as in `need`; seed by seed, with
    an interval as for `need`. Without a `warmup`: `rate_sensitivity`, `S(0) - S(ref)`. Undefined
    where a seed never learned: there no rate loses anything against the best one.
    """
    name = "rate_sensitivity" if warmup is None else f"rate_sensitivity w={warmup}"
    wanted = (0, reference) if warmup is None else (warmup,)
    reason, pairs, table = _complete(arm, wanted)
    if not reason and len(pairs.seeds) < 2:
        reason = "one seed: no other seed to choose the rate on"
    if reason:
        return undefined(arm, math.nan, name, reason, pairs)
    tops = _entropies(pairs)
    if any((tops - losses.min(axis=1) < LEARNED).any() for losses in table.values()):
        return undefined(arm, math.nan, name, f"a seed {NEVER} at some warm-up", pairs)
    found = [_risen(arm, losses) for losses in table.values()]
    values = found[0] - found[1] if warmup is None else found[0]
    widen, wider = _widening(table.values())
    low, high, p = t_interval(values.tolist(), widen)
    return Score(
        **score_identity(arm, math.nan, name),
        estimate=float(values.mean()),
        low=low,
        high=high,
        p=p if warmup is None else math.nan,
        **pairs.counts,
        note=join_notes(pairs.missing, wider),
        values=_by_seed(pairs, values),
        widen=widen,
    )


def _risen(arm: Arm, losses: "np.ndarray[Any, Any]") -> "np.ndarray[Any, Any]":
    """S by seed; `losses` is [seed, rate]."""
    places = np.log(arm.rates)
    averages = np.trapezoid(losses, places, axis=1) / (places[-1] - places[0])
    return averages - losses[np.arange(len(losses)), chosen_rates(losses)]


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
        "the largest rate with a finished run: a lower bound" if best == max(runs) else "",
        _smaller([cell for lr, cells in runs.items() if lr < best for cell in cells]),
        unfinished("runs", planned, len(finished)),
    )
    return Score(**score_identity(arm, math.nan, name), estimate=best, **counts, note=note)


def _smaller(cells: Sequence[CellResult]) -> str:
    failed = failures(cells)
    return f"a smaller rate {failed}" if failed else ""


def _complete(
    arm: Arm, warmups: Sequence[int | None]
) -> tuple[str, Paired, Mapping[int, "np.ndarray[Any, Any]"]]:
    """Why a score over rates is undefined, the seeds with every run, and [seed, rate] losses."""
    known = [warmup for warmup in warmups if warmup is not None]
    points = [(warmup, lr) for warmup in known for lr in arm.rates]
    planned = {key[:2] for key in arm.planned}
    pairs = arm.at(points)
    reason = ""
    if None in warmups or len(set(known)) < len(known):
        reason = "no reference warm-up to compare with"
    elif missing := [point for point in points if point not in planned]:
        reason = f"no arm with warm-up {missing[0][0]} at rate {label(missing[0][1])}"
    elif len(arm.rates) < 2:
        reason = "one rate only"
    elif not pairs.seeds:
        reason = "no seed has finished every run that it needs"
    if reason:
        return reason, pairs, {}
    table = {
        warmup: np.array(
            [[pairs.runs[(warmup, lr), s].loss for lr in arm.rates] for s in pairs.seeds]
        )
        for warmup in known
    }
    return "", pairs, table


def _entropies(pairs: Paired) -> "np.ndarray[Any, Any]":
    """The unigram entropy of each seed."""
    return np.array([mean([pairs.runs[p, s].entropy for p in pairs.points]) for s in pairs.seeds])


def _listed(arm: Arm, chosen: "np.ndarray[Any, Any]") -> str:
    return "/".join(f"{label(arm.rates[place])}" for place in dict.fromkeys(chosen.tolist()))


def _by_seed(pairs: Paired, values: "np.ndarray[Any, Any]") -> tuple[tuple[int, float], ...]:
    return tuple(zip(pairs.seeds, values.tolist(), strict=True))
