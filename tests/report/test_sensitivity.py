"""Scores against numbers worked by hand, and against a slow second road to the same numbers."""

# pyright: reportAttributeAccessIssue=false
# SciPy's results of tests carry their fields at run time only.

import json
import math
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from scipy import stats

from lightning_app.report.headline import own_reading
from lightning_app.report.limits import limits
from lightning_app.report.pairs import NOT_YET, Score, scores_frame
from lightning_app.report.results import read_results
from lightning_app.report.warmup import holm, sensitivity_scores
from tests.report.conftest import messages
from tests.told import told

H = 4.5
PRESET = "model.block.preset"
WARMUP = "model.schedule.warmup_steps"
RATE = "model.optimizer.lr"
SEED = "seed_everything"
THREE = {SEED: [1, 2, 3], PRESET: ["post_ln", "pre_ln"], WARMUP: [0, 60]}
LOSSES = {
    ("post_ln", 0): [4.47, 4.5, 5.25],  # all failed, so each counts as 4.5
    ("post_ln", 60): [2.0, 2.2, 2.4],
    ("pre_ln", 0): [2.3, 2.5, 2.4],
    ("pre_ln", 60): [2.2, 2.3, 2.1],
}


def worked(axes: Mapping[str, Any]) -> float:
    return LOSSES[axes[PRESET], axes[WARMUP]][axes[SEED] - 1]


def by_name(folder, **where: Any) -> dict[tuple[str, str], Score]:
    """Scores by variant and name, of one slice of the grid."""
    found = [
        score
        for score in sensitivity_scores(read_results(folder))
        if all(getattr(score, key) == value for key, value in where.items())
    ]
    named = {(score.variant, score.score): score for score in found}
    assert len(named) == len(found)
    return named


def interval(score: Score) -> tuple[float, float, float]:
    return score.low, score.estimate, score.high


def test_three_seeds_by_hand(make_grid):
    found = by_name(make_grid(worked, THREE).folder)
    # 2.5 2.3 2.1: sd 0.2, t_2 = 4.302653, half width 4.302653 * 0.2 / sqrt(3)
    assert interval(found["post_ln", "delta"]) == pytest.approx((1.803172, 2.3, 2.796828), abs=1e-6)
    # 0.1 0.2 0.3
    assert interval(found["pre_ln", "delta"]) == pytest.approx((-0.048414, 0.2, 0.448414), abs=1e-6)
    # 2.4 2.1 1.8; three stalls against none are no more than chance may do with three seeds
    versus = found["post_ln", "interaction"]
    assert interval(versus) == pytest.approx((1.354758, 2.1, 2.845242), abs=1e-6)
    assert math.isnan(versus.p)
    assert math.isnan(versus.p_holm)
    assert versus.note == "3 seeds are too few to tell stalls from chance, so no p value"
    assert (versus.seeds, versus.cells, versus.diverged) == (3, 12, 3)
    assert (found["post_ln", "delta"].bound, found["pre_ln", "delta"].bound) == (">=", "")
    # 0.1 0.2 0.3: t = 0.2 / (0.1 / sqrt(3)) with 2 degrees of freedom; pooled with 2.5 2.3 2.1
    assert found["pre_ln", "delta"].p_sign == pytest.approx(2 / 2**3)
    pooled = math.sqrt((0.1**2 + 0.2**2) / 2)
    apart = 0.2 / (pooled / math.sqrt(3))
    expected = max(2 * stats.t.sf(2 * math.sqrt(3), 2), 2 * stats.t.sf(apart, 4))
    assert found["pre_ln", "delta"].p == pytest.approx(expected)
    # Wilson: 3 of 3 has the lower end 1 / (1 + z^2 / 3)
    low, estimate, high = interval(found["post_ln", "stalls w=0"])
    assert (low, estimate, high) == pytest.approx((1 / (1 + 1.959964**2 / 3), 1.0, 1.0), abs=1e-6)
    assert found["pre_ln", "stalls w=0"].diverged == 0
    assert dict(found["post_ln", "delta"].each) == pytest.approx({1: 2.5, 2: 2.3, 3: 2.1})


