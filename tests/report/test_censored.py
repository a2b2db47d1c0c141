"""Estimates that are bounds make no label that the bound does not support."""

import json
import math
import random
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
from scipy import stats

from lightning_app.report.facts import p_value
from lightning_app.report.headline import (
    CAPPED,
    EDGE,
    HELPS,
    LESS,
    MORE,
    findings,
    own_reading,
    relation,
)
from lightning_app.report.pairs import ELSEWHERE, NEVER, Score, arms
from lightning_app.report.results import GridResults, read_results
from lightning_app.report.statistics import chosen_on_others, is_clear, t_intervals
from lightning_app.report.warmup import largest_rate, sensitivity_scores
from tests.told import told

PRESET = "model.block.preset"
WARMUP = "model.schedule.warmup_steps"
RATE = "model.optimizer.lr"
SEED = "seed_everything"
STALL = 4.6
Outcome = Callable[[Mapping[str, Any]], float | str]


def noise(axes: Mapping[str, Any]) -> float:
    return random.Random(str(sorted(axes.items()))).gauss(0.0, 0.02)


def scores(grid: GridResults, variant: str) -> dict[str, Score]:
    return {row.score: row for row in sensitivity_scores(grid) if row.variant == variant}


@pytest.mark.parametrize(
    ("own", "base", "bound", "reads"),
    [
        # (without warm-up, with it) of the variant and of the baseline
        ((STALL, 3.0), (2.2, 2.0), ">=", MORE),
        ((STALL, 3.8), (4.0, 2.0), ">=", CAPPED),
        ((2.2, 2.0), (STALL, 3.0), "<=", LESS),
        ((4.0, 2.0), (STALL, 3.8), "<=", CAPPED),
        ((STALL, 2.1), (STALL, 2.5), "?", CAPPED),
        ((3.0, 2.0), (2.2, 2.0), "", MORE),
    ],
)
def test_runs_that_stall_hide_how_far_two_variants_differ(
    make_grid: Any,
    own: tuple[float, float],
    base: tuple[float, float],
    bound: str,
    reads: str,
) -> None:
    """All stalled runs count as the same loss, so that a difference of two is a bound, or none."""

    def outcome(axes: Mapping[str, Any]) -> float:
        loss = (own if axes[PRESET] == "sas" else base)[axes[WARMUP] > 0]
        return loss if loss == STALL else loss + noise(axes)

    axes = {PRESET: ["pre_ln", "sas"], WARMUP: [0, 60], SEED: [1, 2, 3, 4, 5]}
    grid = read_results(make_grid(outcome, axes, curves=False).folder)
    found = scores(grid, "sas")
    assert found["interaction"].bound == bound
    assert found["interaction"].p_holm < 0.001
    assert relation(found) == reads
    if reads == CAPPED:
        text = findings(grid, sensitivity_scores(grid))[-1]
        assert "the difference is" in text


def by_rate(bare: list[float], warm: list[float]) -> Outcome:
    """Losses at the rates 0.001, 0.002, 0.004, 0.008 without warm-up and with it."""

    def outcome(axes: Mapping[str, Any]) -> float:
        place = round(math.log2(axes[RATE] / 0.001))
        loss = (warm if axes[WARMUP] else bare)[place]
        return loss if loss == STALL else loss + noise(axes)

    return outcome


RATES = {RATE: [0.001, 0.002, 0.004, 0.008]}
FIVE = {PRESET: ["pre_ln"], WARMUP: [0, 60], **RATES, SEED: [1, 2, 3, 4, 5]}


@pytest.mark.parametrize(
    ("bare", "warm", "bound", "reads"),
    [
        ([3.0, 2.3, 2.5, 3.0], [3.0, 2.4, 2.0, 2.5], "", HELPS),
        ([2.3, 2.5, 3.0, 3.2], [3.0, 2.4, 2.0, 2.5], "<=", EDGE),
        ([3.0, 2.3, 2.5, 3.0], [3.0, 2.4, 2.2, 2.0], ">=", HELPS),
        ([2.3, 2.5, 3.0, 3.2], [3.0, 2.4, 2.2, 2.0], "?", EDGE),
        ([STALL] * 4, [3.0, 2.4, 2.0, 2.5], "?", EDGE),
    ],
)
def test_a_best_rate_at_the_edge_makes_no_label_that_a_better_one_could_undo(
    make_grid: Any, bare: list[float], warm: list[float], bound: str, reads: str
) -> None:
    grid = read_results(make_grid(by_rate(bare, warm), FIVE, curves=False).folder)
    found = scores(grid, "pre_ln")
    assert found["need"].bound == bound
    assert found["need"].p_holm < 0.01
    assert own_reading(found, "need") == reads
    if reads == EDGE:
        text = " ".join(findings(grid, sensitivity_scores(grid)))
        assert f"pre_ln (p {p_value(found['need'].p_holm)})" in text
        assert "warm-up helps pre_ln" not in text


