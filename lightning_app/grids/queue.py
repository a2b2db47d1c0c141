"""The queue of a grid: an Optuna study with one trial per attempt to run a cell.

Several supervisors share it: each cell is claimed by one of them, and cells of a supervisor that
sends no heartbeat return to the queue. The study is only an index: it can always be rebuilt from
the run folders.

For a pruner, a cell appends a line to `attempts/<k>/reports.jsonl` at each validation, the
supervisor passes it to Optuna, and the cell ends when it finds `attempts/<k>/stop`. No process of a
cell opens the study, so cells of several processes are pruned in the same way as others."""

import json
import math
import secrets
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import optuna
from optuna.exceptions import UpdateFinishedTrialError
from optuna.pruners import BasePruner, HyperbandPruner, MedianPruner, NopPruner
from optuna.storages import RDBStorage
from optuna.trial import FrozenTrial, Trial, TrialState
from tenacity import RetryCallState, Retrying, retry_if_exception, stop_after_delay, wait_fixed

from lightning_app.config.tree import label
from lightning_app.core.errors import UserError
from lightning_app.core.files import move, write_whole
from lightning_app.grids.plan import Grid, arms_of, lacking_lines, score_of
from lightning_app.grids.search import distributions
from lightning_app.grids.storages import (
    LOST_AFTER,
    Journal,
    StorageSpec,
    close_storage,
    fail_lost,
    is_outage,
    open_storage,
    reason,
)
from lightning_app.runs.folder import RunFolder
from lightning_app.runs.locks import Interrupted, if_free, trained_for_another
from lightning_app.runs.records import Cell
from lightning_app.runs.run import ReportReader, RunState, read_reports

_PATIENCE = 600.0  # seconds that a database may be unavailable
_HURRY = 20.0  # the same while the supervisor is asked to stop
_RETRY = 1.0  # seconds

P = ParamSpec("P")
T = TypeVar("T")


class StorageLost(Exception):
    """The database did not come back. Results are on disk, and the next supervisor continues."""


