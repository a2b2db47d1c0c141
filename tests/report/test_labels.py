"""The rules of labels: p values, readings and headline, against SciPy, enumeration and hand."""

# pyright: reportAttributeAccessIssue=false
# SciPy's results of tests carry their fields at run time only.

import csv
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from benchmarks import false_labels
from lightning_app.report.headline import COSTS, HELPS, LOST, UNSHOWN, own_reading
from lightning_app.report.pairs import Score
from lightning_app.report.results import read_results
from lightning_app.report.statistics import (
    failures_p,
    no_less_than_failures,
    permutation_p,
    sign_flip_p,
)
from lightning_app.report.warmup import sensitivity_scores

H = 4.5
PRESET, SEED = "model.block.preset", "seed_everything"
WARMUP, RATE = "model.schedule.warmup_steps", "model.optimizer.lr"


def scores_of(folder: Path) -> dict[tuple[str, str, float], Score]:
    return {(s.variant, s.score, s.lr): s for s in sensitivity_scores(read_results(folder))}


def of(folder: Path, variant: str) -> dict[str, Score]:
    """The scores of one variant of a grid with one rate, by name."""
    return {s.score: s for s in sensitivity_scores(read_results(folder)) if s.variant == variant}


@pytest.mark.parametrize("count", [6, 8])
def test_sign_flips_are_those_of_scipy(count: int) -> None:
    values = np.random.default_rng(count).normal(0.3, 1.0, count)
    test = stats.permutation_test(
        (values,), np.mean, permutation_type="samples", n_resamples=100_000, alternative="two-sided"
    )
    assert sign_flip_p(values.tolist()) == pytest.approx(test.pvalue)
    assert sign_flip_p(np.abs(values).tolist()) == pytest.approx(2 / 2**count)


def test_sign_flips_stand_beside_a_t_test_where_they_can_tell() -> None:
    assert math.isnan(sign_flip_p([1.0] * 5))  # at least 2 / 2^5
    assert math.isnan(sign_flip_p([1.0] * 17))


@pytest.mark.parametrize(
    ("first", "second"),
    [([3, 4, 4, 3, 3], [1, 2, 2, 1, 2]), ([0, 3, 1], [2, 0, 0, 1]), ([2, 2, 2], [0, 0, 0])],
)
def test_failures_are_compared_by_whole_seeds(first: list[int], second: list[int]) -> None:
    expected = stats.permutation_test(
        (first, second), lambda a, b, axis: np.mean(a, axis) - np.mean(b, axis), n_resamples=9999
    ).pvalue
    assert permutation_p(first, second) == pytest.approx(expected)
    assert failures_p(first, second, 4, 8) == pytest.approx(expected)


def test_an_arm_that_always_fails_has_a_bound_of_its_own() -> None:
    """`2 / 4^n` with fewer than 5 planned seeds; a p value of losses is no smaller."""
    assert (
        failures_p([4, 4, 4], [0, 3, 1], 4, 3) == failures_p([0, 0, 3], [4, 4, 4], 4, 4) == 2 / 64
    )
    assert failures_p([4, 4, 4], [0, 3, 1], 4, 5) == permutation_p([4, 4, 4], [0, 3, 1]) == 0.1
    assert failures_p([4, 4, 4], [0, 4, 1], 4, 3) == permutation_p([4, 4, 4], [0, 4, 1])
    assert math.isnan(failures_p([4, 4], [0, 0], 4, 2))
    alone = [True] * 3, [False] * 3
    assert no_less_than_failures(1e-9, 3, alone) == 2 / 64
    assert no_less_than_failures(1e-9, 8, alone) == 0.1
    assert no_less_than_failures(1e-9, 3, ([True] * 3, [True] * 3)) == 1e-9
    assert no_less_than_failures(1e-9, 3, ([False] * 3, [False] * 3)) == 1e-9
    assert no_less_than_failures(0.5, 3, alone) == 0.5
    assert math.isnan(no_less_than_failures(math.nan, 3, alone))


def test_one_seed_at_several_rates_is_no_evidence_of_its_own() -> None:
    """Runs that stall above a largest rate of their seed, alike with and without warm-up."""
    rng = np.random.default_rng(1)
    for spread in (0.25, 1.0, 2.0):
        for seeds in (3, 5, 10):
            row = false_labels.failure_rates(spread, 1, seeds, 400, rng)
            assert row.false <= 0.06 + 2 * 0.012, row


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


@pytest.mark.parametrize("noise", ["one skewed arm", "30 % stall"])
@pytest.mark.parametrize("seeds", [3, 5])
def test_the_simulation_has_the_rules_of_the_report(make_grid: Any, noise: str, seeds: int) -> None:
    """Grids on disk with the same differences: the same labels, also while some seeds run."""
    names = ["pre_ln", "post_ln", "sas", "realformer"]
    rng, seen = np.random.default_rng(3), 0
    for number in range(6):
        shape = (1, len(names), seeds)
        stalled = np.zeros((2, *shape), dtype=bool)
        values = 0.03 * false_labels.differences("one skewed arm", shape, 6.0, rng)
        if noise == "30 % stall":
            stalled = rng.random((2, *shape)) < 0.4
            stalled[0, 0, 1], stalled[1, 0, 1] = True, False
            values[0, 1] = H - 2.0 - 0.001 * np.arange(seeds)

        def outcome(axes: Mapping[str, Any], values: Any = values, stalled: Any = stalled) -> Any:
            if axes[SEED] > seeds:
                return "waiting"
            place = 0, names.index(axes[PRESET]), axes[SEED] - 1
            arm = int(axes[WARMUP] > 0)
            if stalled[(arm, *place)]:
                return H
            return 2.0 + (0.001 * (axes[SEED] - 1) if arm else values[place])

        every = [*range(1, seeds + 1 + (noise != "30 % stall"))]
        axes = {SEED: every, PRESET: names, WARMUP: [0, 60]}
        folder = make_grid(outcome, axes, curves=False, name=f"g{number}").folder
        losses = np.where(stalled, H, 2.0)
        losses[0] += np.where(stalled[0], 0.0, values)
        losses[1] += np.where(stalled[1], 0.0, 0.001 * np.arange(seeds))
        delta, failures = false_labels.labels_of(losses, stalled)
        for (variant, name, _), score in scores_of(folder).items():
            if name in ("delta", "stall_difference"):
                given = (delta if name == "delta" else failures)[0, names.index(variant)]
                assert (score.p_holm < 0.05) == given, (number, variant, name)
                seen += int(given)
    assert seen or (noise == "30 % stall" and seeds == 3)  # where four variants cannot have one


def test_labels_are_bounded_on_both_sides() -> None:
    rng = np.random.default_rng(12)
    for noise in ("normal", "t4", "30 % stall"):
        for variants in (1, 8):
            row = false_labels.rates(noise, variants, 5, 1000, rng)
            assert row.false < 0.06 + 4 * 0.007, row
    for seeds, least in ((5, 0.7), (8, 0.95)):
        row = false_labels.rates("normal", 4, seeds, 500, rng)
        assert row.power >= least, row
