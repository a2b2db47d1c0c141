"""Bounds of best losses, tolerated rates and steps saved, between the rates that were tried."""

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from scipy import stats

from benchmarks import coverage, left_out, steps_to_loss
from lightning_app.report.pairs import arms, tau
from lightning_app.report.results import read_results
from lightning_app.report.statistics import concave, crossing, influences, lowest, steps_between

ALL = np.ones(6, dtype=bool)
PRESET, SEED = "model.block.preset", "seed_everything"
WARMUP, RATE = "model.schedule.warmup_steps", "model.optimizer.lr"
RATES = [0.001, 0.002, 0.004, 0.008]


def convex_draws(seed: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Places at uneven distances, and convex curves whose minimum is inside."""
    rng = np.random.default_rng(seed)
    places = np.cumsum(rng.uniform(0.25, 1.0, (count, 6)), axis=1)
    slopes = np.sort(rng.uniform(-2.0, 2.0, (count, 5)), axis=1)
    slopes[:, 0], slopes[:, -1] = -rng.uniform(2, 3, count), rng.uniform(2, 3, count)
    values = np.concatenate(
        [np.zeros((count, 1)), np.cumsum(slopes * np.diff(places), axis=1)], axis=1
    )
    return places, values


def is_convex(places: list[float], values: list[float]) -> bool:
    slopes = np.diff(values) / np.diff(places)
    return bool((np.diff(slopes) >= -1e-9).all())


def smallest_by_search(places: np.ndarray, values: np.ndarray) -> float:
    """The smallest value that a point between the others can have so that all are convex."""
    best = float(values.min())
    for gap in range(len(places) - 1):
        for x in np.linspace(places[gap], places[gap + 1], 41)[1:-1]:
            low, high = best - 20.0, float(max(values))
            above = [*places[: gap + 1], x, *places[gap + 1 :]]
            inside = np.interp(x, places, values)
            for _ in range(60):  # what is convex with a value is convex up to the line between
                middle = (low + high) / 2
                found = [*values[: gap + 1], middle, *values[gap + 1 :]]
                if middle > inside or is_convex(above, found):
                    high = middle
                else:
                    low = middle
            best = min(best, high)
    return best


def test_the_lower_bound_is_the_smallest_that_convexity_allows() -> None:
    places, values = convex_draws(1, 12)
    for x, y in zip(places, values, strict=True):
        low, high = lowest(y, x, ALL)
        assert high == pytest.approx(y.min())
        found = smallest_by_search(x, y)
        assert float(low) <= found + 1e-6
        assert float(low) == pytest.approx(found, abs=0.06)  # the search has 40 places in a gap


def test_curves_are_bounded_all_at_once() -> None:
    places, values = convex_draws(2, 5)
    both = np.stack([values[0], values[1] - 3.0])
    low, high = lowest(both, places[0], np.stack([ALL, ALL]))
    for number, curve in enumerate(both):
        one = lowest(curve, places[0], ALL)
        assert (low[number], high[number]) == (pytest.approx(one[0]), pytest.approx(one[1]))


@pytest.mark.parametrize(
    ("values", "sound", "low", "high"),
    [
        ([3.0, 2.0, 2.5, 4.0], "1111", 1.5, 2.0),  # 2.5 to 2.0 leads to 1.5 at the first place
        ([2.0, 2.5, 3.0, 4.0], "1111", -math.inf, 2.0),  # the best one is the first
        ([4.0, 3.0, 2.5, 2.0], "1111", -math.inf, 2.0),  # or the last
        ([3.0, 2.0, 5.0, 5.0], "1100", -math.inf, 2.0),  # two points before a cliff bound nothing
        ([4.0, 3.0, 2.5, 5.0], "1110", 2.0, 2.5),  # three do: as far down as the cliff
        ([5.0, 5.0, 5.0, 5.0], "0000", -math.inf, 5.0),
        ([3.0, 2.9, 2.0, 4.0], "1111", 0.0, 2.0),  # 3 to 2.9 to 2 is not convex: 4 to 2 alone
        ([4.0, 2.0, 2.9, 3.0], "1111", 0.0, 2.0),
        ([3.0, 2.9, 2.0, 5.0], "1110", -math.inf, 2.0),  # and a cliff on the other side
    ],
)
def test_bounds_by_hand(values: list[float], sound: str, low: float, high: float) -> None:
    found = lowest(values, [0.0, 1.0, 2.0, 3.0], [each == "1" for each in sound])
    assert [float(end) for end in found] == [pytest.approx(low), pytest.approx(high)]


def test_a_tolerated_rate_lies_between_its_bounds() -> None:
    """Of parabolas and of V, with the minimum between two of the places."""
    places = np.arange(6.0)
    for best in np.linspace(2.0, 3.0, 21):
        for limit in (0.3, 0.9):
            for risen, true in (
                (0.7 * (places - best) ** 2, best + math.sqrt(limit / 0.7)),
                (np.maximum(-0.8 * (places - best), 2.2 * (places - best)), best + limit / 2.2),
            ):
                ends = [
                    float(crossing(risen, places, ALL, limit, at_most=k)) for k in (False, True)
                ]
                assert ends[0] - 1e-9 <= true <= ends[1] + 1e-9
    rising = [3.0, 2.0, 1.9, 1.8, 1.7, 1.6]
    assert float(crossing(rising, places, ALL, 2.5, at_most=True)) == math.inf
    assert float(crossing(rising, places, ALL, 2.5, at_most=False)) == 5.0


def test_noise_alone_rarely_bends_a_line() -> None:
    """Of straight sides a sixth of the places is bent, by one standard error; of flat ends all."""
    rng = np.random.default_rng(9)
    away = np.abs(np.arange(6.0) - 2.0)
    noise = 0.05 * rng.standard_normal((2000, 6, 5))
    straight = concave(0.5 * away[:, None] + noise, np.arange(6.0), ALL)
    assert straight.shape == (2000, 6)
    assert straight[:, [0, 2, 5]].mean() == 0.0
    assert straight[:, [1, 3, 4]].mean() == pytest.approx(0.187, abs=0.02)  # t of 4, above 1
    flat = concave(0.5 * np.minimum(away, 1.5)[:, None] + noise, np.arange(6.0), ALL)
    assert flat[:, 4].mean() > 0.99
    unsound = concave(
        0.5 * np.minimum(away, 1.5)[:, None] + noise, np.arange(6.0), ALL & (away < 3)
    )
    assert not unsound[:, 4].any()


@pytest.mark.parametrize("sides", [(0.8, 2.2), (2.2, 0.8)])
def test_a_curve_that_flattens_away_from_its_minimum_stays_within_its_bounds(
    sides: tuple[float, float],
) -> None:
    """The lower bound is at most 0.1 too high, where a point lies just beyond the bend."""
    places, reach = np.arange(6.0), 1.6
    for best in np.linspace(2.0, 3.0, 21):

        def curve(x: Any, best: float = float(best)) -> Any:
            away = np.clip(x - best, -reach, reach)
            return np.maximum(-sides[0] * away, sides[1] * away)

        low, high = lowest(curve(places), places, ALL)
        assert float(low) <= 0.1
        assert float(high) >= 0.0
        ends = [float(crossing(curve(places), places, ALL, 0.3, at_most=k)) for k in (False, True)]
        assert ends[0] <= ends[1]


def test_warm_up_saves_no_steps_where_both_runs_fail() -> None:
    """Their losses tie at the unigram entropy, which one may touch before it stalls again."""

    def run(curve: dict[int, float], failed: bool = True) -> Any:
        found = SimpleNamespace(curve={"val/nll": curve}.__getitem__)
        loss = 4.5 if failed else min(curve.values())
        monitored = SimpleNamespace(loss="val/nll")
        return SimpleNamespace(run=found, monitored=monitored, failed=failed, loss=loss)

    stalled, touching = {50: 4.6, 100: 4.6, 200: 4.6}, {50: 4.6, 100: 4.4, 200: 4.6}
    assert tau(run(stalled), run(touching)) == (0.0, False)
    assert tau(run(touching), run(stalled)) == (0.0, False)
    assert tau(run(stalled), run({50: 4.6, 100: 4.4, 200: 3.0}, failed=False)) == (125.0, False)


def test_influences_have_the_mean_and_the_error_of_the_jackknife() -> None:
    values = np.random.default_rng(4).normal(2.0, 0.3, (3, 7))

    def function(means: Any) -> Any:
        return means[..., 0] * means[..., 1] - means[..., 2] ** 2

    each = influences(function, values)
    whole = function(values.mean(axis=-1))
    without = np.array([function(np.delete(values, k, axis=-1).mean(axis=-1)) for k in range(7)])
    error = math.sqrt(6 / 7 * float(((without - without.mean()) ** 2).sum()))
    assert each.mean() == pytest.approx(whole)
    assert stats.sem(each) == pytest.approx(error)
    linear = influences(lambda means: means[..., 0], values)
    assert linear == pytest.approx(values[0])


def test_steps_saved_by_hand() -> None:
    """Curves that fall evenly, with the best place among those tried: no bound is loose."""
    places, steps = np.arange(7.0), np.array([100.0, 200.0, 300.0, 400.0])
    risen = 3.0 * np.abs(places - 3.0)
    fall = (400.0 - steps) / 100.0
    bare = 2.0 + risen[:, None] + fall
    warm = 1.0 + risen[:, None] + fall
    kept = np.arange(1, 6)  # of the second arm, which has fewer rates
    at, sound = (places, places[kept]), (np.ones(7, dtype=bool), np.ones(5, dtype=bool))
    ends = steps_between((bare, warm[kept]), at, sound, steps)
    assert [float(end) for end in ends] == [pytest.approx(100.0), pytest.approx(100.0)]
    ends = steps_between((warm, bare[kept]), at, sound, steps)
    assert [float(end) for end in ends] == [pytest.approx(-100.0), pytest.approx(-100.0)]


def test_rates_left_out_and_asked_for_again(make_grid: Any) -> None:
    """A refinement from one octave apart asks for the rates between that the grid has."""
    rates = [float(f"{0.001 * 2 ** (k / 2):.4g}") for k in range(9)]

    def outcome(axes: dict[str, Any]) -> float:
        best = 0.0028 if axes[WARMUP] == 0 else 0.0056
        return (
            2.0
            + 0.6 * math.log2(axes[RATE] / best) ** 2
            + 0.01 * axes[SEED] * (axes[RATE] * 1e4 % 3)
        )

    axes = {PRESET: ["pre_ln"], WARMUP: [0, 60], RATE: rates, SEED: [1, 2, 3]}
    (arm,) = arms(read_results(make_grid(outcome, axes, curves=False).folder))
    assert left_out.refined(arm, 0, rates[::2], until=0.03) == sorted([*rates[::2], rates[3]])
    assert left_out.refined(arm, 60, rates[1::2], until=0.03) == rates[1::2]
    kept = left_out.at(arm, {0: rates[:3], 60: rates[1:]})
    assert (kept.rates_at(0), kept.rates_at(60)) == (rates[:3], rates[1:])
    need = left_out.scores_of(arm, 60)[0]
    assert left_out.overlap(need, replace(need, low=need.high, high=math.nan))
    assert not left_out.overlap(need, replace(need, low=need.high + 1e-6, high=math.nan))


def test_runs_cut_short(make_grid: Any) -> None:
    """Cut at its last step a run is itself; before, its loss is that of the validation there."""

    def outcome(axes: dict[str, Any]) -> float | None:
        if (axes[WARMUP], axes[RATE]) == (0, RATES[-1]):
            return None
        away = math.log2(axes[RATE] / (0.002 if axes[WARMUP] else 0.001))
        return 2.0 + 0.3 * away**2 + 0.01 * (axes[SEED] * 3 % 7)

    axes = {PRESET: ["pre_ln"], WARMUP: [0, 60], RATE: RATES, SEED: [1, 2, 3]}
    (arm,) = arms(read_results(make_grid(outcome, axes).folder))
    trained = next(iter(cell for cell in arm.cells.values() if not cell.failed))
    steps = sorted(trained.run.curve(trained.monitored.loss))
    assert left_out.scores_of(left_out.cut(arm, steps[-1]), 60) == left_out.scores_of(arm, 60)
    half = left_out.cut(arm, steps[1])
    for key, cell in arm.cells.items():
        curve = cell.run.curve(cell.monitored.loss)
        whole = cell.entropy if cell.failed else min(curve[steps[1]], cell.entropy)
        assert half.cells[key].loss == whole
        assert max(half.cells[key].run.curve(cell.monitored.loss)) == steps[1]
    between = left_out.cut(arm, steps[1] + 1).cells.values()
    assert between
    assert all(cell.failed for cell in between)  # the others have no loss there


@pytest.mark.parametrize("kind", ["inverse_sqrt", "linear"])
def test_only_runs_whose_schedule_has_no_end_are_cut(
    make_grid: Any, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    axes = {PRESET: ["pre_ln"], WARMUP: [0, 60], RATE: RATES[:2], SEED: [1, 2]}
    fake = make_grid(lambda axes: 2.0, axes | {"model.schedule.kind": [kind]})
    monkeypatch.setattr("sys.argv", ["left_out", str(fake.folder), "--steps", "100"])
    if kind == "linear":
        with pytest.raises(SystemExit, match="linear schedules know the end"):
            left_out.main()
    else:
        assert left_out.main() == 0


def test_steps_to_a_loss() -> None:
    def steps(curve: dict[int, float], *targets: float, failed: bool = False) -> list[float | None]:
        run = SimpleNamespace(curve={"val/nll": curve}.__getitem__)
        cell: Any = SimpleNamespace(
            run=run, monitored=SimpleNamespace(loss="val/nll"), failed=failed
        )
        return [steps_to_loss.reached(cell, target) for target in targets]

    curve = {50: 4.0, 100: 3.0, 150: 3.5, 200: 2.0}
    assert steps(curve, 4.5, 3.25, 2.75, 1.9) == [50.0, 87.5, 175.0, None]
    assert steps(curve, 2.75, failed=True) == steps({}, 1.0) == [None]


def test_intervals_over_rates_cover_in_short() -> None:
    rng = np.random.default_rng(7)
    for kind in ("parabola", "V"):
        for row in coverage.over_rates(kind, 0.5, 0.06, 5, 150, rng):
            assert row.rate > coverage.LOW - 0.04, row


@pytest.mark.in_turn(2)
@pytest.mark.parametrize("name", ["refined, until 0.03", "random"])
@pytest.mark.parametrize("kind", ["parabola", "V"])
def test_intervals_at_rates_chosen_by_results_cover_in_short(kind: str, name: str) -> None:
    covered = [*coverage.adapted(name, kind, 0.5, 5, 40, np.random.default_rng(8))]
    assert len(covered) == 3
    for row in covered:
        assert row.rate > coverage.LOW - 0.08, row
