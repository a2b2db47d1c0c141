"""`ablate run`: run the missing cells of a grid, and write its report."""

from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

from lightning_app.commands.grid import show_headline
from lightning_app.config.grid import GridSpec, read_spec
from lightning_app.grids.display import by_status, describe, document
from lightning_app.grids.options import Options
from lightning_app.grids.plan import Grid, waiting_document, waiting_lines
from lightning_app.grids.supervisor import run_grid
from lightning_app.runs.folder import GridFolder
from lightning_app.runs.locks import turn

INTERRUPTED = 130
_STATES = ("ok", "diverged", "pruned", "failed", "missing", "waiting")


def run_command(
    grid: str | Path,
    experiments: Path = Path("experiments"),
    options: Options | None = None,
    *,
    as_json: bool = False,
) -> int:
    """`ablate run`: run the missing cells, write the report, and return the exit code.

    0 when every cell is done, or waits for a run of its parent grid; 1 when cells failed; 130 when
    a signal, the time limit or the loss of the storage ended it early. Raises `UserError`, and
    `OSError` (ENOSPC) when the disk is full.
    """
    spec = read_spec(grid)
    folder = GridFolder(experiments / spec.name)
    with document("run", as_json) as tree:
        tree |= {"grid": spec.name, "folder": folder.path, "cells": 0, "elsewhere": 0}
        tree |= by_status(Counter(), _STATES)
        tree |= {"report": None, **dict.fromkeys(("damaged", "findings", "headline"), ())}
        of_runs = ("comparisons", "effects", "metrics", "failed_runs", "failure_tests")
        tree |= {**dict.fromkeys((*of_runs, "task_scores"), ()), "mixtures": {}, "left_out": {}}
        tree |= {"waiting": (), "unsealed": ()}
        tree["exit_code"] = _run(spec, folder, options, tree)
    return tree["exit_code"]


def _run(spec: GridSpec, folder: GridFolder, options: Options | None, tree: dict[str, Any]) -> int:
    """Run, report, fill the document, and return the exit code."""
    from lightning_app.report.tensorboard import write_index

    ending = run_grid(spec, folder, options, index=partial(write_index, only_new=True))
    grid = ending.grid
    words = Counter[str]() if grid is None else _count(grid, tree)
    if grid is None or ending.cut:
        print(f"{ending.cut}; finished cells are kept, the same command continues ({folder})")
        return INTERRUPTED
    tree["elsewhere"] = ending.elsewhere
    print(f"{grid.name}: {tree['cells']} cells: {describe(words)}")
    for line in waiting_lines(tree["waiting"]):
        print(line)
    if words["missing"] > ending.elsewhere:
        print("cells are still missing; the same command continues")
        return INTERRUPTED
    if ending.elsewhere:
        print(f"{ending.elsewhere} cells run elsewhere; the last supervisor writes the report")
        return 1 if words["failed"] else 0
    if not grid.cells:
        print("no cell can start yet; the same command continues")
        return 0
    tree |= _report(grid)
    print(f"report: {tree['report']}")
    print(f"curves: tensorboard --logdir {folder}")
    if words["failed"]:
        print("--retry-failed runs failed cells again; `ablate status` shows their errors")
    return 1 if words["failed"] else 0


def _count(grid: Grid, tree: dict[str, Any]) -> Counter[str]:
    words = Counter(grid.state(cell).word for cell in grid.cells)
    waiting = waiting_document(grid.plan.waiting, grid.folder.path.parent)
    words["waiting"] = len(waiting)
    tree |= {"cells": words.total(), "waiting": waiting, **by_status(words, _STATES)}
    return words


def _report(grid: Grid) -> dict[str, Any]:
    """Write the report unless it is of the present files; show it, return it for the document."""
    from lightning_app.report.results import read_results
    from lightning_app.report.tensorboard import write_index
    from lightning_app.report.write import is_current, write

    folder = grid.folder
    why = f"{folder.report}: another supervisor writes it; waiting"
    with turn(folder.report_lock, lambda: False, why):
        results = read_results(folder.path)
        if not is_current(results, folder.report):
            write(results, folder.path)
            write_index(folder.path)
    return {"report": folder.report, **show_headline(results)}
