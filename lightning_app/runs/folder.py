"""The paths in the folders of a run, `experiments/.runs/ID`, and of a grid, `experiments/NAME`."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_app.core.errors import UserError

STORE = ".runs"
"""The folder of all runs inside a folder of experiments."""

RESULT = "result.json"
PRUNED = "pruned.json"
CONFIG = "config.yaml"
IDENTITY = "identity.json"
BLOCK = "block.json"
DRAWING = "block.svg"
ENVIRONMENT = "env.json"
METRICS = "metrics.csv"
PROBES = "probes.csv"
HYPOTHESES = "hypotheses.txt"
REFERENCES = "references.txt"
PLUGINS = "plugins.json"

VOUCHED = (CONFIG, IDENTITY, METRICS, PROBES, BLOCK, ENVIRONMENT, HYPOTHESES, REFERENCES, PLUGINS)
"""The files covered by the seal of a result: those that are read after the run and written
before its result."""

NAMED = ("last", "best")
"""The checkpoints that a run may keep."""


def is_pruned(pruned: Mapping[str, Any], pruner: str | None, metric: str | None) -> bool:
    """Whether a `pruned.json` is of this pruner and this metric, as in `Run`."""
    if pruner is None:
        return False
    by, of = pruned.get("grid", pruner), pruned.get("metric", metric)
    return pruner in ("", by) and metric in (None, of)


class RunFolder:
    """The paths in the folder of one run.

    Attributes:
        path: The folder.
        config: The resolved config that the run trains.
        identity: The values that the id of the run is computed from (`identity.record`).
        plugins: The plug-ins that the run uses, if any, with their digests (`plugins`).
        plugin_copies: The folder of copies of plug-ins that are files. The copies are never
            executed.
        block: The resolved wiring of each stack, written at the end of the run.
        environment: Interpreter, libraries and device, written at the end of the run.
        metrics: The curves of all attempts, one row per step.
        probes: The measurements of the callback `SignalProbe`.
        tokenizer: The SentencePiece model of the run's data.
        hypotheses: The translations of the test split, one per line.
        references: The reference translations in the same order.
        result: The outcome of the run, written last; only this file shows that it is finished.
        pruned: The step at which the grid's pruner ended the run, which then has no result.
        checkpoints: The folder of `last.ckpt` and `best.ckpt`.
        attempts: The folder of the numbered attempts.
        added: The folder below which a cell's own loggers and callbacks write.
        listed: One file per grid that lists the run, with the name of its link there.
        lock: Held by the process that trains the run.
        holder: The identity of that process.
        claim: Held by the supervisor that runs the cell, from the start of an attempt to its end.
        queue: The early ends and retries of an unfinished run.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / CONFIG
        self.identity = path / IDENTITY
        self.plugins = path / PLUGINS
        self.plugin_copies = path / "plugins"
        self.block = path / BLOCK
        self.environment = path / ENVIRONMENT
        self.metrics = path / METRICS
        self.probes = path / PROBES
        self.tokenizer = path / "tokenizer.model"
        self.hypotheses = path / HYPOTHESES
        self.references = path / REFERENCES
        self.result = path / RESULT
        self.pruned = path / PRUNED
        self.checkpoints = path / "checkpoints"
        self.attempts = path / "attempts"
        self.added = path / "added"
        self.listed = path / "grids"
        self.lock = path / ".lock"
        self.holder = path / ".holder"
        self.claim = path / ".claim"
        self.queue = path / "queue.json"

    def __str__(self) -> str:
        return str(self.path)

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def grid(self) -> str | None:
        """The name of the grid in whose folder this path lies, None outside ``GRID/runs``."""
        above = self.path.absolute().parent
        return above.parent.name if above.name == "runs" else None

    def grids(self) -> dict[str, str]:
        """The grids that list the run, each with the name of its link; `fit` for single runs."""
        store = self.path.resolve().parent
        found = {}
        for path in sorted(self.listed.iterdir()) if self.listed.is_dir() else ():
            name = path.read_text(encoding="utf-8").strip()
            link = store.parent / path.name / "runs" / name
            # A grid that was removed or now plans other cells no longer lists the run.
            if is_file_name(name) and link.exists() and link.samefile(self.path):
                found[path.name] = name
        return found

    def checkpoint(self, name: str) -> Path:
        """The path of the checkpoint `last` or `best`."""
        return self.checkpoints / f"{name}.ckpt"

    def attempt(self, number: int) -> "AttemptFolder":
        return AttemptFolder(self.attempts / str(number))

    def last_attempt(self) -> int:
        """The highest attempt number; 0 before the first."""
        if not self.attempts.is_dir():
            return 0
        names = (path.name for path in self.attempts.iterdir())
        return max((int(name) for name in names if name.isdigit()), default=0)

    def is_over(self, pruner: str | None, metric: str | None) -> bool:
        """Whether the run has a result or was ended by a grid's pruner (as in `Run`)."""
        if self.result.is_file() or pruner is None:
            return self.result.is_file()
        try:
            return is_pruned(json.loads(self.pruned.read_text(encoding="utf-8")), pruner, metric)
        except FileNotFoundError:
            return False
        except (ValueError, AttributeError):
            return True  # the reader of runs reports the damage


