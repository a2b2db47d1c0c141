"""Join several grids, for example of different data or depth. Each remains a separate group.

No score compares runs of two grids: each has its baseline and its reference warm-up. Only the
correction of the p values is over all of them. A cell that several grids plan (one id: one
experiment) is one run, and counts once wherever runs are pooled; a grid that has not finished it
takes the result of one that has.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from lightning_app.analysis.grid_results import CellResult, GridResults, without_strangers
from lightning_app.errors import UserError
from lightning_app.grid_axes import label, lookup
from lightning_app.identity.relevant import leaves

AXIS = "grid"  # the axis whose values are the names of the grids
UNSAID = (  # folders of a machine, and what changes no result
    *("data.root", "data.cache", "data.num_workers", "trainer.default_root_dir"),
    *("trainer.logger", "trainer.log_every_n_steps"),
    *("trainer.enable_checkpointing", "trainer.enable_progress_bar"),
)


def together(grids: Sequence[GridResults]) -> GridResults:
    """One grid with the cells of all; its `parts` are the grids, its groups distinguish them.

    Settings that are not the same in all of them are left out of its `config`; it names all
    of several baselines, in words. Its folder is beside that of the first and need not exist.

    Raises:
        UserError: for a grid that is given twice, for two of one name, and for one with a pruner,
            which has no scores.
    """
    _check(grids)
    first = grids[0]
    keys = list(dict.fromkeys(key for grid in grids for key in grid.axes))
    results = {cell.id: cell for grid in reversed(grids) for cell in grid.finished[::-1]}
    parts = tuple(_part(grid, keys, results) for grid in grids)
    names = [grid.name for grid in grids]
    config: Mapping[str, Any] = first.config
    for grid in grids[1:]:
        config = _common(config, grid.config)
    baselines = dict.fromkeys(grid.baseline for grid in grids if grid.baseline)
    references = {grid.reference_warmup for grid in grids}
    return GridResults(
        folder=first.folder.parent / "-vs-".join(names),
        name=f"{', '.join(names[:-1])} and {names[-1]}",
        question="\n\n".join(f"{grid.name}: {grid.question}" for grid in grids if grid.question),
        config=config,
        axes={AXIS: names} | {key: _values(key, parts) for key in keys},
        metric=first.metric,
        mode=first.mode,
        reference_warmup=first.reference_warmup if len(references) == 1 else None,
        baseline=" or ".join(baselines) or None,
        cells=tuple(cell for part in parts for cell in part.cells),
        parts=parts,
        strangers=_joined(part.strangers for part in parts),
        without_parent=tuple(name for part in parts for name in part.without_parent),
    )


def shared(grid: GridResults) -> int:
    """The number of cells that are in more than one of the parts."""
    planned = Counter(cell.id for cell in grid.cells)
    return sum(count > 1 for count in planned.values())


def different(grid: GridResults) -> list[CellResult]:
    """Every cell of the parts once, in the order of the plans."""
    return list({cell.id: cell for cell in reversed(grid.cells)}.values())[::-1]


def differing_settings(grid: GridResults) -> dict[str, list[Any]]:
    """Settings that no axis varies and that are not the same in all parts: a value for each."""
    found = {}
    for key in dict.fromkeys(key for part in grid.parts for key, _ in leaves(part.config)):
        values = [lookup(part.config, key) for part in grid.parts]
        if key not in grid.axes and key not in UNSAID and any(v != values[0] for v in values):
            found[key] = values
    return found


def _check(grids: Sequence[GridResults]) -> None:
    if len(grids) < 2:
        raise UserError("a comparison needs two grids or more")
    folders = [grid.folder.resolve() for grid in grids]
    for number, grid in enumerate(grids):
        if folders[number] in folders[:number]:
            raise UserError(f"{grid.name}: the grid is named twice; name two different ones")
        if grid.name in [each.name for each in grids[:number]]:
            raise UserError(f"{grid.folder}: name: another of the grids is called {grid.name} too")
        if grid.pruner is not None:
            raise UserError(
                f"{grid.folder / 'grid.yaml'}: pruner: {grid.pruner}: a grid whose cells were "
                "ended early has no scores to compare; a grid without a pruner has"
            )


def _part(grid: GridResults, keys: Sequence[str], results: Mapping[str, CellResult]) -> GridResults:
    """The grid with its name in each group, what any grid varies in each cell, known results."""
    fixed = {key: lookup(grid.config, key) for key in keys if key not in grid.axes}

    def named(cell: CellResult) -> CellResult:
        others = "" if cell.group == "all" else f", {cell.group}"
        return replace(
            cell if cell.finished else results.get(cell.id, cell),
            axes={AXIS: grid.name, **fixed, **cell.axes},
            variant=cell.variant,
            baseline=cell.baseline,
            group=f"{AXIS}={label(grid.name)}{others}",
        )

    return without_strangers(replace(grid, cells=tuple(map(named, grid.cells))))


def _values(key: str, parts: Sequence[GridResults]) -> list[Any]:
    """The values of an axis over all parts, each once. They need not be hashable."""
    found: list[Any] = []
    for part in parts:
        known = part.axes.get(key, [lookup(part.config, key)])
        found += [value for value in known if value not in found]
    return found


def _joined(of_parts: Iterable[Mapping[str, Sequence[str]]]) -> dict[str, list[str]]:
    """The names of all parts, by the same keys."""
    found: dict[str, list[str]] = {}
    for of in of_parts:
        for key, names in of.items():
            found.setdefault(key, []).extend(names)
    return found


def _common(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that are equal in two configs."""
    found: dict[str, Any] = {}
    for key, value in one.items():
        if isinstance(value, Mapping) and isinstance(other.get(key), Mapping):
            found[key] = _common(value, other[key])
        elif key in other and other[key] == value:
            found[key] = value
    return found
