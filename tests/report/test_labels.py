"""The rules of labels: p values, readings and headline, against SciPy, enumeration and hand."""

# pyright: reportAttributeAccessIssue=false
# SciPy's results of tests carry their fields at run time only.

import csv
import itertools
import json
import math
import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from scipy import stats

from benchmarks import false_labels
from lightning_app.config.tree import label
from lightning_app.report.comparisons import comparisons as metric_comparisons
from lightning_app.report.headline import COSTS, HELPS, LOST, SAME, UNSHOWN, WAITS, own_reading
from lightning_app.report.pairs import Score, StallTable, stratified_p
from lightning_app.report.results import read_results
from lightning_app.report.statistics import guarded_ps, label_values, pooled_spread, sign_flip_p
from lightning_app.report.warmup import holm, sensitivity_scores

H = 4.5
PRESET, SEED = "model.block.preset", "seed_everything"
WARMUP, RATE = "model.schedule.warmup_steps", "model.optimizer.lr"


def scores_of(folder: Path) -> dict[tuple[str, str, float], Score]:
    return {(s.variant, s.score, s.lr): s for s in sensitivity_scores(read_results(folder))}


def of(folder: Path, variant: str) -> dict[str, Score]:
    """The scores of one variant of a grid with one rate, by name."""
    return {s.score: s for s in sensitivity_scores(read_results(folder)) if s.variant == variant}


@pytest.mark.parametrize("count", [2, 3, 5, 8])
def test_sign_flips_are_those_of_scipy(count: int) -> None:
    values = np.random.default_rng(count).normal(0.3, 1.0, count)
    test = stats.permutation_test(
        (values,), np.mean, permutation_type="samples", n_resamples=100_000, alternative="two-sided"
    )
    assert sign_flip_p(values.tolist()) == pytest.approx(test.pvalue)
    assert sign_flip_p(np.abs(values).tolist()) == pytest.approx(2 / 2**count)


def test_sign_flips_of_one_value_and_of_many() -> None:
    assert math.isnan(sign_flip_p([1.0]))
    assert math.isnan(sign_flip_p([1.0] * 17))


def test_the_pooled_spread_is_that_of_a_one_way_analysis_of_variance() -> None:
    rng = np.random.default_rng(3)
    groups = [rng.normal(size=n).tolist() for n in (2, 5, 1, 4)]
    spread, freedom = pooled_spread(groups)
    within = sum(((np.array(g) - np.mean(g)) ** 2).sum() for g in groups)
    assert freedom == 1 + 4 + 0 + 3
    assert spread == pytest.approx(math.sqrt(within / freedom))
    assert pooled_spread([[], [1.0]])[1] == 0


def test_a_label_needs_both_p_values() -> None:
    calm, loud = np.array([1.0, 1.01, 0.99]), np.array([1.0, 2.0, 0.1])
    own = stats.ttest_1samp(calm, 0).pvalue
    assert guarded_ps(calm, 0.001, 10) == pytest.approx(own)
    pooled = 2 * stats.t.sf(1.0 / (0.8 / math.sqrt(3)), 10)
    assert pooled > own
    assert guarded_ps(calm, 0.8, 10) == pytest.approx(pooled)
    assert guarded_ps(loud, 0.1, 10) == pytest.approx(stats.ttest_1samp(loud, 0).pvalue)
    assert np.isnan(guarded_ps(np.array([1.0]), 0.1, 10))
    assert math.isnan(guarded_ps([1.0, 1.01], 0.01, 10))


