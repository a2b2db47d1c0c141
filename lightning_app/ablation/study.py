"""The Optuna study of a grid: the queue of what is missing and the index of what is known.

The record is the run folders; the study can always be rebuilt from them. One supervisor uses a
journal, under the grid's lock. Several share a database: each cell is claimed by one of them, and
what a lost one had claimed goes back by Optuna's heartbeats.
"""

import json
import math
import secrets
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import optuna
from optuna.exceptions import UpdateFinishedTrialError
from optuna.storages import BaseStorage
from optuna.trial import FrozenTrial, Trial, TrialState
from tenacity import RetryCallState, Retrying, retry_if_exception, stop_after_delay, wait_fixed

from lightning_app.ablation.guard import START, Interrupted, if_free
from lightning_app.ablation.plan import Cell, Plan
from lightning_app.ablation.pruning import make_pruner
from lightning_app.ablation.runs import Run, read_reports, read_run, run_folder
from lightning_app.ablation.storages import (
    StorageSpec,
    close_storage,
    is_outage,
    open_storage,
    reason,
    storage_spec,
)
from lightning_app.errors import UserError
from lightning_app.files import write_whole, writing_in

_LOWER_IS_BETTER_CAPS = {"val/nll": lambda entropy: entropy, "val/perplexity": math.exp}
_PATIENCE = 600.0  # seconds that a database may be away
_HURRY = 20.0  # seconds of that for a supervisor that has been told to stop
_RETRY = 1.0  # seconds
_BATCH = 256  # cells that are queued at once: a database takes long for thousands
TOKEN = ".study"  # the file that ties a folder to its study in a database

P = ParamSpec("P")
T = TypeVar("T")


class StorageLost(Exception):
    """The database did not come back. What is done is on disk, and the next supervisor goes on."""


@dataclass(frozen=True)
class Claim:
    """A cell that is ours to run: its trial, how often it was killed, and if it needs a device
    for itself."""

    cell: Cell
    trial: int
    deaths: int = 0
    alone: bool = False


