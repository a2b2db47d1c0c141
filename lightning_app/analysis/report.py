"""The report of a grid: tables, figures, and one HTML page that opens offline."""

from pathlib import Path

from lightning_app.analysis.bleu import bleu_scores
from lightning_app.analysis.exports.write import write_exports
from lightning_app.analysis.figures.write import write_figures
from lightning_app.analysis.grid_results import GridResults
from lightning_app.analysis.page.contents import Contents
from lightning_app.analysis.page.document import page
from lightning_app.analysis.published import comparison
from lightning_app.analysis.read_results import read_results
from lightning_app.analysis.sensitivity import sensitivity_scores
from lightning_app.analysis.tensorboard import write_index
from lightning_app.atomic_write import write_whole


def write_report(grid_dir: Path, out_dir: Path | None = None) -> Path:
    """Write the report of the runs that have finished so far, and return the path of its page.

    Writes `report.html` and the files that its last section lists into `out_dir`. The default is
    the grid folder, whose TensorBoard index is then updated as well. Raises `UserError` for a
    folder that does not belong to a grid or cannot be written.
    """
    grid = read_results(grid_dir)
    path = write(grid, grid.folder if out_dir is None else Path(out_dir))
    if out_dir is None:
        write_index(grid.folder)
    return path


def write(grid: GridResults, out: Path) -> Path:
    """Write the report of a grid, which may join several, into a folder."""
    found = [*sensitivity_scores(grid), *bleu_scores(grid)]
    results = write_exports(grid, found, out)
    drawings = write_figures(grid, out / "figures")
    contents = Contents(
        grid=grid,
        scores=found,
        results=results,
        drawings=drawings,
        published=comparison(grid),
        out=out,
    )
    write_whole(out / "report.html", page(contents))
    return out / "report.html"
