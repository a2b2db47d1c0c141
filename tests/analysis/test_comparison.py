"""Values of an axis compared on the grid's own metric, also without a question about warm-up."""

import json
import math
import random
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from scipy import stats

from lightning_app.ablation.grid_checks import check_compare
from lightning_app.analysis.comparison import (
    WORSE,
    MetricDifference,
    comparisons,
    comparisons_frame,
)
from lightning_app.analysis.formatting import p_value
from lightning_app.analysis.grid_results import GridResults
from lightning_app.analysis.headline import findings
from lightning_app.analysis.read_results import read_results
from lightning_app.analysis.report import write_report
from lightning_app.analysis.sensitivity import sensitivity_scores
from lightning_app.errors import UserError

PRESET = "model.block.preset"
WARMUP = "model.schedule.warmup_steps"
SEED = "seed_everything"
WIDTH = "model.architecture.model_dim"
AXES = {PRESET: ["sas", "pre_ln", "post_ln"], WIDTH: [64, 128], SEED: [1, 2, 3, 4]}


def loss(axes: Mapping[str, Any]) -> float:
    """sas is 0.5 worse than pre_ln, post_ln no different; width helps all alike."""
    noise = random.Random(str(sorted(axes.items()))).gauss(0.0, 0.02)
    return 2.5 + 0.5 * (axes[PRESET] == "sas") - axes[WIDTH] / 640 + noise


def read(fake: Any, **changes: Any) -> GridResults:
    """The grid, after changes of its grid file."""
    path = fake.folder / "grid.yaml"
    path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | changes))
    return read_results(fake.folder)


def by_place(rows: list[MetricDifference]) -> dict[tuple[str, str, str], MetricDifference]:
    return {(row.axis, row.value, row.where): row for row in rows}


def test_differences_are_those_of_a_plain_computation(make_grid: Any) -> None:
    grid = read(make_grid(loss, AXES, curves=False), compare={PRESET: "pre_ln", WIDTH: 64})
    found = by_place(comparisons(grid))
    assert len(found) == 2 * 2 + 3
    table = {(c.variant, c.axes[WIDTH], c.seed): c.metrics["val/nll"] or 0.0 for c in grid.cells}
    truth = {}
    for width in (64, 128):
        for preset in ("sas", "post_ln"):
            truth[PRESET, preset, f"{WIDTH}={width}"] = [
                table[preset, width, seed] - table["pre_ln", width, seed] for seed in (1, 2, 3, 4)
            ]
    for preset in AXES[PRESET]:
        truth[WIDTH, "128", f"{PRESET}={preset}"] = [
            table[preset, 128, seed] - table[preset, 64, seed] for seed in (1, 2, 3, 4)
        ]
    assert found.keys() == truth.keys()
    ps = {}
    for axis in (PRESET, WIDTH):
        rows = [values for place, values in truth.items() if place[0] == axis]
        freedom = 3 * len(rows)
        spread = math.sqrt(sum(3 * np.var(values, ddof=1) for values in rows) / freedom)
        for place, values in truth.items():
            if place[0] == axis:
                pooled = 2 * stats.t.sf(abs(np.mean(values)) / (spread / 2), freedom)
                own: Any = stats.ttest_1samp(values, 0)
                ps[place] = max(float(own.pvalue), float(pooled))
    order = sorted(ps, key=lambda place: ps[place])
    largest = 0.0
    for number, place in enumerate(order):
        row, values = found[place], truth[place]
        low, high = stats.t.interval(0.95, 3, np.mean(values), stats.sem(values))
        largest = max(largest, min(1.0, (len(order) - number) * ps[place]))
        assert row.estimate == pytest.approx(np.mean(values), abs=1e-12)
        assert (row.low, row.high) == pytest.approx((low, high), abs=1e-9)
        assert row.p == pytest.approx(ps[place], abs=1e-9)
        assert row.p_holm == pytest.approx(largest, abs=1e-9)
        assert row.seeds == 4
    assert found[PRESET, "sas", f"{WIDTH}=64"].reading == "worse"
    assert found[PRESET, "post_ln", f"{WIDTH}=64"].reading == "no difference shown"
    assert found[WIDTH, "128", f"{PRESET}=sas"].reading == "better"


def test_a_metric_that_is_to_be_large_reads_the_other_way(make_grid: Any) -> None:
    fake = make_grid(loss, AXES, curves=False)
    grid = read(fake, compare={WIDTH: 64}, metric={"name": "val/nll", "mode": "max"})
    assert {row.reading for row in comparisons(grid)} == {"worse"}