class Patience:
    """Repeat the calls of a storage while its database is not available.

    Args:
        spec: The storage, for messages.
        stopping: Whether the supervisor is asked to stop.
        returned: Called when the database answers again after an outage.
    """

    def __init__(
        self, spec: StorageSpec, stopping: Callable[[], bool], returned: Callable[[], None]
    ) -> None:
        self._spec = spec
        self._stopping = stopping
        self._returned = returned
        self._away = False
        self._journal: tuple[int, int] | None = None  # the identity of its file once it is open

    def __call__(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Return the result of `call` once it succeeds.

        The call may be repeated, since its answer can be lost.

        Raises:
            StorageLost: if the database stays unavailable, or the journal was removed.
            Interrupted: if the database is unavailable while the supervisor is asked to stop.
        """
        self._check_journal()
        retrying = Retrying(
            retry=retry_if_exception(is_outage),
            wait=wait_fixed(_RETRY),
            stop=lambda state: stop_after_delay(_HURRY if self._stopping() else _PATIENCE)(state),
            before_sleep=self._note,
            reraise=True,
        )
        try:
            answer = retrying(call, *args, **kwargs)
        except Exception as error:
            if not is_outage(error):
                self._check_journal(error)
                raise
            if self._stopping():
                raise Interrupted from error
            raise StorageLost(f"{self._spec.shown}: {reason(error)}") from error
        if self._away:
            print(f"{self._spec.shown}: answers again", flush=True)
            self._away = False
            self._returned()
        if self._journal is None:
            self._journal = _file_of(self._spec.journal)
        return answer

    def _check_journal(self, cause: BaseException | None = None) -> None:
        """Raise `StorageLost` if the journal was removed or replaced by another one.

        Optuna would create a new one without the trials that this supervisor holds.
        """
        if self._journal is not None and _file_of(self._spec.journal) != self._journal:
            raise StorageLost(f"{self._spec.shown}: was removed or replaced") from cause

    def _note(self, state: RetryCallState) -> None:
        error = state.outcome and state.outcome.exception()
        if error is not None and not self._away:
            print(f"{self._spec.shown}: {reason(error)}; waiting for it", flush=True)
            self._away = True


def _file_of(journal: Path | None) -> tuple[int, int] | None:
    """The identity of the journal's file: device and inode."""
    if journal is None:
        return None
    try:
        status = journal.stat()
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino


_STARTUP = 5  # complete cells that must have reported at a step before the median rule prunes there


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
class _Reader(ReportReader):
    """Also keeps the steps in the storage, whether the pruner has used them or not."""

    reported: set[int] = field(default_factory=set)


class Reports:
    """Copy the reports of running cells of the grid's metric to their trials."""

    def __init__(self, metric: str) -> None:
        self._metric = metric
        self._readers: dict[int, _Reader] = {}

    def look(self, trial: Trial, folder: RunFolder, attempt: int) -> bool:
        """Pass on new reports, and write the file that stops the cell if Optuna prunes its trial.

        Returns whether the file exists. Reports of earlier attempts count, since the cell continues
        from them. A cell may end before it finds the file; the files in its folder then show how
        it ended. If the storage fails, the next call continues where this one stopped.
        """
        stop = folder.attempt(attempt).stop
        if stop.is_file():
            return True
        reader = self._readers.get(trial.number)
        if reader is None:
            known = trial.study.get_trials(deepcopy=False)[trial.number].intermediate_values
            reader = self._readers[trial.number] = _Reader(self._metric, reported=set(known))
        try:
            for each in range(1, attempt + 1):
                for step, value in reader.new(folder, each):
                    if step not in reader.reported:
                        trial.report(value, step)
                        reader.reported.add(step)
                    if trial.should_prune():
                        write_whole(stop, "pruned\n")
                        return True
        except UpdateFinishedTrialError:
            pass  # another supervisor has taken over the cell; `Queue.tend` will notice
        return False

    def forget(self, trial: Trial) -> None:
        """Drop the reports of a cell that has ended."""
        self._readers.pop(trial.number, None)


FOLDER = "folder"
"""The attribute that holds the token of the folder in a study outside the folder."""

_LOST_AFTER = "lost_after"  # the study's attribute


class AnotherFolder(UserError):
    """The database has a study of this grid that belongs to another folder."""


class Study:
    """The trials of a grid, identified by their numbers.

    A trial has its parameters from the start and the user attributes `cell` (an id) and `name`;
    a waiting trial may have `deaths` and `alone`.

    Args:
        grid: The grid.
        spec: The storage.
        lost_after: Seconds without a heartbeat after which the supervisor of a trial is lost.
        alone: Whether no other supervisor works on this grid.

    Raises:
        AnotherFolder: for a study that belongs to another folder.
        UserError: for a storage that cannot be used, and if the other supervisors have a different
            `lost_after`.
    """

    def __init__(self, grid: Grid, spec: StorageSpec, lost_after: float, alone: bool) -> None:
        self._grid = grid
        self._spec = spec
        self._lost_after = lost_after
        self._pruner = make_pruner(grid.spec.pruner)
        self._choices = {
            axis: optuna.distributions.CategoricalDistribution(tuple(map(_primitive, values)))
            for axis, values in grid.plan.axes.items()
        }
        self.notes: list[str] = []
        self._storage, self._study = self._open(alone)
        try:
            if spec.journal != grid.folder.journal:
                self._check_folder()
            self._agree(alone)
        except UserError:
            self.close()
            raise
        self._id = cache(self._find_id)

    def close(self) -> None:
        """Close the connections to a database."""
        close_storage(self._storage)

    def clear(self) -> None:
        """Delete all trials. No other supervisor may use the study."""
        folder = self._study.user_attrs.get(FOLDER)
        optuna.delete_study(study_name=self._grid.plan.study, storage=self._storage)
        self._study = self._create(self._storage)
        self._id = cache(self._find_id)
        if folder is not None:
            self._study.set_user_attr(FOLDER, folder)

    def trials(self, *states: TrialState) -> list[FrozenTrial]:
        """The trials in some states, or all of them, by their numbers."""
        return self._study.get_trials(deepcopy=False, states=states or None)

    def trials_of_cells(self) -> dict[str, list[FrozenTrial]]:
        """The trials of each cell of the plan, by its id."""
        found: dict[str, list[FrozenTrial]] = {cell.id: [] for cell in self._grid.cells}
        for trial in self.trials():
            found.get(trial.user_attrs.get("cell", ""), []).append(trial)
        return found

    def contradicts(self, runs: Mapping[str, RunState]) -> bool:
        """Whether trials that Optuna cannot change differ from the runs on disk (by cell id)."""
        trials = self.trials_of_cells()
        others = (trial for trial in self.trials() if trial.user_attrs.get("cell") not in trials)
        if any(trial.state != TrialState.FAIL for trial in others):
            return True
        return any(self._differ(trials[cell], run) for cell, run in runs.items())

    def _differ(self, trials: list[FrozenTrial], run: RunState) -> bool:
        ended = {TrialState.COMPLETE: "done", TrialState.PRUNED: "pruned"}
        finished = [trial for trial in trials if trial.state in ended]
        if len(finished) > 1 or any(ended[trial.state] != run.state for trial in finished):
            return True
        if run.result is None:
            return False
        return any(trial.value != self.value(run.result) for trial in finished)

    def trial(self, number: int) -> Trial:
        """A running trial, for a pruner."""
        return Trial(self._study, self._id(number))

    def is_running(self, number: int) -> bool:
        return self._storage.get_trial(self._id(number)).state == TrialState.RUNNING

    def claim(self, number: int) -> bool:
        """Take a waiting trial. Of several supervisors that try, one succeeds."""
        # The heartbeat comes first: if the supervisor dies now, the old heartbeat reveals it.
        self.beat(number)
        try:
            return self._storage.set_trial_state_values(self._id(number), TrialState.RUNNING)
        except UpdateFinishedTrialError:
            return False

    def beat(self, number: int) -> None:
        """Record a heartbeat of the supervisor that runs a trial."""
        self._storage.record_heartbeat(self._id(number))

    def fail_lost(self) -> None:
        """End the trials whose supervisors have sent no heartbeat for too long."""
        fail_lost(self._study, self._storage)

    def add(self, cell: Cell, state: TrialState, run: RunState | None = None, **marks: Any) -> None:
        """Add a trial with its parameters, so that waiting cells show theirs as well.

        `run`: the files of a finished cell.
        """
        reports, value, ended = None, None, None
        if run is not None and run.result is not None:
            ended, value = run.result, self.value(run.result)
            marks |= attributes(run.result)
            if self._grid.prunes:  # pruners compare with the reports of complete cells
                reports = read_reports(self._grid.run(cell), self._grid.plan.metric)
        elif run is not None and run.pruned is not None:
            ended, value = run.pruned, run.pruned["value"]
        elif run is not None:
            marks |= {"error": run.error}
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

    def end(
        self, number: int, state: TrialState, marks: Mapping[str, Any], value: float | None = None
    ) -> None:
        """End a trial unless another supervisor, or an earlier try of this call, has done so."""
        trial = self._id(number)
        try:
            for key, each in marks.items():
                self._storage.set_trial_user_attr(trial, key, each)
            self._storage.set_trial_state_values(trial, state, None if value is None else [value])
        except UpdateFinishedTrialError:
            return

    def record_search(self) -> None:
        """Write a study per arm of a search into the storage, for `optuna-dashboard`.

        Its trials are those that have ended for all seeds, in the order asked, with the mean over
        seeds as value. Nothing reads these studies: the search is a function of the results. The
        caller holds the start lock.
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
        direction = "minimize" if self._grid.plan.mode == "min" else "maximize"
        study = optuna.create_study(
            study_name=name, storage=self._storage, direction=direction, load_if_exists=True
        )
        if study.metric_names is None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
                study.set_metric_names([self._grid.plan.metric])
        return study

    def value(self, result: Mapping[str, Any]) -> float:
        """The score of a finished run (`score_of`)."""
        return score_of(self._grid.plan, result)

    def _find_id(self, number: int) -> int:
        """The id of a trial in the storage."""
        study = self._storage.get_study_id_from_name(self._grid.plan.study)
        return self._storage.get_trial_id_from_study_id_trial_number(study, number)

    def _open(self, alone: bool) -> tuple[Journal | RDBStorage, optuna.Study]:
        """Open or create the study, and record the repair of a damaged journal."""
        try:
            storage = open_storage(self._spec, self._lost_after)
            return storage, self._create(storage)
        except (ValueError, LookupError, TypeError, AttributeError, AssertionError) as error:
            journal = self._spec.journal
            if journal is None:
                raise
            if not alone:
                raise UserError(
                    f"{journal}: damaged; let the other supervisors of this grid end first"
                ) from error
        damaged = move(journal, journal.with_name(f"{journal.name}.damaged"))
        made = "a new one was made from the runs"
        self.notes.append(f"{journal}: damaged, kept as {damaged.name}; {made}")
        storage = open_storage(self._spec, self._lost_after)
        return storage, self._create(storage)

    def _create(self, storage: Journal | RDBStorage) -> optuna.Study:
        study = optuna.create_study(
            storage=storage,
            study_name=self._grid.plan.study,
            direction="minimize" if self._grid.plan.mode == "min" else "maximize",
            sampler=optuna.samplers.RandomSampler(seed=0),  # never used: every cell is queued
            pruner=self._pruner,
            load_if_exists=True,
        )
        study.get_trials(deepcopy=False)  # reads the journal to its end
        return study

    def _check_folder(self) -> None:
        """Refuse a study of another folder: the hosts of a grid must share one."""
        path = self._grid.folder.token
        token = path.read_text().strip() if path.is_file() else ""
        known = self._study.user_attrs.get(FOLDER)
        if known is None:
            token = token or secrets.token_hex(8)
            write_whole(path, f"{token}\n")
            self._study.set_user_attr(FOLDER, token)
        elif known != token:
            raise AnotherFolder(
                f"{self._grid.folder}: is not the folder of the study {self._grid.plan.study} in "
                f"{self._spec.shown}; give --experiments the folder that all hosts share, or make "
                f"a new study from this folder with `ablate doctor {self._grid.name} --fix "
                "--storage URL`"
            )

    def _agree(self, alone: bool) -> None:
        """Refuse a `lost_after` that differs from the running supervisors'."""
        known = self._study.user_attrs.get(_LOST_AFTER)
        if alone or known is None:
            self._study.set_user_attr(_LOST_AFTER, self._lost_after)
        elif known != self._lost_after:
            raise UserError(
                f"--lost-after: {self._lost_after:g} here and {known:g} for the supervisors that "
                "run this grid; with different values one would take the cells of others"
            )


def attributes(result: Mapping[str, Any]) -> dict[str, Any]:
    """The user attributes of a complete trial."""
    marks = {"diverged": result["status"] == "diverged", "outcome": result["outcome"]}
    return {
        **marks,
        "seconds": result["seconds"],
        "attempt": result["attempt"],
        **result["metrics"],
    }


def _primitive(value: Any) -> Any:
    """A value in a form that Optuna's categories accept: lists and mappings become JSON."""
    return json.dumps(value, sort_keys=True) if isinstance(value, list | dict) else value


_BATCH = 256  # cells queued at once: thousands take a database a long time


@dataclass(frozen=True)
class Claim:
    """A cell that this supervisor has claimed.

    Attributes:
        cell: The cell.
        trial: The number of the trial that represents this attempt in the study.
        deaths: The number of attempts that ended early.
        alone: Whether the cell needs a device to itself.
    """

    cell: Cell
    trial: int
    deaths: int = 0
    alone: bool = False


class Queue:
    """The remaining cells, in plan order, as the waiting trials of a study.

    A grid that is stopped and continued thus has the cells of its first seeds first. A cell whose
    attempt has died, or that needs a device to itself, comes after the others. A cell has at most
    one trial that waits, runs or is complete; failed trials are its history.
    A process that creates a queue or adds cells to it holds the grid's start lock.

    Args:
        grid: The grid.
        spec: The storage of the study.
        retry_failed: Whether to rerun crashed cells.
        lost_after: Seconds without a heartbeat after which another supervisor's cell is lost.
        alone: Whether no other supervisor works on this grid.
        stopping: Whether this supervisor is asked to stop.

    Raises:
        UserError: for a storage that cannot be used, and for a study that belongs to another
            folder.
    """

    def __init__(
        self,
        grid: Grid,
        spec: StorageSpec,
        *,
        retry_failed: bool = False,
        lost_after: float = LOST_AFTER,
        alone: bool = True,
        stopping: Callable[[], bool] = lambda: False,
    ) -> None:
        self._grid = grid
        self._lost_after = lost_after
        self._claims: dict[int, Claim] = {}
        self._candidates: deque[FrozenTrial] = deque()
        self._place = {cell.id: place for place, cell in enumerate(grid.cells)}
        self._beaten = self._reclaimed = time.monotonic()
        self.patiently = Patience(spec, stopping, self._hurry)
        self._study = self.patiently(Study, grid, spec, lost_after, alone)
        runs = {cell.id: grid.state(cell) for cell in grid.cells}
        self._retried = {cell for cell, run in runs.items() if retry_failed and run.error}
        self._lacking = grid.lacking(runs)
        # All cells to be run by this supervisor or others.
        self.total = sum(run.state == "missing" for run in runs.values()) + len(self._retried)
        if alone:
            self.patiently(self._mend, runs)
            self.patiently(self._take_all_back, runs)
        self._more = False  # whether some of these cells have no trial yet
        self.patiently(self._settle)

    # Queries of the supervisor.

    @property
    def notes(self) -> list[str]:
        """The repairs that were made when the study was opened, and what finished runs lack."""
        return [*self._study.notes, *lacking_lines(self._lacking, self._grid.name)]

    @property
    def waiting(self) -> int:
        """The number of cells that wait in the study."""
        return len(self.patiently(self._study.trials, TrialState.WAITING))

    def elsewhere(self) -> int:
        """The number of cells that other supervisors run, for this grid or another."""
        trials = self.patiently(self._study.trials, TrialState.RUNNING, TrialState.WAITING)
        waiting = (trial for trial in trials if trial.state == TrialState.WAITING)
        others = sum(map(self._is_busy, waiting))
        running = (trial for trial in trials if trial.state == TrialState.RUNNING)
        return others + sum(trial.number not in self._claims for trial in running)

    @property
    def has_candidates(self) -> bool:
        """Whether cells waited at the last look into the study."""
        return bool(self._candidates)

    def pop(self) -> Claim | None:
        """Claim the next cell to run; None if no cell waits."""
        claim = self.patiently(self._pop)
        if claim is None and self._more and self.settle():
            claim = self.patiently(self._pop)
        return claim

    def trial(self, claim: Claim) -> Trial:
        """The trial of a claim, for a pruner."""
        return self.patiently(self._study.trial, claim.trial)

    # Reports of the supervisor. If it sent no heartbeat for too long, others have taken its trials;
    # then reports change nothing, and the others find the files of the cell on disk.

    def done(self, claim: Claim, result: Mapping[str, Any]) -> None:
        """Record a result: COMPLETE with a finite value, even if the run diverged."""
        value = self._study.value(result)
        if self.patiently(self._has_another_trial, claim):
            self.failed(claim, "the cell has its result already")
        else:
            self._end(claim, TrialState.COMPLETE, attributes(result), value)

    def pruned(self, claim: Claim, pruned: Mapping[str, Any]) -> None:
        """Record a run that the pruner ended."""
        marks = {key: pruned[key] for key in ("seconds", "attempt")}
        self._end(claim, TrialState.PRUNED, marks, pruned["value"])

    def failed(self, claim: Claim, error: str) -> None:
        """Record a crash. The cell is not queued again."""
        self._end(claim, TrialState.FAIL, {"error": error})

    def put_back(self, claim: Claim, why: str, *, death: bool = False, alone: bool = False) -> None:
        """Record an attempt that was interrupted, and queue the cell again.

        `death` counts the attempt as one of the few that may end early; with `alone` the cell runs
        without others on its device.
        """
        if self.patiently(self._study.is_running, claim.trial):
            # Queued first, so that the cell always has a trial that waits or runs.
            deaths, alone = claim.deaths + death, claim.alone or alone
            self.patiently(self._enqueue, claim.cell, deaths, alone)
        self._end(claim, TrialState.FAIL, {"error": why})

    def tend(self) -> list[Claim]:
        """Record heartbeats, and requeue the cells of lost supervisors when due.

        Returns the claims that others took because this supervisor sent no heartbeat for too
        long. This queue drops them.
        """
        now = time.monotonic()
        taken: list[Claim] = []
        if now - self._beaten >= self._lost_after / 4:
            for claim in list(self._claims.values()):
                if self.patiently(self._study.is_running, claim.trial):
                    self.patiently(self._study.beat, claim.trial)
                else:
                    taken.append(self._claims.pop(claim.trial))
            self._beaten = time.monotonic()
        if now - self._reclaimed >= self._lost_after / 2:
            with if_free(self._grid.folder.start_lock) as free:
                if free:
                    self.patiently(self._reclaim)
            self._reclaimed = time.monotonic()
        return taken

    def settle(self) -> int:
        """Queue more cells that have no trial yet; return the number of waiting cells."""
        with if_free(self._grid.folder.start_lock) as free:
            if free:
                self.patiently(self._settle)
        return self.waiting

    def record_search(self) -> None:
        """Write what the arms of a search have tried; the caller holds the start lock."""
        if self._grid.spec.adapts:
            self.patiently(self._study.record_search)

    def close(self) -> None:
        """Close the connections to a database."""
        self._study.close()

    # The steps below may be repeated, since a database's answer can be lost. This can add a
    # second trial of a cell, which finds the cell's result and ends.

    def _hurry(self) -> None:
        """After an outage all heartbeats are old: renew ours now, and check others much later."""
        self._beaten, self._reclaimed = -math.inf, time.monotonic() + self._lost_after

    def _is_busy(self, trial: FrozenTrial) -> bool:
        """Whether a supervisor of another grid is training the cell of a waiting trial."""
        cell = self._grid.by_id.get(trial.user_attrs.get("cell", ""))
        return cell is not None and trained_for_another(self._grid.run(cell))

    def _pop(self) -> Claim | None:
        looked = False
        while True:
            if not self._candidates and not looked:
                waiting = self._study.trials(TrialState.WAITING)
                self._candidates.extend(sorted(waiting, key=self._turn))
                looked = True
            if not self._candidates:
                return None
            trial = self._candidates.popleft()
            if self._is_busy(trial) or not self._study.claim(trial.number):
                continue
            marks = trial.user_attrs
            cell = self._grid.by_id.get(marks.get("cell", ""))
            if cell is None:
                self._study.end(trial.number, TrialState.FAIL, {"error": "not a cell of the plan"})
                continue
            deaths, alone = marks.get("deaths", 0), marks.get("alone", False)
            claim = self._hold(Claim(cell, trial.number, deaths, alone))
            run = self._grid.state(cell)
            if run.state in ("missing", "failed"):  # a failed cell was queued for a retry
                return claim
            self._finish(claim, run)

    def _turn(self, trial: FrozenTrial) -> tuple[int, bool, int]:
        """The sort key of waiting trials: the smallest runs first."""
        marks = trial.user_attrs
        alone = marks.get("alone", False)
        return marks.get("deaths", 0), alone, self._place.get(marks.get("cell", ""), -1)

    def _hold(self, claim: Claim) -> Claim:
        self._claims[claim.trial] = claim
        return claim

    def _reclaim(self) -> None:
        """Requeue the claims of lost supervisors. The caller holds the start lock."""
        running = {trial.number: trial for trial in self._study.trials(TrialState.RUNNING)}
        others = running.keys() - self._claims.keys()
        if others:
            self._study.fail_lost()
            lost = {trial for trial in others if not self._study.is_running(trial)}
            self._settle({running[trial].user_attrs.get("cell", "") for trial in lost})

    def _mend(self, runs: Mapping[str, RunState]) -> None:
        """Clear the study if it contradicts what is on disk."""
        if self._study.contradicts(runs):
            self._study.clear()

    def _settle(self, only: Iterable[str] | None = None) -> None:
        """Make the study agree with the disk.

        At most a batch of cells is queued; `_more` is set if there are more.
        """
        chosen = set(self._grid.by_id if only is None else only)
        if not chosen:
            return
        trials = self._study.trials_of_cells()
        self._more = False
        queued = 0
        for cell in self._grid.cells:
            if cell.id not in chosen:
                continue
            run = self._grid.state(cell)
            if any(trial.state != TrialState.FAIL for trial in trials[cell.id]):
                continue
            if not self._is_runnable(cell, run):
                self._enter(cell, run, trials[cell.id])
            elif queued < _BATCH:
                self._enqueue(cell, _deaths(run, trials[cell.id]))
                queued += 1
            else:
                self._more = True

    def _is_runnable(self, cell: Cell, run: RunState) -> bool:
        return run.state == "missing" or (run.state == "failed" and cell.id in self._retried)

    def _take_all_back(self, runs: Mapping[str, RunState]) -> None:
        """End the trials of supervisors that have ended. No other supervisor may be at work."""
        for cell, trials in self._study.trials_of_cells().items():
            waits = any(trial.state == TrialState.WAITING for trial in trials)
            for trial in trials:
                if trial.state == TrialState.RUNNING:
                    deaths = trial.user_attrs.get("deaths", 0)
                    claim = self._hold(Claim(self._grid.by_id[cell], trial.number, deaths))
                    self._take_back(claim, runs[cell], waits)

    def _take_back(self, claim: Claim, run: RunState, waits: bool) -> None:
        """End one of these trials. `waits`: whether its cell has already been requeued."""
        if not self._is_runnable(claim.cell, run):
            self._finish(claim, run)
        elif waits:
            self.failed(claim, "its supervisor ended")
        else:
            self.put_back(claim, run.error or "its supervisor ended")

    def _enter(self, cell: Cell, run: RunState, trials: list[FrozenTrial]) -> None:
        """Record a finished cell that has no finished trial."""
        if run.result is not None:
            self._study.add(cell, TrialState.COMPLETE, run)
        elif run.pruned is not None:
            self._study.add(cell, TrialState.PRUNED, run)
        elif not trials:
            self._study.add(cell, TrialState.FAIL, run)

    def _enqueue(self, cell: Cell, deaths: int = 0, alone: bool = False) -> None:
        marks: dict[str, Any] = {"deaths": deaths} if deaths else {}
        marks |= {"alone": True} if alone else {}
        self._study.add(cell, TrialState.WAITING, **marks)
        self._candidates.clear()  # the cell may be due before them
        self._retried.discard(cell.id)

    def _finish(self, claim: Claim, run: RunState) -> None:
        """Record the result on disk of an earlier attempt of a cell."""
        if run.result is not None:
            self.done(claim, run.result)
        elif run.pruned is not None:
            self.pruned(claim, run.pruned)
        else:
            self.failed(claim, run.error or "no message")

    def _has_another_trial(self, claim: Claim) -> bool:
        """Whether another trial of the cell has its result or will get it.

        If several run, the first gets it, so that all supervisors agree. If that
        trial is lost, the supervisor that requeues the cell finds the result on disk.
        """
        under_way = self._study.trials(TrialState.COMPLETE, TrialState.RUNNING)
        return any(
            trial.state == TrialState.COMPLETE or trial.number < claim.trial
            for trial in under_way
            if trial.user_attrs.get("cell") == claim.cell.id and trial.number != claim.trial
        )

    def _end(
        self, claim: Claim, state: TrialState, marks: Mapping[str, Any], value: float | None = None
    ) -> None:
        self.patiently(self._study.end, claim.trial, state, marks, value)
        self._claims.pop(claim.trial, None)


def mend(grid: Grid, spec: StorageSpec) -> list[str]:
    """Make a grid's study agree with its run folders. No supervisor may be at work in the folder.

    A study of another folder is rebuilt. Returns the repairs.

    Raises:
        UserError: if supervisors of the other folder are at work.
    """
    try:
        queue = Queue(grid, spec)
        notes = queue.notes
    except AnotherFolder:
        storage = open_storage(spec)
        study = optuna.load_study(study_name=grid.plan.study, storage=storage)
        fail_lost(study, storage)
        if alive := len(study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))):
            close_storage(storage)
            raise UserError(
                f"{spec.shown}: the study is of another folder, and {alive} of its cells seem to "
                "run; let their supervisors end first"
            ) from None
        optuna.delete_study(study_name=grid.plan.study, storage=storage)
        close_storage(storage)
        queue = Queue(grid, spec)
        notes = [f"{spec.shown}: the study was of another folder; made again from this one"]
    queue.close()
    return notes


def _deaths(run: RunState, trials: list[FrozenTrial]) -> int:
    """The number of early ends of a missing cell's attempts, from its last trial."""
    if run.state != "missing" or not trials:
        return 0
    return max(trials, key=lambda trial: trial.number).user_attrs.get("deaths", 0)
