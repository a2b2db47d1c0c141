"""Find the results of a grid by its name, its file, its folder, or its published study."""

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from lightning_app.config.grid import GridSpec, read_spec
from lightning_app.config.tree import canonical
from lightning_app.core.errors import UserError
from lightning_app.core.project import shipped_folder
from lightning_app.report.packed import PACKED, unpack
from lightning_app.report.results import GridResults, read_grid_file, read_results, read_runs
from lightning_app.runs.folder import STORE, GridFolder, RunFolder
from lightning_app.runs.records import read_plan
from lightning_app.runs.store import locate_run, stored

_CELLS = {"axes": "axes", "base_config": "base configs", "exclude": "exclusions"}
_CELLS |= {"search": "searches", "refine": "refinements"}
"""The keys of a grid file that determine its cells, besides the grid that it continues."""


class Found(NamedTuple):
    """The results of a grid, and whether its folder is temporary, as for a published study."""

    grid: GridResults
    restored: bool = False


@contextmanager
def found_results(grid: str | Path, experiments: Path) -> Iterator[Found]:
    """Yield the results of a grid; nothing is written.

    Args:
        grid: The name of a grid whose folder is in `experiments`, a grid file, the folder of a
            grid, `fit` for the runs of `ablate fit`, a folder of experiments for all runs in its
            store, or the folder of a published study. Its runs are restored in a temporary folder,
            which exists until the end of the context.
        experiments: The folder that holds the folders of grids.

    Raises:
        UserError: if there are no results, or they cannot be read.
    """
    if (runs := unplanned_runs(grid, experiments)) is not None:
        yield Found(read_runs(*runs))
    elif (study := published(grid, experiments)) is not None:
        with tempfile.TemporaryDirectory(prefix="ablate-results-") as held:
            yield Found(read_results(unpack(study, Path(held)).path), restored=True)
    else:
        yield Found(read_results(*find_planned(grid, experiments)))


def unplanned_runs(grid: str | Path, experiments: Path) -> tuple[Path, list[RunFolder]] | None:
    """The folder and the runs of `ablate fit` or of a whole store, which are not grids."""
    for folder in (Path(grid), experiments / grid):
        here = GridFolder(folder)
        if here.plan.is_file() or (folder / PACKED).is_file():
            return None
        store = folder if folder.name == STORE else folder / STORE
        if store.is_dir():
            names = sorted(name for name in os.listdir(store) if name.isalnum())
            return folder, [RunFolder(stored(store.parent, name)) for name in names]
        if here.runs.is_dir():
            links = sorted(path for path in here.runs.iterdir() if path.exists())
            return folder, [
                locate_run(here, path.name, path.readlink().name)
                if path.is_symlink()
                else RunFolder(path)
                for path in links
                if not path.name.startswith(".")
            ]
    return None


def published(grid: str | Path, experiments: Path) -> Path | None:
    """The packed grid if `grid` is the folder of a published study, else None.

    Raises:
        UserError: if it is also the name of a grid in `experiments`, which makes it ambiguous.
    """
    path, named = Path(grid), GridFolder(experiments / grid)
    if GridFolder(path).plan.is_file() or not (path / PACKED).is_file():
        return None
    if len(path.parts) == 1 and named.plan.is_file() and named.path.resolve() != path.resolve():
        raise UserError(
            f"{grid}: is the published study {path / PACKED} and the grid {named}; give the path "
            f"of one: {path.absolute()} or {named}"
        )
    return path / PACKED


def find_planned(grid: str | Path, experiments: Path) -> tuple[Path, Mapping[str, Any] | None]:
    """The folder of a grid from its name, its file or its folder, and the content of the file.

    Raises:
        UserError: if it does not exist, or holds cells other than those of the file.
    """
    path = Path(grid)
    named = GridFolder(experiments / path)
    if GridFolder(path).plan.is_file():
        return path, None
    try:
        spec = read_spec(grid)
    except UserError:
        if len(path.parts) == 1 and named.plan.is_file():
            return named.path, None  # its file is gone or elsewhere
        raise
    folder = GridFolder(experiments / spec.name)
    if not folder.plan.is_file():
        study = shipped_folder() / "results" / spec.name
        there = f"; `ablate report {_short(study)}` shows published runs"
        raise UserError(
            f"{folder}: holds no plan yet; `ablate run {grid}` makes one"
            f"{there if (study / PACKED).is_file() else ''}"
        )
    check_same_cells(folder, spec)
    return folder.path, spec.tree()


def _short(path: Path) -> Path:
    """The path from the working folder if it is inside."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def check_same_cells(folder: GridFolder, spec: GridSpec) -> None:
    """Refuse a grid file that has other cells, or another metric, than the plan in a folder.

    Raises:
        UserError: naming what differs.
    """
    plan, held = read_plan(folder.plan), read_grid_file(folder.specification)
    if spec.adapts:
        spec = spec.with_cells([cell.axes for cell in (*plan.cells, *plan.waiting)])
    differs = "axes" if plan.axes != spec.axes else _difference_of_files(held, spec.tree())
    metric = held.get("metric") or {}
    known = {key: metric[key] for key in ("name", "mode") if metric.get(key) is not None}
    if differs is None and not known.items() <= {"name": spec.metric, "mode": spec.mode}.items():
        differs = "metrics"
    if differs is not None:
        raise UserError(
            f"{folder}: holds another grid than {spec.source}; its {differs} differ; `ablate run` "
            "plans it again, and its present cells can be read by the path of the folder"
        )


def _difference_of_files(held: Mapping[str, Any], wanted: Mapping[str, Any]) -> str | None:
    """The keys that determine cells and differ in two grid files or the grids they continue."""
    for key, what in _CELLS.items():
        if canonical(held.get(key) or []) != canonical(wanted.get(key) or []):
            return what
    one, other = (tree.get("init_from") or {} for tree in (held, wanted))
    if one.get("match") != other.get("match"):
        return "parents"
    differs = _difference_of_files(one["grid"], other["grid"]) if one else None
    return differs and f"parents' {differs}"