def test_a_small_family_counts_as_a_larger_one_and_needs_sign_flips() -> None:
    """Of 12 comparisons those that are missing count twice: 23 for one, 21 for three, 13 for 11."""
    signs = [2 / 2**6] * 12
    assert label_values([0.002], signs[:1]) == pytest.approx([23 * 0.002])
    assert label_values([0.001], signs[:1]) == pytest.approx([0.03125])  # not 0.023
    assert label_values([0.001], [2 / 2**5]) == pytest.approx([0.0625])
    assert label_values([0.002, 0.01], [0.25, 0.25]) == pytest.approx([0.25, 0.25])
    assert label_values([0.002, 0.01], [0.01, math.nan]) == pytest.approx([0.044, 0.21])
    assert label_values([0.002, math.nan], [0.25, 0.25])[0] == pytest.approx(0.25)
    assert math.isnan(label_values([0.002, math.nan], [0.25, 0.25])[1])
    three = label_values([0.002, 0.01, 0.5], [0.25] * 3)
    assert three == pytest.approx([0.042, 0.2, 1.0])
    ps = [0.002, *[0.5] * 10]
    assert label_values(ps, [1.0] * 11)[0] == pytest.approx(13 * 0.002)
    assert label_values([*ps, 0.5], [1.0] * 12)[0] == pytest.approx(12 * 0.002)
    assert label_values([*ps, *[0.5] * 9], [1.0] * 20)[0] == pytest.approx(20 * 0.002)


def test_exact_tests_of_stalls_have_holms_correction_only() -> None:
    def of_score(name: str) -> list[float]:
        rows = [
            Score(
                group="all", lr=1.0, variant="v", score=name, p=p, p_sign=0.25, estimate=1, seeds=3
            )
            for p in (0.01, 0.03)
        ]
        return [row.p_holm for row in holm(rows)]

    assert of_score("stall_difference") == pytest.approx([0.02, 0.03])
    assert of_score("delta") == pytest.approx([0.25, 0.63])  # 22 and 21 times


@pytest.mark.parametrize("seed", range(3))
def test_a_part_of_a_grid_is_corrected_no_less_than_the_whole(make_grid: Any, seed: int) -> None:
    """Some runs are missing, and two variants with small differences have one seed so far."""
    rates, draw = [0.0005, 0.001, 0.002, 0.004], random.Random(seed)
    presets = ["post_ln", "pre_ln", "sas", "keel", "b2t"]

    def loss_of(axes: Mapping[str, Any]) -> float:
        effect = 0.03 * presets.index(axes[PRESET]) * (axes[WARMUP] == 0)
        away = abs(math.log2(axes[RATE] / 0.002))
        return 2.0 + effect + 0.1 * away + random.Random(str(axes)).gauss(0.0, 0.02)

    def part_of(axes: Mapping[str, Any]) -> float | str:
        late = axes[PRESET] in presets[:2] and axes[SEED] > 1
        return "waiting" if late or draw.random() < 0.03 else loss_of(axes)

    axes = {PRESET: presets, WARMUP: [0, 60], RATE: rates, SEED: [1, 2, 3, 4, 5]}
    found = []
    for name, outcome in (("part", part_of), ("whole", loss_of)):
        fake = make_grid(outcome, axes, curves=False, name=name)
        scores = sensitivity_scores(read_results(fake.folder))
        found.append({(row.score, row.variant, label(row.lr)): row for row in scores})
    tested = 0
    for key, row in found[0].items():
        if not math.isnan(row.p_holm) and row.p == found[1][key].p:
            tested += 1
            assert row.p_holm >= found[1][key].p_holm
    assert tested


def test_no_label_while_a_refinement_may_ask_for_more(make_grid: Any) -> None:
    def outcome(axes: Mapping[str, Any]) -> float:
        away = abs(math.log2(axes[RATE] / 0.002))
        noise = random.Random(str(axes)).gauss(0.0, 0.01)
        return 2.0 + 0.5 * (axes[WARMUP] == 0) + 0.5 * away**1.5 + noise

    rates = [0.0005, 0.001, 0.002, 0.004, 0.008]
    axes = {PRESET: ["post_ln", "pre_ln"], WARMUP: [0, 60], RATE: rates, SEED: [1, 2, 3, 4, 5, 6]}
    fake = make_grid(outcome, axes, curves=False)
    path = fake.folder / "grid.yaml"
    changed = {"refine": {"budget": 40}, "compare": {PRESET: "pre_ln"}}
    path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | changed))

    def labels() -> tuple[set[str], set[str]]:
        grid = read_results(fake.folder)
        scores = sensitivity_scores(grid)
        assert all(math.isnan(row.p_holm) for row in scores) == (grid.more > 0)
        assert all(math.isnan(row.p) for row in scores) == (grid.more > 0)
        own = [{row.score: row} for row in scores if row.score == "need"]
        return {own_reading(of, "need") for of in own}, {
            row.reading for row in metric_comparisons(grid)
        }

    assert labels() == ({HELPS}, {SAME})
    plan = fake.folder / "plan.json"
    plan.write_text(json.dumps(json.loads(plan.read_text()) | {"more": 12}))
    assert labels() == ({WAITS}, {WAITS})


