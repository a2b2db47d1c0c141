"""What a page is made of."""

import itertools
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from lightning_app.analysis.figures.drawing import Drawing
from lightning_app.analysis.runs import Cell, Grid
from lightning_app.analysis.sensitivity import Score

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, kw_only=True)
class Contents:
    """The grid, what was computed from it, and the folder `out` that the page will lie in.

    `results` has a row for each cell; `published` the figures of papers beside ours.
    """

    grid: Grid
    scores: Sequence[Score]
    results: "pd.DataFrame"
    drawings: Sequence[Drawing]
    published: "pd.DataFrame"
    out: Path
    _tables: Iterator[int] = field(default_factory=lambda: itertools.count(1), repr=False)

    def next_table(self) -> str:
        """Tables are numbered in the order in which the sections ask."""
        return f"Table {next(self._tables)}."

    def link(self, cell: Cell) -> str:
        """The folder of a run, as seen from the page."""
        return quote(Path(os.path.relpath(cell.folder, self.out)).as_posix()) + "/"
