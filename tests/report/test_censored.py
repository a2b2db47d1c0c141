"""Estimates that are bounds make no label that the bound does not support."""

import json
import math
import random
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
from scipy import stats

from lightning_app.report.headline import (
    CAPPED,
    EDGE,
    HELPS,
    LESS,
    MORE,
    findings,
    own_reading,
    relation,
    with_numbers,
)
from lightning_app.report.pairs import ELSEWHERE, NEVER, NOT_YET, Score
from lightning_app.report.results import GridResults, read_results
from lightning_app.report.warmup import sensitivity_scores
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

    axes = {PRESET: ["pre_ln", "sas"], WARMUP: [0, 60], SEED: [1, 2, 3, 4, 5, 6]}
    grid = read_results(make_grid(outcome, axes, curves=False).folder)
    found = scores(grid, "sas")
    assert found["interaction"].bound == bound
    assert found["interaction"].p_holm == found["interaction"].p_sign == 2 / 2**6
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
        ([3.0, 2.3, 2.5, 3.0], [3.0, 2.4, 1.8, 2.5], "", HELPS),
        ([2.3, 2.5, 3.0, 3.2], [3.0, 2.4, 2.0, 2.5], "<=", EDGE),
        ([3.0, 2.3, 2.5, 3.0], [3.0, 2.4, 2.0, 1.8], ">=", HELPS),
        ([2.3, 2.5, 3.0, 3.2], [3.0, 2.4, 2.2, 2.0], "?", EDGE),
        ([STALL] * 4, [3.0, 2.4, 2.0, 2.5], "?", EDGE),
    ],
)
def test_a_best_rate_at_the_edge_makes_no_label_that_a_better_one_could_undo(
    make_grid: Any, bare: list[float], warm: list[float], bound: str, reads: str
) -> None:
    axes = {**FIVE, SEED: list(range(1, 9))}
    grid = read_results(make_grid(by_rate(bare, warm), axes, curves=False).folder)
    found = scores(grid, "pre_ln")
    assert found["need"].bound == bound
    assert (found["need"].p_holm < 0.05) == (reads == HELPS)
    assert own_reading(found, "need") == reads
    if reads == EDGE:
        text = " ".join(findings(grid, sensitivity_scores(grid)))
        assert with_numbers(found["need"]) in text
        assert "lowers the loss of pre_ln" not in text


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


def test_where_one_run_learned_nothing_is_said_of_all(make_grid: Any) -> None:
    """The mean over seeds shows no learning at one rate or at the best of several."""

    def outcome(axes: Mapping[str, Any]) -> float:
        return STALL - 0.3 if axes[WARMUP] == 60 and axes[SEED] == 1 else STALL

    axes = {PRESET: ["pre_ln"], WARMUP: [0, 60], SEED: [1, 2, 3, 4, 5]}
    for rates, name in ({RATE: [0.001]}, "delta"), (RATES, "need"):
        grid = read_results(make_grid(outcome, axes | rates, curves=False, name=name).folder)
        assert own_reading(scores(grid, "pre_ln"), name) == NOT_YET


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


def test_one_seed_has_numbers_instead_of_a_test(make_grid: Any) -> None:
    def outcome(axes: Mapping[str, Any]) -> float:
        return 2.0 + {"pre_ln": 0.06, "post_ln": 1.04}[axes[PRESET]] * (axes[WARMUP] == 0)

    axes = {PRESET: ["pre_ln", "post_ln"], WARMUP: [0, 60], SEED: [1]}
    grid = read_results(make_grid(outcome, axes, curves=False).folder)
    (text,) = findings(grid, sensitivity_scores(grid))
    numbers = "Δ is 0.060 for pre_ln and 1.040 for post_ln, in nats per token."
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


def test_the_interval_of_the_need_is_that_of_its_bounds(make_grid: Any) -> None:
    """By hand: lines through the two points on each side of the best rate, seed by seed."""
    grid = read_results(
        make_grid(by_rate([3.0, 2.3, 2.5, 3.0], [3.0, 2.4, 2.0, 2.5]), FIVE, curves=False).folder
    )
    need = scores(grid, "pre_ln")["need"]
    lows, highs = (np.array([end[side] for end in need.ends]) for side in (1, 2))
    # Without noise: 2.1 to 2.3 without warm-up, the line from 2.5 through 2.3 meets the first rate;
    # with it 1.6 to 2.0, as both 2.4 to 2.0 and 2.5 to 2.0 do not fall any further than that.
    assert lows.mean() == pytest.approx(2.1 - 2.0, abs=0.05)
    assert highs.mean() == pytest.approx(2.3 - 1.6, abs=0.05)
    half = [stats.t.ppf(0.975, 4) * stats.sem(values) for values in (lows, highs)]
    assert need.low == pytest.approx(lows.mean() - half[0])
    assert need.high == pytest.approx(highs.mean() + half[1])
    own = 2 * stats.t.sf(abs(lows.mean()) / stats.sem(lows), 4)
    assert need.p >= own - 1e-12
    assert lows.mean() < need.estimate < highs.mean()


def test_rates_that_do_not_determine_the_need_make_no_label(make_grid: Any) -> None:
    """The same losses at the best rates; in the one grid the curve may fall between the rates."""
    flat, steep = [2.61, 2.3, 2.6, 3.0], [4.0, 2.3, 2.31, 4.0]
    found = {}
    for name, bare in (("flat", flat), ("steep", steep)):
        outcome = by_rate(bare, [3.0, 2.21, 2.2, 2.9])
        grid = read_results(make_grid(outcome, FIVE, curves=False, name=name).folder)
        found[name] = scores(grid, "pre_ln")["need"]
    assert found["flat"].estimate == pytest.approx(found["steep"].estimate, abs=0.02)
    assert found["steep"].low < -0.5
    assert found["steep"].p_holm == 1.0
    tried = re.findall(r"0\.\d+", found["steep"].note.split("rates ")[-1])
    assert tried == ["0.0014", "0.0028", "0.0057"]  # beside 0.002, and beside 0.004


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
