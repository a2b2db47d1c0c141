"""Write all files of a report except its page and figures."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_app.analysis.exports.bibliography import references
from lightning_app.analysis.exports.tables import write_table, write_tables
from lightning_app.analysis.exports.task_tables import task_tables
from lightning_app.analysis.exports.tidy import write_scores, write_tidy
from lightning_app.analysis.grid_results import GridResults
from lightning_app.analysis.score import Score
from lightning_app.atomic_write import write_whole

if TYPE_CHECKING:
    import pandas as pd


def write_exports(grid: GridResults, scores: Sequence[Score], out: Path) -> "pd.DataFrame":
    """Write the exports into a folder; return the rows of `results`, one for each planned cell.

    `results` and `validations` as `.csv` and `.parquet`, `sensitivity.csv`, the tables of other
    questions as `.csv` if they have rows (`write_scores`), `tables/*.tex` and `.md`, and
    `references.bib`.
    """
    results = write_tidy(grid, out)
    write_scores(grid, scores, out)
    write_tables(grid, scores, out / "tables")
    for table in task_tables(grid):
        write_table(table, out / "tables")
    write_whole(out / "references.bib", references(grid))
    return results
