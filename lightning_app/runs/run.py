"""A run, read from its folder: the only reader of its files. The folder is the record."""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from lightning_app.core.errors import UserError
from lightning_app.runs.folder import METRICS, RunFolder, is_pruned
from lightning_app.runs.records import (
    CUT_SHORT,
    OUTCOMES,
    Curve,
    LacksMetric,
    OtherVersion,
    Unreadable,
    Unsound,
    read_curves,
    read_json,
    read_pruned,
    read_result,
    read_yaml,
)


class DamagedRun(Exception):
    """`result.json` or `pruned.json` cannot be used.

    Attributes:
        path: The file.
        other_version: Whether another version of this program wrote it.
        torn: Whether it is torn, or unlike its seal or its id: not of another version, unreadable
            for this user or on this disk, or without a metric.
    """

    def __init__(self, path: Path, reason: Unsound) -> None:
        super().__init__(str(reason))
        self.path = path
        self.other_version = isinstance(reason, OtherVersion)
        self.torn = not isinstance(reason, OtherVersion | Unreadable | LacksMetric)


@dataclass(frozen=True, kw_only=True)
class RunState:
    """The state of a run on disk.

    It is `done` (there is a result), `pruned` (the grid's pruner ended it), `failed` (the last
    attempt left an error, or its result is that of a run that was cut short) or `missing` (none of
    these, even after other attempts).
    """

    state: Literal["done", "pruned", "failed", "missing"]
    attempts: int  # so far
    result: Mapping[str, Any] | None = None  # of `result.json`
    pruned: Mapping[str, Any] | None = None  # of `pruned.json`
    error: str | None = None  # its last line
    short: Mapping[str, Any] | None = None  # of `result.json`, where the run was cut short

    @property
    def word(self) -> str:
        """How a finished run ended, in the words of `OUTCOMES`; otherwise the state."""
        return self.state if self.result is None else OUTCOMES[self.result["outcome"]]


class Run:
    """A run in a folder that may not exist; each file is checked once, when first read.

    Args:
        folder: The folder of the run.
        identity: The id required in its result; None for any.
        metric: The metric of its grid, which a trained run must have reported, and by which a
            pruner must have ended it; None for any.
        pruner: The grid whose pruner may have ended the run, "" for any; None to ignore pruning, so
            that a pruned run must continue.
    """

    def __init__(
        self,
        folder: RunFolder | Path,
        identity: str | None = None,
        metric: str | None = None,
        *,
        pruner: str | None = "",
    ) -> None:
        self.folder = folder if isinstance(folder, RunFolder) else RunFolder(folder)
        self._identity = identity
        self._metric = metric
        self._pruner = pruner

    @cached_property
    def result(self) -> dict[str, Any] | None:
        """The content of `result.json`, None before the run has finished.

        Raises:
            DamagedRun: if it is damaged, belongs to another cell, or is from another version.
        """
        with _damaging(self.folder.result):
            return read_result(self.folder.result, self._identity, self._metric)

    @cached_property
    def state(self) -> RunState:
        """The progress of the run.

        Raises:
            DamagedRun: if a result is damaged, belongs to another cell, or is from another version.
        """
        folder, attempts = self.folder, self.folder.last_attempt()
        if result := self.result:
            if why := cut_short(result):
                return RunState(state="failed", attempts=attempts, error=why, short=result)
            return RunState(state="done", attempts=attempts, result=result)
        with _damaging(folder.pruned):
            pruned = read_pruned(folder.pruned, self._identity, beside=False)
            if pruned and self._pruner is not None and pruned["attempt"] == attempts:
                # Where such a run has continued, the files next to it have changed.
                pruned = read_pruned(folder.pruned, self._identity)
        if pruned and is_pruned(pruned, self._pruner, self._metric):
            return RunState(state="pruned", attempts=attempts, pruned=pruned)
        if error := folder.attempt(attempts).error_line():
            return RunState(state="failed", attempts=attempts, error=error)
        return RunState(state="missing", attempts=attempts)

    @property
    def finished(self) -> dict[str, Any]:
        """The content of `result.json` of a run that must have one.

        Raises:
            UserError: if it is missing or damaged.
        """
        path = self.folder.result
        try:
            result = self.result
        except DamagedRun as error:
            raise UserError(f"{path}: {error}") from error
        if result is None:
            raise UserError(f"{path}: is missing; the run has not finished")
        return result

    @cached_property
    def config(self) -> dict[str, Any]:
        """The content of `config.yaml`.

        Raises:
            UserError: if it is missing or damaged.
        """
        path = self.folder.config
        try:
            return read_yaml(path)
        except FileNotFoundError as error:
            raise UserError(f"{path}: is missing; a finished run has it") from error
        except Unsound as error:
            raise UserError(f"{path}: {error}") from error

    @cached_property
    def id(self) -> str | None:
        """The id in `identity.json`; None without that file.

        Raises:
            UserError: if it is damaged.
        """
        path = self.folder.identity
        try:
            return str(read_json(path)["id"])
        except FileNotFoundError:
            return None
        except (Unsound, KeyError) as error:
            raise UserError(f"{path}: damaged: {error}; it holds no id of a run") from error

    def file(self, name: str) -> Path | None:
        """A file of the folder; None if it is missing, or the seal of the result is broken."""
        path = self.folder.path / name
        with suppress(DamagedRun):
            return path if self.state and path.is_file() else None
        return None

    def curves(self, wanted: Callable[[str], bool]) -> dict[str, Curve]:
        """The `wanted` columns of `metrics.csv`, none if the file is missing."""
        path = self.file(METRICS)
        return {} if path is None else read_curves(path, wanted)

    def curve(self, tag: str) -> Curve:
        """One column of `metrics.csv`, empty if the column is missing."""
        return self.curves(tag.__eq__).get(tag, {})


