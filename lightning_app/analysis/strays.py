"""Finished runs in a grid's folder that are no cells of its plan: counted nowhere, but named."""

from pathlib import Path

from lightning_app.analysis.runs import Grid
from lightning_app.errors import UserError
from lightning_app.identity.record import read_record


def strays(grid: Grid) -> str | None:
    """Say how many finished runs of other experiments lie beside those of the grid, if any do.

    They are there where the corpus was edited, or a value of an axis removed, after they ran.
    """
    folders = _others(grid)
    if not folders:
        return None
    corpora = {_corpus(cell.folder) for cell in grid.cells} - {None}
    other = sum(_corpus(folder) not in {None, *corpora} for folder in folders) if corpora else 0
    count = f"{len(folders)} finished runs in this folder are other experiments than the grid plans"
    where = f", {other} of them on other files of the corpus" if other else ""
    return f"{count}{where}. They count nowhere in this report (such as {folders[0].name})."


def _others(grid: Grid) -> list[Path]:
    planned = {cell.name for cell in grid.cells}
    runs = grid.folder / "runs"
    folders = sorted(runs.iterdir()) if runs.is_dir() else []
    return [each for each in folders if each.name not in planned and _is_finished(each)]


def _is_finished(folder: Path) -> bool:
    return not folder.name.startswith(".") and (folder / "result.json").is_file()


def _corpus(folder: Path) -> str | None:
    """The digest of what the corpus of a run held, None where it is not recorded."""
    try:
        record = read_record(folder)
    except UserError:
        return None  # a run's folder that is damaged is named where runs are read
    return None if record is None else record.corpus
