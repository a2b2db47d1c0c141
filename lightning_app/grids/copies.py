"""Finished runs of planned cells in other stores, listed under `results:` of ablate.yaml.

They are checked and copied once into the store of this folder of experiments.

A folder's name is never trusted: the id is recomputed from the run's own records."""

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

from lightning_app.config.identity import (
    CONTINUED,
    needed_by,
    read_record,
    relevant,
    relevant_blocks,
)
from lightning_app.config.tree import canonical, lookup, replaced
from lightning_app.core import strict_yaml
from lightning_app.core.errors import UserError
from lightning_app.core.files import disk_full, is_disk_full, write_whole, writing_in
from lightning_app.grids.plan import Grid
from lightning_app.plugins import KEY
from lightning_app.runs.folder import BLOCK, ENVIRONMENT, METRICS, NAMED, RESULT, STORE, RunFolder
from lightning_app.runs.parent import FIELD
from lightning_app.runs.records import (
    CHECKS,
    Cell,
    Unsound,
    is_sealed,
    read_curves,
    read_json,
    read_yaml,
    sealed,
)
from lightning_app.runs.run import DamagedRun, Run, RunState
from lightning_app.runs.store import outside_store
from lightning_app.scores.task_facts import LOSS

_BY_CONTENT = (FIELD, "data.init_from", KEY, CONTINUED)
"""The fields that `config.yaml` stores as paths, or not at all, but that an id covers by
content."""

_DAMAGED = (LookupError, TypeError, AttributeError, ValueError)  # from trees of another layout


@dataclass(frozen=True, kw_only=True)
class Elsewhere:
    """The runs of missing cells in other stores: those that can be copied, and the others.

    Attributes:
        found: The states of the runs that can be copied, by the ids of their cells.
        places: The folders of these runs, by the ids of their cells.
        refused: The cells and folders of the other runs, with the reasons.
        unmoved: The number of other cells whose run is in the folder of a grid, by grid.
    """

    found: Mapping[str, RunState]
    places: Mapping[str, Path]
    refused: tuple[tuple[Cell, Path, str], ...]
    unmoved: Mapping[str, int]

    def lines(self) -> list[str]:
        """One line per store, per run that is not copied, and per former grid."""
        stores = list(dict.fromkeys(path.parent for path in self.places.values()))
        counts = [sum(path.parent == store for path in self.places.values()) for store in stores]
        found = [
            f"{count} cells are finished in {store}: `ablate run` copies them"
            for count, store in zip(counts, stores, strict=True)
        ]
        found += [f"{path}: not copied: {why}" for _, path, why in self.refused]
        return found + [
            f"{count} cells have runs in the folder of the grid {grid}, which only `ablate doctor "
            f"{grid} --fix` makes known to others"
            for grid, count in self.unmoved.items()
        ]


def find_elsewhere(grid: Grid, stores: Iterable[Path]) -> Elsewhere:
    """Look up the cells of a grid that have no run here in other stores, by id.

    Raises:
        UserError: if a store cannot be read.
    """
    found, places, refused = {}, {}, []
    stores = list(stores)
    missing = [cell for cell in grid.cells if not grid.run(cell).path.exists()]
    for cell in missing:
        for store in stores:
            folder = RunFolder(store / STORE / cell.id)
            if not os.path.lexists(folder.path):
                continue
            try:
                state = RunState(state="done", attempts=0, result=_check(folder, cell))
            except Unsound as why:
                refused.append((cell, folder.path, str(why)))
                continue
            found[cell.id], places[cell.id] = state, folder.path
            break
    left = (cell.id for cell in missing if cell.id not in found)
    unmoved = outside_store(grid.folder.experiments, left)
    return Elsewhere(found=found, places=places, refused=tuple(refused), unmoved=unmoved)


