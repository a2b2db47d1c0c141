"""What a run's folder says about its cell. Files only: this is the record, the study its index."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from filelock import FileLock, Timeout

from lightning_app.ablation.plan import Cell
from lightning_app.errors import UserError
from lightning_app.records import (
    OUTCOMES,
    PRUNED,
    RESULT,
    Newer,
    Unsound,
    outcome,
    read_pruned,
    read_result,
)

LOCK = ".lock"
REPORTS = "reports.jsonl"  # of an attempt: a line for each validation, where the grid has a pruner
STOP = "stop"  # of an attempt: the supervisor's word to end it


@dataclass(frozen=True, kw_only=True)
class Run:
    """The state of one cell on disk.

    `done`: there is a result. `pruned`: the grid's pruner ended it, and `pruned` holds where.
    `failed`: the last attempt left an error, of which `error` is the last line. `missing`: none of
    these, whatever was tried. `attempts` counts the attempts so far.
    """

    state: Literal["done", "pruned", "failed", "missing"]
    attempts: int
    result: Mapping[str, Any] | None = None
    pruned: Mapping[str, Any] | None = None
    error: str | None = None

    @property
    def status(self) -> str:
        """What counts are made of: the result's status where there is one, else the state."""
        return self.state if self.result is None else self.result["status"]

    @property
    def word(self) -> str:
        """What people read: how a finished run ended in the words of `OUTCOMES`, else the state."""
        return self.state if self.result is None else OUTCOMES[outcome(self.result)]


def run_folder(directory: Path, cell: Cell) -> Path:
    return directory / "runs" / cell.name


def read_run(directory: Path, cell: Cell, metric: str | None = None) -> Run:
    """Read a cell's state; with `metric`, that of the grid, a trained run must have reported it.

    Raises `UserError` for a result that is damaged, not the cell's, or of a newer version.
    """
    folder = run_folder(directory, cell)
    attempts = last_attempt(folder)
    path = folder / RESULT
    try:
        if result := read_result(path, cell.id, metric):
            return Run(state="done", attempts=attempts, result=result)
        path = folder / PRUNED
        if pruned := read_pruned(path, cell.id):
            return Run(state="pruned", attempts=attempts, pruned=pruned)
    except Unsound as error:
        doctor = f"; `ablate doctor {directory.name} --fix` moves it, so that the cell runs again"
        raise UserError(f"{path}: {error}{'' if isinstance(error, Newer) else doctor}") from error
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
        progress = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None
    return progress if isinstance(progress, dict) else None


@dataclass
class ReportReader:
    """Reads what a run reports; knows the steps given and the bytes read of each file."""

    steps: set[int] = field(default_factory=set)
    read: dict[Path, int] = field(default_factory=dict)

    def new(self, folder: Path, attempt: int) -> Iterator[tuple[int, float]]:
        """Yield (step, value) of an attempt's whole lines that are new and have a finite value.

        What the caller does not come back from counts as not given, and is given again.
        """
        path = folder / "attempts" / str(attempt) / REPORTS
        start = self.read.get(path, 0)
        try:
            with path.open("rb") as file:
                file.seek(start)
                data = file.read()
        except FileNotFoundError:
            return
        whole = data.rfind(b"\n") + 1
        for line in data[:whole].splitlines():
            try:
                report = json.loads(line)
            except ValueError:
                continue  # a power loss can leave zeros; what was lost is one report
            if report["value"] is not None and report["step"] not in self.steps:
                yield report["step"], report["value"]
                self.steps.add(report["step"])
        self.read[path] = start + whole


def read_reports(folder: Path) -> dict[int, float]:
    """Every step and value that a run has reported, by whatever attempt."""
    reader, attempts = ReportReader(), range(1, last_attempt(folder) + 1)
    return {step: value for attempt in attempts for step, value in reader.new(folder, attempt)}


def is_over(folder: Path, prunes: bool) -> bool:
    """Whether a run has its result, or was ended by the pruner of a grid that `prunes`."""
    return (folder / RESULT).is_file() or (prunes and (folder / PRUNED).is_file())


def trim_checkpoints(folder: Path, keep: str) -> None:
    """Remove the checkpoints of a finished run that a grid's `checkpoints` does not keep.

    `keep`: `all` (last and best), `last`, `best` or `none`.
    """
    for name in ("last", "best"):
        if keep not in ("all", name):
            (folder / "checkpoints" / f"{name}.ckpt").unlink(missing_ok=True)


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


def by_status(words: Counter[str], states: Sequence[str]) -> dict[str, dict[str, int]]:
    """The same counts for scripts: `states`, of which results know two, and `outcomes` of those."""
    outcomes = {key: words[word] for key, word in OUTCOMES.items()}
    failed = outcomes["stalled"] + outcomes["non_finite"]
    known = {**words, "ok": sum(outcomes.values()) - failed, "diverged": failed}
    return {"states": {state: known.get(state, 0) for state in states}, "outcomes": outcomes}


def describe(states: Counter[str]) -> str:
    """Counts by state in one line, in a fixed order, without zeros."""
    order = (*OUTCOMES.values(), "pruned", "failed", "running", "waiting", "missing")
    return ", ".join(f"{states[state]} {state}" for state in order if states[state])