@contextmanager
def _damaging(path: Path) -> Iterator[None]:
    try:
        yield
    except Unsound as error:
        raise DamagedRun(path, error) from error


def cut_short(result: Mapping[str, Any]) -> str | None:
    """How a run was cut short; None if it did all its steps or was ended by our own rules."""
    if result["outcome"] == "non_finite":
        return None
    asked = result.get("steps_asked")
    if result["status"] == CUT_SHORT or (asked is not None and result["steps"] < asked):
        return words_of_short(result["steps"], asked)
    return None


def words_of_short(steps: int, asked: int | None) -> str:
    """The name in messages of a run that was cut short."""
    return f"cut short at {steps} of {asked} steps"


def read_progress(folder: RunFolder, attempt: int) -> Mapping[str, Any] | None:
    """`progress.json` of an attempt, or None if it does not exist yet."""
    try:
        progress = json.loads(folder.attempt(attempt).progress.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None
    return progress if isinstance(progress, dict) else None


def fraction(progress: Mapping[str, Any] | None) -> float:
    """The completed fraction of a run's steps, between 0 and 1; 0 if only its time is limited."""
    if progress is None or progress["max_steps"] < 1:
        return 0.0
    return min(1.0, progress["step"] / progress["max_steps"])


@dataclass
class ReportReader:
    """Read the reports of one run; tracks the steps yielded and the bytes read per file.

    Reports of another metric are left out: a grid that shares the run may have had another.
    """

    metric: str
    steps: set[int] = field(default_factory=set)
    read: dict[Path, int] = field(default_factory=dict)

    def new(self, folder: RunFolder, attempt: int) -> Iterator[tuple[int, float]]:
        """Yield (step, value) of an attempt's new complete lines with finite values.

        A line counts as yielded once the caller asks for the next one; otherwise it is repeated.
        """
        path = folder.attempt(attempt).reports
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
                continue  # a power loss can leave zeros; one report is lost
            step, value = report["step"], report["value"]
            if report["metric"] == self.metric and value is not None and step not in self.steps:
                yield step, value
                self.steps.add(step)
        self.read[path] = start + whole


def read_reports(folder: RunFolder, metric: str) -> dict[int, float]:
    """Every step and value of `metric` that a run has reported, over all its attempts."""
    reader, attempts = ReportReader(metric), range(1, folder.last_attempt() + 1)
    return {step: value for attempt in attempts for step, value in reader.new(folder, attempt)}


def last_report(folder: RunFolder, metric: str) -> float | None:
    """The value of the last step that a run has reported; None before the first report."""
    reports = read_reports(folder, metric)
    return reports[max(reports)] if reports else None
