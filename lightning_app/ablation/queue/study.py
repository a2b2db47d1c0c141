"""The Optuna study of a grid: a trial for each attempt to run one of its cells.

The study is only an index: it can always be made again from the run folders.
"""

import json
import math
import secrets
from collections.abc import Mapping
from datetime import datetime
from functools import cache
from typing import Any

import optuna
from optuna.exceptions import UpdateFinishedTrialError
from optuna.storages import RDBStorage
from optuna.trial import FrozenTrial, Trial, TrialState

from lightning_app.ablation.cells import Cell
from lightning_app.ablation.grid import Grid
from lightning_app.ablation.queue.pruning import make_pruner
from lightning_app.ablation.queue.storages import (
    Journal,
    StorageSpec,
    close_storage,
    fail_lost,
    open_storage,
)
from lightning_app.ablation.reports import read_reports
from lightning_app.atomic_write import move, write_whole
from lightning_app.errors import UserError
from lightning_app.run_state import RunState
from lightning_app.task_facts import LOSS

FOLDER = "folder"
"""The attribute of a study outside of its folder that holds the token of the folder."""

_LOST_AFTER = "lost_after"  # the study's attribute

_LOWER_IS_BETTER_CAPS = {LOSS: lambda entropy: entropy, "val/perplexity": math.exp}


class AnotherFolder(UserError):
    """The database has a study of this grid that belongs to another folder."""


class Study:
    """The trials of a grid, called by their numbers.

    A trial has its parameters from the start and the user attributes `cell` (an id) and `name`;
    one that waits may have `deaths` and `alone`.

    Args:
        grid: The grid.
        spec: The storage.
        lost_after: Seconds without a heartbeat after which the supervisor of a trial is lost.
        alone: Whether no other supervisor works on this grid now.

    Raises:
        AnotherFolder: for a study of another folder.
        UserError: for a storage that cannot be used, and if the other supervisors have another
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
        # The heartbeat comes first: if the supervisor dies now, the old heartbeat shows it.
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
        """Add a trial with its parameters, so that waiting cells show theirs too.

        `run`: the files of a finished cell.
        """
        reports, value, ended = None, None, None
        if run is not None and run.result is not None:
            ended, value = run.result, self.value(run.result)
            marks |= attributes(run.result)
            if self._grid.prunes:  # a pruner compares others with the reports of complete cells
                reports = read_reports(self._grid.run(cell))
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
        """End a trial unless it has ended, by another supervisor or an earlier try of this call."""
        trial = self._id(number)
        try:
            for key, each in marks.items():
                self._storage.set_trial_user_attr(trial, key, each)
            self._storage.set_trial_state_values(trial, state, None if value is None else [value])
        except UpdateFinishedTrialError:
            return

    def value(self, result: Mapping[str, Any]) -> float:
        """The metric, never NaN. A run that failed counts as a model that ignores the context.

        If the metric of such a model is not known, a run without the metric is worse than all
        others.

        Raises:
            UserError: if results do not have the metric.
        """
        name, entropy = self._grid.plan.metric, result["unigram_entropy"]
        diverged = result["status"] == "diverged"
        if name not in result["metrics"] and not diverged:
            known = ", ".join(result["metrics"])
            raise UserError(f"{self._grid.name}: metric.name: runs report no '{name}' ({known})")
        value = result["metrics"].get(name)
        if self._grid.plan.mode == "max":
            # A correlation is 0 where the context is ignored, and no share is below 0.
            return 0.0 if value is None else value
        worst = math.inf if value is None else value
        if diverged and name in _LOWER_IS_BETTER_CAPS:
            return min(worst, _LOWER_IS_BETTER_CAPS[name](entropy))
        return worst

    def _find_id(self, number: int) -> int:
        """The id of a trial in the storage."""
        study = self._storage.get_study_id_from_name(self._grid.plan.study)
        return self._storage.get_trial_id_from_study_id_trial_number(study, number)

    def _open(self, alone: bool) -> tuple[Journal | RDBStorage, optuna.Study]:
        """Open or make the study, and note the repair of a damaged journal."""
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
        study.get_trials(deepcopy=False)  # reads a journal to its end
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
        """Refuse a `lost_after` that differs from that of the running supervisors."""
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
    """A value in a form that Optuna's categories can hold: lists and mappings become JSON."""
    return json.dumps(value, sort_keys=True) if isinstance(value, list | dict) else value
