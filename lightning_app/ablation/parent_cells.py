"""The runs of a parent grid: which of them a cell starts from, and whether it is finished."""

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from lightning_app.ablation.cells import Cell, Waiting
from lightning_app.ablation.config_tree import Tree, keys_of
from lightning_app.ablation.grid_spec import ParentGrid
from lightning_app.ablation.supervision.locks import is_held
from lightning_app.errors import UserError, nearest
from lightning_app.grid_axes import key_of, label, lookup
from lightning_app.grid_folder import GridFolder
from lightning_app.parent import find_parent
from lightning_app.run_folder import RunFolder
from lightning_app.run_state import DamagedRun, read_state


class ParentState(NamedTuple):
    """The state of a run that a cell starts from.

    `word` is `done`, `running`, `failed`, `missing`, or `waiting` for its own parent; `error` is
    the last line of the error of a failed run.
    """

    word: str
    error: str | None = None

    def __str__(self) -> str:
        return f"{self.word}: {self.error}" if self.error else self.word


def parent_state(experiments: Path, parent: str, identity: str) -> ParentState:
    """Read the state of the run in the folder `parent` of `experiments`, by its id.

    Raises:
        UserError: if its result is damaged or of another run.
    """
    if not parent:
        return ParentState("waiting")
    folder = RunFolder(experiments / parent)
    try:
        run = read_state(folder, identity, prunes=False)
    except DamagedRun as error:
        raise UserError(
            f"{error.path}: {error}; `ablate doctor` repairs the grid that it belongs to"
        ) from error
    if run.state != "done" and is_held(folder.lock):
        return ParentState("running")
    return ParentState(run.state, run.error)


def waiting_document(cells: Iterable[Waiting], experiments: Path) -> list[dict[str, Any]]:
    """Name, and parent with its state, of each cell that waits, for `--json`."""
    found = []
    for cell in cells:
        state = parent_state(experiments, cell.parent, cell.parent_id)
        found.append(
            {
                "name": cell.name,
                "parent": cell.parent or None,
                "state": state.word,
                "error": state.error,
            }
        )
    return found


def waiting_lines(waiting: Iterable[Mapping[str, Any]]) -> list[str]:
    """A line for each parent that cells wait for, from `waiting_document`."""
    counts: dict[tuple[Any, ...], int] = {}
    for each in waiting:
        key = (each["parent"], each["state"], each["error"])
        counts[key] = counts.get(key, 0) + 1
    lines = []
    for (parent, state, error), count in counts.items():
        cells = "1 cell waits" if count == 1 else f"{count} cells wait"
        name = parent or "a run that has no id yet"
        why = str(ParentState(state, error))
        ready = "; `ablate run` starts what it can now" if state == "done" else ""
        lines.append(f"{cells} for {name} ({why}){ready}")
    return lines


def placed(data: Mapping[str, Any], experiments: Path) -> dict[str, Any]:
    """A data config of a plan, whose parent is named from the folder of experiments."""
    return {**data, "init_from": str(experiments / data["init_from"])}


def parent_name(experiments: Path, parent: str) -> str | None:
    """What the id of a child says of its parent, None if the parent's folder is gone.

    Empty if the parent cannot be continued now, such as one that is trained again.
    """
    folder = experiments / parent
    if not folder.is_dir():
        return None
    try:
        return find_parent(str(folder)).name
    except UserError:
        return ""


@dataclass(frozen=True)
class _PlannedRun:
    cell: Cell | Waiting
    folder: str  # in the folder of experiments


class ParentCells:
    """The planned cells of a parent grid, found by their values.

    Args:
        parent: The grid, and the keys by which cells match.
        cells: Its planned cells.
        configs: Their resolved configs, in the same order.
        source: The file of the child grid, for messages.

    Raises:
        UserError: if a cell of the parent grid does not have a key.
    """

    def __init__(
        self,
        parent: ParentGrid,
        cells: Iterable[Cell | Waiting],
        configs: Iterable[Tree],
        source: str,
    ) -> None:
        self._parent = parent
        self._source = source
        self._known: dict[tuple[Hashable, ...], list[_PlannedRun]] = {}
        runs = GridFolder(Path(parent.spec.name)).runs
        for cell, config in zip(cells, configs, strict=True):
            key = self._key(config, f"'{parent.spec.name}'")
            self._known.setdefault(key, []).append(_PlannedRun(cell, (runs / cell.name).as_posix()))

    def of(self, config: Tree) -> tuple[str, str]:
        """Folder and id of the run from which a cell with this config starts; empty if it waits.

        Raises:
            UserError: if no cell of the parent grid matches, or several do.
        """
        found = self._known.get(self._key(config, "this grid"), [])
        if len(found) != 1:
            values = ", ".join(f"{key}={label(lookup(config, key))}" for key in self._parent.match)
            said = "no cell" if not found else f"{len(found)} cells"
            such = f" (such as {found[0].cell.name} and {found[1].cell.name})" if found else ""
            fix = "add a key that tells them apart" if found else "a cell needs exactly one"
            raise UserError(
                f"{self._source}: init_from.match: '{self._parent.spec.name}' has {said} with "
                f"{values}{such}; {fix}"
            )
        cell = found[0].cell
        return (found[0].folder, cell.id) if isinstance(cell, Cell) else ("", "")

    def _key(self, config: Tree, where: str) -> tuple[Hashable, ...]:
        known = list(keys_of(config))
        for key in self._parent.match:
            if key not in known:
                raise UserError(
                    f"{self._source}: init_from.match: a cell of {where} has no "
                    f"'{key}'{nearest(key, known)}"
                )
        return tuple(key_of(lookup(config, key)) for key in self._parent.match)
