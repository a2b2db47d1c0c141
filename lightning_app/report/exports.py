"""The tidy tables of a report, for other programs and for a paper."""

import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from lightning_app.core.files import write_whole
from lightning_app.report.bibliography import references
from lightning_app.report.comparisons import comparisons, comparisons_frame, effects, effects_frame
from lightning_app.report.frames import results_frame, validations_frame
from lightning_app.report.pairs import Score, scores_frame
from lightning_app.report.results import GridResults
from lightning_app.report.tables import task_tables, write_table, write_tables
from lightning_app.report.tasks import (
    failed_runs,
    failure_tests,
    failures_table,
    scores_table,
    task_scores,
)

if TYPE_CHECKING:
    import pandas as pd


Row = TypeVar("Row")


def write_tidy(grid: GridResults, out: Path) -> "pd.DataFrame":
    """Write `results` and `validations` as `.csv` and `.parquet`; return the rows of the cells."""
    results = results_frame(grid)
    _write(results, out / "results")
    _write(validations_frame(grid), out / "validations")
    return results


def write_scores(grid: GridResults, scores: Sequence[Score], out: Path) -> None:
    """Write `sensitivity.csv`, and the tables of other questions if they have rows.

    Those are `effects`, `comparisons`, `failed_runs`, `failure_tests` and `task_scores.csv`.
    """
    write_whole(out / "sensitivity.csv", scores_frame(scores).to_csv(index=False))
    _write_if(out / "effects.csv", effects(grid, scores), effects_frame)
    compared = comparisons(grid)
    _write_if(out / "comparisons.csv", compared, comparisons_frame)
    _write_if(out / "failed_runs.csv", failed_runs(grid), failures_table)
    _write_if(out / "failure_tests.csv", failure_tests(grid), failures_table)
    _write_if(out / "task_scores.csv", task_scores(grid), scores_table)


def _write_if(
    path: Path, rows: Sequence[Row], frame: Callable[[Sequence[Row]], "pd.DataFrame"]
) -> None:
    """Write the table, or remove that of an earlier report if there are no rows now."""
    if rows:
        write_whole(path, frame(rows).to_csv(index=False))
    else:
        path.unlink(missing_ok=True)


def _write(table: "pd.DataFrame", path: Path) -> None:
    write_whole(path.with_suffix(".csv"), table.to_csv(index=False))
    parquet = io.BytesIO()
    table.to_parquet(parquet, index=False)
    write_whole(path.with_suffix(".parquet"), parquet.getvalue())


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
