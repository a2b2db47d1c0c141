"""Find the results of a grid by its name, its file, its folder, or its published study."""

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from lightning_app.ablation.config_tree import canonical
from lightning_app.ablation.grid_spec import GridSpec, read_spec
from lightning_app.analysis.grid_results import GridResults
from lightning_app.analysis.packed_grid import PACKED, unpack
from lightning_app.analysis.papers import read_grid_file
from lightning_app.analysis.read_results import read_results
from lightning_app.errors import UserError
from lightning_app.grid_folder import GridFolder

_CELLS = {"axes": "axes", "base_config": "base configs", "exclude": "exclusions"}
"""The keys of a grid file that decide its cells, beside the grid that it continues."""


class Found(NamedTuple):
    """The results of a grid, and whether its folder is a temporary one, of a published study."""

    grid: GridResults
    restored: bool = False


@contextmanager
def found_results(grid: str | Path, experiments: Path) -> Iterator[Found]:
    """Yield the results of a grid; nothing is written.

    Args:
        grid: The name of a grid whose folder is in `experiments`, a grid file, the folder of a
            grid, or the folder of a published study. Its runs are restored in a temporary folder,
            which is there until the end of the context.
        experiments: The folder that holds the folders of grids.

    Raises:
        UserError: if there are no results, or they cannot be read.
    """
    path = Path(grid)
    if GridFolder(path).plan.is_file():
        yield Found(read_results(path))
    elif (path / PACKED).is_file():
        with tempfile.TemporaryDirectory(prefix="ablate-results-") as held:
            yield Found(read_results(unpack(path / PACKED, Path(held)).path), restored=True)
    else:
        yield Found(_planned(grid, experiments))


def _planned(grid: str | Path, experiments: Path) -> GridResults:
    """The results of a grid by its name or its file, whose cells are those of that file."""
    path = Path(grid)
    named = GridFolder(experiments / path)
    try:
        spec = read_spec(grid)
    except UserError:
        if len(path.parts) == 1 and named.plan.is_file():
            return read_results(named.path)  # of a file that has gone, or lies elsewhere
        raise
    folder = GridFolder(experiments / spec.name)
    if not folder.plan.is_file():
        raise UserError(f"{folder}: holds no plan yet; `ablate run {grid}` makes one")
    found = read_results(folder.path)
    if (differs := _difference(found, spec)) is not None:
        raise UserError(
            f"{folder}: holds another grid than {spec.source}; its {differs} differ; `ablate run` "
            "plans it again, and its present cells can be read by the path of the folder"
        )
    return found


def _difference(found: GridResults, spec: GridSpec) -> str | None:
    """What differs between a planned grid and a grid file, None if they have the same cells."""
    if found.axes != spec.axes:
        return "axes"
    held = read_grid_file(GridFolder(found.folder).specification)
    if (differs := _difference_of_files(held, spec.tree())) is not None:
        return differs
    return None if (found.metric, found.mode) == (spec.metric, spec.mode) else "metrics"


def _difference_of_files(held: Mapping[str, Any], wanted: Mapping[str, Any]) -> str | None:
    """What decides cells and differs in two grid files, or in those that they continue."""
    for key, what in _CELLS.items():
        if canonical(held.get(key) or []) != canonical(wanted.get(key) or []):
            return what
    one, other = (tree.get("init_from") or {} for tree in (held, wanted))
    if one.get("match") != other.get("match"):
        return "parents"
    differs = _difference_of_files(one["grid"], other["grid"]) if one else None
    return differs and f"parents' {differs}"