def test_a_label_needs_an_estimate_with_the_sign_of_its_bounds() -> None:
    """Of two rates that are tied, the one chosen on other seeds may be worse for each seed."""
    both: dict[str, Any] = {
        "group": "all",
        "lr": math.nan,
        "variant": "v",
        "score": "need",
        "p": 1e-5,
    }
    ends = ((1, 0.1, 0.6), (2, 0.1, 0.7))
    score = Score(**both, p_holm=0.001, estimate=0.3, low=0.05, high=0.8, ends=ends)
    assert own_reading({"need": score}, "need") == HELPS
    assert own_reading({"need": replace(score, estimate=-0.2)}, "need") == UNSHOWN
    turned = tuple((seed, -high, -low) for seed, low, high in ends)
    assert own_reading({"need": replace(score, estimate=-0.2, ends=turned)}, "need") == COSTS


@pytest.mark.parametrize(
    ("failed_bare", "bare", "failed_ref", "ref"), [(3, 3, 0, 3), (1, 3, 2, 4), (0, 3, 2, 3)]
)
def test_one_table_is_fishers_exact_test(
    failed_bare: int, bare: int, failed_ref: int, ref: int
) -> None:
    table = [[failed_bare, bare - failed_bare], [failed_ref, ref - failed_ref]]
    expected = stats.fisher_exact(table).pvalue
    found = stratified_p([StallTable(0.1, failed_bare, bare, failed_ref, ref)])
    assert found == pytest.approx(expected)


def test_several_tables_by_enumeration() -> None:
    """Every way to deal the failures of each rate to the two arms, one by one."""
    tables = [StallTable(1, 1, 3, 0, 3), StallTable(2, 2, 3, 0, 3), StallTable(3, 3, 3, 1, 3)]
    sums: list[int] = []
    deals = [
        [sum(run < t.bare for run in failed) for failed in itertools.combinations(range(6), total)]
        for t in tables
        for total in [t.failed_bare + t.failed_ref]
    ]
    weights: dict[int, int] = {}
    for chosen in itertools.product(*deals):
        weights[sum(chosen)] = weights.get(sum(chosen), 0) + 1
        sums.append(sum(chosen))
    likely = weights[6]
    expected = sum(count for count in weights.values() if count <= likely) / len(sums)
    assert stratified_p(tables) == pytest.approx(expected)


def curves_of(grid: Any, loss: Callable[[Mapping[str, Any], int], float]) -> None:
    """Give each run validations and learning rates every 10 steps."""
    for cell in grid.cells:
        axes = cell["axes"]
        with (grid.run(cell) / "metrics.csv").open("w", newline="") as file:
            rows = csv.writer(file)
            rows.writerow(["step", "train/lr", "val/nll"])
            for step in (1, *range(10, 201, 10)):
                warmup = axes[WARMUP] or 1
                rate = 0.004 * min(1.0, step / warmup) * min(1.0, math.sqrt(60 / step))
                rows.writerow([step, rate, loss(axes, step) if step > 1 else ""])


