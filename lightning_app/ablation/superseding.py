"""List and move away finished cells of another code, data or libraries."""

from collections.abc import Iterator, Mapping
from typing import Any

from lightning_app.ablation.cells import Cell
from lightning_app.ablation.grid import Grid
from lightning_app.atomic_write import move
from lightning_app.errors import UserError
from lightning_app.mixtures import STALE, Groups, counted, others, some
from lightning_app.records import Unsound, read_json

WORDS = {
    "code": "version of the code",
    "data": "state of the data",
    "libraries": "set of library versions",
    "device": "kind of device",
}


def lines(found: Mapping[str, Groups]) -> Iterator[str]:
    """One line of `ablate plan` for each kind of such cells."""
    for kind, of in found.items():
        total = sum(map(len, of.values()))
        cells = "1 finished cell" if total == 1 else f"{total} finished cells"
        if kind == "unrecorded":
            yield f"{cells} without a record of the code and libraries that made them: {some(of)}"
        else:
            yield f"{cells} of another {WORDS[kind]} than here and now ({counted(of)}): {some(of)}"


def supersede(grid: Grid, here: Mapping[str, Any]) -> list[str]:
    """Move away the runs of another code, data or libraries, so that their cells run again.

    Interrupted runs are moved too: otherwise two versions would train the same weights. No other
    supervisor may use the grid. Returns a line with their number. Raises `UserError` if the folder
    cannot be written.
    """
    records = {cell.name: record for cell in grid.cells if (record := _record(grid, cell))}
    found = {kind: of for kind, of in others(records, here).items() if kind in STALE}
    names = dict.fromkeys(name for of in found.values() for each in of.values() for name in each)
    for name in names:
        move(grid.folder.run(name).path, grid.folder.superseded / name)
    if not names:
        return [f"{grid.name}: no cell is of another code, data or libraries than now"]
    why = "; ".join(f"{kind}: {counted(of)}" for kind, of in found.items())
    return [f"{len(names)} runs moved to {grid.folder.superseded}; their cells run again ({why})"]


def _record(grid: Grid, cell: Cell) -> Mapping[str, Any] | None:
    """The provenance of a run, None if it has left nothing that the next attempt would use."""
    state, folder = grid.state(cell, with_metric=False), grid.run(cell)
    if state.result is not None or state.pruned is not None:
        return state.result or state.pruned
    if not folder.checkpoint("last").is_file():
        return None
    path = folder.attempt(state.attempts).provenance
    try:
        return {"provenance": read_json(path)}
    except FileNotFoundError:
        return {"provenance": {}}
    except Unsound as error:
        raise UserError(f"{path}: {error}; remove the file") from error