@pytest.mark.parametrize(
    ("learns", "word"), [(None, NEVER), (0, ELSEWHERE), (20, ELSEWHERE), (60, "")]
)
def test_a_variant_never_learned_only_if_no_arm_of_it_learned(
    make_grid: Any, learns: int | None, word: str
) -> None:
    """Warm-up 60 is the reference; the arm that learns may be another one."""

    def outcome(axes: Mapping[str, Any]) -> float:
        return 2.0 + noise(axes) if axes[WARMUP] == learns else STALL

    axes = {PRESET: ["pre_ln"], WARMUP: [0, 20, 60], SEED: [1, 2, 3, 4, 5]}
    for rates, name in ({RATE: [0.001]}, "delta"), (RATES, "need"):
        grid = read_results(make_grid(outcome, axes | rates, curves=False, name=name).folder)
        score = scores(grid, "pre_ln")[name]
        assert math.isnan(score.estimate) == (learns != 60)
        assert (own_reading({name: score}, name) == word) == bool(word)
        text = " ".join(findings(grid, sensitivity_scores(grid)))
        assert ("never learned" in text) == (word == NEVER)


def test_where_nothing_is_learned_no_rate_loses_anything(make_grid: Any) -> None:
    """S(0) - S(ref) would be negative for a variant that stalls at every rate without warm-up."""
    outcome = by_rate([STALL] * 4, [3.0, 2.4, 2.0, 2.5])
    found = scores(read_results(make_grid(outcome, FIVE, curves=False).folder), "pre_ln")
    for name in ("rate_sensitivity", "rate_sensitivity w=0", "octaves"):
        assert math.isnan(found[name].estimate)
        assert "never learned at" in found[name].note
    assert found["rate_sensitivity w=60"].estimate > 0
    assert "no run without" in found["need"].note


@pytest.mark.parametrize("seeds", [3, 6])
def test_chosen_runs_that_end_differently_give_no_interval(make_grid: Any, seeds: int) -> None:
    """Seed 1 stalls without warm-up at every rate; the others learn."""
    learned = by_rate([3.0, 2.3, 2.5, 3.0], [3.0, 2.4, 2.0, 2.5])

    def outcome(axes: Mapping[str, Any]) -> float | str:
        return STALL if axes[SEED] == 1 and axes[WARMUP] == 0 else learned(axes)

    axes = {**FIVE, SEED: list(range(1, seeds + 1))}
    need = scores(read_results(make_grid(outcome, axes, curves=False).folder), "pre_ln")["need"]
    assert math.isnan(need.low)
    assert told(f"stalled 1 of {seeds} … 0").search(need.note)
    assert math.isnan(need.p)


def test_unequal_numbers_of_runs_make_no_difference_of_stalls(make_grid: Any) -> None:
    """At 0.004 every run stalls in both arms, but four of five have not run without warm-up."""

    def outcome(axes: Mapping[str, Any]) -> float | str:
        if axes[RATE] < 0.004:
            return 2.0 + noise(axes)
        return "waiting" if axes[WARMUP] == 0 and axes[SEED] > 1 else STALL

    axes = {PRESET: ["pre_ln"], WARMUP: [0, 60], RATE: [0.001, 0.004], SEED: [1, 2, 3, 4, 5]}
    grid = read_results(make_grid(outcome, axes, curves=False).folder)
    assert scores(grid, "pre_ln")["stall_difference"].estimate == 0
    assert "stall" not in " ".join(findings(grid, sensitivity_scores(grid)))


def test_runs_that_become_non_finite_do_not_stall(make_grid: Any) -> None:
    def outcome(axes: Mapping[str, Any]) -> float | None:
        return None if axes[WARMUP] == 0 else 2.0 + noise(axes)

    axes = {PRESET: ["pre_ln"], WARMUP: [0, 60], SEED: [1, 2, 3, 4, 5]}
    grid = read_results(make_grid(outcome, axes, curves=False).folder)
    text = findings(grid, sensitivity_scores(grid))[0]
    said = "pre_ln (5 of 5 runs without warm-up, 0 of 5 with it) becomes non-finite more often"
    assert said in text
    assert "stall" not in text


def test_the_largest_sound_rate_is_a_bound_where_no_larger_one_was_tried(make_grid: Any) -> None:
    """Without warm-up the runs at the two largest rates have not finished."""

    def outcome(axes: Mapping[str, Any]) -> float | str:
        return "waiting" if axes[WARMUP] == 0 and axes[RATE] > 0.002 else 2.0 + noise(axes)

    grid = read_results(make_grid(outcome, FIVE, curves=False).folder)
    (arm,) = arms(grid)
    assert largest_rate(arm, 0).estimate == 0.002
    assert "a lower bound" in largest_rate(arm, 0).note


