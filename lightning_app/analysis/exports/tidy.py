"""Tidy tables of a grid, as CSV and as Parquet: a row per cell, a row per cell and validation."""

import io
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_app.analysis.frames import results_frame, validations_frame
from lightning_app.analysis.grid_results import GridResults
from lightning_app.atomic_write import write_whole

if TYPE_CHECKING:
    import pandas as pd


def write_tidy(grid: GridResults, out: Path) -> "pd.DataFrame":
    """Write `results` and `validations` as `.csv` and `.parquet`; return the rows of the cells."""
    results = results_frame(grid)
    _write(results, out / "results")
    _write(validations_frame(grid), out / "validations")
    return results


def _write(table: "pd.DataFrame", path: Path) -> None:
    write_whole(path.with_suffix(".csv"), table.to_csv(index=False))
    parquet = io.BytesIO()
    table.to_parquet(parquet, index=False)
    write_whole(path.with_suffix(".parquet"), parquet.getvalue())
