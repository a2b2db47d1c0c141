"""The data of a figure: its files on disk, and the figure before it is written."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from lightning_app.analysis.figures.links import Links
from lightning_app.analysis.figures.logs import Log
from lightning_app.analysis.grid_results import CellResult, GridResults

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

Question = Literal["need", "cost", "stable", "inside"]


@dataclass(frozen=True, kw_only=True)
class FigureFiles:
    """One figure as files: `path` is the SVG; PDF and CSV (the data drawn) have the same stem.

    `text` explains the marks, `limits` lists invalid conclusions. `group` names the values of the
    other axes, `all` without other axes; `lr` is None if the figure is over several rates.
    """

    path: Path
    question: Question
    title: str
    text: str
    limits: str
    group: str
    lr: float | None
    cells: tuple[CellResult, ...]


@dataclass(frozen=True, kw_only=True)
class Part:
    """The finished runs of a grid that a figure shows, and limits for the drawing.

    `group` and `lr` as in `FigureFiles`. `logs` holds the logged curves by id of the cell, `points`
    is the maximum for a single curve, `figures` the maximum for a kind with one for each variant.
    """

    grid: GridResults
    group: str
    lr: float | None
    cells: Sequence[CellResult]
    colours: Mapping[str, str]
    logs: Mapping[str, Log]
    points: int
    figures: int

    def variants(self, cells: Sequence[CellResult]) -> list[str]:
        """The variants of `cells` in the order of the plan."""
        present = {cell.variant for cell in cells}
        return [name for name in self.colours if name in present]


@dataclass(frozen=True, kw_only=True)
class Sketch:
    """A figure before it is written. `table` holds the data, a row for each mark."""

    figure: "Figure"
    table: "pd.DataFrame"
    title: str
    text: str
    limits: str
    links: Links
    cells: Sequence[CellResult]


def warmup_of(cell: CellResult) -> int:
    """The warm-up in updates; 0 for a schedule without warm-up."""
    return cell.warmup or 0


def identity(cell: CellResult) -> dict[str, object]:
    """The columns that identify a run in every table of a figure."""
    return {
        "variant": cell.variant,
        "warmup": cell.warmup,
        "lr": cell.lr,
        "seed": cell.seed,
        "run": cell.name,
        "status": cell.state,
        "outcome": cell.outcome,
    }
