"""Final loss and quality against warm-up: every run, and intervals only where one holds."""

import csv
import json
import re

import numpy as np
import pytest
import yaml
from scipy import stats

from lightning_app.report.results import read_results
from lightning_app.report.warmup import sensitivity_scores

PRESET = "model.block.preset"
WARMUP = "model.schedule.warmup_steps"
SEED = "seed_everything"


def read(folder, metric="val/nll"):
    """Final values by preset, warm-up and seed, straight from the files."""
    found = {}
    for cell in json.loads((folder / "plan.json").read_text())["cells"]:
        record = json.loads((folder / "runs" / cell["name"] / "result.json").read_text())
        axes = cell["axes"]
        key = (axes.get(PRESET, "post_ln"), axes[WARMUP], axes[SEED])
        found[key] = (record["metrics"].get(metric), record["status"])
    return found


def test_numbers_are_those_of_the_runs(make_grid, draw, outcome):
    """Runs as `result.json` has them; means and t intervals as SciPy has them."""
    folder = make_grid(outcome).folder
    truth, entropy = read(folder), 4.5
    table = draw(folder).table("loss_by_warmup")
    runs = table[table["mark"] == "run"].set_index(["variant", "warmup", "seed"])
    assert len(runs) == len(truth) == 30
    for key, (loss, status) in truth.items():
        assert runs.loc[key, "status"] == status
        assert runs.loc[key, "value"] == (entropy if status == "diverged" else loss)
    means = table[table["mark"] == "mean"].set_index(["variant", "warmup"])
    assert len(means) == 6
    for (preset, warmup), row in means.iterrows():
        values = [runs.loc[(preset, warmup, seed), "value"] for seed in range(1, 6)]
        assert row["value"] == pytest.approx(np.mean(values))
        if np.ptp(values) == 0:
            assert np.isnan(row["low"])
        else:
            ends = stats.t.interval(0.95, 4, np.mean(values), stats.sem(values))
            assert (row["low"], row["high"]) == pytest.approx(ends)


def test_no_interval_where_seeds_end_differently(make_grid, draw):
    def outcome(axes):
        return 4.5 if axes[WARMUP] == 0 and axes[SEED] == 1 else 2.0 + axes[SEED] / 10

    drawn = draw(make_grid(outcome, {SEED: [1, 2, 3], WARMUP: [0, 60]}).folder)
    means = drawn.table("loss_by_warmup").query("mark == 'mean'").set_index("warmup")
    assert means["low"].isna().to_dict() == {0: True, 60: False}
    assert means.loc[0, "value"] == pytest.approx((4.5 + 2.2 + 2.3) / 3)
    text = drawn.by_name["loss_by_warmup"].text
    assert "If some seeds" in text
    alike = draw(make_grid(lambda a: 2 + a[SEED] / 10, {SEED: [1, 2]}, name="alike").folder)
    assert "If some seeds" not in alike.by_name["loss_by_warmup"].text
    assert "t interval" in alike.by_name["loss_by_warmup"].text


def test_one_seed_has_no_interval_and_the_text_says_so(make_grid, draw):
    drawn = draw(make_grid(lambda a: 2.0, {SEED: [1], WARMUP: [0, 60]}).folder)
    text = drawn.by_name["loss_by_warmup"].text
    assert "single seed has" in text
    assert "t interval" not in text.replace("no t interval", "")


def test_every_run_has_its_mark(make_grid, draw, outcome):
    """A dot for each run, a cross for each that stalled."""
    folder = make_grid(outcome).folder
    text = draw(folder).svg("loss_by_warmup")
    stalled = sum(cell.state == "diverged" for cell in read_results(folder).cells)
    links = re.findall(r"<title>([^<]*)</title>.*?</a>", text, flags=re.DOTALL)
    assert len(links) == 30
    assert sum("stalled" in words for words in links) == stalled == 5


@pytest.mark.parametrize(
    ("metrics", "kind", "title"),
    [
        ({"val/bleu": 20.0}, "translation", "Validation BLEU against warm-up"),
        ({"val/bleu": 20.0, "test/bleu": 19.0}, "translation", "Test BLEU against warm-up"),
        ({}, "masked_lm", "Validation accuracy against warm-up"),
        ({}, "translation", None),
    ],
)
def test_quality_is_what_the_task_has(make_grid, draw, metrics, kind, title):
    """Accuracy of the next token is no measure of a translation."""
    folder = make_grid(lambda a: 2.0, {SEED: [1], WARMUP: [0, 60]}, metrics=metrics).folder
    tree = yaml.safe_load((folder / "grid.yaml").read_text())
    tree["base_config"]["model"]["objective"]["kind"] = kind
    (folder / "grid.yaml").write_text(yaml.safe_dump(tree))
    drawn = draw(folder)
    if title is None:
        assert "quality_by_warmup" not in drawn.names
        return
    assert drawn.by_name["quality_by_warmup"].title == title
    expected = min(metrics.values(), default=0.5)
    runs = drawn.table("quality_by_warmup").query("mark == 'run'")
    assert set(runs["value"]) == {expected}


def test_the_effect_of_warm_up_is_that_of_the_scores(make_grid, draw, outcome):
    """The forest by variant, the largest Delta first, and the last point of each curve."""
    folder = make_grid(outcome).folder
    drawn = draw(folder)
    table = drawn.table("warmup_effect")
    scores = {
        score.variant: score
        for score in sensitivity_scores(read_results(folder))
        if score.score == "delta"
    }
    means = table[table["mark"] == "mean"].set_index("variant")
    assert set(means.index) == set(scores)
    assert means["value"].is_monotonic_decreasing
    for variant, score in scores.items():
        row = means.loc[variant]
        assert row["value"] == pytest.approx(score.estimate)
        ends = pytest.approx((score.low, score.high), nan_ok=True)
        assert (row["low"], row["high"]) == ends
        seeds = table[(table["mark"] == "seed") & (table["variant"] == variant)]
        assert dict(zip(seeds["seed"], seeds["value"], strict=True)) == pytest.approx(
            dict(score.values)
        )
    curves = table[table["mark"] == "curve"]
    assert set(curves["variant"]) == set(scores)
    for variant in scores:
        own = curves[curves["variant"] == variant].set_index("step")["value"]
        for step, value in own.items():
            assert value == pytest.approx(delta_at(folder, variant, int(step)))


def delta_at(folder, variant, step):
    """The mean over seeds of the capped validation losses at a step, read by hand."""
    found = {}
    for cell in json.loads((folder / "plan.json").read_text())["cells"]:
        if cell["axes"][PRESET] == variant:
            with (folder / "runs" / cell["name"] / "metrics.csv").open() as file:
                losses = {
                    int(r["step"]): r["val/nll"] for r in csv.DictReader(file) if r["val/nll"]
                }
            found[cell["axes"][SEED], cell["axes"][WARMUP]] = min(float(losses[step]), 4.5)
    seeds = {seed for seed, _ in found}
    return np.mean([found[seed, 0] - found[seed, 60] for seed in seeds])


def test_several_rates_or_no_reference_have_no_single_effect(make_grid, draw):
    axes = {PRESET: ["pre_ln"], WARMUP: [0, 60], SEED: [1, 2]}
    bare = {"reference_warmup": None, "baseline": None}
    drawn = draw(make_grid(lambda a: 2.0 + 0.1 * a[SEED], axes, sensitivity=bare).folder)
    assert "warmup_effect" not in drawn.names