def test_a_p_value_by_hand(make_grid):
    def outcome(axes: Mapping[str, Any]) -> float:
        return worked(axes) - 0.5 * (axes[PRESET] == "post_ln" and axes[WARMUP] == 0)

    found = by_name(make_grid(lambda a: min(outcome(a), 4.0 - 0.3 * a[SEED]), THREE).folder)
    # post_ln 3.7 3.4 3.1 less 2.0 2.2 2.4 is 1.7 1.2 0.7; less pre_ln's 0.1 0.2 0.3: 1.6 1.0 0.4
    versus = found["post_ln", "interaction"]
    t = 1.0 / (0.6 / math.sqrt(3))
    assert versus.estimate == pytest.approx(1.0)
    pooled = math.sqrt(2 * (0.5**2 + 0.1**2) / 2)  # the spread of both Deltas, 4 degrees of freedom
    other = 2 * stats.t.sf(1.0 / (pooled / math.sqrt(3)), 4)
    assert versus.p == pytest.approx(max(1 - t / math.sqrt(t**2 + 2), other))  # 2 degrees
    assert versus.p_holm == min(1.0, 23 * versus.p)


def test_the_baseline_is_not_compared_with_itself(make_grid):
    own = by_name(make_grid(worked, THREE).folder)["pre_ln", "interaction"]
    assert math.isnan(own.estimate)
    assert math.isnan(own.p)
    assert own.note == "is the baseline"


def test_a_second_road_to_every_score(make_grid):
    """Seven seeds, four variants, three warm-ups, random losses: NumPy and SciPy, array-wise.

    Some runs of `realformer` without warm-up stall.
    """
    presets, warmups, seeds = ["post_ln", "pre_ln", "sas", "realformer"], [0, 30, 60], range(1, 8)
    draw = random.Random(5)
    table = np.array([[[draw.uniform(1.5, 4.4) for _ in seeds] for _ in warmups] for _ in presets])
    table[3, 0, :4] = 4.6

    def outcome(axes: Mapping[str, Any]) -> float:
        return float(
            table[presets.index(axes[PRESET]), warmups.index(axes[WARMUP]), axes[SEED] - 1]
        )

    axes = {SEED: list(seeds), PRESET: presets, WARMUP: warmups}
    found = by_name(make_grid(outcome, axes).folder)
    failed = table >= H - 0.05
    capped = np.where(failed, H, table)
    assert 0 < failed.sum() < failed.size
    lost = capped[:, 0] - capped[:, 2]
    versus = lost - lost[1]
    p = {}
    for i, name in enumerate(presets):
        mixed = name == "realformer"
        student = stats.t(len(seeds) - 1, lost[i].mean(), stats.sem(lost[i]))
        expected = student.ppf([0.025, 0.5, 0.975])
        assert found[name, "delta"].estimate == pytest.approx(expected[1])
        if mixed:
            assert math.isnan(found[name, "delta"].low)
            assert told("stalled 4 of 7 … 0").search(found[name, "delta"].note)
            assert [value for _, value in found[name, "delta"].each] == pytest.approx(lost[i])
        else:
            assert interval(found[name, "delta"]) == pytest.approx(expected)
        for j, warmup in enumerate(warmups):
            stalled = found[name, f"stalls w={warmup}"]
            k = int(failed[i, j].sum())
            ends = stats.binomtest(k, 7).proportion_ci(0.95, "wilson")
            assert interval(stalled) == pytest.approx((ends.low, k / 7, ends.high))
        if name != "pre_ln":
            test = stats.ttest_1samp(versus[i], 0)
            ends = test.confidence_interval(0.95)
            expected = (ends.low, versus[i].mean(), ends.high)
            nothing = (math.nan, expected[1], math.nan)
            wanted = pytest.approx(nothing if mixed else expected, nan_ok=True)
            assert interval(found[name, "interaction"]) == wanted
            pooled = math.sqrt(2 * lost.var(axis=1, ddof=1).mean() / len(seeds))
            p[name] = max(test.pvalue, 2 * stats.t.sf(abs(versus[i].mean()) / pooled, 24))
    for name, value in p.items():
        assert found[name, "interaction"].p == pytest.approx(value)
        ranked = sorted(p.values())
        steps = [(21 - rank) * q for rank, q in enumerate(ranked)]
        expected = min(1.0, max(steps[: ranked.index(value) + 1]))
        assert found[name, "interaction"].p_holm == pytest.approx(expected)


