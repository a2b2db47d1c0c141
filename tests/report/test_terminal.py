"""The headline in a terminal: the numbers are the runs', nothing is cut, a pipe gets plain text."""

import io
import json
import math
import re
from collections.abc import Callable
from statistics import fmean
from typing import Any

import pytest
from rich.console import Console

from lightning_app.report.headline import findings
from lightning_app.report.limits import limits
from lightning_app.report.results import GridResults, read_results
from lightning_app.report.terminal import PLAIN, ROWS, headline_document, show_report
from lightning_app.report.warmup import sensitivity_scores
from tests.report.conftest import messages

PRESET = "model.block.preset"
WARMUP = "model.schedule.warmup_steps"
RATE = "model.optimizer.lr"
SEED = "seed_everything"
LONG = "a_variant_with_a_name_that_is_longer_than_many_a_terminal_is_wide"

Make = Callable[..., Any]


def show(grid: GridResults, **console: Any) -> str:
    out = io.StringIO()
    show_report(Console(file=out, highlight=False, **console), grid, sensitivity_scores(grid))
    return out.getvalue()


def losses(fake: Any, variant: str, warmup: int) -> list[float]:
    """Final losses by seed, read from the result files."""
    found = []
    for cell in fake.cells:
        if (cell["axes"][PRESET], cell["axes"][WARMUP]) == (variant, warmup):
            result = json.loads((fake.run(cell) / "result.json").read_text())
            value, top = result["metrics"]["val/nll"], result["unigram_entropy"]
            found.append(top if result["status"] == "diverged" else value)
    return found


def test_a_pipe_gets_the_numbers_of_the_runs_as_plain_text(make_grid: Make, outcome: Any) -> None:
    fake = make_grid(outcome)
    grid = read_results(fake.folder)
    text = show(grid, width=1000)
    assert text.isascii()
    assert "\x1b" not in text
    for variant in ("post_ln", "pre_ln", "sas"):
        without, with_ = losses(fake, variant, 0), losses(fake, variant, 60)
        delta = fmean(a - b for a, b in zip(without, with_, strict=True))
        row = next(line for line in text.splitlines() if line.startswith(variant))
        assert f" {delta:.3f} [" in row, row
    assert re.search(r"^post_ln +helps \(p .*\) +more \(p .*\) .* 5 / 5 +0 / 5$", text, re.M)
    for sentence in findings(grid, sensitivity_scores(grid)):
        assert sentence.translate(PLAIN) in text


def test_the_plot_puts_every_mean_where_it_belongs(make_grid: Make, outcome: Any) -> None:
    fake = make_grid(outcome)
    rows = dict(re.findall(r"^(\w+) +\|(.*)\|$", show(read_results(fake.folder), width=1000), re.M))
    assert set(rows) == {"post_ln", "pre_ln", "sas"}
    means = {(v, w): fmean(losses(fake, v, w)) for v in rows for w in (0, 60)}
    low, high = min(means.values()), 4.5  # the grid's unigram entropy
    for variant, row in rows.items():
        for mark, warmup in (("a", 0), ("b", 60)):
            at = row.find(mark) if mark in row else row.index("*")
            share = (means[variant, warmup] - low) / (high - low)
            assert at / (len(row) - 1) == pytest.approx(share, abs=0.51 / (len(row) - 1))


@pytest.mark.parametrize("width", [24, 50, 80, 130])
def test_nothing_is_cut_however_narrow(make_grid: Make, outcome: Any, width: int) -> None:
    axes = {PRESET: ["pre_ln", LONG], WARMUP: [0, 15, 60, 240], SEED: [1, 2, 3]}
    grid = read_results(make_grid(outcome, axes).folder)
    text = show(grid, width=width, force_terminal=True)
    seen = re.sub(r"\x1b\[[0-9;]*m", "", text)
    assert max(map(len, seen.splitlines())) <= width
    assert "…" not in seen
    joined = re.sub(r"\s", "", seen)
    assert joined.count(LONG) >= 2
    for row in headline_document(sensitivity_scores(grid)):
        estimate = f"{row['scores']['delta']['estimate']:.3f}".replace("-", "−")
        assert estimate in joined


