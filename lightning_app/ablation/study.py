"""The Optuna study of a grid: the queue of what is missing and the index of what is known.

The record is the run directories; the study can always be rebuilt from them. One supervisor at a
time uses it, under the grid's lock.
"""

import json
import math
import warnings
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import optuna
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, Trial, TrialState

from lightning_app.ablation.plan import Cell, Plan
from lightning_app.ablation.runs import Run, read_run
from lightning_app.errors import UserError

_LOWER_IS_BETTER_CAPS = {"val/nll": lambda entropy: entropy, "val/perplexity": math.exp}


class Queue:
    """The cells still to run, first in, first out, as the waiting trials of a study.

    A cell has a user attribute `cell` (its id) and `name`, its parameters from the start, and at
    most one trial that waits, runs or is complete. Failed trials are its history.
    """

    def __init__(self, directory: Path, plan: Plan, retry_failed: bool) -> None:
        self._directory = directory
        self._plan = plan
        self._retry_failed = retry_failed
        self._cells = {cell.id: cell for cell in plan.cells}
        self._choices = {
            axis: optuna.distributions.CategoricalDistribution(tuple(map(_primitive, values)))
            for axis, values in plan.axes.items()
        }
        self._storage, self._study, self.notes = _open(directory / "optuna.journal", plan)
        self._settle()

    @property
    def waiting(self) -> int:
        """How many cells wait."""
        return len(self._study.get_trials(deepcopy=False, states=(TrialState.WAITING,)))

    def pop(self) -> tuple[Cell, Trial] | None:
        """Take the next cell that has to run, or None where none waits."""
        while self.waiting:
            trial = self._study.ask()
            cell = self._cells.get(trial.user_attrs.get("cell", ""))
            if cell is None:
                self._fail(trial, "no cell of the plan")
                continue
            run = read_run(self._directory, cell)
            if run.state == "missing" or (run.state == "failed" and self._retry_failed):
                return cell, trial
            self._finish(trial, run)
        return None

    def done(self, trial: Trial, result: Mapping[str, Any]) -> None:
        """Enter a result: COMPLETE with a finite value, also where the run diverged."""
        for key, value in _attributes(result).items():
            trial.set_user_attr(key, value)
        self._study.tell(trial, self._value(result))

    def failed(self, trial: Trial, error: str) -> None:
        """Enter a crash. The cell is not put back."""
        self._fail(trial, error)

    def put_back(self, cell: Cell, trial: Trial, reason: str) -> None:
        """Enter an attempt that was cut short, and queue the cell again."""
        self._fail(trial, reason)
        self._enqueue(cell)

    def _settle(self) -> None:
        """Bring the study into agreement with the disk after whatever happened before."""
        trials = self._trials()
        runs = {cell.id: read_run(self._directory, cell) for cell in self._plan.cells}
        if any(_contradicts(runs[cell], trials[cell]) for cell in runs):
            optuna.delete_study(study_name=self._plan.study, storage=self._storage)
            self._study = _create(self._storage, self._plan)
            trials = self._trials()
        for cell in self._plan.cells:
            self._settle_cell(cell, runs[cell.id], trials[cell.id])

    def _settle_cell(self, cell: Cell, run: Run, trials: list[FrozenTrial]) -> None:
        states = {trial.state: trial for trial in trials}
        runnable = run.state == "missing" or (run.state == "failed" and self._retry_failed)
        if TrialState.RUNNING in states:
            trial = Trial(self._study, states[TrialState.RUNNING]._trial_id)
            if runnable:
                self.put_back(cell, trial, run.error or "its supervisor ended")
            else:
                self._finish(trial, run)
        elif TrialState.WAITING in states or TrialState.COMPLETE in states:
            return
        elif runnable:
            self._enqueue(cell)
        elif run.result is not None:
            self._add(cell, TrialState.COMPLETE, _attributes(run.result), run.result)
        elif TrialState.FAIL not in states:
            self._add(cell, TrialState.FAIL, {"error": run.error})

    def _finish(self, trial: Trial, run: Run) -> None:
        if run.result is not None:
            self.done(trial, run.result)
        else:
            self._fail(trial, run.error or "")

    def _fail(self, trial: Trial, error: str) -> None:
        trial.set_user_attr("error", error)
        self._study.tell(trial, state=TrialState.FAIL)

    def _enqueue(self, cell: Cell) -> None:
        self._add(cell, TrialState.WAITING, {})

    def _add(
        self,
        cell: Cell,
        state: TrialState,
        attributes: Mapping[str, Any],
        result: Mapping[str, Any] | None = None,
    ) -> None:
        """Add a trial with its parameters, so that waiting cells show theirs too."""
        trial = optuna.create_trial(
            state=state,
            value=None if result is None else self._value(result),
            params={axis: _primitive(value) for axis, value in cell.axes.items()},
            distributions=dict(self._choices),
            user_attrs={"cell": cell.id, "name": cell.name, **attributes},
        )
        if result is not None:
            trial.datetime_start = datetime.fromisoformat(result["started"])
            trial.datetime_complete = datetime.fromisoformat(result["finished"])
        self._study.add_trial(trial)

    def _trials(self) -> dict[str, list[FrozenTrial]]:
        trials: dict[str, list[FrozenTrial]] = {cell: [] for cell in self._cells}
        for trial in self._study.get_trials(deepcopy=False):
            trials.get(trial.user_attrs.get("cell", ""), []).append(trial)
        return trials

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


