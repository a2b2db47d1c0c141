"""`ablate status`: what the files of a grid's folder say, while it runs and afterwards."""

from collections import Counter
from pathlib import Path

from lightning_app.ablation.display import clock, plain_console, running_table
from lightning_app.ablation.grid import read_grid
from lightning_app.ablation.plan import load_plan
from lightning_app.ablation.runs import (
    LOCK,
    describe,
    fraction,
    is_held,
    read_progress,
    read_run,
    run_folder,
)
from lightning_app.errors import UserError


def status_command(grid: str | Path, experiments: Path = Path("experiments")) -> int:
    """Print counts by state, running cells, time left, and the errors of failed cells.

    Time left: the mean seconds of finished cells, over as many workers as cells run now.
    """
    spec = read_grid(grid)
    directory = experiments / spec.name
    plan = load_plan(directory)
    if plan is None:
        raise UserError(f"{directory}: holds no plan yet; `ablate plan` or `ablate run` makes one")
    if plan.axes != spec.axes:
        raise UserError(f"{directory}: holds another grid than {spec.source}; its axes differ")
    states: Counter[str] = Counter()
    running, failed, seconds = [], [], []
    for cell in plan.cells:
        folder, run = run_folder(directory, cell), read_run(directory, cell)
        if run.result is not None:
            states[run.result["status"]] += 1
            seconds.append(run.result["seconds"])
        elif run.state == "pruned" and spec.pruner is not None:
            states["pruned"] += 1
        elif is_held(folder / LOCK):
            states["running"] += 1
            running.append((cell.name, read_progress(folder, run.attempts)))
        elif run.state == "failed":
            states["failed"] += 1
            failed.append((cell.name, run.error))
        else:
            states["waiting"] += 1
    console = plain_console()
    console.print(f"{plan.name}: {len(plan.cells)} cells: {describe(states)}", markup=False)
    if running:
        console.print(running_table(running))
    if running and seconds:
        cells = states["waiting"] + sum(1 - fraction(progress) for _, progress in running)
        left = cells * sum(seconds) / len(seconds) / len(running)
        console.print(f"time left: {clock(left)} with {len(running)} workers", markup=False)
    for name, error in failed:
        console.print(f"{name}: {error}", markup=False)
    return 0
