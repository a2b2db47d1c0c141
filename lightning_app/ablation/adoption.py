"""Give finished runs from other folders the place of planned cells: renamed, or copied whole."""

import json
import os
import shutil
from collections.abc import Iterable, Mapping
from functools import reduce
from pathlib import Path
from typing import Any

from lightning_app import strict_yaml
from lightning_app.ablation.config_tree import replaced
from lightning_app.ablation.finished_checks import check_finished
from lightning_app.ablation.finished_elsewhere import FinishedElsewhere, origins
from lightning_app.ablation.grid import Grid
from lightning_app.atomic_write import disk_full, is_disk_full, write_whole, writing_in
from lightning_app.grid_axes import lookup
from lightning_app.parent import FIELD
from lightning_app.records import Unsound, is_sealed, read_yaml, sealed
from lightning_app.run_folder import NAMED, RunFolder


def take_over(grid: Grid, found: Iterable[FinishedElsewhere]) -> list[str]:
    """Give the runs that were found their planned names; return a line for each grid they were in.

    Runs of this grid are renamed, those of other grids are copied and stay as they are. A run that
    cannot be copied has a line with the reason, and its cell stays missing. The caller holds the
    supervisor's lock, so that no other process takes over the same cells.

    Raises:
        OSError: ENOSPC, if the disk is full. No part of a run remains.
        UserError: if the grid's folder cannot be written.
    """
    for left in grid.folder.runs.glob(".*.part"):  # by a process that was killed
        shutil.rmtree(left)
    taken, lines = [], []
    for each in found:
        try:
            _take(grid, each)
            taken.append(each)
        except Unsound as why:
            lines.append(f"{each.folder}: not copied: {why}; the cell {each.cell.name} runs")
    counts = origins(taken)
    return [f"{counts[name]} cells are finished in {name}: taken over" for name in counts] + lines


def _take(grid: Grid, each: FinishedElsewhere) -> None:
    target = grid.run(each.cell)
    if not each.is_copied:
        _rename(each.folder, target, each, each.result)
        return
    copy = RunFolder(target.path.with_name(f".{target.name}.part"))
    try:
        _copy(each.folder, copy, grid.spec.checkpoints)
        # The run may have changed since it was found.
        result = check_finished(copy, each.cell, grid, is_copied=True)
        _set_places(copy, each, grid)
        _rename(copy, target, each, result)
    except OSError as error:
        if is_disk_full(error):
            raise disk_full(grid.folder.path) from error
        raise Unsound(f"{error.filename or 'a file'}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(copy.path, ignore_errors=True)


def _rename(
    folder: RunFolder, target: RunFolder, each: FinishedElsewhere, result: Mapping[str, Any]
) -> None:
    """Write the cell's name into a result, and then give its folder the cell's name."""
    named = {**result, "name": target.name, "taken_from": each.origin}
    if is_sealed(result):  # it was checked, and its name and places are set here
        named = sealed(named, folder.path)
    write_whole(folder.result, json.dumps(named, indent=1))
    os.rename(folder.path, target.path)


def _copy(source: RunFolder, copy: RunFolder, keep: str) -> None:
    """Copy the files of a run, all written to the disk, without those that a cell does not keep.

    Only what a run writes is copied, and nothing that is behind a link. Neither modes nor owners
    are copied: the folder of another user may be read-only.

    Raises:
        Unsound: if the run has changed meanwhile.
    """
    without = {source.lock, source.pruned}  # a result counts, and `pruned.json` beside it does not
    without |= {source.checkpoint(name) for name in NAMED if keep not in ("all", name)}
    before = _files(source)
    for path in before:
        if path not in without:
            target = copy.path / path.relative_to(source.path)
            with writing_in(copy.path):
                target.parent.mkdir(parents=True, exist_ok=True)
            # A link, or a pipe, may have taken the place of the file meanwhile.
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


def _set_places(copy: RunFolder, each: FinishedElsewhere, grid: Grid) -> None:
    """Name corpus and parent in a copy's config by their places here.

    An id covers what they hold, and not where they are, which may be on another machine.
    """
    tree = grid.tree(each.cell)
    here = {key: lookup(tree, key) for key in ("data.root", "data.cache", FIELD)}
    here["data.init_from"] = here[FIELD]
    config = read_yaml(copy.config)
    placed = reduce(lambda found, key: replaced(found, key, here[key]), here, config)
    if placed != config:
        write_whole(copy.config, strict_yaml.dump_yaml(placed))
