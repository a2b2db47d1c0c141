"""Every planned run of a grid as a row, finished or not, with folders."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_app.analysis.frames import results_frame
from lightning_app.analysis.grid_results import CellResult, GridResults
from lightning_app.grid_axes import RATE, SEED, WARMUP

if TYPE_CHECKING:
    import pandas as pd

SHORT = {SEED: "seed", WARMUP: "warmup", RATE: "lr"}
"""The columns of `results_frame` that hold these axes."""


def runs_frame(
    grid: GridResults,
    runs_now: Callable[[Path], bool] = lambda folder: False,
    *,
    restored: bool = False,
) -> "pd.DataFrame":
    """One row for each planned run.

    The columns are those of `results_frame`, with these besides: each axis by its dotted key (seed,
    warm-up and rate, too), `error` (the last line of the error of a failed run, or what is damaged)
    and `folder`. `status` is `ok`, `diverged`, `pruned`, `failed`, `running`, `unfinished` (cut
    short; the grid goes on there), `waiting`, `damaged` or `other_data`.

    Args:
        grid: The results of a grid.
        runs_now: Whether a process trains the run in this folder.
        restored: Whether the folders of the runs will be removed, so that none is named.
    """
    frame = results_frame(grid)
    frame["status"] = [_status(cell, runs_now) for cell in grid.cells]
    for axis in (each for each in grid.axes if each in SHORT):
        frame.insert(list(frame.columns).index("reference_warmup"), axis, frame[SHORT[axis]])
    frame["error"] = [cell.error for cell in grid.cells]
    frame["folder"] = [None if restored else str(cell.folder) for cell in grid.cells]
    return frame


def _status(cell: CellResult, runs_now: Callable[[Path], bool]) -> str:
    if cell.state in ("unfinished", "failed", "waiting") and runs_now(cell.folder):
        return "running"
    return cell.state
