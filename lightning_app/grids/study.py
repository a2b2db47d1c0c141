"""The Optuna study of a grid, with one trial per attempt to run a cell, for `optuna-dashboard`.

Nothing but a pruner reads it: which cells run is decided by the folders of the runs. A thread
writes it, so that no cell waits for a database. After an outage the thread continues where it
stopped, and the next supervisor adds what is still missing.

For a pruner, a cell appends a line to `attempts/<k>/reports.jsonl` at each validation, the
thread passes it to Optuna, and the cell ends when it finds `attempts/<k>/stop`. No process of a
cell opens the study, so cells of several processes are pruned in the same way as others."""

import json
import queue
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from itertools import chain
from typing import Any, Literal

import optuna
from filelock import FileLock, Timeout
from optuna.exceptions import UpdateFinishedTrialError
from optuna.pruners import BasePruner, HyperbandPruner, MedianPruner, NopPruner
from optuna.storages import JournalStorage, RDBStorage
from optuna.trial import FrozenTrial, Trial, TrialState

from lightning_app.config.tree import label
from lightning_app.core.errors import UserError
from lightning_app.core.files import move, write_whole
from lightning_app.grids.plan import Grid, arms_of, score_of
from lightning_app.grids.search import distributions
from lightning_app.grids.storages import StorageSpec, close_storage, open_storage, reason
from lightning_app.runs.folder import RunFolder
from lightning_app.runs.locks import is_held
from lightning_app.runs.records import Cell
from lightning_app.runs.run import ReportReader, RunState, read_reports

_RETRY = 5.0  # seconds between tries during an outage
_HURRY = 10.0  # seconds without progress after which the end of a supervisor is not delayed
_LOCKED = 30.0  # seconds that another supervisor may write
_LOOK = 0.2  # seconds between looks at reports
_STARTUP = 5  # complete cells that must have reported at a step before the median rule prunes there
_LOST = "its supervisor ended"
_ENDED = {TrialState.COMPLETE: "done", TrialState.PRUNED: "pruned"}

FOLDER = "folder"
"""The attribute that holds the token of the folder in a study outside the folder."""


def make_pruner(name: str | None) -> BasePruner:
    """The pruner of a grid; with None it never prunes.

    `median` ends a cell whose best value so far is worse than the median of the complete cells at
    the same step, if there are at least five. `hyperband` compares cells at a few steps, each three
    times the one before, and lets the best third continue. It prunes nothing before one is
    complete.
    """
    if name is None:
        return NopPruner()
    if name == "median":
        return MedianPruner(n_startup_trials=_STARTUP, n_min_trials=_STARTUP)
    return _Hyperband()


class _Hyperband(BasePruner):
    """Optuna's Hyperband, from the first to the last validation of a complete cell.

    Optuna would compare from step 1: the first report, after a few hundred steps, would then
    need to win several comparisons at once.
    """

    def __init__(self) -> None:
        self._pruner: HyperbandPruner | None = None

    def prune(self, study: optuna.Study, trial: FrozenTrial) -> bool:
        if self._pruner is None:
            complete = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
            steps = [step for each in complete for step in each.intermediate_values]
            if not steps:
                return False
            self._pruner = HyperbandPruner(max(1, min(steps)), max(steps))
        return self._pruner.prune(study, trial)


@dataclass
class Reports:
    """The reports of a running cell of the grid's metric, which go to its trial."""

    folder: RunFolder
    attempt: int
    metric: str
    trial: Trial | None = None

    def follow(self, trial: Trial) -> None:
        """Copy the reports to this trial from now on, those in its storage excepted."""
        known = trial.study.get_trials(deepcopy=False)[trial.number].intermediate_values
        self._reader, self._reported = ReportReader(self.metric), set(known)
        self.trial = trial

    def look(self) -> bool:
        """Pass on new reports, and write the file that stops the cell if Optuna prunes its trial.

        Returns whether the file exists. Reports of earlier attempts count, since the cell continues
        from them. A cell may end before it finds the file; the files in its folder then show how
        it ended.
        """
        assert self.trial is not None
        stop = self.folder.attempt(self.attempt).stop
        if stop.is_file():
            return True
        with suppress(UpdateFinishedTrialError):  # another supervisor has seen its result
            for each in range(1, self.attempt + 1):
                for step, value in self._reader.new(self.folder, each):
                    if step not in self._reported:
                        self.trial.report(value, step)
                        self._reported.add(step)
                    if self.trial.should_prune():  # also of steps that the storage has
                        write_whole(stop, "pruned\n")
                        return True
        return False


