"""Figures of papers stand beside the arm that is nearest to them, and the distance is said."""

import itertools
import json
import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import yaml

from lightning_app.blocks.presets import PRESETS
from lightning_app.config.grid import read_spec
from lightning_app.report.bibliography import bibliography
from lightning_app.report.frames import COLUMNS, comparison, our_settings
from lightning_app.report.results import read_results
from lightning_app.report.statistics import t_interval
from lightning_app.scores.task_facts import GENERAL, TASKS

PRESET = "model.block.preset"
WARMUP = "model.schedule.warmup_steps"
RATE = "model.optimizer.lr"
SEED = "seed_everything"
FIGURE = {
    "paper": "xiong2020layer",
    "setting": "theirs",
    "variant": "post_ln",
    "warmup": 60,
    "lr": 0.002,
    "metric": "test/bleu",
    "value": 31.16,
    "note": "section 3.2",
}
AXES = {
    SEED: [1, 2, 3],
    PRESET: ["post_ln", "pre_ln"],
    WARMUP: [0, 60],
    RATE: [0.001, 0.002, 0.008],
}


def bleu(axes: Mapping[str, Any]) -> float:
    return 20.0 + axes[SEED] + 100 * axes[RATE] + axes[WARMUP] / 7


def loss(axes: Mapping[str, Any]) -> float:
    """The smallest at 0.002; Post-LN stalls at 0.008 with one seed of three."""
    if axes[RATE] == 0.008 and axes[SEED] == 1 and axes[PRESET] == "post_ln":
        return 4.6
    return 2.0 + 100 * abs(axes[RATE] - 0.002)


@pytest.fixture
def row(make_grid) -> Callable[..., dict[str, Any]]:
    """`row(warmup=..., ...)` is the one row beside the figure with these changes."""

    names = map(str, itertools.count())

    def made(**changes: Any) -> dict[str, Any]:
        grid = grid_with(make_grid, [FIGURE | changes], name=next(names))
        (found,) = comparison(grid).to_dict("records")
        return {str(key): value for key, value in found.items()}

    return made


def grid_with(make_grid, published, axes=AXES, name="demo"):
    fake = make_grid(loss, axes, curves=False, name=name)
    for cell in fake.cells:
        path = fake.run(cell) / "result.json"
        result = json.loads(path.read_text())
        result["metrics"]["test/bleu"] = bleu(cell["axes"])
        if cell["axes"][SEED] == 2:
            result["metrics"]["test/sacrebleu"] = None
        path.write_text(json.dumps(result))
    path = fake.folder / "grid.yaml"
    path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | {"published": published}))
    return read_results(fake.folder)


def test_the_same_arm(row):
    found = row()
    values = [bleu({SEED: seed, RATE: 0.002, WARMUP: 60}) for seed in (1, 2, 3)]
    assert found["ours"] == pytest.approx(sum(values) / 3)
    assert (found["low"], found["high"]) == pytest.approx(t_interval(values)[:2])
    assert (found["seeds"], found["theirs"], found["paper"]) == (3, 31.16, "Xiong et al. 2020")
    assert (found["setting"], found["note"]) == ("theirs", "section 3.2")
    assert found["differences"] == ""


@pytest.mark.parametrize(
    ("changes", "at", "said"),
    [
        ({"warmup": 4000}, (60, 0.002), "Warm-up 60 instead of 4,000."),
        ({"warmup": 1}, (60, 0.002), "Warm-up 60 instead of 1."),
        ({"warmup": 0}, (0, 0.002), ""),
        ({"warmup": None}, (60, 0.002), "Their warm-up is not stated, ours is 60."),
        ({"lr": 0.0013}, (60, 0.001), "Learning rate 0.001 instead of 0.0013."),
        (
            {"lr": None},
            (60, 0.002),
            "Their learning rate is not stated, ours is 0.002, the best of 3 by validation loss.",
        ),
    ],
)
def test_the_nearest_arm(row, changes, at, said):
    found = row(**changes)
    mean = sum(bleu({SEED: seed, WARMUP: at[0], RATE: at[1]}) for seed in (1, 2, 3)) / 3
    assert found["ours"] == pytest.approx(mean)
    assert found["differences"] == said


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"variant": "admin"}, "No finished run of admin here."),
        ({"metric": "GLUE"}, "Our runs have no finite GLUE."),
    ],
)
def test_what_we_do_not_have_is_a_dash(row, changes, said):
    found = row(**changes)
    assert (found["ours"], found["seeds"]) == ("–", 0)
    assert math.isnan(found["low"])
    assert found["differences"] == said
    assert found["theirs"] == 31.16


