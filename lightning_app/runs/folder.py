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
    """The paths in the folder of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / CONFIG  # the resolved config that the run trains
        self.identity = path / IDENTITY  # the values that its id is computed from
        self.plugins = path / PLUGINS  # the plug-ins that it uses, if any, with their digests
        self.plugin_copies = path / "plugins"  # of plug-ins that are files; never executed
        self.block = path / BLOCK  # the resolved wiring of each stack, written at the end
        self.environment = path / ENVIRONMENT  # Python, libraries and device, written at the end
        self.metrics = path / METRICS  # the curves of all attempts, one row per step
        self.probes = path / PROBES  # the measurements of the callback `SignalProbe`
        self.tokenizer = path / "tokenizer.model"  # the SentencePiece model of its data
        self.hypotheses = path / HYPOTHESES  # the translations of the test split, one per line
        self.references = path / REFERENCES  # the reference translations in the same order
        self.result = path / RESULT  # the outcome, written last; only it shows a finished run
        self.pruned = path / PRUNED  # where a grid's pruner ended the run, which has no result
        self.checkpoints = path / "checkpoints"  # `last.ckpt` and `best.ckpt`
        self.attempts = path / "attempts"  # the numbered attempts
        self.added = path / "added"  # a cell's own loggers and callbacks write below it
        self.listed = path / "grids"  # one file per grid that lists the run, with its name there
        self.lock = path / ".lock"  # held by the process that trains the run
        self.holder = path / ".holder"  # the identity of that process
        self.claim = path / ".claim"  # held by the supervisor of an attempt from start to end
        self.queue = path / "queue.json"  # the early ends and retries of an unfinished run

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
    """The paths in the folder of one attempt of a run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.progress = path / "progress.json"  # step, steps per second and loss, for display
        self.provenance = path / "provenance.json"  # code, libraries, data, written at the start
        self.metrics = path / METRICS  # the curves of this attempt
        self.reports = path / "reports.jsonl"  # one line per validation, if the grid has a pruner
        self.stop = path / "stop"  # written by the supervisor to end the attempt
        self.meeting = path / "meeting"  # the file through which the ranks find each other
        self.error = path / "error.txt"  # the traceback of a crash; the message in its last line

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
    """The paths in the folder of one grid."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.specification = path / "grid.yaml"  # the grid file with its base inlined
        self.plan = path / "plan.json"  # the cells, with their ids and names
        self.runs = path / "runs"  # one link per cell into the store of runs
        self.journal = path / "optuna.journal"  # the study, unless `--storage` names another
        self.report = path / "report.html"  # the page that `ablate report` writes
        self.token = path / ".study"  # ties the folder to its study in another storage
        self.holder = path / ".supervisor.json"  # who works in the folder, or did so last
        self.supervisor_lock = path / ".supervisor.lock"  # held by the supervisors in the folder
        self.start_lock = path / ".start.lock"  # held while a supervisor starts
        self.study_lock = path / ".study.lock"  # held while a supervisor writes the study
        self.link_lock = path / ".link.lock"  # held while a run is listed by this grid
        self.report_lock = path / ".report.lock"  # held while the report or the index is written

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
