"""The queue of a grid: which cells are to run, who runs them, and what becomes of lost ones.

One supervisor uses a journal, under the grid's lock. Several share a database: each cell is claimed
by one of them, and what a lost one had claimed goes back by Optuna's heartbeats.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from optuna.trial import FrozenTrial, Trial, TrialState

from lightning_app.ablation.plan import Cell, Plan
from lightning_app.ablation.queue.patience import Patience
from lightning_app.ablation.queue.storages import (
    LOST_AFTER,
    StorageSpec,
    close_storage,
    open_storage,
    storage_spec,
)
from lightning_app.ablation.queue.study import Study, attributes, contradicts
from lightning_app.ablation.runs import Run, read_run
from lightning_app.ablation.supervision.guard import START, if_free

_BATCH = 256  # cells that are queued at once: a database takes long for thousands


@dataclass(frozen=True)
class Claim:
    """A cell that is ours to run.

    `trial` stands for this attempt in the study, `deaths` counts attempts that ended early, and
    `alone` says that the cell needs a device for itself.
    """

    cell: Cell
    trial: int
    deaths: int = 0
    alone: bool = False


class Queue:
    """The cells still to run, first in, first out, as the waiting trials of a study.

    A cell has at most one trial that waits, runs or is complete; failed trials are its history.
    Who makes a queue, or adds cells to it, holds the grid's START lock.

    Args:
        directory: The grid's folder.
        plan: Its cells.
        retry_failed: Whether cells that crashed run again.
        spec: The storage, by default the journal in the grid's folder.
        lost_after: Seconds without a heartbeat after which another supervisor's cell is lost.
        alone: Whether no other supervisor works on this grid now.
        pruner: The grid's pruner.
        stopping: Whether this supervisor has been told to stop.

    Raises:
        UserError: for a storage that cannot be used, and for a study of another folder.
    """

    def __init__(
        self,
        directory: Path,
        plan: Plan,
        retry_failed: bool,
        *,
        spec: StorageSpec | None = None,
        lost_after: float = LOST_AFTER,
        alone: bool = True,
        pruner: str | None = None,
        stopping: Callable[[], bool] = lambda: False,
    ) -> None:
        self._directory = directory
        self._cells = {cell.id: cell for cell in plan.cells}
        self._metric = plan.metric
        self._prunes = pruner is not None
        self._lost_after = lost_after
        self._claims: dict[int, Claim] = {}
        self._candidates: deque[FrozenTrial] = deque()
        self._beaten = self._reclaimed = time.monotonic()
        spec = spec or storage_spec(None, directory, {})
        self._several = spec.several
        self.patiently = Patience(spec, stopping, self._hurry)
        self._study = self.patiently(Study, directory, plan, spec, lost_after, pruner, alone)
        runs = {cell.id: self._read(cell) for cell in plan.cells}
        self._retried = {cell for cell, run in runs.items() if retry_failed and run.error}
        # Cells that are to run, wherever they do.
        self.total = sum(run.state == "missing" for run in runs.values()) + len(self._retried)
        if alone:
            self.patiently(self._mend, runs)
            self.patiently(self._take_all_back, runs)
        self._more = False  # whether cells are to run of which the study knows nothing yet
        self.patiently(self._settle)

    # What the supervisor asks.

    @property
    def notes(self) -> list[str]:
        """What had to be mended when the study was opened."""
        return self._study.notes

    @property
    def waiting(self) -> int:
        """How many cells wait in the study."""
        return len(self.patiently(self._study.trials, TrialState.WAITING))

    def elsewhere(self) -> int:
        """How many cells other supervisors run."""
        running = self.patiently(self._study.trials, TrialState.RUNNING)
        return sum(trial._trial_id not in self._claims for trial in running)

    @property
    def has_candidates(self) -> bool:
        """Whether cells are known to have waited when last looked."""
        return bool(self._candidates)

    def pop(self) -> Claim | None:
        """Claim the next cell that has to run, or None where none waits."""
        claim = self.patiently(self._pop)
        if claim is None and self._more and self.settle():
            claim = self.patiently(self._pop)
        return claim

    def trial(self, claim: Claim) -> Trial:
        """The trial of a claim, for a pruner."""
        return self.patiently(self._study.trial, claim.trial)

    # What the supervisor tells. A trial that others took meanwhile, because this supervisor was
    # silent for too long, is theirs: what the cell has left on disk they will find.

    def done(self, claim: Claim, result: Mapping[str, Any]) -> None:
        """Enter a result: COMPLETE with a finite value, also where the run diverged."""
        value = self._study.value(result)
        if self.patiently(self._is_anothers, claim):
            self.failed(claim, "the cell has its result already")
        else:
            self._end(claim, TrialState.COMPLETE, attributes(result), value)

    def pruned(self, claim: Claim, pruned: Mapping[str, Any]) -> None:
        """Enter a run that the pruner ended."""
        marks = {key: pruned[key] for key in ("seconds", "attempt")}
        self._end(claim, TrialState.PRUNED, marks, pruned["value"])

    def failed(self, claim: Claim, error: str) -> None:
        """Enter a crash. The cell is not put back."""
        self._end(claim, TrialState.FAIL, {"error": error})

    def put_back(self, claim: Claim, why: str, *, death: bool = False, alone: bool = False) -> None:
        """Enter an attempt that was cut short, and queue the cell again.

        `death` counts it among those of which a cell has few; `alone` has it run without others
        on its device.
        """
        if self.patiently(self._study.is_running, claim.trial):
            # Queued first: who comes in between never sees a cell that nobody will run.
            deaths, alone = claim.deaths + death, claim.alone or alone
            self.patiently(self._enqueue, claim.cell, deaths, alone)
        self._end(claim, TrialState.FAIL, {"error": why})

    def tend(self) -> list[Claim]:
        """Say that our cells live, and put back those of lost supervisors, when it is time.

        Returns the claims that others have taken meanwhile, as this supervisor was silent for too
        long. They are forgotten.
        """
        now = time.monotonic()
        taken: list[Claim] = []
        if not self._several:
            return taken
        if now - self._beaten >= self._lost_after / 4:
            for claim in list(self._claims.values()):
                if self.patiently(self._study.is_running, claim.trial):
                    self.patiently(self._study.beat, claim.trial)
                else:
                    taken.append(self._claims.pop(claim.trial))
            self._beaten = time.monotonic()
        if now - self._reclaimed >= self._lost_after / 2:
            with if_free(self._directory / START) as free:
                if free:
                    self.patiently(self._reclaim)
            self._reclaimed = time.monotonic()
        return taken

    def settle(self) -> int:
        """Queue more of the cells that nobody would run yet; return how many wait."""
        with if_free(self._directory / START) as free:
            if free:
                self.patiently(self._settle)
        return self.waiting

    def close(self) -> None:
        """Give the connections to a database back."""
        self._study.close()

    # How it is done. Each step may be made twice, as an answer can be lost on its way: a trial too
    # many for a cell finds the cell's result and ends.

    def _hurry(self) -> None:
        """After a silence all heartbeats are old: ours come first, judgements much later."""
        self._beaten, self._reclaimed = -math.inf, time.monotonic() + self._lost_after

    def _pop(self) -> Claim | None:
        while True:
            if not self._candidates:
                self._candidates.extend(self._study.trials(TrialState.WAITING))
            if not self._candidates:
                return None
            trial = self._candidates.popleft()
            if not self._study.claim(trial._trial_id):
                continue
            marks = trial.user_attrs
            cell = self._cells.get(marks.get("cell", ""))
            if cell is None:
                self._study.end(trial._trial_id, TrialState.FAIL, {"error": "no cell of the plan"})
                continue
            deaths, alone = marks.get("deaths", 0), marks.get("alone", False)
            claim = self._hold(Claim(cell, trial._trial_id, deaths, alone))
            run = self._read(cell)
            if run.state in ("missing", "failed"):  # who queued it, wants it to run
                return claim
            self._finish(claim, run)

    def _hold(self, claim: Claim) -> Claim:
        self._claims[claim.trial] = claim
        return claim

    def _reclaim(self) -> None:
        """Put back what lost supervisors had claimed. Under the lock of those that start."""
        running = {trial._trial_id: trial for trial in self._study.trials(TrialState.RUNNING)}
        others = running.keys() - self._claims.keys()
        if others:
            self._study.fail_lost()
            lost = {trial for trial in others if not self._study.is_running(trial)}
            self._settle({running[trial].user_attrs.get("cell", "") for trial in lost})

    def _mend(self, runs: Mapping[str, Run]) -> None:
        """Start the study anew where it says what the disk does not."""
        trials = self._study.trials_of_cells()
        if any(contradicts(runs[cell], trials[cell]) for cell in runs):
            self._study.begin_anew()

    def _settle(self, only: Iterable[str] | None = None) -> None:
        """Bring the study into agreement with the disk after whatever happened before.

        At most a batch of cells is queued; `_more` tells if there are others.
        """
        chosen = set(self._cells if only is None else only)
        if not chosen:
            return
        trials = self._study.trials_of_cells()
        self._more = False
        queued = 0
        for cell in self._cells.values():
            if cell.id not in chosen:
                continue
            run = self._read(cell)
            if any(trial.state != TrialState.FAIL for trial in trials[cell.id]):
                continue
            if not self._is_runnable(cell, run):
                self._enter(cell, run, trials[cell.id])
            elif queued < _BATCH:
                self._enqueue(cell, _deaths(run, trials[cell.id]))
                queued += 1
            else:
                self._more = True

    def _is_runnable(self, cell: Cell, run: Run) -> bool:
        return run.state == "missing" or (run.state == "failed" and cell.id in self._retried)

    def _take_all_back(self, runs: Mapping[str, Run]) -> None:
        """End the trials of supervisors that are no more, as nobody else is at work."""
        for cell, trials in self._study.trials_of_cells().items():
            waits = any(trial.state == TrialState.WAITING for trial in trials)
            for trial in trials:
                if trial.state == TrialState.RUNNING:
                    deaths = trial.user_attrs.get("deaths", 0)
                    claim = self._hold(Claim(self._cells[cell], trial._trial_id, deaths))
                    self._take_back(claim, runs[cell], waits)

    def _take_back(self, claim: Claim, run: Run, waits: bool) -> None:
        """End one of them; `waits`: its cell has been put back already."""
        if not self._is_runnable(claim.cell, run):
            self._finish(claim, run)
        elif waits:
            self.failed(claim, "its supervisor ended")
        else:
            self.put_back(claim, run.error or "its supervisor ended")

    def _enter(self, cell: Cell, run: Run, trials: list[FrozenTrial]) -> None:
        """Enter a cell that is over and of which the study knows nothing."""
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

    def _read(self, cell: Cell) -> Run:
        """What a cell has on disk. That it was pruned means nothing to a grid without a pruner."""
        run = read_run(self._directory, cell, self._metric)
        if run.pruned is None or self._prunes:
            return run
        return replace(run, state="missing", pruned=None)

    def _finish(self, claim: Claim, run: Run) -> None:
        """Enter what a cell has left on disk, though not for this claim."""
        if run.result is not None:
            self.done(claim, run.result)
        elif run.pruned is not None:
            self.pruned(claim, run.pruned)
        else:
            self.failed(claim, run.error or "no message")

    def _is_anothers(self, claim: Claim) -> bool:
        """Whether another trial of the cell has entered its result, or is the one that will.

        Of several that are under way the first does: all who ask at once agree on it. Should it
        be lost, whoever puts it back finds the result on disk.
        """
        under_way = self._study.trials(TrialState.COMPLETE, TrialState.RUNNING)
        return any(
            trial.state == TrialState.COMPLETE or trial._trial_id < claim.trial
            for trial in under_way
            if trial.user_attrs.get("cell") == claim.cell.id and trial._trial_id != claim.trial
        )

    def _end(
        self, claim: Claim, state: TrialState, marks: Mapping[str, Any], value: float | None = None
    ) -> None:
        self.patiently(self._study.end, claim.trial, state, marks, value)
        self._claims.pop(claim.trial, None)


def rebuild(directory: Path, plan: Plan, spec: StorageSpec, pruner: str | None = None) -> Queue:
    """Make a grid's study anew from its run folders. No supervisor may be at work."""
    if spec.kind == "journal":
        Path(spec.url).unlink(missing_ok=True)
    else:
        storage = open_storage(spec)
        studies = {study.study_name: study._study_id for study in storage.get_all_studies()}
        if plan.study in studies:
            storage.delete_study(studies[plan.study])
        close_storage(storage)
    return Queue(directory, plan, retry_failed=False, spec=spec, pruner=pruner)


def _deaths(run: Run, trials: list[FrozenTrial]) -> int:
    """How often a cell that is missing has been killed, as its last trial says."""
    if run.state != "missing" or not trials:
        return 0
    return max(trials, key=lambda trial: trial.number).user_attrs.get("deaths", 0)
