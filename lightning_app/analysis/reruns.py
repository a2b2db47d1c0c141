"""How far do runs differ that differ only in their rounding?

A grid with the axis `model.rounding` runs some cells again with other last bits. With `l_0` the
loss of a run and `l_1 .. l_n` those of its reruns, the rerun component of a variant is the standard
deviation `sqrt(mean of var(l_0, .., l_n))` over its runs, the variance with n degrees of freedom.
It is a part of the spread between seeds, since each of those runs has one rounding too: intervals
over seeds include it. No score includes the reruns themselves.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import numpy as np

from lightning_app.analysis.grid_results import CellResult, GridResults

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, kw_only=True)
class RerunComponent:
    """One row of `reruns.csv`: a variant at one warm-up and rate, nats per token.

    `rounding` is the standard deviation between runs that differ only in their rounding, `seeds`
    that between the runs of the grid, of which it is a part. `runs` were repeated, `reruns` times
    in all.
    """

    group: str
    variant: str
    warmup: int | None
    lr: float | None
    rounding: float
    seeds: float
    runs: int
    reruns: int

    @property
    def share(self) -> float:
        """The share of the variance between seeds; NaN where seeds do not differ."""
        return (self.rounding / self.seeds) ** 2 if self.seeds > 0 else math.nan


def rerun_components(grid: GridResults) -> list[RerunComponent]:
    """A row for each arm of which runs were repeated; none for a grid without reruns."""
    found: list[RerunComponent] = []
    for part in grid.parts or (grid,):
        arms = dict.fromkeys(map(_arm, (cell for cell in part.reruns if _counts(cell))))
        for arm in arms:
            cells = [cell for cell in part.finished if _arm(cell) == arm and _counts(cell)]
            again = [cell for cell in part.reruns if _arm(cell) == arm and _counts(cell)]
            alike = [
                [cell.loss, *(other.loss for other in again if other.seed == cell.seed)]
                for cell in cells
            ]
            repeated = [losses for losses in alike if len(losses) > 1]
            if repeated:
                group, variant, warmup, lr = arm
                found.append(
                    RerunComponent(
                        group=group,
                        variant=variant,
                        warmup=warmup,
                        lr=lr,
                        rounding=_within(repeated),
                        seeds=_within([[cell.loss for cell in cells]]),
                        runs=len(repeated),
                        reruns=sum(len(losses) - 1 for losses in repeated),
                    )
                )
    return found


def reruns_frame(rows: Sequence[RerunComponent]) -> "pd.DataFrame":
    """The components as a table, a row each."""
    import pandas as pd

    return pd.DataFrame([asdict(row) | {"share": row.share} for row in rows])


def _arm(cell: CellResult) -> tuple[str, str, int | None, float | None]:
    return cell.group, cell.variant, cell.warmup, cell.lr


def _counts(cell: CellResult) -> bool:
    return cell.finished and math.isfinite(cell.loss)


def _within(samples: Sequence[Sequence[float]]) -> float:
    """The standard deviation within samples, pooled by their degrees of freedom; NaN without."""
    freedom = sum(len(sample) - 1 for sample in samples)
    squares = sum(float(np.var(sample)) * len(sample) for sample in samples)
    return math.sqrt(squares / freedom) if freedom else math.nan
