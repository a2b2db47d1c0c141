"""The state of a run, read from its folder. The folder is the record; the queue is an index."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lightning_app.errors import UserError
from lightning_app.records import (
    CUT_SHORT,
    OUTCOMES,
    OtherVersion,
    Unsound,
    read_pruned,
    read_result,
)
from lightning_app.run_folder import RunFolder
from lightning_app.strict_yaml import load_yaml


class DamagedRun(Exception):
    """`result.json` or `pruned.json` cannot be used.

    Attributes:
        path: The file.
        other_version: Whether another version of this program wrote it, which this one cannot read.
    """

    def __init__(self, path: Path, reason: Unsound) -> None:
        super().__init__(str(reason))
        self.path = path
        self.other_version = isinstance(reason, OtherVersion)


@dataclass(frozen=True, kw_only=True)
class RunState:
    """The state of a run on disk.

    Attributes:
        state: `done` (there is a result), `pruned` (the grid's pruner ended it), `failed` (the last
            attempt left an error, or its result is of a run that was cut short) or `missing` (none
            of these, even after other attempts).
        attempts: The number of attempts so far.
        result: The content of `result.json`.
        pruned: The content of `pruned.json`.
        error: The last line of the error.
        short: The content of `result.json` of a run that was cut short.
    """

    state: Literal["done", "pruned", "failed", "missing"]
    attempts: int
    result: Mapping[str, Any] | None = None
    pruned: Mapping[str, Any] | None = None
    error: str | None = None
    short: Mapping[str, Any] | None = None

    @property
    def word(self) -> str:
        """How a finished run ended, in the words of `OUTCOMES`, else the state."""
        return self.state if self.result is None else OUTCOMES[self.result["outcome"]]


def read_state(
    folder: RunFolder, identity: str, metric: str | None = None, *, prunes: bool = True
) -> RunState:
    """Read the state of the run with this id.

    Args:
        folder: The run's folder, which may not exist.
        identity: The id that its result must have.
        metric: The metric of its grid, which a trained run must have reported.
        prunes: Whether the grid has a pruner. If not, a run that was pruned must continue.

    Raises:
        DamagedRun: if a result is damaged, belongs to another cell, or is of another version.
    """
    attempts = folder.last_attempt()
    path = folder.result
    try:
        if result := read_result(path, identity, metric):
            if why := cut_short(folder, result):
                return RunState(state="failed", attempts=attempts, error=why, short=result)
            return RunState(state="done", attempts=attempts, result=result)
        path = folder.pruned
        # Without a pruner such a run goes on, and the files beside it change.
        if (pruned := read_pruned(path, identity, beside=prunes)) and prunes:
            return RunState(state="pruned", attempts=attempts, pruned=pruned)
    except Unsound as error:
        raise DamagedRun(path, error) from error
    if error := folder.attempt(attempts).error_line():
        return RunState(state="failed", attempts=attempts, error=error)
    return RunState(state="missing", attempts=attempts)


def cut_short(folder: RunFolder, result: Mapping[str, Any]) -> str | None:
    """Say how a run was cut short, None if it did all its steps, or was ended by our own rules.

    Earlier versions recorded the steps of a run and not those that were asked for: these are the
    `max_steps` of its config, unless its epochs may have been fewer.
    """
    if result["outcome"] == "non_finite":
        return None
    asked = result.get("steps_asked")
    if asked is None and result["status"] != CUT_SHORT:
        asked = _steps_of(folder)
    if result["status"] == CUT_SHORT or (asked is not None and result["steps"] < asked):
        return words_of_short(result["steps"], asked)
    return None


def words_of_short(steps: int, asked: int | None) -> str:
    """How messages name a run that was cut short."""
    return f"cut short at {steps} of {asked} steps"


def _steps_of(folder: RunFolder) -> int | None:
    """The steps that `max_steps` alone asks for; other checks say what is wrong with the config."""
    try:
        tree: Any = load_yaml(folder.config.read_text(encoding="utf-8"))
        trainer = tree["trainer"]
        steps, epochs = trainer["max_steps"], trainer.get("max_epochs")
    except (OSError, ValueError, UserError, LookupError, TypeError):
        return None
    counts = isinstance(steps, int) and steps > 0 and epochs in (None, -1)
    return steps if counts else None


def read_progress(folder: RunFolder, attempt: int) -> Mapping[str, Any] | None:
    """`progress.json` of an attempt, or None if it does not exist yet."""
    try:
        progress = json.loads(folder.attempt(attempt).progress.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None
    return progress if isinstance(progress, dict) else None


def fraction(progress: Mapping[str, Any] | None) -> float:
    """The fraction of a run's steps that are done, between 0 and 1."""
    return min(1.0, progress["step"] / max(1, progress["max_steps"])) if progress else 0.0
