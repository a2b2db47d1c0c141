"""Find finished runs of planned cells under other names: equal ids mean equal experiments.

Such a run is in the folder of its grid, from the time before a value or an axis was added or
removed, or in the folder of another grid or of `ablate fit`. Its id may be one of schema 1.
"""

import json
import os
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from lightning_app.ablation.cells import Cell
from lightning_app.ablation.grid import Grid
from lightning_app.atomic_write import write_whole
from lightning_app.data.config import DataConfig
from lightning_app.data.corpus import resolved_data
from lightning_app.errors import UserError
from lightning_app.grid_folder import GridFolder
from lightning_app.identity.ids import identify
from lightning_app.identity.relevant import completed, relevant_blocks
from lightning_app.records import Unsound, read_json, read_result, read_yaml
from lightning_app.run_folder import RunFolder

_SUFFIX = 8  # the name of a run's folder ends with this many digits of its id


@dataclass(frozen=True, kw_only=True)
class FinishedElsewhere:
    """A finished run of a planned cell, in a folder that is not the one planned for it."""

    cell: Cell
    folder: RunFolder
    result: Mapping[str, Any]


def find_finished(grid: Grid) -> list[FinishedElsewhere]:
    """Find the cells of a grid that are finished elsewhere in the folder of experiments."""
    folders: dict[str, list[RunFolder]] = {}
    found = []
    for cell in grid.cells:
        if os.path.lexists(grid.run(cell).path):
            continue
        # Usually nothing is missing, and then no folder is listed.
        folders = folders or _folders_by_suffix(grid.folder)
        for folder in _candidates(cell, folders):
            result = _result_of(folder, cell, grid)
            if result is not None:
                found.append(FinishedElsewhere(cell=cell, folder=folder, result=result))
                break
    return found


def take_over(grid: Grid, found: Iterable[FinishedElsewhere]) -> list[str]:
    """Give the runs that were found their planned names; return a line for each grid they were in.

    Runs of this grid are renamed, those of other grids are copied. The caller holds the
    supervisor's lock.
    """
    origins: Counter[str] = Counter()
    for each in found:
        target = grid.run(each.cell)
        source = each.folder
        if source.path.parent != target.path.parent:
            source = _copy(source, target, grid.spec.checkpoints)
        former = {"former_id": each.result["id"]} if each.result["id"] != each.cell.id else {}
        origin = each.folder.path.parent.parent
        came = {"taken_from": f"{origin.name}/{each.folder.name}"}
        result = {**each.result, "id": each.cell.id, "name": target.name, **former, **came}
        write_whole(source.result, json.dumps(result, indent=1))
        os.rename(source.path, target.path)
        origins[str(origin)] += 1
    return [f"{count} cells are finished in {name}: taken over" for name, count in origins.items()]


def _copy(source: RunFolder, target: RunFolder, keep: str) -> RunFolder:
    """Copy a run of another grid beside its planned place, with the checkpoints to `keep`."""
    copy = RunFolder(target.path.with_name(f".{target.name}.part"))
    shutil.rmtree(copy.path, ignore_errors=True)
    shutil.copytree(source.path, copy.path, ignore=shutil.ignore_patterns(source.lock.name))
    copy.trim_checkpoints(keep)
    return copy


def _folders_by_suffix(grid: GridFolder) -> dict[str, list[RunFolder]]:
    """The run folders of all grids by the end of their names; those of `grid` come first."""
    experiments = grid.path.parent
    paths = sorted(experiments.iterdir()) if experiments.is_dir() else []
    found: dict[str, list[RunFolder]] = {}
    for path in sorted(paths, key=lambda path: path != grid.path):
        for run in GridFolder(path).all_runs():
            found.setdefault(run.name[-_SUFFIX:], []).append(run)
    return found


def _candidates(cell: Cell, folders: Mapping[str, list[RunFolder]]) -> Iterator[RunFolder]:
    for identity in filter(None, (cell.id, cell.former)):
        yield from folders.get(identity[:_SUFFIX], ())


def _result_of(folder: RunFolder, cell: Cell, grid: Grid) -> dict[str, Any] | None:
    """The result in a folder if it is the cell's, under its present id or that of schema 1."""
    with suppress(Unsound):  # damaged, or of a newer version: commands on its own grid report it
        return read_result(folder.result, cell.id, grid.plan.metric)
    with suppress(Unsound):
        result = read_result(folder.result, cell.former, grid.plan.metric)
        if result is not None and _is_the_same(folder, result, cell, grid):
            return result
    return None


def _is_the_same(folder: RunFolder, result: Mapping[str, Any], cell: Cell, grid: Grid) -> bool:
    """Whether a run with an id of schema 1 is the experiment of `cell`.

    That id left out the callbacks, plugins and strategy, the definition of the blocks and the
    corpus. All of these are compared: by the run's config, by its `block.json`, and by the checksum
    of its tokens.
    """
    try:
        config = read_yaml(folder.config)
        blocks = relevant_blocks(read_json(folder.block))
        checksum = result["data"]["checksum"]
        corpora = dict(zip(grid.plan.corpora, grid.plan.data, strict=True))
        alike = (
            corpus
            for corpus in corpora
            if identify(config, blocks=blocks, corpus=corpus).id == cell.id
        )
        corpus = next(alike, None)
        if corpus is None:
            return False
        # With the data settings of the run: an axis may give each cell another vocabulary.
        places = {key: corpora[corpus][key] for key in ("root", "cache")}
        data = resolved_data({**completed(config)["data"], **places})
    except (
        FileNotFoundError,
        Unsound,
        UserError,
        LookupError,
        ValueError,
        TypeError,
        AttributeError,
    ):
        return False  # damaged: the cell runs again
    return checksum == _checksum(data, corpus)


@lru_cache(maxsize=256)
def _checksum(config: DataConfig, corpus: str) -> str:
    """Prepare a corpus and return the checksum of its tokens; `corpus` is its digest."""
    from lightning_app.data.prepare import prepare

    return prepare(config).meta["checksum"]
