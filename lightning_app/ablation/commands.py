"""The commands on a grid: what `ablate plan | run | status | report` call."""

import re
from collections import Counter
from math import inf
from pathlib import Path

from lightning_app.ablation.grid import read_grid
from lightning_app.ablation.overview import plan_command
from lightning_app.ablation.plan import Plan
from lightning_app.ablation.runner import run_grid
from lightning_app.ablation.runs import describe, read_run, run_folder
from lightning_app.ablation.status import status_command
from lightning_app.ablation.workers import Interrupted
from lightning_app.errors import UserError

__all__ = ["plan_command", "report_command", "run_command", "status_command"]

INTERRUPTED = 130


def run_command(
    grid: str | Path,
    experiments: Path = Path("experiments"),
    workers: int | None = None,
    max_time: str | None = None,
    retry_failed: bool = False,
) -> int:
    """`ablate run`: run what is missing, write the report, and return the exit code.

    0 when every cell is done, 1 when cells failed, 130 when a signal or `max_time` (HH:MM) left
    some. Raises `UserError`, and `OSError` (ENOSPC) when the disk is full.
    """
    from lightning_app.analysis.tensorboard import write_index

    spec = read_grid(grid)
    directory = experiments / spec.name
    seconds = inf if max_time is None else parse_max_time(max_time)
    if workers is not None and workers < 1:
        raise UserError(f"--workers: expected 1 or more, found {workers}")
    try:
        plan, ending = run_grid(
            spec,
            directory,
            workers=workers,
            seconds=seconds,
            retry_failed=retry_failed,
            index=write_index,
        )
    except Interrupted:
        print(f"interrupted; what is done is kept, the same command goes on ({directory})")
        return INTERRUPTED
    runs = [read_run(directory, cell) for cell in plan.cells]
    states = Counter(run.result["status"] if run.result else run.state for run in runs)
    print(f"{plan.name}: {len(runs)} cells: {describe(states)}")
    _report(directory, plan, ending.ran)
    if states["missing"]:
        print("time is over; the same command goes on")
        return INTERRUPTED
    if states["failed"]:
        print("failed cells run again with --retry-failed; `ablate status` shows their errors")
    return 1 if states["failed"] else 0


def parse_max_time(text: str) -> float:
    """HH:MM in seconds."""
    match = re.fullmatch(r"(\d+):([0-5]\d)", text)
    if match is None:
        raise UserError(f"--max-time: expected HH:MM such as 01:30, found '{text}'")
    return 60.0 * (60 * int(match[1]) + int(match[2]))


def _report(directory: Path, plan: Plan, ran: bool) -> None:
    """Write the report unless it is newer than everything that it tells of."""
    report = directory / "report.html"
    sources = [run_folder(directory, cell) / "result.json" for cell in plan.cells]
    times = [path.stat().st_mtime for path in (*sources, directory / "plan.json") if path.is_file()]
    if ran or not report.is_file() or report.stat().st_mtime < max(times):
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
    write_index(directory)
    return 0
