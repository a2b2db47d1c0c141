"""The commands that work on the cells of a grid: `run`, `submit` and `doctor`."""

from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

from lightning_app.commands.grid import show_headline
from lightning_app.commands.options import EXPERIMENTS, Parser, add_grid, add_json, add_threads
from lightning_app.config.grid import GridSpec, read_spec
from lightning_app.core.project import read_project
from lightning_app.grids.display import by_status, describe, document
from lightning_app.grids.options import Options
from lightning_app.grids.plan import Grid, waiting_document, waiting_lines
from lightning_app.runs.folder import GridFolder
from lightning_app.runs.locks import turn

INTERRUPTED = 130
_STATES = ("ok", "diverged", "pruned", "failed", "missing", "waiting")


def _add_storage(parser: Parser) -> None:
    parser.add(
        "--storage URL",
        "the queue: the path of a journal, or the URL of a database, as for Optuna, such as "
        "postgresql://user@host/db (default: ABLATE_STORAGE or a journal in the grid's folder)",
    )


def _add_supervisor(parser: Parser) -> None:
    """Add the options of one supervisor, as `Options.of` reads them."""
    parser.add("--workers N", "cells to run at once (default: as many as fit)")
    text = "devices, and so processes, per cell (default: trainer.devices)"
    parser.add("--devices-per-cell N", text)
    parser.add("--slots-per-device N", "cells that share a GPU (default: 1)")
    _add_storage(parser)
    text = "seconds without heartbeat until a supervisor's cells are taken over (default: 120)"
    parser.add("--lost-after SECONDS", text, default=120.0)
    text = "kill a cell after this time without progress (default: 00:30)"
    parser.add("--hang-limit HH:MM[:SS]", text, default="00:30")
    text = "stop and requeue running cells after this time"
    parser.add("--max-time HH:MM[:SS]", text)
    parser.add("--retry-failed", "also rerun crashed cells")
    text = "do not wait for cells of other supervisors, except to find lost ones"
    parser.add("--no-wait", text, dest="wait", action="store_false")


def add_run(parser: Parser) -> None:
    add_grid(parser)
    _add_supervisor(parser)
    add_threads(parser, "of each process that trains a cell")
    text = "rerun cells of other code, data or library versions; the old runs are kept"
    parser.add("--rerun-stale", text)
    add_json(parser)
    parser.set_defaults(call=run_command)


def add_submit(parser: Parser) -> None:
    parser.epilog = "Words after -- go to sbatch: ablate submit GRID -- -p gpu -t 12:00:00"
    add_grid(parser)
    parser.add("--array N", "supervisors, one per job (default: 1)", default=1)
    parser.add("--concurrent N", "at most N of them at once")
    text = "do not requeue an interrupted job"
    parser.add("--no-requeue", text, dest="requeue", action="store_false")
    parser.add("--dry-run", "print the script; write and submit nothing")
    _add_supervisor(parser)
    parser.set_defaults(call=_submit)


def add_doctor(parser: Parser) -> None:
    add_grid(parser)
    _add_storage(parser)
    parser.add("--fix", "repair what can be repaired safely")
    parser.add("--seal", "seal sound results of earlier versions that have no seal")
    parser.set_defaults(call=_doctor)


def _submit(**values: Any) -> int:
    from lightning_app.grids.submit import submit_command

    return submit_command(**values)


def _doctor(**values: Any) -> int:
    from lightning_app.grids.doctor import doctor_command

    return doctor_command(**values)


def run_command(
    grid: str | Path, experiments: Path = EXPERIMENTS, *, as_json: bool = False, **words: Any
) -> int:
    """`ablate run`: run the missing cells, write the report, and return the exit code.

    The code is 0 if every cell is done or waits for a run of its parent grid, 1 if cells failed,
    130 if a signal, the time limit or the loss of the storage ended it early. `words` are parsed by
    `Options.of`. Raises `UserError`, and `OSError` (ENOSPC) when the disk is full.
    """
    options = Options.of(words, read_project().folders_of_results())
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


def _run(spec: GridSpec, folder: GridFolder, options: Options, tree: dict[str, Any]) -> int:
    """Run, write the report, fill the document, and return the exit code."""
    from lightning_app.grids.supervisor import run_grid
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
    """Write the report unless it is up to date; show it and return it for the document."""
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
