"""Finished runs of planned cells that lie under another name: an id means the same anywhere.

A cell's run is found in the folder of its grid, though a value of an axis or the axis itself has
gone since; in that of another grid or of `ablate fit`; and where its id is one of schema 1.
"""

import json
import os
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from lightning_app.ablation.plan import Cell, Plan
from lightning_app.ablation.runs import LOCK, RESULT, run_folder, trim_checkpoints
from lightning_app.files import write_whole, writing_in
from lightning_app.identity.ids import identify
from lightning_app.identity.relevant import relevant_blocks
from lightning_app.records import Unsound, read_result

_YAML: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_SUFFIX = 8  # digits of the id that end the name of a run's folder


@dataclass(frozen=True, kw_only=True)
class Found:
    """A finished run of a planned cell, in a folder that is not the one planned for it."""

    cell: Cell
    folder: Path
    result: Mapping[str, Any]


def find_finished(directory: Path, plan: Plan) -> list[Found]:
    """Find the cells of a plan that are finished elsewhere, below the folder of `directory`."""
    folders: dict[str, list[Path]] = {}
    found = []
    for cell in plan.cells:
        if os.path.lexists(run_folder(directory, cell)):
            continue
        # Most often nothing is missing, and then no folder is listed.
        folders = folders or _folders_by_suffix(directory)
        for folder in _candidates(cell, folders):
            result = _result_of(folder, cell, plan)
            if result is not None:
                found.append(Found(cell=cell, folder=folder, result=result))
                break
    return found


def take_over(directory: Path, found: Iterable[Found], keep: str) -> list[str]:
    """Give the runs that were found their planned names; return a line for each grid they were in.

    Runs of this grid are renamed, those of others copied. Holds the supervisor's lock.

    Args:
        directory: The grid's folder.
        found: What `find_finished` has found there.
        keep: The checkpoints to keep of a run that has ended: all, last, best or none.
    """
    origins: Counter[str] = Counter()
    for each in found:
        target = run_folder(directory, each.cell)
        with writing_in(target.parent):
            target.parent.mkdir(parents=True, exist_ok=True)
            source = each.folder
            if source.parent != target.parent:
                source = target.with_name(f".{target.name}.part")
                shutil.rmtree(source, ignore_errors=True)
                shutil.copytree(each.folder, source, ignore=shutil.ignore_patterns(LOCK))
                trim_checkpoints(source, keep)
            former = {"former_id": each.result["id"]} if each.result["id"] != each.cell.id else {}
            origin = each.folder.parent.parent
            came = {"taken_from": f"{origin.name}/{each.folder.name}"}
            result = {**each.result, "id": each.cell.id, "name": target.name, **former, **came}
            write_whole(source / RESULT, json.dumps(result, indent=1))
            os.rename(source, target)
        origins[str(origin)] += 1
    return [f"{count} cells are finished in {name}: taken over" for name, count in origins.items()]


def strays(directory: Path, plan: Plan) -> list[str]:
    """The names of finished runs in a grid's folder that its plan does not hold."""
    planned = {cell.name for cell in plan.cells}
    runs = directory / "runs"
    names = sorted(path.name for path in runs.iterdir()) if runs.is_dir() else []
    return [name for name in names if name not in planned and (runs / name / RESULT).is_file()]


def _folders_by_suffix(directory: Path) -> dict[str, list[Path]]:
    """All folders of runs below the parent of `directory`, its own first, by the name's end."""
    grids = sorted(directory.parent.iterdir()) if directory.parent.is_dir() else []
    found: dict[str, list[Path]] = {}
    for grid in sorted(grids, key=lambda grid: grid != directory):
        runs = grid / "runs"
        for path in sorted(runs.iterdir()) if runs.is_dir() else ():
            if not path.name.startswith("."):
                found.setdefault(path.name[-_SUFFIX:], []).append(path)
    return found


def _candidates(cell: Cell, folders: Mapping[str, list[Path]]) -> Iterator[Path]:
    for identity in filter(None, (cell.id, cell.former)):
        yield from folders.get(identity[:_SUFFIX], ())


def _result_of(folder: Path, cell: Cell, plan: Plan) -> dict[str, Any] | None:
    """The result of a folder if it is the cell's, also under its id of schema 1."""
    with suppress(Unsound):  # damaged, or of a newer version: its own grid says so
        return read_result(folder / RESULT, cell.id, plan.metric)
    with suppress(Unsound):
        result = read_result(folder / RESULT, cell.former, plan.metric)
        if result is not None and _is_the_same(folder, result, cell, plan):
            return result
    return None


def _is_the_same(folder: Path, result: Mapping[str, Any], cell: Cell, plan: Plan) -> bool:
    """Whether a run with an id of schema 1 is the experiment of `cell`.

    That id left out the callbacks, plugins and strategy, the definition of the blocks and the
    corpus, so all of these are compared: by the run's config, by its `block.json`, and by the
    checksum of its tokens.
    """
    try:
        config = yaml.load((folder / "config.yaml").read_text(encoding="utf-8"), Loader=_YAML)
        stacks = json.loads((folder / "block.json").read_text(encoding="utf-8"))
        blocks, checksum = relevant_blocks(stacks), result["data"]["checksum"]
        for data, corpus in zip(plan.data, plan.corpora, strict=True):
            if identify(config, blocks=blocks, corpus=corpus).id == cell.id:
                return checksum == _checksum(data)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, yaml.YAMLError):
        return False  # damaged: the cell runs again
    return False


def _checksum(section: Mapping[str, Any]) -> str:
    """The checksum of the tokens that a `data` section comes to now; prepares the corpus."""
    from lightning_app.data.corpus import data_config
    from lightning_app.data.prepare import prepare

    return prepare(data_config(section)).meta["checksum"]
