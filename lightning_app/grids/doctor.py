"""`ablate doctor`: find and repair damage in the runs of a grid that `ablate run` refuses.

`--fix` never deletes a result: it renames or moves files and folders. It also moves runs that are
in the grid's folder, as in earlier versions, into the store. The plan and the queue are not
examined, since `ablate run` rebuilds both when they are damaged; `--fix` also rebuilds a damaged
queue.
"""

import errno
import importlib
import json
import os
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_app.config.grid import read_spec
from lightning_app.config.identity import require
from lightning_app.config.tree import keys_of
from lightning_app.core import strict_yaml
from lightning_app.core.errors import UserError, named
from lightning_app.core.files import move, write_whole, writing_in
from lightning_app.grids.plan import Grid, planned_again, runs_with_plugins
from lightning_app.grids.supervisor import PROGRAM
from lightning_app.runs.folder import STORE, GridFolder, RunFolder
from lightning_app.runs.locks import is_held, supervisor_lock
from lightning_app.runs.mixtures import unsealed
from lightning_app.runs.records import (
    Cell,
    OtherVersion,
    Unsound,
    check_schema,
    is_sealed,
    read_json,
    read_pruned,
    read_result,
    read_yaml,
    sealed,
    with_file,
)
from lightning_app.runs.run import DamagedRun, Run
from lightning_app.runs.store import link_run, put_aside, stored

