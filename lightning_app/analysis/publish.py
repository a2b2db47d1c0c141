"""A study as a small folder to keep: everything that its numbers come from, and its scores."""

from pathlib import Path

from lightning_app.analysis.exports.tidy import write_scores
from lightning_app.analysis.frames import results_frame
from lightning_app.analysis.grid_results import GridResults
from lightning_app.analysis.packed_grid import PACKED, pack
from lightning_app.analysis.sensitivity import sensitivity_scores


def publish(grid: GridResults, out: Path) -> None:
    """Write `results.parquet`, a packed grid, and the scores `sensitivity.csv`, `effects.csv`."""
    pack(grid, results_frame(grid), out / PACKED)
    write_scores(grid, sensitivity_scores(grid), out)
