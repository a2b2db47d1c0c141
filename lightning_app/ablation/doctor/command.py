"""`ablate doctor`: what is wrong in a grid's folder and its study, and mending of what is safe."""

import importlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext, suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from lightning_app.ablation.adoption import Found, find_finished, take_over
from lightning_app.ablation.doctor.findings import (
    ASIDE,
    RUNS_AGAIN,
    Finding,
    damaged,
    move_aside,
    put_aside,
)
from lightning_app.ablation.doctor.index_check import Index, Torn, differences, read_index
from lightning_app.ablation.doctor.inspection import Inspector, of_newer
from lightning_app.ablation.grid import Grid, read_grid
from lightning_app.ablation.plan import (
    Cell,
    Plan,
    cell_tree,
    expand,
    load_plan,
    save_plan,
)
from lightning_app.ablation.queue.queue import Queue, rebuild
from lightning_app.ablation.queue.storages import StorageSpec, storage_spec
from lightning_app.ablation.queue.study import TOKEN
from lightning_app.ablation.runs import LOCK, RESULT, is_held, read_run, run_folder
from lightning_app.ablation.supervision.guard import HOLDER, is_supervised, supervisor_lock
from lightning_app.ablation.supervision.runner import PROGRAM
from lightning_app.errors import UserError
from lightning_app.files import writing_in
from lightning_app.identity.record import read_record as read_identity
from lightning_app.mixtures import SUPERSEDED, left_out, statements, strangers
from lightning_app.records import PLAN_SCHEMA, Newer, Unsound, check_schema, read_json, read_yaml

_PASSES = 4  # what a fix uncovers is mended too; nothing hides deeper than this
_SHOWN = 3  # notes of one kind that are printed each


def doctor_command(
    grid: str | Path,
    experiments: Path = Path("experiments"),
    *,
    storage: str | None = None,
    fix: bool = False,
    program: str = PROGRAM,
) -> int:
    """`ablate doctor`: examine a grid's folder and study, and print a line for each finding.

    With `fix` what is safe is mended: a result is never deleted, damaged files are moved, and the
    study is rebuilt from the run folders. Without it nothing is changed, and cells may run
    meanwhile. Returns 0 where all is sound or mended, 1 where findings remain.

    Raises:
        UserError: where there is no such folder or, with `fix`, where a supervisor works in it.
    """
    spec = read_grid(grid)
    directory = experiments / spec.name
    if not directory.is_dir():
        raise UserError(f"{directory}: no such folder; `ablate run` makes it")
    _refuse_newer(directory / "plan.json")
    index = storage_spec(storage, directory)
    elsewhere = None
    if index.kind == "journal" and not Path(index.url).exists():
        elsewhere = _last_database(directory)
    guard = supervisor_lock(directory, elsewhere or index.shown) if fix else nullcontext()
    with guard:
        return _Doctor(spec, directory, index, elsewhere, fix, program).examine()


def _refuse_newer(path: Path) -> None:
    try:
        check_schema(read_json(path), PLAN_SCHEMA)
    except Newer as error:
        raise UserError(f"{path}: {error}") from error
    except (Unsound, OSError):
        return  # for the examination


def _last_database(directory: Path) -> str | None:
    """The database of the last supervisor's queue, if that is not what is looked at."""
    try:
        shown = read_json(directory / HOLDER).get("storage")
    except (Unsound, OSError):
        return None
    return shown if isinstance(shown, str) and "://" in shown else None


