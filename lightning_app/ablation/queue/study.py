"""The Optuna study of a grid, an index of its cells: a trial for each attempt to have one done.

The record is the run folders; the study can always be made anew from them.
"""

import json
import math
import secrets
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import optuna
from optuna.exceptions import UpdateFinishedTrialError
from optuna.storages import BaseStorage
from optuna.trial import FrozenTrial, Trial, TrialState

from lightning_app.ablation.plan import Cell, Plan
from lightning_app.ablation.queue.pruning import make_pruner
from lightning_app.ablation.queue.storages import StorageSpec, close_storage, open_storage
from lightning_app.ablation.runs import Run, read_reports, run_folder
from lightning_app.errors import UserError
from lightning_app.files import write_whole, writing_in
from lightning_app.records import outcome

TOKEN = ".study"
"""The file that ties a folder to its study in a database."""

FOLDER = "folder"
"""The study's attribute that holds the token of its folder."""

_LOST_AFTER = "lost_after"  # the study's attribute

_LOWER_IS_BETTER_CAPS = {"val/nll": lambda entropy: entropy, "val/perplexity": math.exp}


class Study:
    """The trials of a grid.

    A trial has its parameters from the start and the user attributes `cell` (an id) and `name`;
    one that waits may have `deaths` and `alone`.

    Args:
        directory: The grid's folder.
        plan: Its cells.
        spec: The storage.
        lost_after: Seconds without a heartbeat after which a trial's supervisor is lost.
        pruner: The grid's pruner.
        alone: Whether no other supervisor works on this grid now.

    Raises:
        UserError: for a storage that cannot be used, a study of another folder, and where others
            count supervisors as lost after another time.
    """

    def __init__(
        self,
        directory: Path,
        plan: Plan,
        spec: StorageSpec,
        lost_after: float,
        pruner: str | None,
        alone: bool,
    ) -> None:
        self._alone = alone
        self._directory = directory
        self._plan = plan
        self._spec = spec
        self._lost_after = lost_after
        self._pruner, self._prunes = make_pruner(pruner), pruner is not None
        self._choices = {
            axis: optuna.distributions.CategoricalDistribution(tuple(map(_primitive, values)))
            for axis, values in plan.axes.items()
        }
        self.notes: list[str] = []
        self._storage, self._study = self._open()

    def close(self) -> None:
        """Give the connections to a database back."""
        close_storage(self._storage)

    def begin_anew(self) -> None:
        """Forget all trials. Nobody else may use the study."""
        folder = self._study.user_attrs.get(FOLDER)
        optuna.delete_study(study_name=self._plan.study, storage=self._storage)
        self._study = self._create(self._storage)
        if folder is not None:
            self._study.set_user_attr(FOLDER, folder)

    def trials(self, *states: TrialState) -> list[FrozenTrial]:
        """The trials in some states, or all of them, by their numbers."""
        return self._study.get_trials(deepcopy=False, states=states or None)

    def trials_of_cells(self) -> dict[str, list[FrozenTrial]]:
        """The trials of each cell of the plan, by its id."""
        found: dict[str, list[FrozenTrial]] = {cell.id: [] for cell in self._plan.cells}
        for trial in self.trials():
            found.get(trial.user_attrs.get("cell", ""), []).append(trial)
        return found

    def trial(self, number: int) -> Trial:
        """A running trial, for a pruner."""
        return Trial(self._study, number)

    def is_running(self, trial: int) -> bool:
        return self._storage.get_trial(trial).state == TrialState.RUNNING

    def claim(self, trial: int) -> bool:
        """Take a waiting trial; whoever is first has it."""
        # Before it runs: a supervisor that dies in between leaves a heartbeat to grow old.
        self.beat(trial)
        try:
            return self._storage.set_trial_state_values(trial, state=TrialState.RUNNING)
        except UpdateFinishedTrialError:
            return False

    def beat(self, trial: int) -> None:
        """Say that the supervisor of a trial lives."""
        if self._spec.several:
            self._storage.record_heartbeat(trial)  # type: ignore[attr-defined]

    def fail_lost(self) -> None:
        """End the trials whose supervisors have been silent for too long."""
        with _no_advice():
            optuna.storages.fail_stale_trials(self._study)

    def add(self, cell: Cell, state: TrialState, run: Run | None = None, **marks: Any) -> None:
        """Add a trial with its parameters, so that waiting cells show theirs too.

        `run`: what a cell that is over has left on disk.
        """
        reports, value, ended = None, None, None
        if run is not None and run.result is not None:
            ended, value = run.result, self.value(run.result)
            marks |= attributes(run.result)
            if self._prunes:  # others are judged by what the complete ones have reported
                reports = read_reports(run_folder(self._directory, cell))
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
        self._storage.create_new_trial(self._study._study_id, template_trial=trial)

    def end(
        self, trial: int, state: TrialState, marks: Mapping[str, Any], value: float | None = None
    ) -> None:
        """End a trial, unless it has ended: others took it, or a broken link hid our first try."""
        try:
            for key, each in marks.items():
                self._storage.set_trial_user_attr(trial, key, each)
            self._storage.set_trial_state_values(trial, state, None if value is None else [value])
        except UpdateFinishedTrialError:
            return

    def value(self, result: Mapping[str, Any]) -> float:
        """The metric, never NaN. A run that failed is as bad as a model without any context.

        Where that has no bound, a run without the metric is worse than all that have it.

        Raises:
            UserError: where results do not have it.
        """
        name, entropy = self._plan.metric, result["unigram_entropy"]
        diverged = result["status"] == "diverged"
        if name not in result["metrics"] and not diverged:
            known = ", ".join(result["metrics"])
            raise UserError(f"{self._plan.name}: metric.name: runs report no '{name}' ({known})")
        value = result["metrics"].get(name)
        if self._plan.mode == "max":
            return 0.0 if value is None else value  # no metric of a run is below
        worst = math.inf if value is None else value
        if diverged and name in _LOWER_IS_BETTER_CAPS:
            return min(worst, _LOWER_IS_BETTER_CAPS[name](entropy))
        return worst

    def _open(self) -> tuple[BaseStorage, optuna.Study]:
        """Open or make the study, and note what had to be mended."""
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        if self._spec.kind != "journal":
            storage = open_storage(self._spec, self._lost_after)
            study = self._create(storage)
            if self._spec.several:
                self._check_folder(study)
                self._agree(study)
            return storage, study
        journal = Path(self._spec.url)
        journal.with_name(f"{journal.name}.lock").unlink(missing_ok=True)  # of a killed supervisor
        if _cut_torn_line(journal):
            self.notes.append(f"{journal}: a torn last line was removed")
        try:
            storage = open_storage(self._spec)
            return storage, self._create(storage)
        except (ValueError, LookupError, TypeError, AttributeError, AssertionError):
            damaged = _free_name(journal.with_name(f"{journal.name}.damaged"))
            journal.replace(damaged)
        self.notes.append(f"{journal}: damaged, kept as {damaged.name}; made anew from the runs")
        storage = open_storage(self._spec)
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
        known = study.user_attrs.get(FOLDER)
        if known is None:
            token = token or secrets.token_hex(8)
            with writing_in(self._directory):
                write_whole(path, f"{token}\n")
            study.set_user_attr(FOLDER, token)
        elif known != token:
            raise UserError(
                f"{self._directory}: is not the folder of the study {self._plan.study} in "
                f"{self._spec.shown}; give --experiments the folder that all hosts share, or make "
                f"the study anew from this folder with `ablate doctor {self._plan.name} --fix "
                "--storage URL`"
            )

    def _agree(self, study: optuna.Study) -> None:
        """Refuse another idea of when a supervisor is lost than that of those at work."""
        known = study.user_attrs.get(_LOST_AFTER)
        if self._alone or known is None:
            study.set_user_attr(_LOST_AFTER, self._lost_after)
        elif known != self._lost_after:
            raise UserError(
                f"--lost-after: {self._lost_after:g} here and {known:g} where others run this "
                "grid; their cells would be taken from them"
            )


def attributes(result: Mapping[str, Any]) -> dict[str, Any]:
    """What a complete trial says of its result."""
    marks = {"diverged": result["status"] == "diverged", "outcome": outcome(result)}
    return {
        **marks,
        "seconds": result["seconds"],
        "attempt": result["attempt"],
        **result["metrics"],
    }


def contradicts(run: Run, trials: list[FrozenTrial]) -> bool:
    """Whether finished trials, which Optuna never changes, say something else than the disk."""
    ended = {TrialState.COMPLETE: "done", TrialState.PRUNED: "pruned"}
    states = [ended[trial.state] for trial in trials if trial.state in ended]
    return len(states) > 1 or any(state != run.state for state in states)


@contextmanager
def _no_advice() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        yield


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


def _free_name(path: Path) -> Path:
    names = (path, *(path.with_name(f"{path.name}.{k}") for k in range(2, 1000)))
    return next(name for name in names if not name.exists())