def test_no_arm_stands_in_for_one_without_warmup_or_with(make_grid):
    for warmup, theirs, said in ((60, 0, "without"), (0, 500, "with")):
        axes = AXES | {WARMUP: [warmup]}
        grid = grid_with(make_grid, [FIGURE | {"warmup": theirs}], axes, name=f"only{warmup}")
        (found,) = comparison(grid).to_dict("records")
        assert found["ours"] == "–"
        assert found["differences"] == f"No finished run {said} warm-up here."


def test_our_setting_is_said_once(make_grid):
    text = our_settings(grid_with(make_grid, [FIGURE]))
    assert text.startswith(
        "Data: synthetic, 30,000 training, 500 validation, 500 test examples. 200 steps,"
    )
    assert "3 + 3 layers" in text
    assert "decoupled" in text
    assert "T_ref = 60" in text


def test_stalls_are_said_and_have_no_interval(row):
    found = row(lr=0.008)
    assert math.isnan(found["low"])
    assert found["differences"] == "1 / 3 of ours stalled."
    diverged = row(lr=0.01, value="diverged")
    assert (diverged["theirs"], diverged["ours"], diverged["seeds"]) == (
        "diverged",
        "1 / 3 stalled",
        3,
    )


def test_a_value_that_is_not_finite_is_left_out_and_said(make_grid):
    grid = grid_with(make_grid, [FIGURE | {"metric": "test/sacrebleu"}])
    for cell in grid.cells:  # seed 2 wrote a null; the others get a value
        path = cell.folder / "result.json"
        result = json.loads(path.read_text())
        result["metrics"].setdefault("test/sacrebleu", 10.0 + (cell.seed or 0))
        path.write_text(json.dumps(result))
    (found,) = comparison(read_results(grid.folder)).to_dict("records")
    assert (found["ours"], found["seeds"]) == (12.0, 2)
    assert found["differences"] == "1 of 3 of ours without a finite test/sacrebleu."


@pytest.mark.parametrize(
    ("field", "alike", "otherwise"),
    [("model.objective.label_smoothing", 0.0, 0.1), ("data.evaluation_streams", 1, 8)],
)
@pytest.mark.parametrize("metric", ["test/word_perplexity", "test/bits_per_byte"])
def test_a_perplexity_of_words_measured_otherwise_is_not_compared(
    make_grid, field, alike, otherwise, metric
):
    """The number stays in the results; published ones are of one stream without smoothing."""
    axes = AXES | {"model.objective.label_smoothing": [0.0], field: [alike, otherwise]}
    fake = make_grid(loss, axes, curves=False, metrics={metric: 99.0})
    path = fake.folder / "grid.yaml"
    grid = yaml.safe_load(path.read_text()) | {"published": [FIGURE | {"metric": metric}]}
    path.write_text(yaml.safe_dump(grid))
    rows = comparison(read_results(fake.folder)).to_dict("records")
    assert len(rows) == 2
    assert rows[0]["ours"] == 99.0
    refused = metric == "test/word_perplexity"
    assert rows[1]["ours"] == ("–" if refused else 99.0)
    said = f"Not compared: {field} is {otherwise} in ours, and {alike} is needed."
    assert (said in rows[1]["differences"]) == refused
    assert {cell.metrics[metric] for cell in read_results(fake.folder).cells} == {99.0}


def test_a_row_for_each_value_of_the_other_axes(make_grid):
    axes = AXES | {"model.architecture.model_dim": [64, 128]}
    frame = comparison(grid_with(make_grid, [FIGURE], axes))
    assert len(frame) == 2
    assert frame["differences"].tolist()[0] == "Ours with model.architecture.model_dim=64."


def test_a_grid_without_figures_or_runs(make_grid, outcome):
    frame = comparison(read_results(make_grid(outcome, curves=False).folder))
    assert frame.empty
    assert list(frame) == list(COLUMNS)
    fake = make_grid(lambda axes: "waiting", name="waiting")
    path = fake.folder / "grid.yaml"
    path.write_text(f"{path.read_text()}\npublished: [{json.dumps(FIGURE)}]\n")
    assert comparison(read_results(fake.folder))["ours"].tolist() == ["–"]


@pytest.mark.parametrize("name", ["warmup_iwslt14", "warmup_mlm"])
def test_the_figures_that_ship_name_papers_variants_and_metrics(name):
    grid = read_spec(name)
    assert len(grid.published) > 5
    for figure in grid.published:
        assert figure["paper"] in bibliography()
        assert figure["variant"] in PRESETS
        assert figure["metric"] in (*GENERAL, *(s.metric for t in TASKS.values() for s in t.scores))
        assert figure["note"]
        if figure["metric"].endswith("accuracy") and figure["value"] != "diverged":
            assert 0 < figure["value"] < 1  # ours is a share
    assert set(grid.axes[PRESET]) & {figure["variant"] for figure in grid.published}
