"""Write the event files of the index when they are out of date."""

# pyright: reportAttributeAccessIssue=false
# The generated protocol buffer modules of TensorBoard carry no type information.

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from tensorboard.compat.proto.summary_pb2 import Summary

from lightning_app.analysis.grid_results import CellResult, GridResults
from lightning_app.analysis.read_results import read_results
from lightning_app.analysis.tensorboard.pages import CURVES, curve_tag, layout, rulers_of
from lightning_app.analysis.tensorboard.summaries import (
    LAST,
    SUFFIX,
    markdown_summary,
    replace,
    scalar,
)
from lightning_app.analysis.tensorboard.table import (
    ended,
    experiment,
    final_metrics,
    finished_at,
    metric_tags,
    reference_cells,
    started,
)
from lightning_app.analysis.tensorboard.text import question_of, run_text

POINTS = 500  # points of one copied curve, at most
TEXT = "run"
WHOLE = ".grid"
"""Marks the file that also has the parts for the whole grid."""


def write_index(grid_dir: Path, only_new: bool = False) -> None:
    """Bring the event files of the index up to date with the run folders.

    The file of the first cell that has begun also holds the table's columns and the pages. With
    `only_new`, other finished cells are skipped if their file is newer than the plan, their result
    and that of their reference run. This is fast enough for a supervisor.
    """
    grid = read_results(grid_dir)
    tags, compared = metric_tags(grid), reference_cells(grid)
    question = question_of(grid)
    kinds = {cell.id: name for cell, name in zip(grid.cells, rulers_of(grid), strict=True)}
    for old in grid.folder.glob(f"events.out.tfevents.*{SUFFIX}"):  # of earlier versions
        old.unlink(missing_ok=True)
    begun = [cell for cell in grid.cells if cell.state != "waiting"]
    for cell in begun[:1]:
        whole = [(0, experiment(grid, tags, question)), (0, layout(grid))]
        events = whole + _events(grid, tags, cell, compared, kinds[cell.id], question)
        replace(cell.folder, finished_at(cell), events, mark=WHOLE)
    for cell in begun[1:]:
        if not (only_new and _is_indexed(grid, cell, compared)):
            events = _events(grid, tags, cell, compared, kinds[cell.id], question)
            replace(cell.folder, finished_at(cell), events)


def _is_indexed(grid: GridResults, cell: CellResult, compared: Mapping[str, CellResult]) -> bool:
    """Whether a finished cell has an index file that is newer than all of its sources."""
    if not cell.finished:
        return False
    sources = [grid.folder / "plan.json", cell.folder / "result.json"]
    other = compared.get(cell.id)
    if other is not None and other.finished:
        sources.append(other.folder / "result.json")
    newest = max(path.stat().st_mtime for path in sources)
    files = [
        path
        for path in cell.folder.glob(f"events.out.tfevents.{LAST}.*{SUFFIX}")
        if not path.name.endswith(WHOLE + SUFFIX)  # now an earlier cell has begun
    ]
    return any(path.stat().st_mtime > newest for path in files)


def _events(
    grid: GridResults,
    tags: Sequence[str],
    cell: CellResult,
    compared: Mapping[str, CellResult],
    kind: str,
    question: str,
) -> list[tuple[int, Summary]]:
    """Parameters, status, text and, once there is a result, curves and metrics of one cell."""
    events = [(0, started(grid, cell)), (0, markdown_summary(TEXT, run_text(cell, question)))]
    if cell.state == "unfinished":
        return events
    events.append((0, ended(cell)))
    if not cell.finished:
        return events
    events += [
        (step, scalar(curve_tag(cell, tag, kind), value))
        for tag in CURVES
        for step, value in _thinned(cell, tag)
    ]
    last = int(cell.record.get("steps") or 0)
    finals = final_metrics(cell, tags, compared.get(cell.id))
    return events + [(last, scalar(tag, value)) for tag, value in finals.items()]


def _thinned(cell: CellResult, tag: str) -> list[tuple[int, float]]:
    points = [point for point in cell.curve(tag).items() if math.isfinite(point[1])]
    stride = math.ceil(len(points) / POINTS) or 1
    return points[::-1][::stride][::-1]
