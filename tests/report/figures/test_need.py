"""What decides, final loss and quality: every run, and intervals only where one holds."""

import json
import random
from typing import Any

import numpy as np
import pandas as pd
import pytest
import yaml
from matplotlib.collections import PathCollection
from matplotlib.patches import Rectangle
from scipy import stats

from lightning_app.report.comparisons import BETTER, SAME, WORSE
from lightning_app.report.figures import need
from lightning_app.report.figures.sheet import Part
from lightning_app.report.results import read_results
from lightning_app.report.verdicts import GAINS, NO_NEED, verdicts
from lightning_app.report.warmup import sensitivity_scores
from tests.report.conftest import PRESET, RATE, SEED, WARMUP, change

WIDTH = "model.architecture.model_dim"
SEEDS, RATES = range(1, 6), [1e-3, 2e-3, 4e-3]
SAVED = {"pre_ln": 0.02, "sas": 0.0, "post_ln": 0.2, "admin": 0.1}  # of warm-up at the best rate
AXES = {SEED: [*SEEDS], PRESET: [*SAVED], WARMUP: [0, 60], RATE: RATES}
FAMILIES = {"after": ["post_ln", "admin"], "before": ["pre_ln"]}


def tuned(axes):
    """The best rate is the middle one."""
    noise = random.Random(str(sorted(axes.items()))).gauss(0.0, 0.005)
    gain = SAVED[axes[PRESET]] * (axes[WARMUP] == 0)
    return 2.0 + 0.3 * abs(np.log2(axes[RATE] / 2e-3)) + gain + noise


def forest(folder, *, narrow=False):
    """The figure of all runs: its names, the ends of its lines by width and row, and its dots."""
    grid = read_results(folder)
    part = Part(grid=grid, group="all", lr=None, cells=grid.finished)
    (drawn,) = need.forest(part, narrow=narrow)
    axes = drawn.figure.axes[0]
    names = [label.get_text().replace("\n", "") for label in axes.get_yticklabels()]
    ends = {}
    for line in axes.lines[1:]:  # without that at zero
        (low, y), (high, _) = np.asarray(line.get_xydata()).tolist()
        ends[line.get_linewidth(), round(y)] = (low, high)
    dots = [each for each in axes.collections if isinstance(each, PathCollection)]
    return drawn, names, ends, [np.asarray(each.get_offsets()) for each in dots]


def decides(rows):
    """The t interval of each row at 95 %, and that of Holm's step; all rows are one family."""
    ps = np.array([stats.ttest_1samp(values, 0.0)[1] for values in rows.values()])
    order, holm = np.argsort(ps), {}
    for step, place in enumerate(order):
        worst = max((len(ps) - n) * ps[each] for n, each in enumerate(order[: step + 1]))
        holm[[*rows][place]] = len(ps) - step if worst < 0.05 else len(ps)
    return {
        name: [
            stats.t.interval(1 - 0.05 / m, len(values) - 1, np.mean(values), stats.sem(values))
            for m in (1, holm[name])
        ]
        for name, values in rows.items()
    }


