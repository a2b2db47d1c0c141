"""What a run's folder says about its cell. Files only: this is the record, the study its index."""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from filelock import FileLock, Timeout

from lightning_app.ablation.plan import Cell
from lightning_app.errors import UserError

LOCK = ".lock"


@dataclass(frozen=True, kw_only=True)
class Run:
    """The state of one cell on disk.

    `done`: there is a result. `failed`: the last attempt left an error, of which `error` is the
    last line. `missing`: neither, whatever was tried. `attempts` counts the attempts so far.
    """

    state: Literal["done", "failed", "missing"]
    attempts: int
    result: Mapping[str, Any] | None = None
    error: str | None = None


def run_folder(directory: Path, cell: Cell) -> Path:
    return directory / "runs" / cell.name


def read_run(directory: Path, cell: Cell) -> Run:
    """Read a cell's state. Raises `UserError` for a result that is damaged or not the cell's."""
    folder = run_folder(directory, cell)
    attempts = last_attempt(folder)
    path = folder / "result.json"
    if path.is_file():
        try:
            result = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise UserError(f"{path}: no valid JSON; remove the run's folder") from error
        if result["id"] != cell.id:
            raise UserError(f"{path}: id: {result['id']} is not the planned {cell.id}")
        return Run(state="done", attempts=attempts, result=result)
    error = folder / "attempts" / str(attempts) / "error.txt"
    if error.is_file():
        lines = error.read_text(encoding="utf-8", errors="replace").split("\n")
        last = next((line for line in reversed(lines) if line.strip()), "no message")
        return Run(state="failed", attempts=attempts, error=last.strip())
    return Run(state="missing", attempts=attempts)


def last_attempt(folder: Path) -> int:
    """The highest number of an attempt in a run's folder, 0 before the first."""
    attempts = folder / "attempts"
    if not attempts.is_dir():
        return 0
    return max((int(path.name) for path in attempts.iterdir() if path.name.isdigit()), default=0)


def read_progress(folder: Path, attempt: int) -> Mapping[str, Any] | None:
    """`progress.json` of an attempt, or None as long as it has written none."""
    path = folder / "attempts" / str(attempt) / "progress.json"
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, json.JSONDecodeError):
        return None


def fraction(progress: Mapping[str, Any] | None) -> float:
    """The part of a run that is over, between 0 and 1."""
    return min(1.0, progress["step"] / max(1, progress["max_steps"])) if progress else 0.0


def is_held(lock: Path) -> bool:
    """Whether a living process holds a lock file."""
    if not lock.is_file():
        return False
    try:
        with FileLock(lock, timeout=0):
            return False
    except Timeout:
        return True


def describe(states: Counter[str]) -> str:
    """Counts by state in one line, in a fixed order, without zeros."""
    order = ("ok", "diverged", "failed", "running", "waiting", "missing")
    return ", ".join(f"{states[state]} {state}" for state in order if states[state])
