"""`ablate report`: the report of a grid, or of several side by side."""

import os
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_app.ablation.counts import by_status
from lightning_app.ablation.display import plain_console
from lightning_app.ablation.documents import document
from lightning_app.ablation.plan import runs_with_plugins
from lightning_app.errors import UserError
from lightning_app.grid_folder import GridFolder
from lightning_app.plugin_copies import require
from lightning_app.records import is_sealed

if TYPE_CHECKING:
    from lightning_app.analysis.grid_results import GridResults

_STATES = (  # from the run folders
    *("ok", "diverged", "pruned", "failed", "unfinished", "waiting", "damaged"),
    "other_data",
)


def report_command(
    grids: Sequence[str | Path],
    experiments: Path = Path("experiments"),
    out: Path | None = None,
    *,
    publish_in: Path | None = None,
    port: int | None = None,
    as_json: bool = False,
) -> int:
    """`ablate report`: tables, figures and `report.html` from run folders alone.

    Several grids get one report, in a folder of its own. A grid may also be the folder of a
    published study, whose runs are then restored in `experiments`; `publish_in` is where to write
    such a folder. With a `port` the page is served together with TensorBoard until a signal
    arrives; port 0 takes a free one. Raises `UserError`.
    """
    from lightning_app.ablation.find_results import find_planned
    from lightning_app.analysis.merge_grids import different, together
    from lightning_app.analysis.publish import publish
    from lightning_app.analysis.read_results import read_results
    from lightning_app.analysis.report import write
    from lightning_app.analysis.serve import claim, serve
    from lightning_app.analysis.tensorboard import write_index

    if publish_in is not None and len(grids) > 1:
        raise UserError(f"--publish: takes the results of one grid, found {len(grids)} grids")
    if publish_in is not None and GridFolder(publish_in).plan.is_file():
        raise UserError(f"--publish: {publish_in}: is the folder of a grid; name another folder")
    found = [find_planned(_restored(grid, experiments), experiments) for grid in grids]
    folders = [folder for folder, _ in found]
    for run in (run for folder in folders for run in runs_with_plugins(GridFolder(folder))):
        require(run)  # what is known of a task may come from it
    with ExitStack() as held, document("report", as_json) as tree:
        claimed = None if port is None else held.enter_context(claim(port))
        read = [read_results(folder, file) for folder, file in found]
        grid = read[0] if len(read) == 1 else together(read)
        if grid.parts:
            _check_apart(out or grid.folder)
        if as_json and out is None and port is None and not _can_write(grid.folder):
            print(f"{grid.folder}: may only be read: no report.html", file=sys.stderr)
            page = None
        else:
            page = write(grid, out or grid.folder)
        if publish_in is not None:
            publish(grid, publish_in)
        for folder in filter(_can_write, folders):
            write_index(folder)
        cells = different(grid)
        words = Counter(cell.word for cell in cells)
        words["waiting"] += len(grid.without_parent)
        tree |= {"grids": [each.name for each in read], "report": page, "cells": words.total()}
        tree |= {**by_status(words, _STATES), **show_headline(grid)}
        if page is not None:
            print(f"report: {page}")
        if page is not None and claimed is not None:
            serve(page, folders, claimed)
    return 1 if tree["damaged"] else 0


def _can_write(folder: Path) -> bool:
    there = next(each for each in (folder, *folder.parents) if each.exists())
    return os.access(there, os.W_OK)


def _restored(grid: str | Path, experiments: Path) -> str | Path:
    """The folder in which a published study was restored; another grid as it was given."""
    from lightning_app.ablation.find_results import published
    from lightning_app.analysis.packed_grid import unpack

    if (study := published(grid, experiments)) is None:
        return grid
    folder = unpack(study, experiments).path
    print(f"{study}: read in {folder}, which holds the same runs", file=sys.stderr, flush=True)
    return folder


def _check_apart(out: Path) -> None:
    """Refuse to overwrite the report of one grid by that of several."""
    for folder in (out.resolve(), *out.resolve().parents):
        if GridFolder(folder).plan.is_file():
            raise UserError(
                f"--out: {out}: lies in the folder of a grid; a report of several needs its own"
            )


def show_headline(grid: "GridResults") -> dict[str, Any]:
    """Print the headline of a report, and return it for the document."""
    from lightning_app.analysis.comparison import comparison_document, comparisons
    from lightning_app.analysis.damaged_files import damaged_files
    from lightning_app.analysis.factors import effects
    from lightning_app.analysis.failed_runs import failed_runs, failure_tests
    from lightning_app.analysis.headline import findings
    from lightning_app.analysis.metric import metrics_document
    from lightning_app.analysis.run_summary import records_of
    from lightning_app.analysis.sensitivity import sensitivity_scores
    from lightning_app.analysis.task_scores import task_scores
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
        "effects": [asdict(effect) for effect in effects(grid, found)],
        "comparisons": [comparison_document(row) for row in comparisons(grid)],
        "metrics": metrics_document(grid),
        "failed_runs": [asdict(arm) for arm in failed_runs(grid)],
        "failure_tests": [asdict(test) for test in failure_tests(grid)],
        "task_scores": [asdict(score) for score in task_scores(grid)],
        "mixtures": mixtures(grid),
        "left_out": dict(grid.strangers),
        "unsealed": [name for name, each in records_of(grid).items() if not is_sealed(each)],
    }
