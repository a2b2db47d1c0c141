"""The headline in a terminal: the numbers are the runs', nothing is cut, a pipe gets plain text."""

import json
import re
from collections.abc import Callable
from statistics import fmean
from typing import Any

import pytest

from lightning_app.report.headline import answer
from lightning_app.report.limits import limits
from lightning_app.report.results import GridResults, read_results
from lightning_app.report.terminal import PLAIN, ROWS, headline_document
from lightning_app.report.verdicts import verdicts
from lightning_app.report.warmup import sensitivity_scores
from tests.report.conftest import PRESET, RATE, SEED, WARMUP, messages, shown

SAS = {PRESET: ["sas"], WARMUP: [0, 60]}
WIDTH = "model.architecture.model_dim"
LONG = "a_variant_with_a_name_that_is_longer_than_many_a_terminal_is_wide"

Make = Callable[..., Any]


def show(grid: GridResults, **console: Any) -> str:
    return shown(grid, sensitivity_scores(grid), **console)


def losses(fake: Any, variant: str, warmup: int) -> list[float]:
    """Final losses by seed, read from the result files."""
    found = []
    for cell in fake.cells:
        if (cell["axes"][PRESET], cell["axes"][WARMUP]) == (variant, warmup):
            result = json.loads((fake.run(cell) / "result.json").read_text())
            value, top = result["metrics"]["val/nll"], result["unigram_entropy"]
            found.append(top if result["status"] == "diverged" else value)
    return found


def test_a_pipe_gets_the_numbers_of_the_runs_as_plain_text(make_grid, outcome, monkeypatch) -> None:
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
    scores = sensitivity_scores(grid)
    assert text.splitlines()[0] == answer(grid, scores).translate(PLAIN) != ""
    words = {verdict.variant: verdict.word for verdict in verdicts(grid, scores)}
    assert len(words) == 4  # the three variants, and all of them
    for variant, word in words.items():
        assert re.search(rf"^{variant} +{word} ", text, re.M)
    assert re.search(r"^post_ln .* 5 of 5 +0 of 5 ", text, re.M)
    assert re.search(r"^pre_ln .* 0 of 5 +0 of 5 ", text, re.M)
    monkeypatch.setenv("NO_COLOR", "1")
    text = show(grid, width=100, force_terminal=True)
    codes = set(re.findall(r"\x1b\[([0-9;]*)m", text))
    assert codes <= {"0", "1"}  # bold and its end


@pytest.mark.parametrize("width", [24, 50, 80, 130])
def test_nothing_is_cut_however_narrow(make_grid: Make, outcome: Any, width: int) -> None:
    axes = {PRESET: ["pre_ln", LONG], WARMUP: [0, 15, 60, 240], SEED: [1, 2, 3]}
    grid = read_results(make_grid(outcome, axes).folder)
    text = show(grid, width=width, force_terminal=True)
    seen = re.sub(r"\x1b\[[0-9;]*m", "", text)
    assert max(map(len, seen.splitlines())) <= width
    assert "…" not in seen
    joined = re.sub(r"\s", "", seen)
    assert LONG in joined
    for verdict in verdicts(grid, sensitivity_scores(grid)):
        estimate = f"{verdict.estimate:.3f}".replace("-", "−")
        assert estimate in joined
        assert verdict.word.replace(" ", "") in joined


@pytest.mark.parametrize(
    ("outcome", "axes", "expected"),
    [
        (lambda a: "waiting", {PRESET: ["post_ln"], SEED: [1]}, "No cell has"),
        (lambda a: "failed", {PRESET: ["post_ln"], SEED: [1]}, "No cell has"),
        (lambda a: 4.5, {PRESET: ["pre_ln", "sas"], WARMUP: [0, 60], SEED: [1, 2]}, "not learned"),
        (lambda a: None, {PRESET: ["pre_ln", "sas"], WARMUP: [0, 60], SEED: [1]}, "1 of 1"),
        (lambda a: 2.0, {**SAS, SEED: [1, 2]}, r"sas +\w+ +0\.000 .* 2\n"),
        (lambda a: 2.0, {PRESET: ["pre_ln", "sas"], SEED: [1, 2]}, r"pre_ln +2\.000 n = 2"),
        (lambda a: 2.0, {PRESET: ["pre_ln"]}, r"pre_ln +2\.000 n = 1"),
        (lambda a: 2.0, {**SAS, SEED: [1]}, r"sas +\w+ +0\.000 .* 1\n"),
        (lambda a: 2.0 if a[SEED] < 3 else "failed", {WARMUP: [0, 60], SEED: [1, 2, 3]}, "0 of 2"),
    ],
)
def test_grids_with_little_to_tell(make_grid: Make, outcome: Any, axes: Any, expected: str) -> None:
    text = show(read_results(make_grid(outcome, axes).folder), width=1000)
    assert re.search(expected, text), text
    assert "nan" not in text
    assert all(text.splitlines())  # no answer leaves no empty line


def test_a_pruner_that_ended_a_cell_takes_all_scores_and_another_none(make_grid: Make, outcome):
    fake = make_grid(outcome)
    scores = sensitivity_scores(read_results(fake.folder))
    fake.prune()
    grid = read_results(fake.folder)
    assert repr(sensitivity_scores(grid)) == repr(scores)
    assert "ended early" not in show(grid, width=1000)
    assert "limits.pruner" not in dict(messages(limits(grid)))
    fake.prune(0, 1)
    grid = read_results(fake.folder)
    assert sensitivity_scores(grid) == []
    text = show(grid, width=1000)
    assert "2 cells are damaged or ended early" in text
    assert (verdicts(grid, []), "verdict" in text) == ([], False)


def test_of_very_many_slices_the_first_are_shown(make_grid: Make) -> None:
    widths = list(range(1, ROWS + 5))
    axes = {PRESET: ["pre_ln", "sas"], WIDTH: widths}
    for more, rows in (({}, 2), ({WARMUP: [0, 60]}, 3)):  # verdicts have a row for all variants
        fake = make_grid(lambda a: 2.0, axes | more, curves=False, name=f"demo{rows}")
        text = show(read_results(fake.folder), width=1000)
        count = len(re.findall(rf"{WIDTH}=\d+$", text, re.M))
        assert count == ROWS // rows
        assert f"{len(widths) - count} more" in text


def test_scripts_get_every_score(make_grid: Make, outcome: Any) -> None:
    axes = {PRESET: ["post_ln", "pre_ln"], WARMUP: [0, 60], RATE: [0.001, 0.004], SEED: [1, 2, 3]}
    found = sensitivity_scores(read_results(make_grid(outcome, axes).folder))
    rows = headline_document(found)
    assert sum(len(row["scores"]) for row in rows) == len(found)
    by_row = {(row["group"], row["variant"], str(row["lr"])): row["scores"] for row in rows}
    assert len(by_row) == len(rows)
    for score in found:
        told = by_row[score.group, score.variant, str(score.lr)][score.score]
        for field, value in told.items():
            assert repr(value) == repr(getattr(score, field))
        assert {"estimate", "p_holm", "holm_low", "holm_high", "note"} <= told.keys()
