"""Finished runs that a grid does not plan: named in the report, and counted nowhere."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning_app.config.identity import Record, write_record
from lightning_app.report.limits import limits
from lightning_app.report.results import read_results, stray_runs
from lightning_app.report.write import write

Make = Callable[..., Any]


def remember(folder: Path, corpus: str) -> None:
    write_record(folder, Record(config={}, blocks={}, corpus=corpus))


def leave(grid: Any, name: str, corpus: str | None) -> None:
    """Leave a finished run in the folder that the plan does not name."""
    folder = grid.folder / "runs" / name
    shutil.copytree(grid.run(grid.cells[0]), folder)
    (folder / "identity.json").unlink(missing_ok=True)
    if corpus is not None:
        remember(folder, corpus)


def test_runs_on_another_corpus_are_named_and_count_nowhere(
    make_grid: Make, outcome: Any, tmp_path: Path
) -> None:
    grid = make_grid(outcome)
    assert stray_runs(read_results(grid.folder)) is None
    for cell in grid.cells:
        remember(grid.run(cell), "new")
    leave(grid, "a-11111111", "old")
    leave(grid, "b-22222222", "new")
    leave(grid, "c-33333333", None)
    (grid.folder / "runs" / "unfinished").mkdir()
    read = read_results(grid.folder)
    said = (
        "3 finished runs in this folder are other experiments than the grid plans, 1 of them on "
        "other files of the corpus. They count nowhere in this report (such as a-11111111)."
    )
    assert stray_runs(read) == said
    assert said in limits(read)
    assert said in write(read, tmp_path / "out").read_text(encoding="utf-8")
    assert len(read.finished) == len(grid.cells)


def test_without_a_record_nothing_is_said_of_the_corpus(make_grid: Make, outcome: Any) -> None:
    grid = make_grid(outcome)
    leave(grid, "a-11111111", "old")
    (grid.folder / "runs" / "a-11111111" / "identity.json").write_text(json.dumps({"schema": 2}))
    said = stray_runs(read_results(grid.folder))
    assert said is not None
    assert said.startswith("1 finished run in this folder is another experiment than the grid")
    assert "corpus" not in said