def test_one_seed_has_numbers_instead_of_a_test(make_grid: Any) -> None:
    def outcome(axes: Mapping[str, Any]) -> float:
        return 2.0 + {"pre_ln": 0.06, "post_ln": 1.04}[axes[PRESET]] * (axes[WARMUP] == 0)

    axes = {PRESET: ["pre_ln", "post_ln"], WARMUP: [0, 60], SEED: [1]}
    grid = read_results(make_grid(outcome, axes, curves=False).folder)
    (text,) = findings(grid, sensitivity_scores(grid))
    numbers = "Δ is 0.06 for pre_ln and 1.04 for post_ln, in nats per token."
    assert (
        text
        == f"Within 200 steps at learning rate 0.004: one seed, so no test is possible: {numbers}"
    )


def test_each_group_names_its_own_budget(make_grid: Any) -> None:
    steps = "trainer.max_steps"
    axes = {PRESET: ["pre_ln"], steps: [100, 200], WARMUP: [0, 60], SEED: [1, 2, 3, 4, 5]}
    fake = make_grid(lambda axes: 2.0 + noise(axes), axes, curves=False)
    for cell in fake.cells:
        path = fake.run(cell) / "result.json"
        record = json.loads(path.read_text()) | {"steps": cell["axes"][steps]}
        path.write_text(json.dumps(record))
    grid = read_results(fake.folder)
    texts = findings(grid, sensitivity_scores(grid))
    for count in (100, 200):
        assert any(
            text.startswith(f"Within {count} steps at learning rate 0.004, {steps}={count}: ")
            for text in texts
        )


def test_a_choice_that_is_not_clear_widens_the_interval(make_grid: Any) -> None:
    """By Nadeau and Bengio's factor: rates that tie are chosen by the noise of the other seeds."""
    clear = by_rate([3.0, 2.3, 2.5, 3.0], [3.0, 2.4, 2.0, 2.5])
    tied = by_rate([3.0, 2.3, 2.301, 3.0], [3.0, 2.4, 2.0, 2.5])
    found = {}
    for name, outcome in (("clear", clear), ("tied", tied)):
        grid = read_results(make_grid(outcome, FIVE, curves=False, name=name).folder)
        found[name] = scores(grid, "pre_ln")["need"]
        values = [value for _, value in found[name].values]
        half = stats.t.ppf(0.975, 4) * stats.sem(values) * found[name].widen
        assert found[name].low == pytest.approx(sum(values) / 5 - half)
        p = 2 * stats.t.sf(sum(values) / 5 / stats.sem(values) / found[name].widen, 4)
        assert found[name].p == pytest.approx(p, rel=1e-6)
    assert found["clear"].widen == 1.0
    assert found["tied"].widen == pytest.approx(math.sqrt(1 + 5 / 4))
    assert "1.50" in found["tied"].note


def test_ties_make_intervals_that_contain_the_truth() -> None:
    """Six rates that are equal: without the factor 15 % of the intervals leave zero out."""
    rng = np.random.default_rng(3)
    losses = rng.normal(0.0, 0.05, (4000, 2, 6, 5))  # [grid, warm-up, rate, seed]
    places = (losses.sum(axis=-1, keepdims=True) - losses).argmin(axis=2)
    values = np.take_along_axis(losses, places[:, :, None], axis=2)[:, :, 0]
    values = values[:, 0] - values[:, 1]
    sure = is_clear(losses).all(axis=1)
    assert sure.mean() < 0.02
    outside = []
    for widen in (1.0, chosen_on_others(5)):
        low, high, _ = t_intervals(values, widen)
        outside.append(float(((low > 0) | (high < 0)).mean()))
    assert outside[0] > 0.12
    assert outside[1] < 0.065


def test_runs_that_end_at_different_steps_have_no_lost_steps(make_grid: Any) -> None:
    """A run that becomes non-finite has no rates after that step: their sum says nothing."""
    axes = {PRESET: ["pre_ln"], WARMUP: [0, 60], SEED: [1, 2]}
    fake = make_grid(lambda axes: 2.0 + noise(axes), axes)
    found = scores(read_results(fake.folder), "pre_ln")["lost_steps"]
    assert not math.isnan(found.estimate)
    short = next(cell for cell in fake.cells if cell["axes"] == {**cell["axes"], WARMUP: 0})
    path = fake.run(short) / "metrics.csv"
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    path.write_text("".join(lines[:10]), encoding="utf-8")
    found = scores(read_results(fake.folder), "pre_ln")["lost_steps"]
    assert math.isnan(found.estimate)
    assert "runs that ended" in found.note