class _Doctor:
    """One examination of one grid. `elsewhere`: where its queue is, if not in `index`."""

    def __init__(
        self,
        grid: Grid,
        directory: Path,
        index: StorageSpec,
        elsewhere: str | None,
        fix: bool,
        program: str,
    ) -> None:
        module = importlib.import_module(program)  # heavy: it resolves configs
        self._grid = grid
        self._directory = directory
        self._index = index
        self._elsewhere = elsewhere
        self._fix = fix
        self._plan = expand(grid, module.resolve, module.identify)[0]
        self._cells = {cell.name: cell for cell in self._plan.cells}
        self._inspector = Inspector(
            directory=directory,
            keep=grid.checkpoints,
            prunes=grid.pruner is not None,
            identify=lambda config: module.identify(config).id,
            resolve=lambda cell: module.resolve(
                cell_tree(grid.base_config, cell.axes), str(run_folder(directory, cell))
            ),
        )
        self._supervised = not fix and is_supervised(directory)
        self._fixed = 0
        self._left: list[Finding] = []

    def examine(self) -> int:
        """Examine, and mend if asked to, from the outside in: what lies where, then what is in it,
        then whether the study says the same.
        """
        self._mend(self._strangers)
        self._mend(self._papers)
        running, unsound = self._runs()
        self._mend(partial(self._metric, unsound))
        self._left += self._mixtures(unsound)
        if self._supervised or running:
            what = "not compared with the run folders while cells run"
            self._left.append(Finding(path=self._index.shown, what=what, note=True))
        elif self._elsewhere is not None:
            what = "holds the queue, by the last supervisor's record; --storage compares it"
            self._left.append(Finding(path=self._elsewhere, what=what, note=True))
        else:
            self._mend(partial(self._study, unsound))
        return self._conclude(len(running))

    def _mend(self, look: Callable[[], list[Finding]]) -> bool:
        """Look and, if asked to, mend until nothing is left to; whether all is sound now."""
        found = look()
        refused: dict[Path | str, str] = {}
        for _ in range(_PASSES if self._fix else 0):
            tried = [each for each in found if each.fix and each.path not in refused]
            if not tried:
                break
            for each in tried:
                assert each.fix is not None
                try:
                    print(each.line(done=each.fix()), flush=True)
                    self._fixed += 1
                except UserError as error:
                    refused[each.path] = str(error)
            found = look()
        for each in found:
            if each.path in refused:
                each = replace(each, remedy=f"not mended: {refused[each.path]}", fix=None)
            self._left.append(each)
        return all(each.note for each in found)

    def _strangers(self) -> list[Finding]:
        """What lies in `runs/` under no name of the plan."""
        runs = self._directory / "runs"
        if not runs.is_dir():
            return []
        by_id = {cell.id: cell for cell in self._plan.cells}
        paths = [path for path in runs.iterdir() if path.name not in self._cells]
        finished = find_finished(self._directory, self._plan)
        finished = [each for each in finished if each.folder.parent == runs]
        found, unknown = [self._finished(each) for each in finished], []
        taken = {each.cell.name for each in finished}
        paths = [path for path in paths if path not in [each.folder for each in finished]]
        # Of several folders of one cell, one with a result takes its name.
        for path in sorted(paths, key=lambda path: (not (path / RESULT).exists(), path)):
            cell = None if of_newer(path) else by_id.get(self._identity(path) or "")
            if cell is None:
                unknown.append(path)
                continue
            folder = run_folder(self._directory, cell)
            if os.path.lexists(folder) or cell.name in taken:
                found.append(self._copy(path, cell))
            else:
                taken.add(cell.name)
                found.append(_misnamed(path, folder))
        if unknown:
            what = f"{len(unknown)} names that this grid does not plan (such as {unknown[0].name})"
            found.append(Finding(path=runs, what=f"{what}; left alone", note=True))
        return found

    def _finished(self, found: Found) -> Finding:
        """A finished run of a planned cell under another name, or with an id of schema 1."""

        def take() -> str:
            take_over(self._directory, [found], self._grid.checkpoints)
            return f"taken over as {found.cell.name}"

        return Finding(
            path=found.folder,
            what=f"is the finished run of the cell {found.cell.name}",
            remedy="take it over",
            fix=take,
        )

    def _identity(self, folder: Path) -> str | None:
        """The id of the cell whose folder it seems to be, by its record or else its result."""
        with suppress(UserError):
            if record := read_identity(folder):
                return record.id
        with suppress(Unsound, OSError):
            return str(read_json(folder / RESULT).get("id"))
        return None

    def _copy(self, path: Path, cell: Cell) -> Finding:
        return Finding(
            path=path,
            what=f"a second folder of the cell {cell.name}",
            remedy=f"move it to {ASIDE}/",
            fix=lambda: move_aside(path, self._directory),
        )

    def _papers(self) -> list[Finding]:
        """What is wrong with `plan.json` and `grid.yaml`, compared with those of the grid file."""
        found = [*self._plan_file()]
        if all(each.note for each in found):
            found += self._grid_file()
        return found

    def _plan_file(self) -> Iterator[Finding]:
        path = self._directory / "plan.json"
        finding = partial(Finding, path=path, remedy="plan anew", fix=self._save_plan)
        try:
            stored = load_plan(self._directory)
        except UserError:
            yield finding(what="torn or damaged")
            return
        if stored is None:
            yield finding(what="missing")
        elif _content(stored) != _content(self._plan):
            same = stored.made_from == self._plan.made_from
            other = "does not agree with the grid file that it names: damaged or edited"
            yield finding(what=other if same else f"older than {self._grid.source}, which differs")
        elif stored.made_from != self._plan.made_from:
            what = "made with another version of the programs; the same cells come of it"
            yield Finding(path=path, what=what, note=True)

    def _grid_file(self) -> Iterator[Finding]:
        path = self._directory / "grid.yaml"
        try:
            if not path.is_file():
                raise Unsound("missing")
            tree = self._grid.tree()
            written = {**asdict(self._grid), **read_yaml(path)}  # keys of late have their defaults
            if _canonical({key: written[key] for key in tree}) != _canonical(tree):
                raise Unsound(f"says something else than {self._grid.source}")
        except Unsound as error:
            remedy = f"write it anew from {self._grid.source}"
            yield Finding(path=path, what=str(error), remedy=remedy, fix=self._save_plan)

    def _save_plan(self) -> str:
        with writing_in(self._directory):
            for name in ("grid.yaml", "plan.json"):
                if (self._directory / name).is_dir():
                    put_aside(self._directory / name)
            save_plan(self._directory, self._grid, self._plan)
        return f"written anew, {len(self._plan.cells)} cells"

    def _runs(self) -> tuple[list[Cell], set[str]]:
        """Examine all run folders. Returns the cells that run and the ids of unsound ones."""
        running, unsound, absent = [], set(), []
        for cell in self._plan.cells:
            folder = run_folder(self._directory, cell)
            if not os.path.lexists(folder):
                absent.append(folder)
            elif _is_busy(folder):
                running.append(cell)
            elif not self._mend(partial(self._inspector.inspect, folder, cell)):
                unsound.add(cell.id)
        if absent:
            what = f"{len(absent)} cells have not begun (such as {absent[0].name})"
            self._left.append(Finding(path=self._directory / "runs", what=what, note=True))
        return running, unsound

    def _metric(self, unsound: set[str]) -> list[Finding]:
        """Results without the metric of the grid: damaged if most have it, else its mistake."""
        having, lacking = 0, []
        for cell in self._plan.cells:
            result = None if cell.id in unsound else read_run(self._directory, cell).result
            if result is not None and result["status"] == "ok":
                if self._plan.metric in result["metrics"]:
                    having += 1
                else:
                    lacking.append(run_folder(self._directory, cell) / RESULT)
        what = f"reports no '{self._plan.metric}'"
        if having > len(lacking):
            return [damaged(path, f"{what}, as others do", RUNS_AGAIN) for path in lacking]
        remedy = f"set metric.name of {self._grid.source} to what they report"
        return [Finding(path=path, what=what, remedy=remedy) for path in lacking]

    def _mixtures(self, unsound: set[str]) -> Iterator[Finding]:
        """In what the finished cells differ, and what has been done again: notes, no damage."""
        runs, records, axes = self._directory / "runs", {}, {}
        for cell in self._plan.cells:
            result = None if cell.id in unsound else read_run(self._directory, cell).result
            if result is not None:
                records[cell.name], axes[cell.name] = result, cell.axes
        for what in (left_out(strangers(records, axes)), *statements(records).values()):
            if what:
                yield Finding(path=runs, what=what.rstrip("."), note=True)
        aside = self._directory / SUPERSEDED
        if aside.is_dir():
            what = f"{len(list(aside.iterdir()))} earlier runs, done again since"
            yield Finding(path=aside, what=what, note=True)

    def _study(self, unsound: set[str]) -> list[Finding]:
        """How the study differs from the disk, in the cells whose folders are sound."""
        mend = self._settle
        try:
            index = read_index(self._plan, self._index)
            what = self._differences(index, unsound)
            if index.folder is not None and index.folder != self._token():
                what = "the study of this grid there is of another folder"
                mend = partial(self._rebuild, index.alive)
        except Unsound as error:
            what = str(error)
            mend = self._settle if isinstance(error, Torn) else self._renew
        if not what:
            return []
        remedy = "bring it into agreement with the run folders"
        return [Finding(path=self._index.shown, what=what, remedy=remedy, fix=mend)]

    def _differences(self, index: Index, unsound: set[str]) -> str:
        runs = {}
        for cell in self._plan.cells:
            if cell.id not in unsound:
                run = read_run(self._directory, cell)
                ignored = run.state == "pruned" and self._grid.pruner is None
                runs[cell.id] = replace(run, state="missing") if ignored else run
        return "; ".join(differences(self._plan, runs, index.trials))

    def _token(self) -> str:
        path = self._directory / TOKEN
        return path.read_text(encoding="utf-8").strip() if path.is_file() else ""

    def _settle(self) -> str:
        """Do as a supervisor does that starts; where that is not enough, start the study anew."""
        pruner = self._grid.pruner
        Queue(self._directory, self._plan, False, spec=self._index, pruner=pruner).close()
        if self._differences(read_index(self._plan, self._index), set()):
            return self._rebuild()
        return "brought into agreement with the run folders"

    def _renew(self) -> str:
        """Put a journal aside that cannot be read to its end, and make another."""
        return f"{put_aside(Path(self._index.url))}, {self._rebuild()}"

    def _rebuild(self, alive: int = 0) -> str:
        if alive:
            raise UserError(f"{alive} of its cells seem to run; let their supervisors end first")
        rebuild(self._directory, self._plan, self._index, self._grid.pruner).close()
        return "rebuilt from the run folders"

    def _conclude(self, running: int) -> int:
        findings = [each for each in self._left if not each.note]
        for each in findings:
            print(each.line())
        for line in _shortened([each for each in self._left if each.note]):
            print(line)
        counts = [f"{len(self._cells)} cells"]
        counts += [f"{running} running now"] if running else []
        counts += [f"{self._fixed} findings fixed"] if self._fixed else []
        if findings:
            easy = sum(each.fix is not None for each in findings)
            counts.append(f"{len(findings)} findings remain, of which --fix mends {easy}")
        print(f"{self._plan.name}: {', '.join(counts)}{'' if findings else ': sound'}", flush=True)
        return 1 if findings else 0


def _misnamed(path: Path, folder: Path) -> Finding:
    def rename() -> str:
        path.rename(folder)
        return f"renamed to {folder.name}"

    return Finding(
        path=path,
        what=f"is planned under the name {folder.name}",
        remedy="rename it",
        fix=rename,
    )


def _is_busy(folder: Path) -> bool:
    """Whether a living process works in a run's folder."""
    lock = folder / LOCK
    return os.access(lock, os.R_OK | os.W_OK) and is_held(lock)


def _shortened(notes: list[Finding]) -> Iterator[str]:
    """The lines of notes, a few of each kind."""
    kinds: dict[str, list[Finding]] = {}
    for each in notes:
        kinds.setdefault(each.what, []).append(each)
    for same in kinds.values():
        yield from (each.line() for each in same[:_SHOWN])
        if len(same) > _SHOWN:
            yield f"note: {len(same) - _SHOWN} more: {same[0].what}"


def _content(plan: Plan) -> str:
    return _canonical({**asdict(plan), "made_from": None})


def _canonical(tree: Mapping[str, Any]) -> str:
    try:
        return json.dumps(tree, sort_keys=True)
    except TypeError as error:  # dates, or keys of several types
        raise Unsound("torn or damaged: holds what is no plain value") from error
