"""The contents of a page."""

import itertools
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from lightning_app.analysis.figures.drawing import FigureFiles
from lightning_app.analysis.grid_results import CellResult, GridResults
from lightning_app.analysis.score import Score

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, kw_only=True)
class Contents:
    """The grid, the values computed from it, and the folder `out` of the page.

    `results` has a row for each cell; `published` the figures of papers beside ours, `made_from`
    the digest of all inputs.
    """

    grid: GridResults
    scores: Sequence[Score]
    results: "pd.DataFrame"
    drawings: Sequence[FigureFiles]
    published: "pd.DataFrame"
    out: Path
    made_from: str = ""
    _tables: Iterator[int] = field(default_factory=lambda: itertools.count(1), repr=False)

    def next_table(self) -> str:
        """Number the tables in the order of the sections."""
        return f"Table {next(self._tables)}."

    def link(self, cell: CellResult) -> str:
        """The folder of a run, as seen from the page."""
        return quote(Path(os.path.relpath(cell.folder, self.out)).as_posix()) + "/"