class Study:
    """The trials of a grid. Their user attributes name the `cell` (its id) and the `attempt`.

    The methods return at once; a thread does what they ask for, in order, one supervisor at a time.
    `runs` holds the states of the cells by id; `alone`: no other supervisor works on this grid.
    Raises `UserError` for a storage that cannot be used, and for a study of another folder.
    """

    def __init__(
        self, grid: Grid, spec: StorageSpec, runs: Mapping[str, RunState], alone: bool = True
    ) -> None:
        self._grid = grid
        self._spec = spec
        self._choices = {
            axis: optuna.distributions.CategoricalDistribution(tuple(map(_primitive, values)))
            for axis, values in grid.plan.axes.items()
        }
        self.notes: list[str] = []
        self._storage, self._study = self._open(alone)
        if alone and self._contradicts(runs):
            # No other supervisor uses the study, so all trials may be deleted.
            optuna.delete_study(study_name=self._grid.plan.study, storage=self._storage)
            self._study = self._create(self._storage)
        self._jobs: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._watched: dict[str, Reports] = {}
        self._away = False
        self._closing = threading.Event()
        self._moved = time.monotonic()
        self._put(self._settle, runs)
        self._thread = threading.Thread(target=self._work, daemon=True, name="study")
        self._thread.start()

    # What has happened to a cell.

    def begin(self, cell: Cell, folder: RunFolder, attempt: int) -> None:
        """An attempt begins. The caller holds the claim of the cell until it ends."""
        self._put(self._begin, cell, attempt)
        if self._grid.prunes:
            reports = Reports(folder, attempt, self._grid.plan.metric)
            self._put(self._watched.__setitem__, cell.id, reports)

    def enter(self, cell: Cell, run: RunState) -> None:
        """A run has ended, in whatever process: its trial is COMPLETE, PRUNED or failed."""
        self._put(self._watched.pop, cell.id, None)
        self._put(self._enter, cell, run)

    def fail(self, cell: Cell, attempt: int, error: str) -> None:
        """An attempt has ended without a result."""
        self._put(self._watched.pop, cell.id, None)
        self._put(self._fail, cell, attempt, error)

    def record_search(self) -> None:
        """Write what the arms of a search have tried."""
        if self._grid.spec.adapts:
            self._put(self._record_search)

    def close(self) -> None:
        """Write what is left, unless the database is away, and close the connections."""
        self._moved = time.monotonic()
        self._closing.set()
        self._jobs.put(None)
        while self._thread.is_alive() and time.monotonic() - self._moved < _HURRY:
            self._thread.join(0.05)
        if self._thread.is_alive() and not self._away:
            self._say("does not answer")

    # The thread.

    def _put(self, job: Callable[..., object], *arguments: Any) -> None:
        self._jobs.put(partial(job, *arguments))

    def _work(self) -> None:
        while (job := self._next()) is not None:
            while not self._succeeds(job):
                if self._closing.is_set():
                    return
                self._closing.wait(_RETRY)
        close_storage(self._storage)

    def _next(self) -> Callable[[], object] | None:
        try:
            return self._jobs.get(timeout=_LOOK if self._watched else None)
        except queue.Empty:
            return self._look

    def _succeeds(self, job: Callable[[], object]) -> bool:
        """Do a job, which may be repeated; return False during an outage."""
        try:
            with FileLock(self._grid.folder.study_lock, timeout=_LOCKED):
                if self._away:
                    self._storage, self._study = self._open(alone=False)
                    self._settle({cell.id: self._grid.state(cell) for cell in self._grid.cells})
                job()
        except Exception as error:  # nothing that happens to the study may stop a cell
            if not self._away:
                self._say(reason(error, self._spec))
                self._away = True
            with suppress(Exception):
                close_storage(self._storage)
            for each in self._watched.values():
                each.trial = None
            return False
        self._away = False
        self._moved = time.monotonic()
        return True

    def _say(self, why: str) -> None:
        text = why.removeprefix(f"{self._spec.shown}: ")
        print(f"{self._spec.shown}: {text}; the study is caught up later", flush=True)

    def _look(self) -> None:
        for cell, each in self._watched.items():
            if each.trial is None:
                number = self._begin(self._grid.by_id[cell], each.attempt)
                each.follow(Trial(self._study, self._id(number)))
            each.look()

    def _trials_of(self, cell: Cell) -> list[FrozenTrial]:
        trials = self._study.get_trials(deepcopy=False)
        return [trial for trial in trials if trial.user_attrs.get("cell") == cell.id]

    def _begin(self, cell: Cell, attempt: int) -> int:
        """Return the number of the trial of an attempt, made if it does not exist."""
        trials = self._trials_of(cell)
        for trial in trials:
            if trial.user_attrs.get("attempt") == attempt:
                return trial.number
        for trial in trials:
            if trial.state == TrialState.RUNNING:
                self._end(trial, TrialState.FAIL, {"error": _LOST})
        self._add(cell, TrialState.RUNNING, attempt=attempt)
        return self._trials_of(cell)[-1].number

    def _fail(self, cell: Cell, attempt: int, error: str) -> None:
        for trial in self._trials_of(cell):
            if trial.user_attrs.get("attempt") == attempt and not trial.state.is_finished():
                self._end(trial, TrialState.FAIL, {"error": error})

    def _enter(
        self, cell: Cell, run: RunState, trials: Sequence[FrozenTrial] | None = None
    ) -> None:
        """Make the trials of a cell that nobody runs agree with its run."""
        trials = self._trials_of(cell) if trials is None else trials
        left = [trial for trial in trials if not trial.state.is_finished()]
        ended = run.result or run.pruned
        if ended is None:
            for trial in left:
                self._end(trial, TrialState.FAIL, {"error": run.error or _LOST})
            if run.error and not trials:
                self._add(cell, TrialState.FAIL, run)
            return
        state = TrialState.PRUNED if run.result is None else TrialState.COMPLETE
        left.sort(key=lambda trial: trial.user_attrs.get("attempt") == ended["attempt"])
        if not any(trial.state == state for trial in trials):
            if left:
                self._end(left.pop(), state, attributes(ended), self._value(ended))
            else:
                self._add(cell, state, run)
        for trial in left:
            self._end(trial, TrialState.FAIL, {"error": "the cell has its result already"})

    def _settle(self, runs: Mapping[str, RunState]) -> None:
        """Make the study agree with the disk."""
        trials: dict[str, list[FrozenTrial]] = {cell.id: [] for cell in self._grid.cells}
        for trial in self._study.get_trials(deepcopy=False):
            trials.get(trial.user_attrs.get("cell", ""), []).append(trial)
        for cell in self._grid.cells:
            self._moved = time.monotonic()
            run = runs[cell.id]
            if any(trial.state == TrialState.RUNNING for trial in trials[cell.id]):
                if is_held(self._grid.run(cell).claim):
                    continue
                run = self._grid.state(cell)  # it may have ended since `runs` was read
            self._enter(cell, run, trials[cell.id])

    def _add(
        self, cell: Cell, state: TrialState, run: RunState | None = None, **marks: Any
    ) -> None:
        reports, value, ended = None, None, None
        if run is not None and (ended := run.result or run.pruned):
            value, marks = self._value(ended), marks | attributes(ended)
            if self._grid.prunes and run.result:  # pruners compare with the reports of these
                reports = read_reports(self._grid.run(cell), self._grid.plan.metric)
        elif run is not None:
            marks |= {"error": run.error, "attempt": run.attempts}
        trial = optuna.create_trial(
            state=state,
            value=value,
            intermediate_values=reports,
            params={axis: _primitive(value) for axis, value in cell.axes.items()},
            distributions=dict(self._choices),
            user_attrs={"cell": cell.id, "name": cell.name, **marks},
        )
        if ended is not None:
            trial.datetime_start = datetime.fromisoformat(ended["started"])
            trial.datetime_complete = datetime.fromisoformat(ended["finished"])
        self._study.add_trial(trial)

    def _end(
        self,
        trial: FrozenTrial,
        state: TrialState,
        marks: Mapping[str, Any],
        value: float | None = None,
    ) -> None:
        """End a trial, unless an earlier try of this call has done so."""
        known = self._id(trial.number)
        with suppress(UpdateFinishedTrialError):
            for key, each in marks.items():
                self._storage.set_trial_user_attr(known, key, each)
            self._storage.set_trial_state_values(known, state, None if value is None else [value])

    def _value(self, ended: Mapping[str, Any]) -> float:
        pruned = ended["status"] == "pruned"
        return ended["value"] if pruned else score_of(self._grid.plan, ended)

    def _id(self, number: int) -> int:
        study = self._storage.get_study_id_from_name(self._grid.plan.study)
        return self._storage.get_trial_id_from_study_id_trial_number(study, number)

    def _record_search(self) -> None:
        """Write a study per arm of a search into the storage, for `optuna-dashboard`.

        Its trials are those that have ended for all seeds, in the order asked, with the mean over
        seeds as value. Nothing reads these studies: the search is a function of the results.
        """
        asked, known = arms_of(self._grid)
        shared = self._study.user_attrs.get(FOLDER)  # set where other folders use the storage
        for arm in asked:
            trials = [
                optuna.create_trial(
                    state=TrialState.COMPLETE if outcome.pruned is None else TrialState.PRUNED,
                    value=outcome.score,
                    params=values,
                    distributions=distributions(self._grid.spec, values),
                    user_attrs={"sound": outcome.sound},
                )
                for values in chain.from_iterable(arm.rounds)
                if (outcome := arm.outcome(values, known)) is not None
            ]
            axes = (f"{key}={label(at)}" for key, at in arm.name.items())
            name = ", ".join([self._grid.name, *filter(None, [shared]), *axes])
            study = self._create_arm(name)
            before = study.get_trials(deepcopy=False)
            if [(t.params, t.value) for t in before] != [
                (t.params, t.value) for t in trials[: len(before)]
            ]:
                optuna.delete_study(study_name=name, storage=self._storage)  # repeated runs
                study, before = self._create_arm(name), []
            study.add_trials(trials[len(before) :])

    def _create_arm(self, name: str) -> optuna.Study:
        study = optuna.create_study(
            study_name=name, storage=self._storage, direction=self._direction, load_if_exists=True
        )
        if study.metric_names is None:
            study.set_metric_names([self._grid.plan.metric])
        return study

    # Opening.

    @property
    def _direction(self) -> Literal["minimize", "maximize"]:
        return "minimize" if self._grid.plan.mode == "min" else "maximize"

    def _open(self, alone: bool) -> tuple[JournalStorage | RDBStorage, optuna.Study]:
        """Open or create the study, and record the repair of a damaged journal."""
        storage = None
        try:
            storage = open_storage(self._spec)
            return storage, self._create(storage)
        except UserError:
            if storage is not None:
                close_storage(storage)
            raise
        except Exception as error:  # Optuna raises errors of many kinds for a damaged journal
            journal = self._spec.journal
            if journal is None or isinstance(error, Timeout):
                why = reason(error, self._spec)
                raise UserError(f"{self._spec.shown}: cannot be used: {why}") from error
            if not alone:
                raise UserError(
                    f"{journal}: damaged; let the other supervisors of this grid end first"
                ) from error
        damaged = move(journal, journal.with_name(f"{journal.name}.damaged"))
        made = "a new one was made from the runs"
        self.notes.append(f"{journal}: damaged, kept as {damaged.name}; {made}")
        storage = open_storage(self._spec)
        return storage, self._create(storage)

    def _create(self, storage: JournalStorage | RDBStorage) -> optuna.Study:
        study = optuna.create_study(
            storage=storage,
            study_name=self._grid.plan.study,
            direction=self._direction,
            sampler=optuna.samplers.RandomSampler(seed=0),  # never used: the plan has all cells
            pruner=make_pruner(self._grid.spec.pruner),
            load_if_exists=True,
        )
        study.get_trials(deepcopy=False)  # reads the journal to its end
        if self._spec.journal != self._grid.folder.journal:
            self._check_folder(study)
        return study

    def _check_folder(self, study: optuna.Study) -> None:
        """Refuse a study of another folder: the hosts of a grid must share one."""
        path = self._grid.folder.token
        token = path.read_text().strip() if path.is_file() else ""
        known = study.user_attrs.get(FOLDER)
        if known is None:
            token = token or secrets.token_hex(8)
            write_whole(path, f"{token}\n")
            study.set_user_attr(FOLDER, token)
        elif known != token:
            raise UserError(
                f"{self._grid.folder}: is not the folder of the study {self._grid.plan.study} in "
                f"{self._spec.shown}; give --experiments the folder that all hosts share, or "
                "--storage another storage"
            )

    def _contradicts(self, runs: Mapping[str, RunState]) -> bool:
        """Whether trials that Optuna cannot change differ from the runs on disk (by cell id)."""
        finished: dict[str, list[FrozenTrial]] = {}
        for trial in self._study.get_trials(deepcopy=False):
            cell = trial.user_attrs.get("cell")
            if cell not in runs and trial.state != TrialState.FAIL:
                return True
            if trial.state in _ENDED:
                finished.setdefault(str(cell), []).append(trial)
        for cell, trials in finished.items():
            run = runs[cell]
            if len(trials) > 1 or _ENDED[trials[0].state] != run.state:
                return True
            if run.result is not None and trials[0].value != self._value(run.result):
                return True
        return False


def attributes(ended: Mapping[str, Any]) -> dict[str, Any]:
    """The user attributes of a complete or pruned trial."""
    marks = {key: ended[key] for key in ("seconds", "attempt")}
    if ended["status"] == "pruned":
        return marks
    diverged = {"diverged": ended["status"] == "diverged", "outcome": ended["outcome"]}
    return {**diverged, **marks, **ended["metrics"]}


def _primitive(value: Any) -> Any:
    """A value in a form that Optuna's categories accept: lists and mappings become JSON."""
    return json.dumps(value, sort_keys=True) if isinstance(value, list | dict) else value