def test_holm_by_hand():
    rows = [
        Score(group="all", lr=1.0, variant=str(p), score="interaction", p=p)
        for p in (0.04, math.nan, 0.01, 0.03)
    ]
    corrected = [row.p_holm for row in holm(rows)]
    assert math.isnan(corrected[1])
    assert [corrected[i] for i in (0, 2, 3)] == pytest.approx([0.76, 0.21, 0.60])


def test_holm_counts_a_comparison_whose_p_value_is_withheld():
    rows = [
        Score(group="all", lr=1.0, variant=str(p), score="interaction", p=p, estimate=e, seeds=3)
        for p, e in ((0.01, 1.0), (math.nan, 2.0), (0.03, 1.0), (math.nan, math.nan))
    ]
    corrected = [row.p_holm for row in holm(rows)]
    assert corrected == pytest.approx([0.21, math.nan, 0.60, math.nan], nan_ok=True)


def test_one_seed_has_estimates_and_no_intervals(make_grid):
    found = by_name(make_grid(worked, {**THREE, SEED: [1]}).folder)
    for name in ("delta", "interaction"):
        score = found["post_ln", name]
        assert math.isfinite(score.estimate)
        assert math.isnan(score.low)
        assert math.isnan(score.high)
        assert score.note.startswith("one seed, no interval")
    assert found["post_ln", "delta"].estimate == pytest.approx(2.5)
    assert math.isnan(found["post_ln", "interaction"].p)


def test_a_missing_cell_takes_its_partners_out(make_grid):
    def outcome(axes: Mapping[str, Any]) -> float | str:
        gone = (axes[PRESET], axes[WARMUP], axes[SEED]) == ("pre_ln", 60, 2)
        return "failed" if gone else worked(axes)

    found = by_name(make_grid(outcome, THREE).folder)
    assert found["pre_ln", "delta"].estimate == pytest.approx((0.1 + 0.3) / 2)
    assert found["post_ln", "delta"].estimate == pytest.approx(2.3)
    assert found["post_ln", "interaction"].estimate == pytest.approx((2.4 + 1.8) / 2)
    assert found["post_ln", "interaction"].seeds == 2
    assert "1 of 3" in found["pre_ln", "delta"].note
    assert "1 of 3" in found["post_ln", "interaction"].note
    assert found["pre_ln", "stalls w=60"].note == "1 of 3 runs not finished"
    assert found["pre_ln", "stalls w=60"].cells == 2


@pytest.mark.parametrize(
    ("sensitivity", "reason"),
    [
        ({"reference_warmup": 60, "baseline": "sas"}, "no arm of the baseline sas"),
        ({"reference_warmup": 60, "baseline": None}, "the grid file names no baseline"),
    ],
)
def test_no_baseline(make_grid, sensitivity, reason):
    found = by_name(make_grid(worked, THREE, sensitivity=sensitivity).folder)
    assert math.isnan(found["post_ln", "interaction"].estimate)
    assert found["post_ln", "interaction"].note == reason
    assert found["post_ln", "delta"].estimate == pytest.approx(2.3)


def test_all_stalled(make_grid):
    found = by_name(make_grid(lambda axes: None if axes[SEED] == 1 else 4.6, THREE).folder)
    for name in ("delta", "interaction"):
        assert math.isnan(found["post_ln", name].estimate)
        assert found["post_ln", name].note == "never learned"
    assert found["post_ln", "stalls w=60"].estimate == 1.0


def test_a_baseline_that_never_learned_compares_with_nothing(make_grid):
    axes = {**THREE, PRESET: ["post_ln", "sas", "pre_ln"]}
    found = by_name(make_grid(lambda a: None if a[PRESET] == "pre_ln" else 2.0, axes).folder)
    assert math.isnan(found["sas", "interaction"].estimate)
    assert found["sas", "interaction"].note == "baseline: never learned"
    assert found["post_ln", "delta"].estimate == 0.0


