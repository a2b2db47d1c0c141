"""The queue of a grid: the cells to run, their supervisors, and the return of lost cells.

Several supervisors share it: each cell is claimed by one of them, and the cells of one that sends
no heartbeat go back to the queue.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import optuna
from optuna.trial import FrozenTrial, Trial, TrialState

from lightning_app.ablation.cells import Cell
from lightning_app.ablation.grid import Grid
from lightning_app.ablation.queue.retry import Patience
from lightning_app.ablation.queue.storages import (
    LOST_AFTER,
    StorageSpec,
    close_storage,
    fail_lost,
    open_storage,
)
from lightning_app.ablation.queue.study import AnotherFolder, Study, attributes
from lightning_app.ablation.supervision.locks import if_free
from lightning_app.errors import UserError
from lightning_app.run_state import RunState

_BATCH = 256  # cells that are queued at once: thousands take a database long


@dataclass(frozen=True)
class Claim:
    """A cell that this supervisor is to run.

    Attributes:
        cell: The cell.
        trial: The number of the trial that represents this attempt in the study.
        deaths: The number of attempts that ended early.
        alone: Whether the cell needs a device for itself.
    """

    cell: Cell
    trial: int
    deaths: int = 0
    alone: bool = False


class Queue:
    """The cells still to run, first in, first out, as the waiting trials of a study.

    A cell has at most one trial that waits, runs or is complete; failed trials are its history.
    A process that creates a queue, or adds cells to it, holds the grid's start lock.

    Args:
        grid: The grid.
        spec: The storage of the study.
        retry_failed: Whether cells that crashed run again.
        lost_after: Seconds without a heartbeat after which another supervisor's cell is lost.
        alone: Whether no other supervisor works on this grid now.
        stopping: Whether this supervisor is to stop.

    Raises:
        UserError: for a storage that cannot be used, and for a study of another folder.
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
        self._beaten = self._reclaimed = time.monotonic()
        self.patiently = Patience(spec, stopping, self._hurry)
        self._study = self.patiently(Study, grid, spec, lost_after, alone)
        runs = {cell.id: grid.state(cell) for cell in grid.cells}
        self._retried = {cell for cell, run in runs.items() if retry_failed and run.error}
        # All cells to run, by this supervisor or another.
        self.total = sum(run.state == "missing" for run in runs.values()) + len(self._retried)
        if alone:
            self.patiently(self._mend, runs)
            self.patiently(self._take_all_back, runs)
        self._more = False  # whether some cells to run have no trial in the study yet
        self.patiently(self._settle)

    # Queries of the supervisor.

    @property
    def notes(self) -> list[str]:
        """The repairs that were made when the study was opened."""
        return self._study.notes

    @property
    def waiting(self) -> int:
        """How many cells wait in the study."""
        return len(self.patiently(self._study.trials, TrialState.WAITING))

    def elsewhere(self) -> int:
        """How many cells other supervisors run."""
        running = self.patiently(self._study.trials, TrialState.RUNNING)
        return sum(trial.number not in self._claims for trial in running)

    @property
    def has_candidates(self) -> bool:
        """Whether cells waited at the last look into the study."""
        return bool(self._candidates)

    def pop(self) -> Claim | None:
        """Claim the next cell that has to run; None if no cell waits."""
        claim = self.patiently(self._pop)
        if claim is None and self._more and self.settle():
            claim = self.patiently(self._pop)
        return claim

    def trial(self, claim: Claim) -> Trial:
        """The trial of a claim, for a pruner."""
        return self.patiently(self._study.trial, claim.trial)

    # Reports of the supervisor. If it sent no heartbeat for too long, others have taken its trials:
    # then a report changes nothing, and the others find the files of the cell on disk.

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
        """Record heartbeats, and queue the cells of lost supervisors again, each when it is due.

        Returns the claims that others have taken because this supervisor sent no heartbeat for too
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
        """Queue more cells that have no trial yet; return how many wait."""
        with if_free(self._grid.folder.start_lock) as free:
            if free:
                self.patiently(self._settle)
        return self.waiting

    def close(self) -> None:
        """Close the connections to a database."""
        self._study.close()

    # The steps below may be repeated, since the answer of a database can be lost. This can add a
    # second trial of a cell, which finds the cell's result and ends.

    def _hurry(self) -> None:
        """After an outage all heartbeats are old: renew ours now, and check others much later."""
        self._beaten, self._reclaimed = -math.inf, time.monotonic() + self._lost_after

    def _pop(self) -> Claim | None:
        while True:
            if not self._candidates:
                self._candidates.extend(self._study.trials(TrialState.WAITING))
            if not self._candidates:
                return None
            trial = self._candidates.popleft()
            if not self._study.claim(trial.number):
                continue
            marks = trial.user_attrs
            cell = self._grid.by_id.get(marks.get("cell", ""))
            if cell is None:
                self._study.end(trial.number, TrialState.FAIL, {"error": "not a cell of the plan"})
                continue
            deaths, alone = marks.get("deaths", 0), marks.get("alone", False)
            claim = self._hold(Claim(cell, trial.number, deaths, alone))
            run = self._grid.state(cell)
            if run.state in ("missing", "failed"):  # a failed one was queued to be retried
                return claim
            self._finish(claim, run)

    def _hold(self, claim: Claim) -> Claim:
        self._claims[claim.trial] = claim
        return claim

    def _reclaim(self) -> None:
        """Put back the claims of lost supervisors. The caller holds the start lock."""
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
        """Bring the study into agreement with the disk.

        At most a batch of cells is queued; `_more` says whether there are others.
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
        """End the trials of supervisors that have ended. No other supervisor works now."""
        for cell, trials in self._study.trials_of_cells().items():
            waits = any(trial.state == TrialState.WAITING for trial in trials)
            for trial in trials:
                if trial.state == TrialState.RUNNING:
                    deaths = trial.user_attrs.get("deaths", 0)
                    claim = self._hold(Claim(self._grid.by_id[cell], trial.number, deaths))
                    self._take_back(claim, runs[cell], waits)

    def _take_back(self, claim: Claim, run: RunState, waits: bool) -> None:
        """End one of these trials. `waits`: whether its cell has already been queued again."""
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
        """Whether another trial of the cell has its result, or is the one that will get it.

        Of several that run, the first gets it, so all supervisors that ask at once agree. If that
        trial is lost, the supervisor that queues the cell again finds the result on disk.
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
    """Make a grid's study agree with its run folders. No supervisor may work in the folder.

    A study of another folder is made again. Returns the repairs.

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
    """How often the attempts of a missing cell have ended early, by its last trial."""
    if run.state != "missing" or not trials:
        return 0
    return max(trials, key=lambda trial: trial.number).user_attrs.get("deaths", 0)