_PASSES = 4  # a repair can reveal further damage, so the runs are examined up to this often
_RUNS_AGAIN = "so that the cell runs again"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Damage in a grid's folder.

    Attributes:
        path: The damaged file or folder.
        what: The damage.
        remedy: The effect of `fix` or, if that is None, what the user can do.
        fix: Repairs the damage.
    """

    path: Path
    what: str
    remedy: str = ""
    fix: Callable[[], object] | None = None

    def __str__(self) -> str:
        remedy = f"; {'--fix would ' if self.fix else ''}{self.remedy}" if self.remedy else ""
        return " ".join(f"{self.path}: {self.what}{remedy}".split())


def doctor_command(
    grid: str | Path,
    experiments: Path = Path("experiments"),
    *,
    storage: str | None = None,
    fix: bool = False,
    program: str = PROGRAM,
) -> int:
    """`ablate doctor`: examine the runs of a grid and print one line per damage.

    With `fix` damage is repaired where that is safe. Without it, nothing is changed, and cells may
    run meanwhile. Returns 0 if no damage remains, otherwise 1.

    Raises:
        UserError: if there is no such folder, if a newer version of the program made it or, with
            `fix`, if a supervisor works in it.
    """
    spec = read_spec(grid)
    folder = GridFolder(experiments / spec.name)
    if not folder.path.is_dir():
        raise UserError(f"{folder}: no such folder; `ablate run` makes it")
    for run in runs_with_plugins(folder):  # refuses a newer version's plan
        require(run)
    with supervisor_lock(folder) if fix else nullcontext():
        module = importlib.import_module(program)  # slow: it resolves configs
        planned = Grid(spec, folder, planned_again(spec, folder, module.resolve, module.identify))
        doctor = _Doctor(planned, module)
        fixed = doctor.repair() if fix else 0
        for cell in planned.cells if fix else ():
            link_run(folder, cell.name, cell.id)
        findings = doctor.examine()
    for each in findings:
        print(each)
    for note in [*doctor.notes, *filter(None, [doctor.without_seal()])]:
        print(f"note: {note}")
    said = [f"{len(planned.cells)} cells"]
    waiting = len(planned.plan.waiting)
    said += [f"{waiting} more wait for their parents"] if waiting else []
    said += [f"{doctor.running} running now"] if doctor.running else []
    said += [f"{fixed} findings fixed"] if fixed else []
    easy = sum(each.fix is not None for each in findings)
    remain = f"; {len(findings)} findings remain, of which --fix repairs {easy}"
    print(f"{spec.name}: {', '.join(said)}{remain if findings else ': sound'}", flush=True)
    return 1 if findings else 0


class _Doctor:
    """Examine the runs of a grid; `program` resolves and identifies the config of a cell."""

    def __init__(self, grid: Grid, program: Any) -> None:
        self._grid = grid
        self._program = program
        self._refused: dict[Path, str] = {}  # reasons for failed fixes
        self.notes: list[str] = []
        self.running = 0

    def repair(self) -> int:
        """Repair what can be repaired; return the number of repairs."""
        fixed = 0
        for link in self._grid.folder.runs.glob(".*.link"):  # left by a killed move
            link.unlink()
        for _ in range(_PASSES):
            for each in [each for each in self.examine() if each.fix is not None]:
                try:
                    assert each.fix is not None
                    each.fix()
                    print(f"{each.path}: {each.what}; fixed: {each.remedy}", flush=True)
                    fixed += 1
                except UserError as error:
                    self._refused[each.path] = str(error)
        return fixed

    def _ended(self) -> Iterator[tuple[Cell, Path, dict[str, Any]]]:
        """Every cell that has ended, with its sound `result.json` or `pruned.json`."""
        for cell, run in self._folders():
            readers = {run.result: read_result}
            readers |= {run.pruned: read_pruned} if self._grid.prunes else {}
            for path, read in readers.items():
                with suppress(Unsound):  # reported as a finding
                    if (tree := read(path, cell.id)) is not None:
                        yield cell, path, tree

    def without_seal(self) -> str:
        """The sentence about results that have no seal; empty if all have one."""
        return unsealed({cell.name: tree for cell, _, tree in self._ended()})

    def examine(self) -> list[Finding]:
        """All findings: first misplaced runs, then damage in the folders of runs."""
        self.notes, self.running = [], 0
        found = [*self._places(), *self._runs(), *self._metrics()]
        return [
            Finding(path=each.path, what=each.what, remedy=f"not repaired: {refused}")
            if (refused := self._refused.get(each.path))
            else each
            for each in found
        ]

    def _folders(self) -> Iterator[tuple[Cell, RunFolder]]:
        """The cells with their folders, without those whose links are wrong."""
        for cell in self._grid.cells:
            with suppress(UserError):
                yield cell, self._grid.run(cell)

    def _places(self) -> Iterator[Finding]:
        """Wrong links, and runs in the grid's folder instead of the store."""
        folder, planned = self._grid.folder, {cell.name: cell for cell in self._grid.cells}
        unknown: list[str] = []
        paths = sorted(folder.runs.iterdir()) if folder.runs.is_dir() else []
        # If a run has several folders, one with a result goes into the store.
        paths.sort(key=lambda path: not RunFolder(path).result.exists())
        for path in paths:
            cell = planned.get(path.name)
            if path.name.startswith("."):
                continue
            if path.is_symlink():
                if cell is not None:
                    yield from self._link(path, cell)
            elif not path.is_dir():
                yield self._aside(path)
            elif is_held(RunFolder(path).lock):
                self.running += cell is None
            elif other := _of_other_version(RunFolder(path)):
                if cell is None:  # otherwise it is found among the runs
                    yield other
            else:
                yield from self._own_folder(path, cell, unknown)
        earlier = folder.path / "superseded"
        for path in sorted(earlier.iterdir()) if earlier.is_dir() else []:
            if identity := _identity(RunFolder(path)):
                yield self._earlier(path, identity, "was put aside by --rerun-stale")
        if unknown:
            count = f"{len(unknown)} names that this grid does not plan (such as {unknown[0]})"
            self.notes.append(f"{folder.runs}: {count}; left unchanged")

    def _link(self, path: Path, cell: Cell) -> Iterator[Finding]:
        def replace() -> None:
            path.unlink()
            link_run(self._grid.folder, cell.name, cell.id)

        try:
            stored(self._grid.folder.experiments, cell.id)
        except UserError as error:
            yield Finding(path=path, what=str(error))
            return
        try:
            self._grid.run(cell)
        except UserError:
            what = f"is a link to {os.readlink(path)}, not to the run {cell.id} in the store"
            yield Finding(path=path, what=what, remedy="replace the link", fix=replace)

    def _own_folder(self, path: Path, cell: Cell | None, unknown: list[str]) -> Iterator[Finding]:
        """A run in the grid's folder, which other grids cannot use."""
        run = RunFolder(path)
        identity = _identity(run) or (cell.id if cell is not None else "")
        if not identity:
            unknown.append(path.name)
            return
        place = stored(self._grid.folder.experiments, identity)
        if not place.exists():
            yield Finding(
                path=path,
                what="lies in the folder of its grid",
                remedy=f"move it to {place}",
                fix=lambda: self._move(run, place),
            )
            return
        mine, other = _ending(run), _ending(RunFolder(place))
        if mine is not None and other is None and not is_held(RunFolder(place).lock):
            yield Finding(
                path=path,
                what=f"is finished, and {place} is not",
                remedy=f"move it to {place}, and what is there to {place.name}@superseded-N",
                fix=lambda: (put_aside(place.parent.parent, identity), self._move(run, place)),
            )
        elif mine is None or mine == other:
            yield self._earlier(path, identity, f"is a second folder of {place}")
        else:
            self.notes.append(
                f"{path}: is read here and not in {place}, which has another result of this id"
            )

    def _move(self, run: RunFolder, place: Path) -> None:
        """Move a run into the store and leave a link: first what can fail, then two renames."""
        grid, path = self._grid.folder, run.path
        with writing_in(grid.runs):
            write_whole(run.listed / grid.path.resolve().name, f"{path.name}\n")
        with suppress(Unsound):  # reported as a finding
            pruned = read_pruned(run.pruned, None)
            if pruned is not None and "grid" not in pruned:
                pruned["grid"] = self._grid.name
                pruned = sealed(pruned, path) if is_sealed(pruned) else pruned
                write_whole(run.pruned, json.dumps(pruned, indent=1))
        link = path.with_name(f".{path.name}.link")
        link.unlink(missing_ok=True)  # left by a killed process
        try:
            os.symlink(f"../../{STORE}/{place.name}", link, target_is_directory=True)
            place.parent.mkdir(parents=True, exist_ok=True)
            if place.exists():  # a rename replaces an empty folder
                raise FileExistsError(errno.EEXIST, "exists", str(place))
            os.rename(path, place)
        except OSError as error:
            link.unlink(missing_ok=True)
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise UserError(f"stays, since it cannot be moved: {error.strerror}") from error
        os.rename(link, path)

    def _earlier(self, path: Path, identity: str, what: str) -> Finding:
        experiments = self._grid.folder.experiments
        return Finding(
            path=path,
            what=what,
            remedy=f"move it to {experiments / STORE / identity}@superseded-N",
            fix=lambda: put_aside(experiments, identity, path),
        )

    def _aside(self, path: Path) -> Finding:
        target = self._grid.folder.aside / path.name
        return Finding(
            path=path,
            what="is not a folder",
            remedy=f"move it to {target.parent.name}/, {_RUNS_AGAIN}",
            fix=lambda: move(path, target),
        )

    def _runs(self) -> Iterator[Finding]:
        absent = 0
        for cell, run in self._folders():
            if not run.path.exists():
                absent += 1
            elif is_held(run.lock):
                self.running += 1
            elif other := _of_other_version(run):
                yield other
            else:
                yield from self._contents(run, cell)
        if absent:
            self.notes.append(f"{self._grid.folder.runs}: {absent} cells have not started")

    def _contents(self, run: RunFolder, cell: Cell) -> Iterator[Finding]:
        other, damage = None, ""
        try:
            if run.config.exists():
                other = self._other_id(run, cell)
            elif run.result.exists() or run.pruned.exists():
                damage = "missing, although the run has ended"
        except Unsound as error:
            damage = str(error)
        if other is not None:
            what = f"config.yaml is of another experiment: its id is {other}, not {cell.id}"
            store, real = self._grid.folder.experiments, run.path.resolve()
            own = None if real == stored(store, cell.id).resolve() else real
            yield Finding(
                path=run.path,
                what=what,
                remedy=f"move it to {store / STORE / cell.id}@damaged-N, {_RUNS_AGAIN}",
                fix=lambda: put_aside(store, cell.id, own, "damaged"),
            )
            return
        if damage:  # the result's seal can be judged once the config is back
            yield Finding(
                path=run.config,
                what=damage,
                remedy="write it again from the grid file",
                fix=lambda: self._restore_config(run, cell),
            )
            return
        endings = {run.result: read_result, run.pruned: read_pruned}
        for path, read in endings.items():
            try:
                read(path, cell.id)
            except Unsound as error:
                yield _damaged(path, str(error), _RUNS_AGAIN)
        if run.result.exists() and run.pruned.exists():
            yield _damaged(run.pruned, f"a pruned run has no {run.result.name}")

    def _other_id(self, run: RunFolder, cell: Cell) -> str | None:
        """The id of the config if it differs from the cell's, otherwise None. Raises `Unsound`."""
        tree = read_yaml(run.config)
        try:
            with named(run.config):
                identity = self._program.identify(tree).id
        except (LookupError, TypeError, AttributeError, ValueError) as error:
            raise Unsound("torn or damaged: not the config of a run") from error
        if identity == cell.id:
            return None
        # A file that is cut off between two lines is valid YAML but lacks fields.
        if lacking := sorted(set(keys_of(self._resolve(run, cell))) - set(keys_of(tree))):
            raise Unsound(f"torn or damaged: lacks {lacking[0]}")
        return identity

    def _resolve(self, run: RunFolder, cell: Cell) -> dict[str, Any]:
        return self._program.resolve(self._grid.tree(cell), str(run))

    def _restore_config(self, run: RunFolder, cell: Cell) -> None:
        text = strict_yaml.dump_yaml(self._resolve(run, cell))
        if run.config.exists():
            _put_aside(run.config)
        write_whole(run.config, text)
        for path in filter(Path.exists, (run.result, run.pruned)):
            with suppress(Unsound):  # the next pass reports it
                write_whole(path, json.dumps(with_file(read_json(path), run.config), indent=1))

    def _metrics(self) -> Iterator[Finding]:
        """Results without the grid's metric: damaged if most have it, or else a wrong grid."""
        metric, having, lacking = self._grid.plan.metric, 0, []
        for cell, run in self._folders():
            path = run.result
            with suppress(Unsound):
                result = read_result(path, cell.id)
                if result is not None and result["status"] == "ok":
                    having += metric in result["metrics"]
                    lacking += [] if metric in result["metrics"] else [path]
        for path in lacking:
            if having > len(lacking):
                yield _damaged(path, f"reports no '{metric}', but other runs do", _RUNS_AGAIN)
            else:
                remedy = f"set metric.name in {self._grid.spec.source} to a metric of the runs"
                yield Finding(path=path, what=f"reports no '{metric}'", remedy=remedy)


def _put_aside(path: Path) -> Path:
    return move(path, path.with_name(f"{path.name}.damaged"))


def _damaged(path: Path, what: str, then: str = "") -> Finding:
    remedy = f"move it to {path.name}.damaged{f', {then}' if then else ''}"
    return Finding(path=path, what=what, remedy=remedy, fix=lambda: _put_aside(path))


def _ending(run: RunFolder) -> Any:
    """The outcome and the metrics of a finished run; None for others."""
    try:
        result = Run(run).state.result
    except DamagedRun:
        return None
    return result and (result["outcome"], result["metrics"])


def _of_other_version(run: RunFolder) -> Finding | None:
    """A run from another version of this program, which this one must not judge or move."""
    for path in (run.result, run.pruned):
        try:
            check_schema(read_json(path))
        except OtherVersion as error:
            return Finding(path=path, what=str(error))
        except (Unsound, FileNotFoundError):
            continue  # another check reports it
    return None


def _identity(run: RunFolder) -> str | None:
    """The id of a run from its `identity.json`, otherwise from its result."""
    with suppress(UserError):
        if identity := Run(run).id:
            return identity
    with suppress(Unsound, FileNotFoundError):
        return str(read_json(run.result).get("id"))
    return None
