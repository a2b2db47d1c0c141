"""Report finished runs in a grid's folder that are not in its plan and that no score counts."""

from pathlib import Path

from lightning_app.analysis.grid_results import GridResults
from lightning_app.errors import UserError
from lightning_app.grid_folder import GridFolder
from lightning_app.identity.record import read_record


def stray_runs(grid: GridResults) -> str | None:
    """Return the number of finished runs of other experiments in the folder, in a sentence.

    The cause is that the corpus was edited, or a value of an axis was removed, after they ran.
    """
    planned = {cell.name for cell in grid.cells}
    folders = [run.path for run in GridFolder(grid.folder).strays(planned)]
    if not folders:
        return None
    corpora = {_corpus(cell.folder) for cell in grid.cells} - {None}
    other = sum(_corpus(folder) not in {None, *corpora} for folder in folders) if corpora else 0
    where = f", {other} of them on other files of the corpus" if other else ""
    if len(folders) == 1:
        where = ", on other files of the corpus" if other else ""
        return (
            "1 finished run in this folder is another experiment than the grid plans"
            f"{where}. It counts nowhere in this report ({folders[0].name})."
        )
    return (
        f"{len(folders)} finished runs in this folder are other experiments than the grid plans"
        f"{where}. They count nowhere in this report (such as {folders[0].name})."
    )


def _corpus(folder: Path) -> str | None:
    """The digest of the corpus of a run, None if it is not recorded."""
    try:
        record = read_record(folder)
    except UserError:
        return None  # the reader of runs reports a damaged folder
    return None if record is None else record.corpus