def test_no_color_means_no_colour(
    make_grid: Make, outcome: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    text = show(read_results(make_grid(outcome).folder), width=100, force_terminal=True)
    codes = set(re.findall(r"\x1b\[([0-9;]*)m", text))
    assert codes <= {"0", "1"}  # bold and its end


@pytest.mark.parametrize(
    ("outcome", "axes", "expected"),
    [
        (lambda a: "waiting", {PRESET: ["post_ln"], SEED: [1]}, "No cell has"),
        (lambda a: "failed", {PRESET: ["post_ln"], SEED: [1]}, "No cell has"),
        (lambda a: 4.5, {PRESET: ["pre_ln", "sas"], WARMUP: [0, 60], SEED: [1, 2]}, "never learn"),
        (lambda a: None, {PRESET: ["pre_ln", "sas"], WARMUP: [0, 60], SEED: [1]}, "1 / 1"),
        (lambda a: 2.0, {PRESET: ["sas"], WARMUP: [0, 60], SEED: [1, 2]}, "sas +- "),
        (lambda a: 2.0, {PRESET: ["pre_ln", "sas"], SEED: [1, 2]}, "pre_ln +- "),
        (lambda a: 2.0, {PRESET: ["pre_ln"]}, "pre_ln +- "),
        (
            lambda a: 2.0,
            {PRESET: ["sas"], WARMUP: [0, 60], SEED: [1]},
            r"(?m)^-: .*one seed.*\(sas\)",
        ),
        (lambda a: 2.0 if a[SEED] < 3 else "failed", {WARMUP: [0, 60], SEED: [1, 2, 3]}, "0 / 2"),
    ],
)
def test_grids_with_little_to_tell(make_grid: Make, outcome: Any, axes: Any, expected: str) -> None:
    text = show(read_results(make_grid(outcome, axes).folder), width=1000)
    assert re.search(expected, text), text
    assert "nan" not in text


def test_a_pruned_grid_has_no_scores_to_show(make_grid: Make, outcome: Any) -> None:
    fake = make_grid(outcome)
    fake.prune(0, 1)
    grid = read_results(fake.folder)
    assert sensitivity_scores(grid) == []
    text = show(grid, width=1000)
    assert "pruner ended 2 cells" in text
    assert "reads" not in text


def test_a_pruner_that_ended_no_cell_takes_no_score_away(make_grid: Make, outcome: Any) -> None:
    fake = make_grid(outcome)
    scores = sensitivity_scores(read_results(fake.folder))
    fake.prune()
    grid = read_results(fake.folder)
    assert repr(sensitivity_scores(grid)) == repr(scores)
    assert "pruner ended" not in show(grid, width=1000)
    assert "limits.pruner" not in dict(messages(limits(grid)))


def test_of_very_many_slices_the_first_are_shown(make_grid: Make) -> None:
    rates = [0.001 * step for step in range(1, ROWS + 5)]
    axes = {PRESET: ["pre_ln", "sas"], WARMUP: [0, 60], RATE: rates}
    text = show(read_results(make_grid(lambda a: 2.0, axes, curves=False).folder), width=1000)
    scored, metric = text.split("val/nll, lower is better")
    for told in (scored, metric):
        shown = len(re.findall(r"^learning rate ", told, re.M))
        assert shown == ROWS // 2
        assert f"{len(rates) - shown} more" in told


def test_scripts_get_every_score_with_its_reading(make_grid: Make, outcome: Any) -> None:
    axes = {PRESET: ["post_ln", "pre_ln"], WARMUP: [0, 60], RATE: [0.001, 0.004], SEED: [1, 2, 3]}
    grid = read_results(make_grid(outcome, axes).folder)
    rows, found = headline_document(sensitivity_scores(grid)), sensitivity_scores(grid)
    assert sum(len(row["scores"]) for row in rows) == len(found)
    assert {row["reads"] for row in rows if math.isnan(row["lr"])} == {None}
    told = {(row["variant"], row["lr"]): row["reads"] for row in rows if not math.isnan(row["lr"])}
    assert told["pre_ln", 0.004] == "not shown"
    against = {(row["variant"], row["lr"]): row["versus"] for row in rows}
    assert against["pre_ln", 0.004] == "the baseline"
    for score in found:
        (row,) = [
            row
            for row in rows
            if (row["group"], row["variant"], str(row["lr"]))
            == (score.group, score.variant, str(score.lr))
        ]
        assert row["scores"][score.score]["note"] == score.note