def _contradicts(run: Run, trials: list[FrozenTrial]) -> bool:
    """Whether finished trials, which Optuna never changes, say something else than the disk."""
    states = [trial.state for trial in trials if trial.state != TrialState.FAIL]
    return len(states) > 1 or (TrialState.COMPLETE in states and run.state != "done")


def _attributes(result: Mapping[str, Any]) -> dict[str, Any]:
    attributes: dict[str, Any] = {"diverged": result["status"] == "diverged"}
    attributes |= {"seconds": result["seconds"], "attempt": result["attempt"]}
    return {**attributes, **result["metrics"]}


def _primitive(value: Any) -> Any:
    """A value as Optuna's categories can hold it: lists and mappings become JSON."""
    return json.dumps(value, sort_keys=True) if isinstance(value, list | dict) else value


def _open(journal: Path, plan: Plan) -> tuple[JournalStorage, optuna.Study, list[str]]:
    """Open or make the study; also say in a line each what had to be mended."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    journal.with_name(f"{journal.name}.lock").unlink(missing_ok=True)  # of a killed supervisor
    notes = [f"{journal}: a torn last line was removed"] if _cut_torn_line(journal) else []
    try:
        return *_load(journal, plan), notes
    except (ValueError, KeyError, TypeError, AttributeError, AssertionError):
        damaged = journal.with_name(f"{journal.name}.damaged")
        journal.replace(damaged)
    notes.append(f"{journal}: damaged, kept as {damaged.name}; rebuilt from the run folders")
    return *_load(journal, plan), notes


def _load(journal: Path, plan: Plan) -> tuple[JournalStorage, optuna.Study]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        storage = JournalStorage(JournalFileBackend(str(journal)))
    return storage, _create(storage, plan)


def _create(storage: JournalStorage, plan: Plan) -> optuna.Study:
    study = optuna.create_study(
        storage=storage,
        study_name=plan.study,
        direction="minimize" if plan.mode == "min" else "maximize",
        sampler=optuna.samplers.RandomSampler(seed=0),  # never asked: every cell is queued
        load_if_exists=True,
    )
    study.get_trials(deepcopy=False)  # reads the journal to its end
    return study


def _cut_torn_line(journal: Path) -> bool:
    """Remove a last line without its end: the next line would be glued to it for ever."""
    if not journal.is_file():
        return False
    with journal.open("rb+") as file:
        data = file.read()
        whole = data.rfind(b"\n") + 1
        file.truncate(whole)
    return whole < len(data)
