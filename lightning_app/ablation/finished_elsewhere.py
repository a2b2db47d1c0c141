"""Find finished runs of planned cells in other folders: equal ids mean equal experiments.

Such a run is in the folder of its grid, from the time before a value or an axis was added or
removed, or in the folder of another grid or of `ablate fit`: in the same folder of experiments, or
in one that the user's ``ablate.yaml`` lists under ``results``.
"""

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from lightning_app.ablation.cells import Cell
from lightning_app.ablation.finished_checks import check_finished
from lightning_app.ablation.grid import Grid
from lightning_app.errors import UserError
from lightning_app.grid_folder import GridFolder
from lightning_app.records import Unsound
from lightning_app.run_folder import RunFolder

_SUFFIX = 8  # the name of a run's folder ends with this many digits of its id


@dataclass(frozen=True, kw_only=True)
class FinishedElsewhere:
    """A finished run of a planned cell, in a folder that is not the one planned for it.

    Attributes:
        cell: The cell.
        folder: The folder of the run.
        result: The content of its `result.json`.
        is_copied: Whether the run stays there, since it is no run of the cell's own grid.
        is_outside: Whether it is in a folder of results, outside of the grid's experiments.
    """

    cell: Cell
    folder: RunFolder
    result: Mapping[str, Any]
    is_copied: bool
    is_outside: bool

    @property
    def grid(self) -> Path:
        """The folder of the grid that holds the run."""
        return self.folder.path.parent.parent

    @property
    def origin(self) -> str:
        """What the cell's result says of it: GRID/NAME or, from outside, the path of the folder."""
        path = self.folder.path
        return str(path.absolute()) if self.is_outside else f"{self.grid.name}/{path.name}"


class Refused(NamedTuple):
    """A run that has the name of a missing cell's run and cannot take its place, and why."""

    cell: Cell
    folder: RunFolder
    reason: str


class Search(NamedTuple):
    """What was found for the cells of a grid that have no folder yet."""

    found: list[FinishedElsewhere]
    refused: list[Refused]


def find_finished(grid: Grid, results: Iterable[Path] = ()) -> Search:
    """Find the cells of a grid that are finished elsewhere.

    Args:
        grid: The grid; the other grids beside its folder are searched too.
        results: Further folders of experiments, or of single grids.

    Raises:
        UserError: if a folder cannot be read.
    """
    search = Search([], [])
    missing = [cell for cell in grid.cells if not os.path.lexists(grid.run(cell).path)]
    # Usually nothing is missing, and then no folder is listed.
    folders = _runs_by_suffix(grid.folder, results) if missing else {}
    for cell in missing:
        refused = []
        for folder in folders.get(cell.id[:_SUFFIX], ()):
            path, experiments = folder.path, grid.folder.path.parent
            is_copied = path.parent != grid.folder.runs or path.is_symlink()
            try:
                result = check_finished(folder, cell, grid, is_copied=is_copied)
            except Unsound as why:
                refused.append(Refused(cell, folder, str(why)))
                continue
            found = FinishedElsewhere(
                cell=cell,
                folder=folder,
                result=result,
                is_copied=is_copied,
                is_outside=path.parents[2] != experiments,
            )
            search.found.append(found)
            break
        else:
            search.refused.extend(refused)
    return search


def refusals(refused: Iterable[Refused]) -> list[str]:
    """A line for each reason and grid for which runs cannot be used."""
    groups: dict[tuple[Path, str], list[str]] = {}
    for _, folder, reason in refused:
        groups.setdefault((folder.path.parent, reason), []).append(folder.name)
    return [
        f"{where / names[0]}: not used: {reason}"
        if len(names) == 1
        else f"{where}: {len(names)} runs not used, such as {names[0]}: {reason}"
        for (where, reason), names in groups.items()
    ]


def origins(found: Iterable[FinishedElsewhere]) -> Counter[Path]:
    """The number of runs that were found in the folder of each grid."""
    return Counter(each.grid for each in found)


def _runs_by_suffix(grid: GridFolder, results: Iterable[Path]) -> dict[str, list[RunFolder]]:
    """The run folders of all grids by the end of their names; those of `grid` come first."""
    places = [grid, *_grids_in(grid.path.parent)]
    for folder in results:
        places += [GridFolder(folder), *_grids_in(folder)]
    found: dict[str, list[RunFolder]] = {}
    seen: set[Path] = set()
    for place in places:
        real = place.runs.resolve()
        if real not in seen:  # the folder of experiments may be among the results
            seen.add(real)
            for run in _runs_of(place):
                found.setdefault(run.name[-_SUFFIX:], []).append(run)
    return found


def _grids_in(experiments: Path) -> list[GridFolder]:
    if not experiments.is_dir():
        return []
    with _reading(experiments):
        return [GridFolder(path) for path in sorted(experiments.iterdir())]


def _runs_of(grid: GridFolder) -> list[RunFolder]:
    with _reading(grid.runs):
        return grid.all_runs()


@contextmanager
def _reading(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(f"{folder}: cannot be read: {error.strerror}") from error
