"""The report of a grid: tables, figures, and one HTML page that opens offline."""

import io
from pathlib import Path

from lightning_app.analysis.figures import write_figures
from lightning_app.analysis.page import page
from lightning_app.analysis.runs import read_grid, results_frame
from lightning_app.analysis.sensitivity import scores, scores_frame
from lightning_app.analysis.tensorboard import write_index
from lightning_app.files import write_whole


def write_report(grid_dir: Path, out_dir: Path | None = None) -> Path:
    """Write the report of the runs that have finished so far, and return the path of its page.

    Writes `results.csv`, `results.parquet`, `sensitivity.csv`, `figures/*.svg` and `report.html`
    into `out_dir`. Without `out_dir` that is the grid folder, whose TensorBoard index is then
    brought up to date as well. Raises `UserError` for a folder that is no grid or cannot be
    written.
    """
    grid = read_grid(grid_dir)
    out = grid.folder if out_dir is None else Path(out_dir)
    found, results = scores(grid), results_frame(grid)
    write_whole(out / "results.csv", results.to_csv(index=False))
    parquet = io.BytesIO()
    results.to_parquet(parquet, index=False)
    write_whole(out / "results.parquet", parquet.getvalue())
    write_whole(out / "sensitivity.csv", scores_frame(found).to_csv(index=False))
    drawings = write_figures(grid, out / "figures")
    write_whole(out / "report.html", page(grid, found, results, drawings))
    if out_dir is None:
        write_index(grid.folder)
    return out / "report.html"