class Queue:
    """The cells still to run, first in, first out, as the waiting trials of a study.

    A trial has its parameters from the start and the user attributes `cell` (an id), `name`,
    `deaths` and `alone`. A cell has at most one trial that waits, runs or is complete; failed
    trials are its history. Who makes a queue, or adds cells to it, holds the grid's START lock.

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
        UserError: for a study of another folder.
    """

    def __init__(
        self,
        directory: Path,
        plan: Plan,
        retry_failed: bool,
        *,
        spec: StorageSpec | None = None,
        lost_after: float = 120.0,
        alone: bool = True,
        pruner: str | None = None,
        stopping: Callable[[], bool] = lambda: False,
    ) -> None:
        self._directory = directory
        self._plan = plan
        self._spec = spec or storage_spec(None, directory, {})
        self._lost_after = lost_after
        self._alone = alone
        self._stopping = stopping
        self._cells = {cell.id: cell for cell in plan.cells}
        self._choices = {
            axis: optuna.distributions.CategoricalDistribution(tuple(map(_primitive, values)))
            for axis, values in plan.axes.items()
        }
        self._pruner, self._prunes = make_pruner(pruner), pruner is not None
        self._claims: dict[int, Claim] = {}
        self._candidates: deque[FrozenTrial] = deque()
        self._beaten = self._reclaimed = time.monotonic()
        self._out = False
        self.notes: list[str] = []
        self._storage, self._study = self._open()
        runs = self.patiently(self._mend)
        self._retried = {cell for cell, run in runs.items() if retry_failed and run.error}
        # Cells that are to run, wherever they do.
        self.total = sum(run.state == "missing" for run in runs.values()) + len(self._retried)
        self._more = False  # whether cells may be missing of which the study knows nothing yet
        self.patiently(self._settle)

    # What the supervisor asks.

    @property
    def waiting(self) -> int:
        """How many cells wait."""
        return len(self._trials_in(TrialState.WAITING))

    def elsewhere(self) -> int:
        """How many cells other supervisors run."""
        running = self._trials_in(TrialState.RUNNING)
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
        return self.patiently(lambda: Trial(self._study, claim.trial))

    # What the supervisor tells. A trial that others took meanwhile, because this supervisor was
    # silent for too long, is theirs: what the cell has left on disk they will find.

    def done(self, claim: Claim, result: Mapping[str, Any]) -> None:
        """Enter a result: COMPLETE with a finite value, also where the run diverged."""
        self._end(claim, TrialState.COMPLETE, _attributes(result), self._value(result))

    def pruned(self, claim: Claim, pruned: Mapping[str, Any]) -> None:
        """Enter a run that the pruner ended."""
        known = {key: pruned[key] for key in ("seconds", "attempt")}
        self._end(claim, TrialState.PRUNED, known, pruned["value"])

    def failed(self, claim: Claim, error: str) -> None:
        """Enter a crash. The cell is not put back."""
        self._end(claim, TrialState.FAIL, {"error": error})

    def put_back(self, claim: Claim, why: str, *, death: bool = False, alone: bool = False) -> None:
        """Enter an attempt that was cut short, and queue the cell again.

        `death` counts it among those of which a cell has few; `alone` has it run without others
        on its device.
        """
        if self._owns(claim):
            # Queued first: who comes in between never sees a cell that nobody will run.
            self._enqueue(claim.cell, claim.deaths + death, claim.alone or alone)
        self._end(claim, TrialState.FAIL, {"error": why})

    def tend(self) -> list[Claim]:
        """Say that our cells live, and put back those of lost supervisors, when it is time.

        Returns the claims that others have taken meanwhile, as this supervisor was silent for too
        long. They are forgotten.
        """
        now = time.monotonic()
        taken: list[Claim] = []
        if not self._spec.several:
            return taken
        if now - self._beaten >= self._lost_after / 4:
            for claim in list(self._claims.values()):
                if self._owns(claim):
                    self.patiently(self._beat, claim.trial)
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
        close_storage(self._storage)

    # How it is done.

    def _pop(self) -> Claim | None:
        while True:
            if not self._candidates:
                self._candidates.extend(self._trials_in(TrialState.WAITING))
            if not self._candidates:
                return None
            trial = self._candidates.popleft()
            if not self._claim(trial._trial_id):
                continue
            attributes = trial.user_attrs
            cell = self._cells.get(attributes.get("cell", ""))
            if cell is None:
                self._end_trial(trial._trial_id, TrialState.FAIL, {"error": "no cell of the plan"})
                continue
            deaths, alone = attributes.get("deaths", 0), attributes.get("alone", False)
            claim = Claim(cell, trial._trial_id, deaths, alone)
            self._claims[claim.trial] = claim
            run = self._read(cell)
            if run.state in ("missing", "failed"):  # who queued it, wants it to run
                return claim
            self._finish(claim, run)

    def _claim(self, trial: int) -> bool:
        """Take a waiting trial; whoever is first has it."""
        # Before it runs: a supervisor that dies in between leaves a heartbeat to grow old.
        self._beat(trial)
        try:
            return self._storage.set_trial_state_values(trial, state=TrialState.RUNNING)
        except UpdateFinishedTrialError:
            return False

    def _beat(self, trial: int) -> None:
        if self._spec.several:
            self._storage.record_heartbeat(trial)  # type: ignore[attr-defined]

    def _owns(self, claim: Claim) -> bool:
        trial = self.patiently(self._storage.get_trial, claim.trial)
        return trial.state == TrialState.RUNNING

    def _reclaim(self) -> None:
        """Put back what lost supervisors had claimed. Under the lock of those that start."""
        others = [
            trial
            for trial in self._trials_in(TrialState.RUNNING)
            if trial._trial_id not in self._claims
        ]
        if not others:
            return
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            optuna.storages.fail_stale_trials(self._study)
        lost = {
            trial.user_attrs.get("cell", "")
            for trial in others
            if self._storage.get_trial(trial._trial_id).state == TrialState.FAIL
        }
        if lost:
            self._settle(lost)

    def _mend(self) -> dict[str, Run]:
        """Start the study anew where it says what the disk does not, and nobody else uses it."""
        trials = self._trials()
        runs = {cell.id: self._read(cell) for cell in self._plan.cells}
        if self._alone and any(_contradicts(runs[cell], trials[cell]) for cell in runs):
            folder = self._study.user_attrs.get("folder")
            optuna.delete_study(study_name=self._plan.study, storage=self._storage)
            self._study = self._create(self._storage)
            if folder is not None:
                self._study.set_user_attr("folder", folder)
        return runs

    def _settle(self, only: Iterable[str] | None = None) -> None:
        """Bring the study into agreement with the disk after whatever happened before.

        At most a batch of cells is queued; `_more` tells if there may be others.
        """
        chosen = set(self._cells if only is None else only)
        trials = self._trials()
        queued = 0
        for cell in self._plan.cells:
            if cell.id in chosen:
                queued += self._settle_cell(cell, self._read(cell), trials[cell.id])
                if queued >= _BATCH:
                    break
        if only is None:
            self._more = queued >= _BATCH

    def _settle_cell(self, cell: Cell, run: Run, trials: list[FrozenTrial]) -> bool:
        """Settle one cell, and return whether it was queued."""
        states = {trial.state for trial in trials}
        runnable = run.state == "missing" or (run.state == "failed" and cell.id in self._retried)
        if TrialState.RUNNING in states:
            if self._spec.several:
                return False  # its supervisor lives, or its heartbeat will tell
            for trial in trials:
                if trial.state == TrialState.RUNNING and trial._trial_id not in self._claims:
                    self._take_back(cell, run, trial, runnable, TrialState.WAITING in states)
        elif states & {TrialState.WAITING, TrialState.COMPLETE, TrialState.PRUNED}:
            return False
        elif runnable:
            last = max(trials, key=lambda trial: trial.number, default=None)
            killed = run.state == "missing" and last is not None
            self._enqueue(cell, last.user_attrs.get("deaths", 0) if killed and last else 0)
            return True
        elif run.result is not None:
            value = self._value(run.result)
            self._add(cell, TrialState.COMPLETE, _attributes(run.result), value, run.result)
        elif run.pruned is not None:
            self._add(cell, TrialState.PRUNED, {}, run.pruned["value"], run.pruned)
        elif TrialState.FAIL not in states:
            self._add(cell, TrialState.FAIL, {"error": run.error})
        return False

    def _take_back(
        self, cell: Cell, run: Run, trial: FrozenTrial, runnable: bool, queued: bool
    ) -> None:
        """End a trial whose supervisor is no more; `queued`: the cell waits again already."""
        claim = Claim(cell, trial._trial_id, trial.user_attrs.get("deaths", 0))
        self._claims[claim.trial] = claim
        if not runnable:
            self._finish(claim, run)
        elif queued:
            self.failed(claim, "its supervisor ended")
        else:
            self.put_back(claim, run.error or "its supervisor ended")

    def _read(self, cell: Cell) -> Run:
        """What a cell has on disk. That it was pruned means nothing to a grid without a pruner."""
        run = read_run(self._directory, cell)
        if run.pruned is None or self._prunes:
            return run
        return replace(run, state="missing", pruned=None)

    def _finish(self, claim: Claim, run: Run) -> None:
        """Enter what a cell has left on disk, though not for this claim, and only once."""
        if run.result is not None and not self._has_complete(claim.cell):
            self.done(claim, run.result)
        elif run.pruned is not None:
            self.pruned(claim, run.pruned)
        else:
            self.failed(claim, run.error or "the cell has its result already")

    def _has_complete(self, cell: Cell) -> bool:
        complete = self._trials_in(TrialState.COMPLETE)
        return any(trial.user_attrs.get("cell") == cell.id for trial in complete)

    def _end(
        self,
        claim: Claim,
        state: TrialState,
        attributes: Mapping[str, Any],
        value: float | None = None,
    ) -> None:
        self.patiently(self._end_trial, claim.trial, state, attributes, value)
        self._claims.pop(claim.trial, None)

    def _end_trial(
        self,
        trial: int,
        state: TrialState,
        attributes: Mapping[str, Any],
        value: float | None = None,
    ) -> None:
        try:
            for key, each in attributes.items():
                self._storage.set_trial_user_attr(trial, key, each)
            self._storage.set_trial_state_values(trial, state, None if value is None else [value])
        except UpdateFinishedTrialError:
            return  # others took it, or it was entered before the link broke

    def _enqueue(self, cell: Cell, deaths: int = 0, alone: bool = False) -> None:
        self._retried.discard(cell.id)
        marks = {"deaths": deaths} if deaths else {}
        self._add(cell, TrialState.WAITING, {**marks, "alone": True} if alone else marks)

    def _add(
        self,
        cell: Cell,
        state: TrialState,
        attributes: Mapping[str, Any],
        value: float | None = None,
        times: Mapping[str, Any] | None = None,
    ) -> None:
        """Add a trial with its parameters, so that waiting cells show theirs too."""
        # Others are judged by what the complete ones have reported.
        judges = self._prunes and state == TrialState.COMPLETE
        trial = optuna.create_trial(
            state=state,
            value=value,
            intermediate_values=(
                read_reports(run_folder(self._directory, cell)) if judges else None
            ),
            params={axis: _primitive(value) for axis, value in cell.axes.items()},
            distributions=dict(self._choices),
            user_attrs={"cell": cell.id, "name": cell.name, **attributes},
        )
        if times is not None:
            trial.datetime_start = datetime.fromisoformat(times["started"])
            trial.datetime_complete = datetime.fromisoformat(times["finished"])
        self._storage.create_new_trial(self._study._study_id, template_trial=trial)

    def _trials(self) -> dict[str, list[FrozenTrial]]:
        trials: dict[str, list[FrozenTrial]] = {cell: [] for cell in self._cells}
        for trial in self._study.get_trials(deepcopy=False):
            trials.get(trial.user_attrs.get("cell", ""), []).append(trial)
        return trials

    def _trials_in(self, *states: TrialState) -> list[FrozenTrial]:
        return self.patiently(self._study.get_trials, deepcopy=False, states=states)

    def _value(self, result: Mapping[str, Any]) -> float:
        """The metric, capped at what a model without any context reaches, always finite."""
        name, entropy = self._plan.metric, result["unigram_entropy"]
        diverged = result["status"] == "diverged"
        if name not in result["metrics"] and not diverged:
            known = ", ".join(result["metrics"])
            raise UserError(f"{self._plan.name}: metric.name: runs report no '{name}' ({known})")
        value = result["metrics"].get(name)
        cap = _LOWER_IS_BETTER_CAPS[name](entropy) if name in _LOWER_IS_BETTER_CAPS else None
        if value is None:
            return cap if cap is not None else 0.0
        return min(value, cap) if diverged and cap is not None else value

    def patiently(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call the storage; while its database restarts, wait and ask again.

        Each step may be made twice, as an answer can be lost on its way: a trial too many for a
        cell finds the cell's result and ends.

        Raises:
            StorageLost: where the database stays away.
            Interrupted: where it does, and the supervisor has been told to stop.
        """
        retrying = Retrying(
            retry=retry_if_exception(is_outage),
            wait=wait_fixed(_RETRY),
            stop=lambda state: stop_after_delay(_HURRY if self._stopping() else _PATIENCE)(state),
            before_sleep=self._note_outage,
            reraise=True,
        )
        try:
            answer = retrying(call, *args, **kwargs)
        except Exception as error:
            if not is_outage(error):
                raise
            if self._stopping():
                raise Interrupted from error
            raise StorageLost(f"{self._spec.shown}: {reason(error)}") from error
        if self._out:
            print(f"{self._spec.shown}: answers again", flush=True)
            self._out = False
            # After a silence all heartbeats are old: ours come first, judgements much later.
            self._beaten, self._reclaimed = -math.inf, time.monotonic() + self._lost_after
        return answer

    def _note_outage(self, state: RetryCallState) -> None:
        error = state.outcome and state.outcome.exception()
        if error is not None and not self._out:
            print(f"{self._spec.shown}: {reason(error)}; waiting for it", flush=True)
            self._out = True

    # Opening.

    def _open(self) -> tuple[BaseStorage, optuna.Study]:
        """Open or make the study, and note what had to be mended."""
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        if self._spec.kind != "journal":
            storage = self.patiently(open_storage, self._spec, self._lost_after)
            study = self.patiently(self._create, storage)
            if self._spec.several:
                self._check_folder(study)
            return storage, study
        journal = Path(self._spec.url)
        journal.with_name(f"{journal.name}.lock").unlink(missing_ok=True)  # of a killed supervisor
        if _cut_torn_line(journal):
            self.notes.append(f"{journal}: a torn last line was removed")
        try:
            storage = open_storage(self._spec, self._lost_after)
            return storage, self._create(storage)
        except (ValueError, KeyError, TypeError, AttributeError, AssertionError):
            damaged = journal.with_name(f"{journal.name}.damaged")
            journal.replace(damaged)
        self.notes.append(
            f"{journal}: damaged, kept as {damaged.name}; rebuilt from the run folders"
        )
        storage = open_storage(self._spec, self._lost_after)
        return storage, self._create(storage)

    def _create(self, storage: BaseStorage) -> optuna.Study:
        study = optuna.create_study(
            storage=storage,
            study_name=self._plan.study,
            direction="minimize" if self._plan.mode == "min" else "maximize",
            sampler=optuna.samplers.RandomSampler(seed=0),  # never asked: every cell is queued
            pruner=self._pruner,
            load_if_exists=True,
        )
        study.get_trials(deepcopy=False)  # reads a journal to its end
        return study

    def _check_folder(self, study: optuna.Study) -> None:
        """Refuse a study of another folder: the hosts of a grid must share one."""
        path = self._directory / TOKEN
        token = path.read_text().strip() if path.is_file() else ""
        known = study.user_attrs.get("folder")
        if known is None:
            token = token or secrets.token_hex(8)
            with writing_in(self._directory):
                write_whole(path, f"{token}\n")
            study.set_user_attr("folder", token)
        elif known != token:
            raise UserError(
                f"{self._directory}: is not the folder of the study {self._plan.study} in "
                f"{self._spec.shown}; give --experiments the folder that all hosts share, or make "
                f"the study anew from this folder with `ablate doctor {self._plan.name} --fix "
                "--storage URL`"
            )


def rebuild(directory: Path, plan: Plan, spec: StorageSpec, pruner: str | None = None) -> Queue:
    """Make a grid's study anew from its run folders. No supervisor may be at work."""
    if spec.kind == "journal":
        Path(spec.url).unlink(missing_ok=True)
    else:
        storage = open_storage(spec)
        if any(study.study_name == plan.study for study in storage.get_all_studies()):
            optuna.delete_study(study_name=plan.study, storage=storage)
        close_storage(storage)
    return Queue(directory, plan, retry_failed=False, spec=spec, pruner=pruner)


def _contradicts(run: Run, trials: list[FrozenTrial]) -> bool:
    """Whether finished trials, which Optuna never changes, say something else than the disk."""
    ended = {TrialState.COMPLETE: "done", TrialState.PRUNED: "pruned"}
    states = [ended[trial.state] for trial in trials if trial.state in ended]
    return len(states) > 1 or any(state != run.state for state in states)


def _attributes(result: Mapping[str, Any]) -> dict[str, Any]:
    attributes: dict[str, Any] = {"diverged": result["status"] == "diverged"}
    attributes |= {"seconds": result["seconds"], "attempt": result["attempt"]}
    return {**attributes, **result["metrics"]}


def _primitive(value: Any) -> Any:
    """A value as Optuna's categories can hold it: lists and mappings become JSON."""
    return json.dumps(value, sort_keys=True) if isinstance(value, list | dict) else value


def _cut_torn_line(journal: Path) -> bool:
    """Remove a last line without its end: the next line would be glued to it for ever."""
    if not journal.is_file():
        return False
    with journal.open("rb+") as file:
        data = file.read()
        whole = data.rfind(b"\n") + 1
        file.truncate(whole)
    return whole < len(data)