def test_seeds_that_end_differently_have_no_interval(make_grid):
    """One of five seeds stalls: the values stand in its place, and the test of zero stays."""
    axes = {**THREE, SEED: [1, 2, 3, 4, 5]}

    def outcome(a: Mapping[str, Any]) -> float:
        stalls = a[PRESET] == "post_ln" and a[WARMUP] == 0 and a[SEED] == 3
        return 4.5 if stalls else 2.0 + 0.1 * (a[WARMUP] == 0) + 0.01 * a[SEED] * (a[WARMUP] > 0)

    found = by_name(make_grid(outcome, axes).folder)
    own = found["post_ln", "delta"]
    assert own.estimate == pytest.approx((0.28 + 2.47) / 5)
    assert math.isnan(own.low)
    assert own.note == "stalled 1 of 5 at warm-up 0, so no interval over seeds"
    assert len(own.each) == 5
    versus = found["post_ln", "interaction"]
    assert math.isnan(versus.low)
    assert versus.p == pytest.approx(stats.ttest_1samp([0, 0, 2.4, 0, 0], 0).pvalue)
    assert versus.p_sign == 1.0
    assert not math.isnan(found["pre_ln", "delta"].low)


def test_a_damaged_result_is_missing_and_said_to_be(make_grid):
    grid = make_grid(worked, THREE)
    for cell in grid.cells:
        axes = cell["axes"]
        if (axes[PRESET], axes[WARMUP], axes[SEED]) == ("pre_ln", 60, 2):
            path = grid.run(cell) / "result.json"
            record = json.loads(path.read_text())
            record["metrics"]["val/nll"] = math.nan
            path.write_text(json.dumps(record))
    found = by_name(grid.folder)
    assert found["pre_ln", "delta"].estimate == pytest.approx((0.1 + 0.3) / 2)
    assert found["pre_ln", "delta"].note == "1 of 3 seeds not finished"
    assert found["pre_ln", "stalls w=60"].note == "1 of 3 runs not finished"
    assert found["pre_ln", "stalls w=60"].cells == 2


@pytest.mark.parametrize(
    ("warmups", "reference", "reason"),
    [
        (None, 60, "no arm without warm-up"),
        ([0, 30], 60, "no arm with the reference warm-up 60"),
        ([0, 60], 0, "the reference is no warm-up itself"),
        ([0, 60], None, "the grid file names no reference warm-up"),
    ],
)
def test_no_arm_to_compare(make_grid, warmups, reference, reason):
    axes = {SEED: [1, 2], PRESET: ["post_ln", "pre_ln"], WARMUP: warmups}
    axes = {key: values for key, values in axes.items() if values}
    scored = {"reference_warmup": reference, "baseline": "pre_ln"}
    found = by_name(make_grid(lambda axes: 2.0, axes, sensitivity=scored).folder)
    for name in ("delta", "interaction"):
        assert math.isnan(found["post_ln", name].estimate)
        assert found["post_ln", name].note == reason
    if warmups is None:
        assert found["post_ln", "stalls w=60"].estimate == 0.0


@pytest.mark.parametrize(
    ("axes", "sensitivity", "said"),
    [
        ({}, None, []),
        ({WARMUP: [60]}, None, ["no_bare_arm"]),
        ({WARMUP: [0, 30]}, None, ["no_reference"]),
        ({PRESET: ["sas"]}, None, ["no_baseline"]),
        ({}, {"reference_warmup": 0, "baseline": None}, ["no_reference", "no_baseline"]),
    ],
)
def test_what_cannot_be_said_is_said(make_grid, axes, sensitivity, said):
    grid = make_grid(lambda a: 2.0 + 0.1 * a[SEED], {**THREE, **axes}, sensitivity=sensitivity)
    names = [name for name, _ in messages(limits(read_results(grid.folder)))]
    assert [name for name in names if name.startswith("limits.no_")] == [
        f"limits.{name}" for name in said
    ]


def test_several_rates(make_grid):
    """Each rate has its own scores; others look over the rates."""
    losses = {
        (0, 0.001): 2.6,
        (0, 0.002): 2.4,
        (0, 0.004): 4.5,
        (60, 0.001): 2.5,
        (60, 0.002): 2.2,
        (60, 0.004): 2.0,
    }
    rates = [0.001, 0.002, 0.004]
    axes = {SEED: [1, 2], PRESET: ["post_ln"], WARMUP: [0, 60], RATE: rates}
    folder = make_grid(lambda a: losses[a[WARMUP], a[RATE]] + 0.02 * a[SEED], axes).folder
    for lr, lost in ((0.001, 0.1), (0.002, 0.2), (0.004, 4.5 - 2.03)):
        assert by_name(folder, lr=lr)["post_ln", "delta"].estimate == pytest.approx(lost)
    overall = {s.score: s for s in sensitivity_scores(read_results(folder)) if math.isnan(s.lr)}
    names = ["need", "octaves", "stall_difference", "rate_sensitivity", "steps_at_best_rates"]
    names += [f"rate_sensitivity w={w}" for w in (0, 60)]
    assert set(overall) == set(names)
    assert overall["need"].estimate == pytest.approx(2.43 - 2.03)
    assert overall["need"].bound == ">="  # the best rate with warm-up is the largest


