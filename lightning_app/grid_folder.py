"""The files of a grid's folder, `experiments/NAME`."""

from collections.abc import Container, Iterable
from pathlib import Path
from typing import Any

from lightning_app.errors import UserError
from lightning_app.run_folder import RunFolder


def is_file_name(value: Any) -> bool:
    """Whether a value names a file or folder in a folder, and nothing outside of it."""
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
        runs: The folder of the runs, one for each cell.
        journal: The queue, unless `--storage` names another.
        report: The page that `ablate report` writes.
        superseded: Earlier runs that `--rerun-stale` has repeated.
        aside: Folders that `ablate doctor --fix` has moved out of `runs`.
        token: Ties the folder to its study in another storage.
        holder: Names the supervisor that works in the folder, or did last.
        supervisor_lock: Held by the supervisors that work in the folder.
        start_lock: Held while a supervisor starts, and while the queue is repaired.
        report_lock: Held while the report or the index of the runs is written.
        script: The job that `ablate submit` writes for SLURM.
        logs: The folder of the logs of that job.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.specification = path / "grid.yaml"
        self.plan = path / "plan.json"
        self.runs = path / "runs"
        self.journal = path / "optuna.journal"
        self.report = path / "report.html"
        self.superseded = path / "superseded"
        self.aside = path / "aside"
        self.token = path / ".study"
        self.holder = path / ".supervisor.json"
        self.supervisor_lock = path / ".supervisor.lock"
        self.start_lock = path / ".start.lock"
        self.report_lock = path / ".report.lock"
        self.script = path / "submit.sh"
        self.logs = path / "slurm"

    def __str__(self) -> str:
        return str(self.path)

    @property
    def name(self) -> str:
        return self.path.name

    def run(self, name: str) -> RunFolder:
        """The folder of the run of this name. Raises `UserError` if it would lie elsewhere."""
        if not is_file_name(name):
            raise UserError(f"{self.plan}: name: expected the name of a folder, found {name!r}")
        return RunFolder(self.runs / name)

    def all_runs(self) -> list[RunFolder]:
        """The folders of all runs, planned or not, by name."""
        paths = sorted(self.runs.iterdir()) if self.runs.is_dir() else []
        return [RunFolder(path) for path in paths if not path.name.startswith(".")]

    def runs_with_plugins(self, names: Iterable[str]) -> list[Path]:
        """The folders of those runs of these names that use a plug-in."""
        runs = map(self.run, names)
        return [run.path for run in runs if run.plugins.is_file()]

    def strays(self, planned: Container[str]) -> list[RunFolder]:
        """The finished runs whose names are not among the `planned` ones."""
        found = (run for run in self.all_runs() if run.name not in planned)
        return [run for run in found if run.result.is_file()]