def test_a_grid_that_does_not_ask_about_warmup_compares_its_variants(make_grid: Any) -> None:
    """With the baseline of the grid; the page asks nothing about warm-up."""
    fake = make_grid(loss, AXES, curves=False)
    grid = read_results(fake.folder)
    assert {(row.axis, row.baseline) for row in comparisons(grid)} == {(PRESET, "pre_ln")}
    said = findings(grid, sensitivity_scores(grid))
    for row in comparisons(grid):
        (sentence,) = [text for text in said if f", {row.where}: " in text]
        assert f"preset {row.value} (p {p_value(row.p_holm)})" in sentence
        assert (f"{row.value} (p {p_value(row.p_holm)}) is worse" in sentence) == (
            row.reading == WORSE
        )
    page = write_report(fake.folder).read_text(encoding="utf-8")
    assert "Who needs warm-up?" not in page
    assert "Which is better?" in page
    assert "who needs it cannot be said" not in page
    assert f"<h1>{escape(said[0])}</h1>" in page
    table = (fake.folder / "comparisons.csv").read_text()
    assert table.count("\n") == 5
    assert comparisons_frame(comparisons(grid))["reading"].tolist().count("worse") == 2


def test_a_grid_about_warmup_compares_only_what_it_names(make_grid: Any) -> None:
    fake = make_grid(
        lambda axes: 2.0 + axes[SEED] / 9, {PRESET: ["sas"], WARMUP: [0, 60], SEED: [1, 2]}
    )
    assert comparisons(read_results(fake.folder)) == []
    write_report(fake.folder)
    assert not (fake.folder / "comparisons.csv").exists()
    (row,) = comparisons(read(fake, compare={WARMUP: 0}))
    assert (row.axis, row.value, row.baseline, row.estimate) == (WARMUP, "60", "0", 0.0)


def test_pairs_that_lack_a_run_or_a_value_are_left_out(make_grid: Any) -> None:
    def outcome(axes: Mapping[str, Any]) -> float | str | None:
        odd = {("sas", 64, 1): "failed", ("sas", 64, 2): None, ("pre_ln", 128, 3): "waiting"}
        return odd.get((axes[PRESET], axes[WIDTH], axes[SEED]), loss(axes))

    found = by_place(comparisons(read_results(make_grid(outcome, AXES, curves=False).folder)))
    row = found[PRESET, "sas", f"{WIDTH}=64"]
    assert (row.seeds, row.note) == (2, "1 of 3 pairs lack a finite val/nll")
    assert [seed for seed, _ in row.values] == [3, 4]
    assert found[PRESET, "sas", f"{WIDTH}=128"].seeds == 3


def test_seeds_that_ended_differently_have_no_interval(make_grid: Any) -> None:
    """A run that stalled at the entropy is no draw from the noise of those that learned."""

    def outcome(axes: Mapping[str, Any]) -> float:
        return 4.49 if (axes[PRESET], axes[SEED]) == ("sas", 1) else loss(axes)

    rows = comparisons(read_results(make_grid(outcome, AXES, curves=False).folder))
    mixed = [row for row in rows if row.value == "sas"]
    assert {math.isnan(row.p) and math.isnan(row.low) for row in mixed} == {True}
    assert {(row.reading, row.note) for row in mixed} == {
        ("", "some seeds of an arm failed and others did not")
    }


def test_an_empty_comparison_says_why(make_grid: Any) -> None:
    fake = make_grid(lambda axes: "waiting" if axes[PRESET] == "pre_ln" else loss(axes), AXES)
    rows = comparisons(read_results(fake.folder))
    assert {row.note for row in rows} == {"no seed has finished with both values"}
    assert {row.seeds for row in rows} == {0}
    json.dumps([row.note for row in rows])


@pytest.mark.parametrize(
    ("compare", "message"),
    [
        ({"model.block.presets": "sas"}, "compare: no axis 'model.block.presets'; did you mean"),
        (
            {PRESET: "keel"},
            r"compare: model.block.preset: expected one of its values \(sas, pre_ln",
        ),
        ({SEED: 1}, "compare: seed_everything: seeds are what"),
        (["sas"], "compare: expected a mapping"),
    ],
)
def test_a_mistake_in_the_grid_file_is_named(compare: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_compare(compare, AXES)


def test_a_number_that_means_the_same_is_the_value(tmp_path: Path) -> None:
    assert check_compare({WIDTH: 64.0}, AXES) == {WIDTH: 64.0}