class AttemptFolder:
    """The paths in the folder of one attempt of a run.

    Attributes:
        path: The folder.
        progress: The step, the rate in steps per second and the loss, for display.
        provenance: Code, libraries and data of the attempt, written at its start.
        metrics: The curves of this attempt.
        reports: One line per validation, if the grid has a pruner.
        stop: Written by the supervisor to end the attempt.
        meeting: The file through which the ranks of a cell find each other.
        error: The traceback of a crash; its last line is the message.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.progress = path / "progress.json"
        self.provenance = path / "provenance.json"
        self.metrics = path / METRICS
        self.reports = path / "reports.jsonl"
        self.stop = path / "stop"
        self.meeting = path / "meeting"
        self.error = path / "error.txt"

    def log(self, rank: int) -> Path:
        """The file for the output of a rank."""
        return self.path / ("log.txt" if rank == 0 else f"log-rank{rank}.txt")

    def error_of(self, rank: int) -> Path:
        """The file for the error of a rank, if there are several ranks."""
        return self.path / f"error-rank{rank}.txt"

    def error_line(self) -> str | None:
        """The last line of the error, None if the attempt left none."""
        try:
            text = self.error.read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            return None
        lines = (line.strip() for line in reversed(text.split("\n")))
        return next(filter(None, lines), "no message")


def is_file_name(value: Any) -> bool:
    """Whether a value names a file or folder in a folder, and nothing outside it."""
    return (
        isinstance(value, str)
        and value not in ("", ".", "..")
        and Path(value).name == value
        and value.isprintable()
    )


class GridFolder:
    """The paths in the folder of one grid.

    Attributes:
        path: The folder.
        specification: `grid.yaml`, the grid file with its base inlined.
        plan: The cells, with their ids and names.
        runs: One link per cell into the store of runs.
        journal: The Optuna study, unless `--storage` names another storage.
        report: The page that `ablate report` writes.
        token: Ties the folder to its study in another storage.
        holder: The supervisor that works in the folder or did so last.
        supervisor_lock: Held by the supervisors that work in the folder.
        start_lock: Held while a supervisor starts.
        study_lock: Held while a supervisor writes the study.
        link_lock: Held while a run is listed by this grid.
        report_lock: Held while the report or the index of the runs is written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.specification = path / "grid.yaml"
        self.plan = path / "plan.json"
        self.runs = path / "runs"
        self.journal = path / "optuna.journal"
        self.report = path / "report.html"
        self.token = path / ".study"
        self.holder = path / ".supervisor.json"
        self.supervisor_lock = path / ".supervisor.lock"
        self.start_lock = path / ".start.lock"
        self.study_lock = path / ".study.lock"
        self.link_lock = path / ".link.lock"
        self.report_lock = path / ".report.lock"

    def __str__(self) -> str:
        return str(self.path)

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def experiments(self) -> Path:
        """The folder of experiments, which holds the store next to the grids."""
        plain = self.path.name not in ("", "..") and not self.path.is_symlink()
        return (self.path if plain else self.path.resolve()).parent

    def link(self, name: str) -> Path:
        """The link to the run of this name. Raises `UserError` if it would lie elsewhere."""
        if not is_file_name(name):
            raise UserError(f"{self.plan}: name: expected the name of a folder, found {name!r}")
        return self.runs / name
