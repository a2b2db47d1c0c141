"""The commands on a grid: what `ablate plan | run | status | report` call."""

import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_app.ablation.display import plain_console
from lightning_app.ablation.documents import document
from lightning_app.ablation.grid import Grid, read_grid
from lightning_app.ablation.overview import plan_command
from lightning_app.ablation.plan import Plan, load_plan
from lightning_app.ablation.queue.patience import StorageLost
from lightning_app.ablation.runs import by_status, describe, read_run, run_folder
from lightning_app.ablation.status import status_command
from lightning_app.ablation.supervision.guard import REPORT, Interrupted, turn
from lightning_app.ablation.supervision.options import Options
from lightning_app.ablation.supervision.runner import run_grid
from lightning_app.errors import UserError

if TYPE_CHECKING:
    from lightning_app.analysis.grid_results import GridResults

__all__ = ["plan_command", "report_command", "run_command", "status_command"]

INTERRUPTED = 130
STATES = ("ok", "diverged", "pruned", "failed", "missing")
ENDS = (  # as the run folders say
    *("ok", "diverged", "pruned", "failed", "unfinished", "waiting", "damaged"),
    "other_data",
)


def run_command(
    grid: str | Path,
    experiments: Path = Path("experiments"),
    options: Options | None = None,
    *,
    as_json: bool = False,
) -> int:
    """`ablate run`: run what is missing, write the report, and return the exit code.

    0 when every cell is done, 1 when cells failed, 130 when a signal, the end of the time or the
    loss of the storage left some. Raises `UserError`, and `OSError` (ENOSPC) when the disk is full.
    """
    spec = read_grid(grid)
    directory = experiments / spec.name
    with document("run", as_json) as tree:
        tree |= {"grid": spec.name, "folder": directory, "cells": 0, "elsewhere": 0}
        tree |= by_status(Counter(), STATES)
        shown = dict.fromkeys(("damaged", "findings", "headline", "metrics"), ())
        tree |= {"report": None, **shown}
        tree |= {"mixtures": {}, "left_out": {}}
        tree["exit_code"] = _run(spec, directory, options, tree)
    return tree["exit_code"]


def _run(spec: Grid, directory: Path, options: Options | None, tree: dict[str, Any]) -> int:
    """Run, report, fill the document, and return the exit code."""
    from lightning_app.analysis.grid_results import read_results as read_folder
    from lightning_app.analysis.tensorboard import write_index

    try:
        plan, elsewhere = run_grid(
            spec, directory, options, index=partial(write_index, only_new=True)
        )
    except (Interrupted, StorageLost) as why:
        what = "interrupted" if isinstance(why, Interrupted) else str(why)
        print(f"{what}; what is done is kept, the same command goes on ({directory})")
        plan = load_plan(directory) if directory.is_dir() else None
        if plan is not None:
            _count(directory, plan, tree)
        return INTERRUPTED
    states = _count(directory, plan, tree)
    tree["elsewhere"] = elsewhere
    print(f"{plan.name}: {len(plan.cells)} cells: {describe(states)}")
    if states["missing"] > elsewhere:
        print("cells are left; the same command goes on")
        return INTERRUPTED
    if elsewhere:
        print(f"{elsewhere} cells run elsewhere; the last supervisor writes the report")
        return 1 if states["failed"] else 0
    tree["report"] = _report(directory, plan)
    tree |= _show(read_folder(directory))
    print(f"report: {tree['report']}")
    print(f"curves: tensorboard --logdir {directory}")
    if states["failed"]:
        print("failed cells run again with --retry-failed; `ablate status` shows their errors")
    return 1 if states["failed"] else 0


def _count(directory: Path, plan: Plan, tree: dict[str, Any]) -> Counter[str]:
    words = Counter(read_run(directory, cell, plan.metric).word for cell in plan.cells)
    tree["cells"] = len(plan.cells)
    tree |= by_status(words, STATES)
    return words


def _report(directory: Path, plan: Plan) -> Path:
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
    return report


def report_command(
    grids: Sequence[str | Path],
    experiments: Path = Path("experiments"),
    out: Path | None = None,
    *,
    port: int | None = None,
    as_json: bool = False,
) -> int:
    """`ablate report`: tables, figures and `report.html` from run folders alone.

    Of several grids one report, in a folder of its own. With a `port` the page is served together
    with TensorBoard until a signal comes; 0 is any free one. Raises `UserError`.
    """
    from lightning_app.analysis.grid_results import read_results as read_folder
    from lightning_app.analysis.report import write
    from lightning_app.analysis.serve import claim, serve
    from lightning_app.analysis.tensorboard import write_index
    from lightning_app.analysis.together import different, together

    folders = [experiments / read_grid(grid).name for grid in grids]
    with ExitStack() as held, document("report", as_json) as tree:
        claimed = None if port is None else held.enter_context(claim(port))
        read = [read_folder(folder) for folder in folders]
        grid = read[0] if len(read) == 1 else together(read)
        if grid.parts:
            _check_apart(out or grid.folder)
        page = write(grid, out or grid.folder)
        for folder in folders:
            write_index(folder)
        cells = different(grid)
        words = Counter(cell.word for cell in cells)
        tree |= {"grids": [each.name for each in read], "report": page, "cells": len(cells)}
        tree |= {**by_status(words, ENDS), **_show(grid)}
        print(f"report: {page}")
        if claimed is not None:
            serve(page, folders, claimed)
    return 1 if tree["damaged"] else 0


def _check_apart(out: Path) -> None:
    """Refuse to write the report of several grids over that of one."""
    for folder in (out.resolve(), *out.resolve().parents):
        if (folder / "plan.json").is_file():
            raise UserError(
                f"--out: {out}: lies in the folder of a grid; a report of several needs its own"
            )


def _show(grid: "GridResults") -> dict[str, Any]:
    """Print the headline of a report, and return it for the document."""
    from lightning_app.analysis.findings import findings
    from lightning_app.analysis.grid_results import damaged_files
    from lightning_app.analysis.metric import metrics_document
    from lightning_app.analysis.sensitivity import sensitivity_scores
    from lightning_app.analysis.terminal import headline_document, mixtures, show_report

    found = sensitivity_scores(grid)
    show_report(plain_console(), grid, found)
    damaged = damaged_files(grid)
    for line in damaged:
        print(line, file=sys.stderr, flush=True)
    return {
        "damaged": damaged,
        "findings": findings(grid, found),
        "headline": headline_document(found),
        "metrics": metrics_document(grid),
        "mixtures": mixtures(grid),
        "left_out": dict(grid.strangers),
    }
