"""A report of cells that were not made alike: what it leaves out, and what it says."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lightning_app.report.facts import facts, state_counts
from lightning_app.report.frames import results_frame
from lightning_app.report.limits import limits
from lightning_app.report.results import OTHER_DATA, read_results
from lightning_app.report.terminal import mixture_line, mixtures
from lightning_app.report.warmup import sensitivity_scores
from lightning_app.runs.folder import STORE
from tests.report.conftest import messages, write_report
from tests.told import told

AXES = {
    "model.block.preset": ["post_ln", "pre_ln"],
    "model.schedule.warmup_steps": [0, 60],
    "seed_everything": [1, 2, 3],
}
MADE = {"code": "aaaa", "libraries": {"torch": "2.13.0"}, "cpu": "EPYC", "matmul": "MKL"}


def change(grid: Any, number: int, **fields: Any) -> str:
    """Rewrite fields of a cell's result, and return its name."""
    cell = grid.cells[number]
    path = grid.run(cell) / "result.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    return cell["name"]


def other_data(grid: Any, number: int) -> str:
    return change(grid, number, data={"name": "synthetic", "digest": "2" * 64})


def test_results_of_other_data_are_never_pooled(
    make_grid: Callable[..., Any], outcome: Callable[[Mapping[str, Any]], float]
) -> None:
    made = make_grid(outcome, AXES)
    stranger = other_data(made, 0)
    grid = read_results(made.folder)
    assert [cell.name for cell in grid.cells if cell.state == OTHER_DATA] == [stranger]
    assert len(grid.finished) == 11
    assert grid.strangers == {"2" * 64: [stranger]}
    assert all(stranger not in str(score) for score in sensitivity_scores(grid))
    seeds = {
        score.variant: score.seeds for score in sensitivity_scores(grid) if score.score == "delta"
    }
    assert seeds == {"post_ln": 2, "pre_ln": 3}
    frame = results_frame(grid).set_index("name").loc[stranger]
    assert frame["status"] == OTHER_DATA
    assert frame[["val/nll", "loss"]].isna().all()
    assert "1 left out" in state_counts(grid)
    assert limits(grid)[0].startswith("1 finished cell was trained on other data than the rest")
    assert "limits.missing" not in dict(messages(limits(grid)))

    page = write_report(made.folder, figures=False).read_text(encoding="utf-8")
    assert stranger in page
    assert "trained on other" in page


def test_axes_of_the_data_are_no_mixture(make_grid: Callable[..., Any]) -> None:
    made = make_grid(lambda axes: 2.0, {**AXES, "data.window": [16, 32]})
    for number, cell in enumerate(made.cells):
        if cell["axes"]["data.window"] == 32:
            other_data(made, number)
    assert len(read_results(made.folder).finished) == len(made.cells)


def test_every_other_mixture_is_stated(
    make_grid: Callable[..., Any], outcome: Callable[[Mapping[str, Any]], float]
) -> None:
    made = make_grid(outcome, AXES)
    for number in range(len(made.cells)):
        code = "aaaa" if number % 2 else "bbbb"
        change(made, number, provenance={**MADE, "code": code})
    change(made, 0, provenance={**MADE, "cpu": "Xeon"}, precision="bf16-mixed")
    (made.folder.parent / STORE / f"{made.cells[0]['id']}@superseded-1").mkdir(parents=True)
    grid = read_results(made.folder)
    assert len(grid.finished) == len(made.cells)
    assert set(mixtures(grid)) == {"code", "device", "precision"}
    line = mixture_line(grid)
    assert told("2 … , 2 … , 2 precisions").search(line)
    page = write_report(made.folder, figures=False).read_text(encoding="utf-8")
    cautions = page[page.index("What may not be concluded") :]
    assert told("of 2 … (aaaa: 7; bbbb: 5)").search(cautions)
    assert told("of 2 … (Xeon: 1; EPYC: 11)").search(cautions)
    assert facts(grid)["Code"] == "aaaa: 7; bbbb: 5"
    assert facts(grid)["Superseded"].startswith("1 earlier runs, kept as .runs/ID@superseded-N")


def test_results_of_the_old_code_say_that_it_is_not_recorded(
    make_grid: Callable[..., Any], outcome: Callable[[Mapping[str, Any]], float]
) -> None:
    grid = read_results(make_grid(outcome, AXES).folder)
    assert facts(grid)["Code"] == "not recorded"
    assert any("version of the" in text for text in limits(grid))
    assert mixture_line(grid) == ""


def test_one_version_is_no_caution(make_grid: Callable[..., Any], tmp_path: Path) -> None:
    made = make_grid(lambda axes: 2.0, AXES)
    for number in range(len(made.cells)):
        change(made, number, provenance=MADE)
    grid = read_results(made.folder)
    assert not any("version" in text for text in limits(grid))
    assert facts(grid)["Code"] == "aaaa"