def copy_found(grid: Grid, elsewhere: Elsewhere) -> list[str]:
    """Copy these runs into the store; return one line per run that could not be copied.

    Raises:
        OSError: ENOSPC, if the disk is full. No part of a run remains.
        UserError: if the store cannot be written.
    """
    store = grid.folder.experiments / STORE
    lines = []
    for cell in grid.cells:
        if (place := elsewhere.places.get(cell.id)) is None:
            continue
        with writing_in(store):
            store.mkdir(parents=True, exist_ok=True)
            part = Path(tempfile.mkdtemp(prefix=f".{cell.id}-", suffix=".part", dir=store))
        copy = RunFolder(part)
        try:
            _copy(RunFolder(place), copy, grid.spec.checkpoints)
            result = _check(copy, cell)  # the run may have changed since the look-up
            _set_places(copy, cell, grid)
            taken = {**result, "taken_from": str(place.absolute())}
            write_whole(
                copy.result,
                json.dumps(sealed(taken, part) if is_sealed(result) else taken, indent=1),
            )
            part.chmod(0o755)
            part.rename(store / cell.id)  # fails if another process has just created this run
        except Unsound as why:
            lines.append(f"{place}: not copied: {why}; the cell {cell.name} runs")
        except OSError as error:
            if is_disk_full(error):
                raise disk_full(store) from error
            why = f"{error.filename or 'a file'}: {error.strerror or error}"
            lines.append(f"{place}: not copied: {why}; the cell {cell.name} runs")
        finally:
            shutil.rmtree(part, ignore_errors=True)
    return lines


def _check(folder: RunFolder, cell: Cell) -> dict[str, Any]:
    """The sound result of a finished run. Raises `Unsound`."""
    _check_links(folder)
    if not folder.result.is_file():
        ended = "was ended by the pruner of its grid" if folder.pruned.is_file() else "not finished"
        raise Unsound(f"{ended}: has no {RESULT}")
    try:
        state = Run(folder, cell.id).state
    except DamagedRun as error:
        raise Unsound(f"{error.path.name}: {error}") from error
    if state.result is None:
        raise Unsound(state.error)
    check_files(folder, state.result, cell)
    return dict(state.result)


def check_files(folder: RunFolder, result: Mapping[str, Any], cell: Cell) -> None:
    """Check that the files of a run agree with each other, with its result and with the cell.

    Raises:
        Unsound: naming what does not agree.
    """
    for name, check in CHECKS.items():
        path = folder.path / name
        if name in (METRICS, BLOCK, ENVIRONMENT) and not path.is_file():
            raise Unsound(f"has no {name}")
        if path.is_file():
            _about(path, check)
    config = _about(folder.config, read_yaml)
    try:
        _check_record(folder, config, result, cell)
        _check_last_loss(folder, config, result)
    except _DAMAGED as error:
        raise Unsound(f"damaged: {folder.config.name} and its other files do not agree") from error


def _check_links(folder: RunFolder) -> None:
    """Refuse links and pipes: their target may be private to someone else."""
    try:
        links = [folder.path] if folder.path.is_symlink() else folder.own_files()[1]
    except OSError as error:
        raise Unsound(f"{error.filename}: {error.strerror}") from error
    if links:
        raise Unsound(f"{links[0].name} is a link or a pipe, through which nothing is copied")


def _about(path: Path, read: Callable[[Path], Any]) -> Any:
    """Read a file with `read`. Raises `Unsound` naming the file."""
    try:
        return read(path)
    except FileNotFoundError as error:
        raise Unsound(f"has no {path.name}") from error
    except Unsound as error:
        raise Unsound(f"{path.name}: {error}") from error


