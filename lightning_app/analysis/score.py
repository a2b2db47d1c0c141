"""One score of one variant, its row in `sensitivity.csv`, and the notes that go with it."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, kw_only=True)
class Score:
    """One row of `sensitivity.csv`. `lr` is NaN for a score over all rates.

    `p` decides labels (`statistics.guarded_ps`), `p_holm` corrects it over the whole grid, and
    `p_sign` is the exact p value by sign flips. `bound` is ">=" or "<=" where the estimate is
    censored, and "?" where it is on both sides.

    `values` holds seed and value of a mean over seeds. `each` holds the same if they are shown:
    with fewer than 5 seeds, or without an interval because some seeds failed. `bootstrap` holds the
    ends of the bootstrap-t interval, from 5 seeds on. The table has the last two in the note.
    `widen` is the factor of the standard error (`statistics.chosen_on_others`).
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
    p_sign: float = math.nan
    bound: str = ""
    seeds: int = 0
    cells: int = 0
    diverged: int = 0
    note: str = ""
    each: tuple[tuple[int, float], ...] = ()
    bootstrap: tuple[float, float] | None = None
    values: tuple[tuple[int, float], ...] = ()
    widen: float = 1.0


def bound_of(at_most: bool, at_least: bool) -> str:
    """`Score.bound` of an estimate that is censored above, below, on both sides or not at all."""
    return {(True, False): "<=", (False, True): ">=", (True, True): "?"}.get(
        (at_most, at_least), ""
    )


def scores_frame(rows: Sequence[Score]) -> "pd.DataFrame":
    """The scores as a table, one row per group, rate, variant and score."""
    import pandas as pd

    columns = [column.name for column in fields(Score)][:-4]
    table = []
    for row in rows:
        listed = ", ".join(f"{seed}: {_shown(value)}" for seed, value in row.each)
        ends = ", ".join(f"{end:.4f}" for end in row.bootstrap or ())
        note = join_notes(
            row.note, listed and f"per seed {listed}", ends and f"bootstrap-t [{ends}]"
        )
        table.append(asdict(row) | {"note": note})
    return pd.DataFrame(table, columns=columns)


def _shown(value: float) -> str:
    return "undefined" if math.isnan(value) else f"{value:.4f}"


def join_notes(*parts: str) -> str:
    return "; ".join(part for part in parts if part)