def test_steps_saved_and_lost_by_hand(make_grid: Any) -> None:
    """Losses fall linearly: with warm-up a run is as far as the other was 30 steps before."""

    def loss(axes: Mapping[str, Any], step: int) -> float:
        late = 30 if axes[WARMUP] else 0
        late = -late if axes[PRESET] == "post_ln" else late
        noise = 0.0002 * axes[SEED] * (axes[WARMUP] > 0) * (1 if late > 0 else -1)
        return 4.0 - 0.01 * (step - late) + 0.002 * axes[SEED] + noise

    axes = {SEED: [1, 2, 3, 4, 5, 6], PRESET: ["post_ln", "pre_ln"], WARMUP: [0, 60]}
    fake = make_grid(lambda a: loss(a, 200), axes)
    curves_of(fake, loss)
    found = of(fake.folder, "pre_ln")
    assert found["steps_saved"].estimate == pytest.approx(-30, abs=0.2)
    assert of(fake.folder, "post_ln")["steps_saved"].estimate == pytest.approx(30, abs=0.2)
    # The area without warm-up, 60 + 2 sqrt(60) (sqrt(t) - sqrt(60)) peak rates at step t, is
    # 30 less with it.
    target = 60 + 2 * math.sqrt(60) * (math.sqrt(200) - math.sqrt(60)) - 30
    step = ((target - 60) / (2 * math.sqrt(60)) + math.sqrt(60)) ** 2
    assert found["lost_steps"].estimate == pytest.approx(200 - step, abs=1.0)
    assert own_reading(found) == LOST
    worse = {**found, "lost_steps": Score(**{**vars(found["lost_steps"]), "estimate": 20.0})}
    assert own_reading(worse) == COSTS


@pytest.mark.parametrize(
    ("noise", "comparisons", "seeds"),
    [("skewed", 3, 5), ("plateau, both arms", 3, 3), ("30 % stall", 3, 3), ("10 % stall", 3, 5)],
)
def test_the_simulation_has_the_rules_of_the_report(
    make_grid: Any, monkeypatch: pytest.MonkeyPatch, noise: str, comparisons: int, seeds: int
) -> None:
    """The same losses as a grid on disk: the same labels."""
    monkeypatch.setattr(false_labels, "ENTROPY", H)
    draw = false_labels.NOISE[noise]
    names = ["pre_ln", "post_ln", "sas", "realformer"][: comparisons + 1]
    rng = np.random.default_rng(5)
    seen = 0
    rates = [0.001, 0.002]
    for number in range(6):
        losses = draw((1, 2, comparisons + 1, 2, seeds), rng) - (0.0 if "stall" in noise else 0.9)
        losses[:, 0, 1, 1] -= 1.0

        def outcome(axes: Mapping[str, Any], table: Any = losses[0]) -> float:
            place = (rates.index(axes[RATE]), names.index(axes[PRESET]), int(axes[WARMUP] > 0))
            return float(table[place][axes[SEED] - 1])

        axes = {SEED: list(range(1, seeds + 1)), PRESET: names, WARMUP: [0, 60], RATE: rates}
        folder = make_grid(outcome, axes, curves=False, name=f"g{number}").folder
        given = false_labels.labels(losses)
        for (variant, name, lr), score in scores_of(folder).items():
            if name in ("delta", "interaction") and not score.note.startswith("is the baseline"):
                label = np.sign(score.estimate) if score.p_holm < 0.05 else 0
                place = (0, rates.index(lr), names.index(variant))
                if name == "interaction":
                    assert label == given.versus[place[0], place[1], place[2] - 1]
                else:
                    assert label == given.own[place]
                seen += abs(int(label))
    assert seen or "plateau" in noise or "30 %" in noise


def test_false_labels_in_short() -> None:
    rng = np.random.default_rng(12)
    for noise in false_labels.NOISE:
        for comparisons in (3, 23):
            row = false_labels.rates(noise, 5, comparisons, 1, 400, rng)
            assert max(row.versus, row.own) < false_labels.HOLDS + 4 * 0.012, row


def test_more_is_found_where_there_is_more() -> None:
    row = false_labels.rates("normal", 5, 3, 1, 200, np.random.default_rng(1))
    assert row.power > 0.9
