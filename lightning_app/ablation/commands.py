"""The commands on a grid: what `ablate plan | run | status | report` call."""

from collections import Counter
from functools import partial
from pathlib import Path

from lightning_app.ablation.grid import read_grid
from lightning_app.ablation.overview import plan_command
from lightning_app.ablation.plan import Plan
from lightning_app.ablation.queue.patience import StorageLost
from lightning_app.ablation.runs import describe, read_run, run_folder
from lightning_app.ablation.status import status_command
from lightning_app.ablation.supervision.guard import REPORT, Interrupted, turn
from lightning_app.ablation.supervision.options import Options
from lightning_app.ablation.supervision.runner import run_grid

__all__ = ["plan_command", "report_command", "run_command", "status_command"]

INTERRUPTED = 130


def run_command(
    grid: str | Path, experiments: Path = Path("experiments"), options: Options | None = None
) -> int:
    """`ablate run`: run what is missing, write the report, and return the exit code.

    0 when every cell is done, 1 when cells failed, 130 when a signal, the end of the time or the
    loss of the storage left some. Raises `UserError`, and `OSError` (ENOSPC) when the disk is full.
    """
    from lightning_app.analysis.tensorboard import write_index

    spec = read_grid(grid)
    directory = experiments / spec.name
    try:
        plan, elsewhere = run_grid(
            spec, directory, options, index=partial(write_index, only_new=True)
        )
    except Interrupted:
        print(f"interrupted; what is done is kept, the same command goes on ({directory})")
        return INTERRUPTED
    except StorageLost as lost:
        print(f"{lost}; what is done is kept, the same command goes on ({directory})")
        return INTERRUPTED
    runs = [read_run(directory, cell) for cell in plan.cells]
    states = Counter(run.status for run in runs)
    print(f"{plan.name}: {len(runs)} cells: {describe(states)}")
    if states["missing"] > elsewhere:
        print("cells are left; the same command goes on")
        return INTERRUPTED
    if elsewhere:
        print(f"{elsewhere} cells run elsewhere; the last supervisor writes the report")
        return 1 if states["failed"] else 0
    _report(directory, plan)
    if states["failed"]:
        print("failed cells run again with --retry-failed; `ablate status` shows their errors")
    return 1 if states["failed"] else 0


def _report(directory: Path, plan: Plan) -> None:
    """Write the report unless it is newer than everything that it tells of."""
    report = directory / "report.html"
    why = f"{report}: another supervisor writes it; waiting"
    with turn(directory / REPORT, lambda: False, why):
        folders = [run_folder(directory, cell) for cell in plan.cells]
        sources = [folder / name for folder in folders for name in ("result.json", "pruned.json")]
        sources = [path for path in (*sources, directory / "plan.json") if path.is_file()]
        newest = max(path.stat().st_mtime for path in sources)
        if not report.is_file() or report.stat().st_mtime < newest:
            from lightning_app.analysis.report import write_report

            report = write_report(directory)
    print(f"report: {report}")
    print(f"curves: tensorboard --logdir {directory}")


def report_command(
    grid: str | Path, experiments: Path = Path("experiments"), out: Path | None = None
) -> int:
    """`ablate report`: tables, figures and `report.html` from run folders alone."""
    from lightning_app.analysis.report import write_report
    from lightning_app.analysis.tensorboard import write_index

    directory = experiments / read_grid(grid).name
    print(f"report: {write_report(directory, out)}")
    if out is not None:  # else the report has brought it up to date
        write_index(directory)
    return 0
