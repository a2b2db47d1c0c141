"""Whatever metric a grid names is seen on the page, in the terminal, and by scripts."""

import io
import json
import math
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import yaml
from rich.console import Console

from lightning_app.report.comparisons import by_metric, metrics_document, titled
from lightning_app.report.facts import facts
from lightning_app.report.results import read_results
from lightning_app.report.tensorboard import metric_tags
from lightning_app.report.terminal import show_report
from lightning_app.report.warmup import sensitivity_scores
from tests.report.conftest import PRESET, SEED, WARMUP, write_report
from tests.told import told

AXES = {SEED: [1, 2, 3], PRESET: ["post_ln", "pre_ln"], WARMUP: [0, 60]}
BLEU = {("post_ln", 0): 3.0, ("post_ln", 60): 30.0, ("pre_ln", 0): 20.0, ("pre_ln", 60): 21.0}


@pytest.fixture
def folder(make_grid) -> Path:
    """A grid judged by test BLEU, whose seeds differ by 1, where one run has none."""
    fake = make_grid(lambda axes: 2.0 + axes[SEED] / 10, AXES)
    path = fake.folder / "grid.yaml"
    tree = yaml.safe_load(path.read_text())
    tree["metric"] = {"name": "test/bleu", "mode": "max"}
    path.write_text(yaml.safe_dump(tree))
    for cell in fake.cells:
        axes, result = cell["axes"], fake.run(cell) / "result.json"
        record = json.loads(result.read_text())
        value: float | None = BLEU[axes[PRESET], axes[WARMUP]] + axes[SEED]
        if (axes[PRESET], axes[WARMUP], axes[SEED]) == ("pre_ln", 60, 3):
            value = None
        record["metrics"]["test/bleu"] = value
        result.write_text(json.dumps(record))
    return fake.folder


def test_the_best_arm_comes_first_whichever_way_is_better(folder: Path) -> None:
    grid = read_results(folder)
    assert (grid.metric, grid.mode, titled(grid)) == (
        *("test/bleu", "max"),
        "test/bleu, higher is better",
    )
    arms = by_metric(grid)
    assert [(arm.variant, arm.warmup, arm.mean) for arm in arms] == [
        ("post_ln", 60, 32.0),
        ("pre_ln", 0, 22.0),
        ("post_ln", 0, 5.0),
        ("pre_ln", 60, 22.5),  # of the two seeds that have a value
    ]
    assert [(arm.runs, arm.lacking) for arm in arms] == [(3, 0), (3, 0), (3, 0), (2, 1)]
    half = 4.302652729911275 / math.sqrt(3)  # of 1, 2, 3
    assert arms[0].high - arms[0].mean == pytest.approx(half, rel=1e-9)
    (told,) = metrics_document(grid)
    assert (told["metric"], told["mode"], told["arms"][0]["mean"]) == ("test/bleu", "max", 32.0)


def test_page_terminal_and_hparams_name_it(folder: Path) -> None:
    path = folder / "grid.yaml"  # without a reference there are no verdicts to show instead
    path.write_text(path.read_text().replace("reference_warmup: 60", "reference_warmup: 0"))
    grid = read_results(folder)
    console = Console(file=io.StringIO(), width=1000)
    show_report(console, grid, sensitivity_scores(grid))
    text: Any = console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]
    assert told("demo: test/bleu, … [95%]").search(text)
    table = text.split("higher is better")[1]
    assert table.index("post_ln") < table.index("pre_ln")
    assert "32.000 [" in table
    assert ", 1 without" in table
    assert facts(grid)["Metric of the grid"].startswith("test/bleu, higher is better")
    assert metric_tags(grid)[0] == "test/bleu"
    page = write_report(folder, figures=False).read_text(encoding="utf-8")
    assert "test/bleu:" in page
    assert told("1 of 12 … test/bleu").search(page)
    assert "1 of pre_ln at warm-up 60" in page


def test_the_loss_is_shown_as_it_was_measured_not_as_it_is_scored(make_grid) -> None:
    fake = make_grid(lambda axes: 4.49 + axes[SEED], {SEED: [1, 2]})
    (arm,) = by_metric(read_results(fake.folder))
    assert arm.mean == pytest.approx(fmean([5.49, 6.49]))


TOKENIZER = "data.tokenizer"


def test_arms_that_count_other_tokens_are_not_ranked(make_grid: Any) -> None:
    """Those of a ruler stand together, in the order of the plan; JSON and page say why."""
    axes = {SEED: [1, 2], TOKENIZER: ["word", "char"], PRESET: ["post_ln", "pre_ln"]}

    def loss(axes: Any) -> float:
        nats = 2.0 if axes[TOKENIZER] == "word" else 0.5
        return nats + 0.1 * (axes[PRESET] == "post_ln") + axes[SEED] / 100

    fake = make_grid(loss, axes, sensitivity={}, curves=False)
    grid = read_results(fake.folder)
    found = [(arm.ruler, arm.variant) for arm in by_metric(grid)]
    names = [f"{TOKENIZER}={kind}" for kind in ("word", "char")]
    assert found == [(name, preset) for name in names for preset in ("pre_ln", "post_ln")]
    (told,) = metrics_document(grid)
    assert [arm["ruler"] for arm in told["arms"]] == [name for name, _ in found]
    console = Console(file=io.StringIO(), width=1000)
    show_report(console, grid, [])
    assert isinstance(console.file, io.StringIO)
    assert f"{TOKENIZER}" in console.file.getvalue()


def test_arms_of_one_ruler_are_ranked_over_all_groups(make_grid: Any) -> None:
    axes = {SEED: [1, 2], "model.optimizer.kind": ["adam", "sgd"]}
    fake = make_grid(
        lambda axes: 3.0 - (axes["model.optimizer.kind"] == "sgd"),
        axes,
        sensitivity={},
        curves=False,
    )
    arms = by_metric(read_results(fake.folder))
    assert [(arm.ruler, arm.mean) for arm in arms] == [("", 2.0), ("", 3.0)]
