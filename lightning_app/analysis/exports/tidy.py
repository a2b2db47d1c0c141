"""Tidy tables of a grid: a row per cell, per cell and validation, per score and per effect."""

import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from lightning_app.analysis.comparison import comparisons, comparisons_frame
from lightning_app.analysis.factors import effects, effects_frame
from lightning_app.analysis.failed_runs import failed_runs, failure_tests, failures_table
from lightning_app.analysis.frames import results_frame, validations_frame
from lightning_app.analysis.grid_results import GridResults
from lightning_app.analysis.score import Score, scores_frame
from lightning_app.analysis.task_scores import scores_table, task_scores
from lightning_app.atomic_write import write_whole

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