def test_the_forest_is_what_decides(make_grid):
    fake = make_grid(tuned, AXES, curves=False)
    named = {"reference_warmup": 60, "baseline": "pre_ln", "matters": 0.03}
    change(fake, sensitivity=named, families=FAMILIES)

    def best(preset, warmup, seed):
        point = {SEED: seed, PRESET: preset, WARMUP: warmup}
        return min(tuned({**point, RATE: rate}) for rate in RATES)

    saved = {p: np.array([best(p, 0, s) - best(p, 60, s) for s in SEEDS]) for p in SAVED}
    means = {name: np.mean([saved[p] for p in of], axis=0) for name, of in FAMILIES.items()}
    groups = [
        {"all variants": np.mean([*saved.values()], axis=0)},
        means,
        {"after − before": means["after"] - means["before"]},
        {p: saved[p] for p in ("post_ln", "admin", "pre_ln", "sas")},
    ]
    rows = {name: values for group in groups for name, values in group.items()}
    intervals = {name: each for group in groups for name, each in decides(group).items()}
    drawn, names, ends, every = forest(fake.folder)
    assert names == [*rows] == [*drawn.table["variant"].unique()]
    grid = read_results(fake.folder)
    found = {each.variant: each.word for each in verdicts(grid, sensitivity_scores(grid))}
    assert (found["post_ln"], found["sas"]) == (GAINS, NO_NEED)
    (right,) = drawn.figure.axes[0].child_axes
    assert [label.get_text() for label in right.get_yticklabels()] == [found[n] for n in rows]
    for place, (name, values) in enumerate(rows.items()):
        table = drawn.table[drawn.table["variant"] == name]
        assert set(table["verdict"]) == {found[name]}
        seeds, mean = table.query("mark == 'seed'"), table.query("mark == 'mean'").iloc[0]
        assert [*seeds["seed"]] == [*SEEDS]
        assert [*seeds["value"]] == pytest.approx(values)
        assert mean["value"] == pytest.approx(values.mean())
        for (low, high), shown, width in zip(intervals[name], ("", "holm_"), (3, 1), strict=True):
            assert [mean[f"{shown}low"], mean[f"{shown}high"]] == pytest.approx([low, high])
            assert ends[width, place] == pytest.approx((low, high))
        assert every[2 * place][:, 0] == pytest.approx(values)
        assert every[2 * place + 1][:, 0] == pytest.approx([values.mean()])
    (band,) = [each for each in drawn.figure.axes[0].patches if isinstance(each, Rectangle)]
    assert (band.get_x(), band.get_width()) == pytest.approx((-0.03, 0.06))


def test_a_row_of_the_forest_for_each_group_and_variant(make_grid):
    axes = {**AXES, PRESET: ["pre_ln", "post_ln"], RATE: RATES[1:2], WIDTH: [64, 128]}
    fake = make_grid(lambda at: tuned({k: at[k] for k in AXES}), axes, curves=False)
    drawn, names, _, _ = forest(fake.folder)
    order = [("all variants", width) for width in axes[WIDTH]]
    order += [(name, width) for width in axes[WIDTH] for name in ("post_ln", "pre_ln")]
    assert names == [f"{name}, {WIDTH}={width}" for name, width in order]
    assert drawn.figure.axes[0].patches[:] == []
    small, below, _, _ = forest(fake.folder, narrow=True)
    words = drawn.table.groupby("variant")["verdict"].first()
    assert below == [f"{name}{words[name]}" for name in names]
    assert small.figure.axes[0].child_axes == []
    assert small.table.equals(drawn.table)
    assert small.figure.get_figwidth() < drawn.figure.get_figwidth() / 2


def test_the_forest_of_a_comparison_tells_better_by_the_mode_of_the_metric(make_grid):
    axes = {SEED: [*SEEDS], PRESET: ["pre_ln", "sas", "post_ln", "admin"]}
    fake = make_grid(lambda at: 2.0, axes, curves=False)
    change(fake, metric={"name": "val/accuracy", "mode": "max", "matters": 0.02})
    gains = {"pre_ln": 0.0, "sas": 0.1, "post_ln": -0.1, "admin": 0.0}
    noise = {s: np.random.default_rng(s).normal(0, 0.002, 4) for s in SEEDS}
    found = {}
    for number, cell in enumerate(fake.cells):
        seed, preset = cell["axes"].values()
        found[preset, seed] = 0.5 + gains[preset] + noise[seed][axes[PRESET].index(preset)]
        fake.edit(number, {"val/accuracy": found[preset, seed]})
    drawn, names, ends, _ = forest(fake.folder)
    told = drawn.table.groupby("variant", sort=False)["verdict"].first()
    assert names == axes[PRESET][1:]
    assert dict(told) == {"sas": BETTER, "post_ln": WORSE, "admin": SAME}
    rows = {v: np.array([found[v, s] - found["pre_ln", s] for s in SEEDS]) for v in names}
    for place, (name, both) in enumerate(decides(rows).items()):
        seeds = drawn.table[(drawn.table["variant"] == name) & (drawn.table["mark"] == "seed")]
        assert [*seeds["value"]] == pytest.approx(rows[name])
        assert [ends[3, place], ends[1, place]] == [pytest.approx(each) for each in both]
    (band,) = [each for each in drawn.figure.axes[0].patches if isinstance(each, Rectangle)]
    assert (band.get_x(), band.get_width()) == pytest.approx((-0.02, 0.04))
    label = drawn.figure.axes[0].get_xlabel()
    assert all(word in label for word in ("val/accuracy", "pre_ln", "higher"))


