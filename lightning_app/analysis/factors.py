"""Main effects and interactions of the factors of a grid, on any score that has a value per seed.

A factor is an axis of two values, low and high, in the order of the grid file. With `y` the score
of a variant and seed, the effect of factors `F` is the mean, over the levels of all other factors,
of `y` contrasted by each factor of `F`: for one factor `y(high) - y(low)`, for two `(y(high, high)
- y(high, low)) - (y(low, high) - y(low, low))`, and so on. It is computed seed by seed, with
Student's t interval over the seeds (Yates 1937, for a full 2^k factorial). An effect has an
interval and a p value only if each variant of it has, and the largest of their factors `widen`.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import numpy as np

from lightning_app.analysis.grid_results import CellResult, GridResults, unlike
from lightning_app.analysis.score import Score, join_notes
from lightning_app.analysis.statistics import holm_values, sign_flip_p, t_interval
from lightning_app.grid_axes import RATE, SEED, WARMUP, group_name, key_of

if TYPE_CHECKING:
    import pandas as pd

MEASURES = ("octaves", "need", "delta", "rate_sensitivity", "steps_saved")
TESTED = ("need", "delta")  # have a p value of their own, withheld where seeds ended differently
IN_NATS = ("need", "delta", "rate_sensitivity")  # have no effect between unlike tokens
TIMES = " x "

Levels = tuple[int, ...]  # 0 is the low level of a factor, 1 the high one


@dataclass(frozen=True, kw_only=True)
class Effect:
    """One row of `effects.csv`: the effect of `factors` on a `measure`.

    `group` names the values of the axes that are no factor, `lr` is NaN for a score over all rates.
    `p_holm` is corrected over all effects on the measure. `note` says what is missing or censored.
    """

    measure: str
    group: str
    lr: float
    factors: str
    estimate: float = math.nan
    low: float = math.nan
    high: float = math.nan
    p: float = math.nan
    p_holm: float = math.nan
    p_sign: float = math.nan
    seeds: int = 0
    note: str = ""


def effects(grid: GridResults, scores: Sequence[Score]) -> list[Effect]:
    """The effects of all factors on each measure; none for a grid without factors."""
    parts = grid.parts or (grid,)
    return _corrected([row for part in parts if part.factors for row in _of_grid(part, scores)])


def _of_grid(grid: GridResults, scores: Sequence[Score]) -> list[Effect]:
    """The effects of one grid before Holm's correction."""
    places = _places(grid)
    tables: dict[tuple[str, str, float], dict[Levels, Score]] = {}
    for score in scores:
        if score.score in MEASURES and (score.group, score.variant) in places:
            rest, levels = places[score.group, score.variant]
            rate = math.inf if math.isnan(score.lr) else score.lr  # NaN is no key
            tables.setdefault((score.score, rest, rate), {})[levels] = score
    order = {name: place for place, name in enumerate(MEASURES)}
    found: list[Effect] = []
    for (measure, rest, rate), table in sorted(tables.items(), key=lambda of: order[of[0][0]]):
        lr = math.nan if math.isinf(rate) else rate
        arms = {(score.group, score.variant) for score in table.values()}
        cells = [cell for cell in grid.finished if (cell.group, cell.variant) in arms]
        why = unlike(cells, grid.monitored.loss) if measure in IN_NATS else ""
        found += _of_table(list(grid.factors), measure, rest, lr, {} if why else table, why)
    return found


def effects_frame(found: Sequence[Effect]) -> "pd.DataFrame":
    """The effects as a table, a row each."""
    import pandas as pd

    return pd.DataFrame([asdict(effect) for effect in found])


def _places(grid: GridResults) -> dict[tuple[str, str], tuple[str, Levels]]:
    """For each group and variant: the other axes in words, and the level of each factor."""
    known = {axis: [key_of(value) for value in grid.axes[axis]] for axis in grid.factors.values()}
    found = {}
    for cell in grid.cells:
        levels = tuple(known[axis].index(key_of(cell.axes[axis])) for axis in grid.factors.values())
        found[cell.group, cell.variant] = _rest(cell, grid), levels
    return found


def _rest(cell: CellResult, grid: GridResults) -> str:
    special = {SEED, WARMUP, RATE, *grid.factors.values()}
    others = [key for key in cell.axes if key not in special and grid.varies(key)]
    return group_name(cell.axes, others, grid.labels)


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
    known = np.array([[of[seed] for seed in seeds] for of in values])  # [corner, seed]
    unsure = [corner for corner in corners if not missing and math.isnan(table[corner].low)]
    tested = not unsure and not missing
    if measure in TESTED:
        tested = tested and not any(math.isnan(table[corner].p) for corner in corners)
    widen = max((table[corner].widen for corner in corners if corner in table), default=1.0)
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
            each = (signs[:, None] * known).sum(axis=0) / 2 ** (len(names) - size)
            low, high, p = (math.nan,) * 3 if unsure else t_interval(each.tolist(), widen)
            yield Effect(
                factors=text,
                **identity,
                estimate=float(each.mean()),
                low=low,
                high=high,
                p=p if tested else math.nan,
                p_sign=sign_flip_p(each.tolist()),
                seeds=len(seeds),
            )


def _corrected(found: Sequence[Effect]) -> list[Effect]:
    """The effects with p values corrected over each measure."""
    corrected = {}
    for measure in dict.fromkeys(effect.measure for effect in found):
        family = [place for place, effect in enumerate(found) if effect.measure == measure]
        values = holm_values([found[place].p for place in family])
        corrected |= dict(zip(family, values.tolist(), strict=True))
    return [
        Effect(**{**asdict(effect), "p_holm": corrected[place]})
        for place, effect in enumerate(found)
    ]
