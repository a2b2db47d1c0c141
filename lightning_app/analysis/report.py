"""The report of a grid: tables, figures, and one HTML page that opens offline."""

import hashlib
from pathlib import Path

from lightning_app.analysis.bleu import bleu_scores
from lightning_app.analysis.exports.write import write_exports
from lightning_app.analysis.figures.write import write_figures
from lightning_app.analysis.grid_results import GridResults
from lightning_app.analysis.page.appendix import RECOMPUTE
from lightning_app.analysis.page.contents import Contents
from lightning_app.analysis.page.document import page
from lightning_app.analysis.published import comparison
from lightning_app.analysis.read_results import read_results
from lightning_app.analysis.run_summary import superseded
from lightning_app.analysis.sensitivity import sensitivity_scores
from lightning_app.analysis.strays import stray_runs
from lightning_app.analysis.tensorboard import write_index
from lightning_app.atomic_write import write_whole
from lightning_app.grid_folder import GridFolder
from lightning_app.run_folder import PRUNED, RESULT, VOUCHED
from lightning_app.shipped import recompute_program

_HEAD = 1000  # characters of a page that hold the digest of its inputs


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
        made_from=inputs_digest(grid),
    )
    write_whole(out / RECOMPUTE, recompute_program().read_bytes())
    write_whole(out / "report.html", page(contents))
    return out / "report.html"


def is_current(grid: GridResults, path: Path) -> bool:
    """Whether a page was made from the present files of a grid, whatever their times are."""
    try:
        with path.open(encoding="utf-8") as file:
            return inputs_digest(grid) in file.read(_HEAD)
    except (OSError, ValueError):
        return False


def inputs_digest(grid: GridResults) -> str:
    """A digest of what a report is made from: the plan, which has that of the code, the grid file,
    and the state and the files of every run."""
    digest = hashlib.sha256()
    for part in grid.parts or (grid,):
        folder = GridFolder(part.folder)
        files = [folder.plan, folder.specification]
        for cell in part.cells:
            files += [cell.folder / name for name in (RESULT, PRUNED, *VOUCHED)]
            digest.update(f"{cell.name} {cell.state} {cell.error}\n".encode())
        for path in filter(Path.is_file, files):
            digest.update(f"{path.name} {hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
        # Finished runs that are not planned, and repeated ones, are counted.
        digest.update(f"{stray_runs(part)} {superseded(part)}\n".encode())
    return digest.hexdigest()