def test_numbers_are_those_of_the_runs(make_grid, draw, outcome):
    fake = make_grid(outcome)
    table = draw(fake.folder, "loss_by_warmup").table("loss_by_warmup")
    runs = table[table["mark"] == "run"].set_index(["variant", "warmup", "seed"])
    assert len(runs) == len(fake.cells) == 30
    for cell in fake.cells:
        key = tuple(cell["axes"][axis] for axis in (PRESET, WARMUP, SEED))
        record = json.loads((fake.run(cell) / "result.json").read_text())
        stalled = record["status"] == "diverged"
        assert runs.loc[key, "status"] == record["status"]
        assert runs.loc[key, "value"] == (4.5 if stalled else record["metrics"]["val/nll"])
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

    folder = make_grid(outcome, {SEED: [1, 2, 3], WARMUP: [0, 60]}).folder
    drawn = draw(folder, "forest", "loss_by_warmup")
    forest = drawn.table("forest").query("mark == 'mean'").iloc[0]
    assert forest["value"] == pytest.approx((4.5 - 2.1 + 0 + 0) / 3)
    assert np.isnan([forest["low"], forest["holm_low"]]).all()
    means = drawn.table("loss_by_warmup").query("mark == 'mean'").set_index("warmup")
    assert means["low"].isna().to_dict() == {0: True, 60: False}
    assert means.loc[0, "value"] == pytest.approx((4.5 + 2.2 + 2.3) / 3)


@pytest.mark.in_turn(2)
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
    folder = make_grid(lambda a: 2.0, {SEED: [1], WARMUP: [0, 60]}, metrics=metrics).folder
    tree = yaml.safe_load((folder / "grid.yaml").read_text())
    tree["base_config"]["model"]["objective"]["kind"] = kind
    (folder / "grid.yaml").write_text(yaml.safe_dump(tree))
    drawn = draw(folder, "quality_by_warmup")
    if title is None:
        assert "quality_by_warmup" not in drawn.names
        return
    assert drawn.by_name["quality_by_warmup"].title == title
    expected = min(metrics.values(), default=0.5)
    runs = drawn.table("quality_by_warmup").query("mark == 'run'")
    assert set(runs["value"]) == {expected}


def test_the_effect_of_warm_up_is_delta_at_each_step(make_grid, draw, outcome):
    fake = make_grid(outcome)
    curves = draw(fake.folder, "warmup_effect").table("warmup_effect")
    assert set(curves["mark"]) == {"curve"}
    scores = sensitivity_scores(read_results(fake.folder))
    scores = {score.variant: score.estimate for score in scores if score.score == "delta"}
    variants = [*curves["variant"].unique()]
    assert variants == sorted(scores, key=scores.__getitem__, reverse=True)
    for variant in variants:
        own = curves[curves["variant"] == variant].set_index("step")["value"]
        assert [*own.index] == [50, 100, 150, 200]
        if variant != "post_ln":  # whose stalled runs count as H
            assert own[200] == pytest.approx(scores[variant])
        ends = {0: [], 60: []}
        for cell in fake.cells:
            if cell["axes"][PRESET] == variant:
                log = pd.read_csv(fake.run(cell) / "metrics.csv").dropna(subset="val/nll")
                ends[cell["axes"][WARMUP]].append(log.set_index("step")["val/nll"].clip(upper=4.5))
        by_hand: Any = sum(ends[0]) / 5 - sum(ends[60]) / 5
        assert own.to_dict() == pytest.approx(by_hand.to_dict())


def test_several_rates_or_no_reference_have_no_single_effect(make_grid, draw):
    axes = {PRESET: ["pre_ln"], WARMUP: [0, 60], SEED: [1, 2]}
    bare = {"reference_warmup": None, "baseline": None}
    fake = make_grid(lambda a: 2.0 + 0.1 * a[SEED], axes, sensitivity=bare)
    drawn = draw(fake.folder, "warmup_effect")
    assert "warmup_effect" not in drawn.names
