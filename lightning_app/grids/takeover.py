"""Finished runs of planned cells in other folders: found, checked, copied, renamed or put aside.

Equal ids mean equal experiments. Such a run is in the folder of its grid, from the time before a
value or an axis was added or removed, or in the folder of another grid or of `ablate fit`: in the
same folder of experiments, or in one that the user's ``ablate.yaml`` lists under ``results``.
Nothing is taken from the folder's name: the id is computed again from what the run has recorded."""

import json
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any, NamedTuple

from lightning_app.config.identity import CONTINUED, read_record, relevant, relevant_blocks
from lightning_app.config.run_plugins import needed_by
from lightning_app.config.tree import lookup, replaced
from lightning_app.core import strict_yaml
from lightning_app.core.errors import UserError
from lightning_app.core.files import disk_full, is_disk_full, move, write_whole, writing_in
from lightning_app.grids.plan import Grid
from lightning_app.plugins import KEY
from lightning_app.runs.folder import (
    BLOCK,
    ENVIRONMENT,
    METRICS,
    NAMED,
    RESULT,
    GridFolder,
    RunFolder,
)
from lightning_app.runs.mixtures import STALE, Groups, counted, others, some
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
from lightning_app.runs.run import DamagedRun, Run
from lightning_app.scores.task_facts import LOSS

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
    try:
        state = Run(folder, cell.id, grid.plan.metric).state
    except DamagedRun as error:
        raise Unsound(f"{error.path.name}: {error}") from error
    if state.result is None:
        raise Unsound(state.error)
    return dict(state.result)


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


_SUFFIX = 8  # the name of a run's folder ends with this many digits of its id


@dataclass(frozen=True, kw_only=True)
class FinishedElsewhere:
    """A finished run of a planned cell, in a folder that is not the one planned for it.

    Attributes:
        cell: The cell.
        folder: The folder of the run.
        result: The content of its `result.json`.
        is_copied: Whether the run stays there, since it is no run of the cell's own grid.
        is_outside: Whether it is in a folder of results, outside of the grid's experiments.
    """

    cell: Cell
    folder: RunFolder
    result: Mapping[str, Any]
    is_copied: bool
    is_outside: bool

    @property
    def grid(self) -> Path:
        """The folder of the grid that holds the run."""
        return self.folder.path.parent.parent

    @property
    def origin(self) -> str:
        """What the cell's result says of it: GRID/NAME or, from outside, the path of the folder."""
        path = self.folder.path
        return str(path.absolute()) if self.is_outside else f"{self.grid.name}/{path.name}"


class Refused(NamedTuple):
    """A run that has the name of a missing cell's run and cannot take its place, and why."""

    cell: Cell
    folder: RunFolder
    reason: str


class Search(NamedTuple):
    """What was found for the cells of a grid that have no folder yet."""

    found: list[FinishedElsewhere]
    refused: list[Refused]


def find_finished(grid: Grid, results: Iterable[Path] = ()) -> Search:
    """Find the cells of a grid that are finished elsewhere.

    Args:
        grid: The grid; the other grids beside its folder are searched too.
        results: Further folders of experiments, or of single grids.

    Raises:
        UserError: if a folder cannot be read.
    """
    search = Search([], [])
    missing = [cell for cell in grid.cells if not os.path.lexists(grid.run(cell).path)]
    # Usually nothing is missing, and then no folder is listed.
    folders = _runs_by_suffix(grid.folder, results) if missing else {}
    for cell in missing:
        refused = []
        for folder in folders.get(cell.id[:_SUFFIX], ()):
            path, experiments = folder.path, grid.folder.path.parent
            is_copied = path.parent != grid.folder.runs or path.is_symlink()
            try:
                result = check_finished(folder, cell, grid, is_copied=is_copied)
            except Unsound as why:
                refused.append(Refused(cell, folder, str(why)))
                continue
            found = FinishedElsewhere(
                cell=cell,
                folder=folder,
                result=result,
                is_copied=is_copied,
                is_outside=path.parents[2] != experiments,
            )
            search.found.append(found)
            break
        else:
            search.refused.extend(refused)
    return search


def refusals(refused: Iterable[Refused]) -> list[str]:
    """A line for each reason and grid for which runs cannot be used."""
    groups: dict[tuple[Path, str], list[str]] = {}
    for _, folder, reason in refused:
        groups.setdefault((folder.path.parent, reason), []).append(folder.name)
    return [
        f"{where / names[0]}: not used: {reason}"
        if len(names) == 1
        else f"{where}: {len(names)} runs not used, such as {names[0]}: {reason}"
        for (where, reason), names in groups.items()
    ]


def origins(found: Iterable[FinishedElsewhere]) -> Counter[Path]:
    """The number of runs that were found in the folder of each grid."""
    return Counter(each.grid for each in found)


def _runs_by_suffix(grid: GridFolder, results: Iterable[Path]) -> dict[str, list[RunFolder]]:
    """The run folders of all grids by the end of their names; those of `grid` come first."""
    places = [grid, *_grids_in(grid.path.parent)]
    for folder in results:
        places += [GridFolder(folder), *_grids_in(folder)]
    found: dict[str, list[RunFolder]] = {}
    seen: set[Path] = set()
    for place in places:
        real = place.runs.resolve()
        if real not in seen:  # the folder of experiments may be among the results
            seen.add(real)
            for run in _runs_of(place):
                found.setdefault(run.name[-_SUFFIX:], []).append(run)
    return found


def _grids_in(experiments: Path) -> list[GridFolder]:
    if not experiments.is_dir():
        return []
    with _reading(experiments):
        return [GridFolder(path) for path in sorted(experiments.iterdir())]


def _runs_of(grid: GridFolder) -> list[RunFolder]:
    with _reading(grid.runs):
        return grid.all_runs()


@contextmanager
def _reading(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(f"{folder}: cannot be read: {error.strerror}") from error


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
