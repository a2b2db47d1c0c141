"""Check that a run in another folder is the finished run of a planned cell, with all of its files.

Nothing is taken from the folder's name: the id is computed again from what the run has recorded.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from lightning_app.ablation.cells import Cell
from lightning_app.ablation.grid import Grid
from lightning_app.errors import UserError
from lightning_app.grid_axes import lookup
from lightning_app.identity.record import CONTINUED, read_record
from lightning_app.identity.relevant import relevant, relevant_blocks
from lightning_app.parent import FIELD
from lightning_app.plugin_copies import needed_by
from lightning_app.plugins import KEY
from lightning_app.records import Unsound, read_json, read_result, read_yaml
from lightning_app.run_folder import BLOCK, ENVIRONMENT, METRICS, NAMED, RESULT, RunFolder
from lightning_app.run_state import cut_short
from lightning_app.tables import CHECKS, read_curves
from lightning_app.task_facts import LOSS

_BY_CONTENT = (FIELD, "data.init_from", KEY, CONTINUED)
"""The fields that `config.yaml` names by their place, or not at all, and an id by their content."""

_PROBE = "SignalProbe"
_DAMAGED = (LookupError, TypeError, AttributeError, ValueError)  # of a tree of another form


def check_finished(folder: RunFolder, cell: Cell, grid: Grid, *, is_copied: bool) -> dict[str, Any]:
    """Return the result of a run in another folder that can take the place of a cell's run.

    It has ended with a result, not by a pruner, whose id is the cell's. One that `is_copied`, since
    it is no run of this grid, also has recorded the config, blocks and corpus of the cell, its
    files agree with each other, and it has what this grid keeps of a finished cell.

    Raises:
        Unsound: with the reason for which it cannot take that place.
    """
    if is_copied:
        _check_links(folder)
    result = _result(folder, cell, grid)
    if not is_copied:
        return result  # under its planned name, too, this grid would count it by its result alone
    check_files(folder, result, cell)
    try:
        _check_kept(folder, result, cell, grid)
    except _DAMAGED as error:
        raise Unsound(f"damaged: {folder.config.name}") from error
    return result


def check_files(folder: RunFolder, result: Mapping[str, Any], cell: Cell) -> None:
    """Check that the files of a run agree with each other, and with its result and the cell.

    Raises:
        Unsound: naming what does not.
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
    """Refuse links and pipes: what they lead to may be another's, and private."""
    try:
        links = [folder.path] if folder.path.is_symlink() else folder.own_files()[1]
    except OSError as error:
        raise Unsound(f"{error.filename}: {error.strerror}") from error
    if links:
        raise Unsound(f"{links[0].name} is a link or a pipe, through which nothing is copied")


def _about(path: Path, read: Callable[[Path], Any]) -> Any:
    """What `read` returns of a file. Raises `Unsound` that names the file."""
    try:
        return read(path)
    except FileNotFoundError as error:
        raise Unsound(f"has no {path.name}") from error
    except Unsound as error:
        raise Unsound(f"{path.name}: {error}") from error


def _result(folder: RunFolder, cell: Cell, grid: Grid) -> dict[str, Any]:
    """The sound result of a run with the id of the cell."""
    if not folder.result.is_file():
        ended = "was ended by the pruner of its grid" if folder.pruned.is_file() else "not finished"
        raise Unsound(f"{ended}: has no {RESULT}")
    result = _about(folder.result, lambda path: read_result(path, cell.id, grid.plan.metric))
    if why := cut_short(folder, result):
        raise Unsound(why)
    return result


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
    if _json(relevant_blocks(read_json(folder.block))) != _json(record.blocks):
        raise Unsound(f"{folder.block.name} and {name} are of different blocks")
    used = (result.get("provenance") or {}).get(f"{KEY}_used")
    if used is not None and used != needed_by(folder.path):
        raise Unsound(f"{RESULT} and {name} are of different plug-ins")
    data = (result.get("data") or {}).get("name")
    if data is not None and data != config["data"]["name"]:
        raise Unsound(f"{RESULT} and {folder.config.name} are of different data")


def _plain(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that `config.yaml` and `identity.json` write alike."""
    return {
        key: value
        for key, value in fields.items()
        if not any(key == name or key.startswith(f"{name}.") for name in _BY_CONTENT)
    }


def _differing(left: Mapping[str, Any], right: Mapping[str, Any]) -> Iterator[str]:
    for key in left.keys() | right.keys():
        if key not in left or key not in right or _json(left[key]) != _json(right[key]):
            yield key


def _json(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def _check_last_loss(
    folder: RunFolder, config: Mapping[str, Any], result: Mapping[str, Any]
) -> None:
    """Compare the last loss of the curves with that of the result."""
    loss = result["metrics"].get(LOSS)
    if loss is None or config["trainer"].get("logger") is False:
        return  # without loggers a run leaves no curves
    curves = read_curves(folder.metrics, lambda name: name == LOSS)
    last = curves.get(LOSS, {}).get(result["steps"])
    if last is None or not abs(last - loss) <= 1e-6 * abs(loss):  # also where it is not finite
        found = "no" if last is None else "another"
        raise Unsound(f"{METRICS} has {found} {LOSS} at the last step of {RESULT}")


def _check_kept(folder: RunFolder, result: Mapping[str, Any], cell: Cell, grid: Grid) -> None:
    """Check that this grid has not put the run aside, and that it has what a cell here keeps."""
    if _is_superseded(result, cell, grid):
        raise Unsound("this grid has superseded it (--rerun-stale)")
    if result["outcome"] == "non_finite":
        return  # such a run may have left no checkpoint
    tree, keep = grid.tree(cell), grid.spec.checkpoints
    saves = lookup(tree, "trainer.enable_checkpointing") is not False
    kept = [folder.checkpoint(name) for name in NAMED if saves and keep in ("all", name)]
    for path in (*kept, folder.tokenizer) if kept else ():
        if not path.is_file():
            raise Unsound(f"has no {path.name}, which this grid keeps (checkpoints: {keep})")
    probes = f'.{_PROBE}"' in _json(lookup(tree, "trainer.callbacks"))
    if probes and not folder.probes.is_file():
        raise Unsound(f"has no {folder.probes.name}, which {_PROBE} in this grid writes")


def _is_superseded(result: Mapping[str, Any], cell: Cell, grid: Grid) -> bool:
    for path in grid.folder.superseded.glob(f"{cell.name}*/{RESULT}"):
        with suppress(Unsound, FileNotFoundError):
            known = read_json(path)
            if all(known.get(time) == result[time] for time in ("started", "finished")):
                return True
    return False