def test_other_axes_make_groups(make_grid):
    axes = {**THREE, "data.tokens_per_batch": [512, 1024]}
    folder = make_grid(lambda a: worked(a) - a["data.tokens_per_batch"] / 10240, axes).folder
    for tokens in (512, 1024):
        found = by_name(folder, group=f"data.tokens_per_batch={tokens}")
        assert found["pre_ln", "delta"].estimate == pytest.approx(0.2)
        assert found["pre_ln", "delta"].seeds == 3
        assert found["post_ln", "interaction"].cells == 12


def test_the_baseline_shares_the_other_block_axes(make_grid):
    """`post_ln` with RMSNorm is compared with `pre_ln` with RMSNorm."""
    axes = {**THREE, "model.block.norm": ["layer_norm", "rms_norm"]}

    def outcome(a: Mapping[str, Any]) -> float:
        extra = 0.5 if a["model.block.norm"] == "rms_norm" and a[WARMUP] == 0 else 0.0
        return worked(a) + (extra if a[PRESET] == "pre_ln" else 0.0)

    found = by_name(make_grid(outcome, axes).folder)
    plain, rms = (f"post_ln+norm={norm}" for norm in ("layer_norm", "rms_norm"))
    assert found[plain, "interaction"].estimate == pytest.approx(2.1)
    assert found[rms, "interaction"].estimate == pytest.approx(1.6)
    assert found["pre_ln+norm=rms_norm", "interaction"].note == "is the baseline"


def test_nothing_finished(make_grid):
    found = by_name(make_grid(lambda axes: "waiting", THREE).folder)
    assert len(found) == 14
    assert all(math.isnan(score.estimate) and score.note for score in found.values())


def test_the_table_has_a_row_for_each_variant_and_score(make_grid):
    frame = scores_frame(sensitivity_scores(read_results(make_grid(worked, THREE).folder)))
    wanted = "group lr variant score estimate low high p p_holm p_sign bound"
    wanted += " seeds cells diverged note"
    assert list(frame) == wanted.split()
    assert len(frame) == 14
    assert not frame.duplicated(["group", "lr", "variant", "score"]).any()
    assert frame["note"].tolist()[0] == (
        "3 seeds are too few to tell stalls from chance, so no p value; "
        "per seed 1: 2.5000, 2: 2.3000, 3: 2.1000"
    )


def test_a_run_that_has_not_yet_learned_is_no_stall_and_said_to_be_capped(make_grid):
    """Its loss lies above the cap that all variants share."""
    grid = make_grid(worked, THREE)
    for cell in grid.cells:
        axes = cell["axes"]
        if axes[PRESET] == "pre_ln" and (axes[WARMUP], axes[SEED]) == (0, 2):
            early(grid, cell)
        if axes[PRESET] == "post_ln":
            early(grid, cell)
    found = by_name(grid.folder)
    capped = "not yet learned 1 of 3 at warm-up 0, counted as the unigram entropy"
    assert capped in found["pre_ln", "delta"].note
    assert found["pre_ln", "delta"].diverged == 0
    assert found["pre_ln", "stalls w=0"].estimate == 0
    assert found["pre_ln", "stalls w=0"].note == "1 not yet learned"
    assert found["post_ln", "delta"].note == "not yet learned within this budget"
    own = {name: score for (variant, name), score in found.items() if variant == "post_ln"}
    assert own_reading(own) == NOT_YET


def early(grid, cell):
    path = grid.run(cell) / "result.json"
    record = json.loads(path.read_text())
    record |= {"status": "ok", "diverged": None, "outcome": "not_yet_learned"}
    record["metrics"]["val/nll"] = 5.5
    path.write_text(json.dumps(record))