def _check_record(
    folder: RunFolder, config: Mapping[str, Any], result: Mapping[str, Any], cell: Cell
) -> None:
    """Compare the id, the config, the blocks, the plug-ins and the data of `identity.json`."""
    name = folder.identity.name
    try:
        record = read_record(folder.path)
    except UserError as error:
        raise Unsound(f"{name}: damaged") from error
    if record is None:
        raise Unsound(f"has no {name}")
    if record.id != cell.id:
        raise Unsound(f"{name} is of another experiment than {RESULT}")
    made = relevant(config)
    if (FIELD in made) != (FIELD in record.config):
        raise Unsound(f"{folder.config.name} and {name} differ in {FIELD}")
    if differ := sorted(_differing(_plain(made), _plain(record.config))):
        raise Unsound(f"{folder.config.name} and {name} differ in {differ[0]}")
    if canonical(relevant_blocks(read_json(folder.block))) != canonical(record.blocks):
        raise Unsound(f"{folder.block.name} and {name} are of different blocks")
    used = (result.get("provenance") or {}).get(f"{KEY}_used")
    if used is not None and used != needed_by(folder.path):
        raise Unsound(f"{RESULT} and {name} are of different plug-ins")
    data = (result.get("data") or {}).get("name")
    if data is not None and data != config["data"]["name"]:
        raise Unsound(f"{RESULT} and {folder.config.name} are of different data")


def _plain(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that `config.yaml` and `identity.json` store in the same form."""
    return {
        key: value
        for key, value in fields.items()
        if not any(key == name or key.startswith(f"{name}.") for name in _BY_CONTENT)
    }


def _differing(left: Mapping[str, Any], right: Mapping[str, Any]) -> Iterator[str]:
    for key in left.keys() | right.keys():
        if key not in left or key not in right or canonical(left[key]) != canonical(right[key]):
            yield key


def _check_last_loss(
    folder: RunFolder, config: Mapping[str, Any], result: Mapping[str, Any]
) -> None:
    """Compare the last loss of the curves with that of the result."""
    loss = result["metrics"].get(LOSS)
    if loss is None or config["trainer"].get("logger") is False:
        return  # without loggers a run leaves no curves
    curves = read_curves(folder.metrics, lambda name: name == LOSS)
    last = curves.get(LOSS, {}).get(result["steps"])
    if last is None or not abs(last - loss) <= 1e-6 * abs(loss):  # also if it is not finite
        found = "no" if last is None else "another"
        raise Unsound(f"{METRICS} has {found} {LOSS} at the last step of {RESULT}")


def _copy(source: RunFolder, copy: RunFolder, keep: str) -> None:
    """Copy the files of a run and sync them to disk, without those that a cell does not keep.

    Only files that a run writes are copied, and nothing behind a link. Neither modes nor owners
    are copied: the folder of another user may be read-only.

    Raises:
        Unsound: if the run changes meanwhile.
    """
    without = {source.lock, source.pruned}  # a result takes precedence over `pruned.json`
    without |= {source.checkpoint(name) for name in NAMED if keep not in ("all", name)}
    before = _files(source)
    for path in before:
        if path not in without:
            target = copy.path / path.relative_to(source.path)
            with writing_in(copy.path):
                target.parent.mkdir(parents=True, exist_ok=True)
            # A link, or a pipe, may have replaced the file meanwhile.
            opened = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            with open(opened, "rb") as original, target.open("wb") as file:
                shutil.copyfileobj(original, file)
                file.flush()
                os.fsync(file.fileno())
    if _files(source) != before:
        raise Unsound("a process has changed it meanwhile")


def _files(source: RunFolder) -> dict[Path, tuple[int, int]]:
    """The files that a run has written, with the size and the time of each."""
    found = {path: path.lstat() for path in source.own_files()[0]}
    return {path: (each.st_size, each.st_mtime_ns) for path, each in found.items()}


def _set_places(copy: RunFolder, cell: Cell, grid: Grid) -> None:
    """Set the paths of corpus and parent in a copy's config to those on this machine.

    An id covers their content, not their paths, which may be on another machine.
    """
    tree = grid.tree(cell)
    here = {key: lookup(tree, key) for key in ("data.root", "data.cache", FIELD)}
    here["data.init_from"] = here[FIELD]
    config = read_yaml(copy.config)
    placed = reduce(lambda found, key: replaced(found, key, here[key]), here, config)
    if placed != config:
        write_whole(copy.config, strict_yaml.dump_yaml(placed))
