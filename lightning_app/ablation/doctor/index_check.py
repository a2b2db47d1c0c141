"""Whether the study of a grid, the index of its run folders, says what they say. Only reads."""

import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import optuna
from optuna.storages import BaseStorage
from optuna.storages._heartbeat import BaseHeartbeat
from optuna.trial import FrozenTrial, TrialState

from lightning_app.ablation.plan import Cell, Plan
from lightning_app.ablation.queue.storages import StorageSpec, close_storage, open_storage
from lightning_app.ablation.runs import Run
from lightning_app.records import Unsound

FOLDER = "folder"  # attribute of a study in a database: which folder it is of
_DAMAGE = (ValueError, KeyError, TypeError, AttributeError, AssertionError, IndexError)


class Torn(Unsound):
    """A journal whose last line alone is damaged."""


@dataclass(frozen=True)
class Index:
    """What a study holds; `folder` is the token of the grid's folder that it is of, if it has one.

    `alive` counts the running trials whose supervisor may still be at work.
    """

    trials: list[FrozenTrial]
    folder: str | None = None
    alive: int = 0


def read_index(plan: Plan, storage: StorageSpec) -> Index:
    """Read a grid's study, which is empty where there is none yet.

    A journal is read from a copy, as to open one may change it.

    Raises:
        Unsound: for a journal that is torn or damaged.
        UserError: where a database cannot be used.
    """
    if storage.kind != "journal":
        return _read(plan, storage)
    journal = Path(storage.url)
    if not journal.exists():
        return Index([])
    if not journal.is_file():
        raise Unsound("is no file")
    data = journal.read_bytes()
    if not data.endswith(b"\n") and data:
        raise Torn("torn: its last line has no end")
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / journal.name
        copy.write_bytes(data)
        try:
            return _read(plan, StorageSpec("journal", str(copy), storage.shown))
        except _DAMAGE as error:
            reason = f"{type(error).__name__}: {error}"[:80]
            raise Unsound(f"damaged: cannot be replayed ({reason})") from error


def _read(plan: Plan, storage: StorageSpec) -> Index:
    opened = open_storage(storage)
    try:
        return _index(plan, opened, storage.several)
    finally:
        close_storage(opened)


def _index(plan: Plan, opened: BaseStorage, several: bool) -> Index:
    names = {study.study_name for study in opened.get_all_studies()}
    if plan.study not in names:
        return Index([])
    study = optuna.load_study(study_name=plan.study, storage=opened)
    trials = study.get_trials(deepcopy=False)
    running = {trial._trial_id for trial in trials if trial.state == TrialState.RUNNING}
    if isinstance(opened, BaseHeartbeat) and several:
        running -= set(opened._get_stale_trial_ids(study._study_id))
    return Index(trials, study.user_attrs.get(FOLDER), len(running))


def differences(plan: Plan, runs: Mapping[str, Run], trials: list[FrozenTrial]) -> Iterator[str]:
    """Say in a phrase each how the study differs from the disk, while nobody runs the grid.

    `runs` holds the state on disk of each cell to compare, by id.
    """
    found: dict[str, list[str]] = {}
    known: dict[str, list[FrozenTrial]] = {cell.id: [] for cell in plan.cells}
    for trial in trials:
        cell = trial.user_attrs.get("cell")
        if cell in known:
            known[cell].append(trial)
        elif trial.state != TrialState.FAIL:
            found.setdefault("trials of no cell of the plan", []).append(f"trial {trial.number}")
    for cell in plan.cells:
        if cell.id in runs:
            for phrase in _of_cell(plan, cell, runs[cell.id], known[cell.id]):
                found.setdefault(phrase, []).append(cell.name)
    for phrase, names in found.items():
        yield f"{len(names)} {phrase} (such as {names[0]})"


def _of_cell(plan: Plan, cell: Cell, run: Run, trials: list[FrozenTrial]) -> Iterator[str]:
    states = [trial.state for trial in trials if trial.state != TrialState.FAIL]
    outcome = {"done": TrialState.COMPLETE, "pruned": TrialState.PRUNED}.get(run.state)
    if TrialState.RUNNING in states:
        yield "running there, though nobody runs them"
    for state in (TrialState.COMPLETE, TrialState.PRUNED):
        if state in states and state != outcome:
            yield f"{state.name.lower()} there, without it on disk"
    if outcome is not None and outcome not in states:
        yield f"{run.state} on disk, not {outcome.name.lower()} there"
    elif len(states) > 1:
        yield "with several trials that count"
    if run.state == "failed" and not trials:
        yield "failed on disk, unknown there"
    if outcome == TrialState.COMPLETE and any(_differs(plan, run, trial) for trial in trials):
        yield "complete there with another value"


def _differs(plan: Plan, run: Run, trial: FrozenTrial) -> bool:
    """Whether a complete trial holds another metric than the result; diverged ones are capped."""
    if trial.state != TrialState.COMPLETE or run.result is None or run.result["status"] != "ok":
        return False
    value = run.result["metrics"].get(plan.metric)
    return value is not None and trial.value != value
