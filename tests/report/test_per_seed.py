"""Grids in which each seed is a tuning study of its own (`search: {per: seed}`)."""

import itertools
import json
import math
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from lightning_app.cli import main
from lightning_app.config.grid import read_spec
from lightning_app.config.tree import canonical
from lightning_app.core.errors import UserError
from lightning_app.grids.plan import combinations
from lightning_app.grids.search import TrialScore, search_arms, stratified, wanted
from lightning_app.report.comparisons import by_metric, compare_axis, comparisons
from lightning_app.report.headline import answer
from lightning_app.report.results import read_results
from lightning_app.report.verdicts import verdicts
from lightning_app.report.warmup import sensitivity_scores
from tests.report.conftest import PRESET, RATE, SEED, WARMUP, FakeGrid, change, keep, write_report

LOW, HIGH, TRIALS = 0.001, 0.016, 4
FIELDS = {RATE: {"low": LOW, "high": HIGH, "log": True}}
SEARCH: dict[str, Any] = {"per": "seed", "fields": FIELDS, "trials": TRIALS}
BASE = {"seed_everything": 1, "data": {"name": "synthetic"}}
AXES = {PRESET: ["post_ln", "pre_ln"], WARMUP: [0, 60], SEED: 3}


def rates(seed: int) -> list[float]:
    """The rates of a seed, by the formula."""
    share = math.modf(0.6180339887498949 * seed)[0]
    found = [LOW * (HIGH / LOW) ** ((k + share) / TRIALS) for k in range(TRIALS)]
    return [float(f"{rate:.4g}") for rate in found]


def spec_of(folder: Path, **more: Any) -> Any:
    grid = {"name": "studies", "base_config": BASE, "axes": AXES, "search": SEARCH, **more}
    path = folder / "studies.yaml"
    path.write_text(json.dumps(grid))
    return read_spec(path)


def test_each_seed_has_rates_of_its_own_that_are_those_of_every_arm(tmp_path: Path) -> None:
    spec = spec_of(tmp_path)
    assert spec.axes[SEED] == [1, 2, 3]
    arms = search_arms(spec, list(combinations(spec)), {})
    assert len(arms) == 2 * 2 * 3
    assert {arm.name[SEED] for arm in arms} == {1, 2, 3}
    for arm in arms:
        assert [values[RATE] for values in arm.rounds[0]] == rates(arm.name[SEED])
        assert arm.more == 0
    assert len(list(wanted(arms))) == 12 * TRIALS
    found = [rate for seed in range(1, 9) for rate in rates(seed)]
    places = [math.log(rate / LOW) / math.log(HIGH / LOW) for rate in found]
    parts = np.histogram(places, bins=TRIALS, range=(0, 1))[0]
    assert parts.tolist() == [8] * TRIALS
    # A range without `log` is cut into equal parts.
    field = {RATE: {"low": 1.0, "high": 3.0}}
    spec = spec_of(tmp_path, search={**SEARCH, "fields": field, "trials": 2})
    share = 0.6180339887498949
    expected = [float(f"{1 + share:.4g}"), float(f"{2 + share:.4g}")]
    assert [v[RATE] for v in stratified(spec.search, 1)] == expected


def test_the_plan_shows_the_rates_of_each_seed(tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    spec_of(tmp_path)
    assert main(["plan", "studies.yaml", "--json"]) == 0
    tree = json.loads(capsys.readouterr().out)
    assert tree["trials"] == {RATE: {str(seed): rates(seed) for seed in (1, 2, 3)}}
    assert tree["cells"] == 12 * TRIALS
    assert main(["plan", "studies.yaml"]) == 0
    assert f"seed 2: {', '.join(map(str, rates(2)))}" in capsys.readouterr().out


@pytest.mark.parametrize("sampler", ["tpe", "random"])
def test_a_sampler_of_optuna_asks_for_each_seed_apart(tmp_path: Path, sampler: str) -> None:
    spec = spec_of(tmp_path, search={**SEARCH, "sampler": sampler, "together": 2})
    known: dict[str, TrialScore] = {}
    for _ in range(4):
        arms = search_arms(spec, list(combinations(spec)), known)
        for cell in wanted(arms):
            bad = 0.1 * (cell[PRESET] == "post_ln") * cell[SEED]
            known[canonical(cell)] = TrialScore(3.0 + bad + abs(math.log2(cell[RATE] / 0.004)))
    arms = search_arms(spec, list(combinations(spec)), known)
    trials = [[values[RATE] for of in arm.rounds for values in of] for arm in arms]
    assert {len(of) for of in trials} == {TRIALS}
    assert len({tuple(of[:2]) for of in trials}) == 3  # alike in all arms of a seed


def loss(at: Mapping[str, Any]) -> float | None:
    """A loss with noise; without warm-up `post_ln` fails at large rates."""
    place = (at[PRESET] == "post_ln", at[WARMUP], at[SEED], round(1e7 * at[RATE]))
    noise = float(np.random.default_rng([int(each) for each in place]).normal(0, 0.05))
    if place[0] and not at[WARMUP] and at[RATE] > 0.007:
        return None
    best = 0.004 * (1 + (at[WARMUP] > 0))
    rise = 0.2 * math.log2(at[RATE] / best) ** 2
    return 2.0 + rise + noise + 0.6 * (place[0] and not at[WARMUP])


def ends_of(variant: str, warmup: int, seed: int) -> list[float]:
    """The losses of the trials of a seed; H of those that failed."""
    at = {PRESET: variant, WARMUP: warmup, SEED: seed}
    return [4.5 if (end := loss({**at, RATE: r})) is None else end for r in rates(seed)]


@pytest.fixture
def studies(tmp_path: Path) -> FakeGrid:
    every = sorted({rate for seed in range(1, 6) for rate in rates(seed)})
    axes = {PRESET: ["post_ln", "pre_ln"], WARMUP: [0, 60], SEED: [1, 2, 3, 4, 5], RATE: every}

    def tried(at: Mapping[str, Any]) -> bool:
        return at[RATE] in rates(at[SEED])

    fake = FakeGrid(tmp_path / "studies", lambda at: loss(at) if tried(at) else "waiting", axes)
    keep(fake, tried)
    change(fake, search=SEARCH)
    return fake


def test_the_best_of_each_seed_and_the_mean_over_its_rates(studies: FakeGrid) -> None:
    grid = read_results(studies.folder)
    scores = {(s.variant, s.score): s for s in sensitivity_scores(grid)}
    for variant in ("post_ln", "pre_ln"):
        points = itertools.product((0, 60), range(1, 6))
        ends = {(warmup, seed): ends_of(variant, warmup, seed) for warmup, seed in points}
        best = [min(ends[0, s]) - min(ends[60, s]) for s in range(1, 6)]
        apart = [fmean(ends[0, s]) - fmean(ends[60, s]) for s in range(1, 6)]
        tuned, mean = scores[variant, "tuned"], scores[variant, "mean_over_rates"]
        assert [value for _, value in tuned.values] == pytest.approx(best)
        assert tuned.p == pytest.approx(stats.ttest_1samp(best, 0.0)[1])
        assert tuned.tried == (TRIALS, TRIALS)
        assert [value for _, value in mean.values] == pytest.approx(apart)
        assert ("too narrow" in mean.note) == (variant == "post_ln")  # where runs failed
        chosen = {at: rates(at[1])[of.index(min(of))] for at, of in ends.items()}
        shifts = [math.log2(chosen[60, s] / chosen[0, s]) for s in range(1, 6)]
        assert [v for _, v in scores[variant, "rate_shift"].values] == pytest.approx(shifts)
        failed = [sum(end == 4.5 for s in range(1, 6) for end in ends[w, s]) for w in (0, 60)]
        stalls = scores[variant, "stall_difference"]
        assert stalls.estimate == pytest.approx((failed[0] - failed[1]) / (5 * TRIALS))
    assert not any(score.score == "delta" for score in sensitivity_scores(grid))
    words = {verdict.variant: verdict.word for verdict in verdicts(grid, sensitivity_scores(grid))}
    assert words["post_ln"] == "needs"
    assert "four trials" in answer(grid, sensitivity_scores(grid))


def test_the_best_trials_are_compared_and_a_crashed_one_drops_its_seed(studies, oracle) -> None:
    grid = read_results(studies.folder)
    rows = comparisons(grid, {PRESET: "pre_ln"})
    assert [row.seeds for row in rows] == [5, 5]
    for row, warmup in zip(rows, (0, 60), strict=True):
        post, pre = (
            [min(ends_of(variant, warmup, seed)) for seed in range(1, 6)]
            for variant in ("post_ln", "pre_ln")
        )
        assert row.estimate == pytest.approx(fmean(post) - fmean(pre))
    assert len(by_metric(grid)) == 4
    assert {arm.runs for arm in by_metric(grid)} == {5}
    with pytest.raises(UserError, match="each seed"):
        compare_axis(grid, RATE, grid.axes[RATE][0])

    wanted = {SEED: 2, PRESET: "pre_ln", WARMUP: 0, RATE: rates(2)[1]}
    cell = next(cell for cell in studies.cells if cell["axes"] == wanted)
    (studies.run(cell) / "result.json").unlink()
    scores = {(s.variant, s.score): s for s in sensitivity_scores(read_results(studies.folder))}
    assert [seed for seed, _ in scores["pre_ln", "tuned"].values] == [1, 3, 4, 5]
    assert [seed for seed, _ in scores["post_ln", "tuned"].values] == [1, 2, 3, 4, 5]
    assert [seed for seed, _ in scores["post_ln", "tuned_interaction"].values] == [1, 3, 4, 5]
    compared = comparisons(read_results(studies.folder), {PRESET: "pre_ln"})
    assert [row.seeds for row in compared] == [4, 5]
    # The program that shares no code has the same numbers.
    page = write_report(studies.folder, figures=False)
    rows = pd.read_csv(page.parent / "sensitivity.csv")
    assert {"tuned", "mean_over_rates", "rate_shift", "pooled"} <= {*rows["score"]}
    assert oracle.check(page.parent) == []


UNTIL = {"half_width": 0.05, "most_seeds": 20}
STARTS: dict[str, Any] = {"axes": {**AXES, SEED: 5}, "until": UNTIL}
STARTS |= {"sensitivity": {"reference_warmup": 60}, "metric": {"name": "val/nll", "mode": "min"}}


def seeds_run(spec: Any, score: Any) -> list[int]:
    """The seeds of a grid that runs to its end."""
    known: dict[str, TrialScore] = {}
    while True:
        arms = search_arms(spec, list(combinations(spec)), known)
        new = [cell for cell in wanted(arms) if canonical(cell) not in known]
        if not new:
            assert all(arm.more == 0 for arm in arms)
            return sorted({cell[SEED] for cell in wanted(arms)})
        seeds = len({cell[SEED] for cell in wanted(arms)})
        more = (spec.until.most_seeds - seeds) * 4 * TRIALS
        assert sum(arm.more * len(arm.cells) for arm in arms) == more
        for cell in reversed(new):
            known[canonical(cell)] = score(cell)


@pytest.mark.parametrize("noise", [0.01, 0.04, 0.2])
def test_seeds_are_added_by_precision(tmp_path: Path, noise: float) -> None:
    def end(cell: Mapping[str, Any], seed: int) -> float:
        arm = [cell[PRESET] == "post_ln", cell[WARMUP]]
        place = [*map(int, arm), seed, round(1e7 * cell[RATE])]
        return 3 + float(np.random.default_rng(place).normal(0, noise))

    def best(preset: str, warmup: int, seed: int) -> float:
        at = {PRESET: preset, WARMUP: warmup}
        return min(end({**at, RATE: rate}, seed) for rate in rates(seed))

    spec = spec_of(tmp_path, **STARTS)
    found = seeds_run(spec, lambda cell: TrialScore(end(cell, cell[SEED])))
    widths = {}
    for count in range(5, 21):
        half = []
        for preset in ("post_ln", "pre_ln"):
            saved = [best(preset, 0, s) - best(preset, 60, s) for s in range(1, count + 1)]
            half.append(stats.t.ppf(0.985, count - 1) * stats.sem(saved))
        widths[count] = max(half)
    wanted_count = next((count for count in widths if widths[count] <= 0.05), 20)
    assert found == list(range(1, wanted_count + 1))


def test_an_arm_whose_seeds_learn_by_chance_asks_for_none(tmp_path: Path) -> None:
    def end(cell: Mapping[str, Any]) -> TrialScore:
        fails = cell[PRESET] == "post_ln" and not cell[WARMUP] and cell[SEED] % 2
        return TrialScore(6.0, False) if fails else TrialScore(3 + cell[SEED] / 1e3)

    assert seeds_run(spec_of(tmp_path, **STARTS), end) == [1, 2, 3, 4, 5]


def searched(**changes: Any) -> dict[str, Any]:
    return {"search": {**SEARCH, **changes}}


EPSILON = {"model.optimizer.eps": {"low": 1e-9, "high": 1e-6}}
MISTAKES: list[tuple[dict[str, Any], str]] = [
    (searched(trials=None), "search: trials"),
    (searched(budget=12), "search: budget"),
    (searched(per="arm"), "search: budget"),
    (searched(per="arm", trials=None, budget=40, sampler="stratified"), "search: sampler"),
    (searched(sampler="grid", trials=0), "search: trials"),
    (searched(fields={"model.architecture.dropout": {"low": 0.0, "high": 0.5}}), "search: fields"),
    (searched(fields=FIELDS | EPSILON), "search: fields"),
    *(({"axes": {**AXES, SEED: seeds}}, "seed_everything") for seeds in (0, -1, 100_000, True)),
]
OF_UNTIL: list[tuple[dict[str, Any], str]] = [
    ({"until": {**UNTIL, "half_width": 0}}, "half_width"),
    ({"until": {**UNTIL, "most_seeds": 4}}, "most_seeds"),
    ({"axes": AXES}, "most_seeds"),
    ({"search": None}, "until"),
    (searched(per="arm", trials=None, budget=40), "until"),
    ({"sensitivity": None}, "until"),
    ({"axes": {PRESET: ["pre_ln"], WARMUP: [60], SEED: 5}}, "until"),
    ({"metric": {"name": "val/accuracy", "mode": "max"}}, "until"),
    ({"exclude": [{SEED: 2, PRESET: "pre_ln"}]}, "until"),
]


@pytest.mark.parametrize(
    ("parts", "told"), [*MISTAKES, *((STARTS | parts, told) for parts, told in OF_UNTIL)]
)
def test_what_studies_of_seeds_and_further_seeds_need(tmp_path, parts: Any, told: str) -> None:
    with pytest.raises(UserError, match=told):
        spec_of(tmp_path, **parts)


def test_seeds_that_were_added_by_results_make_wider_intervals(studies: FakeGrid) -> None:
    before = {(s.variant, s.score): s for s in sensitivity_scores(read_results(studies.folder))}
    change(studies, until=UNTIL)
    grid = read_results(studies.folder)
    for (variant, name), old in before.items():
        new = {(s.variant, s.score): s for s in sensitivity_scores(grid)}[variant, name]
        values = [value for _, value in new.values]
        if not math.isnan(old.low):
            half = stats.t.ppf(0.985, len(values) - 1) * stats.sem(values)
            centre = fmean(values)
            assert (new.low, new.high) == pytest.approx((centre - half, centre + half))
        if not math.isnan(old.p):
            assert new.p == pytest.approx(min(1.0, old.p * 5 / 3))
            assert (new.p_holm < 0.05) == (new.holm_low * new.holm_high > 0) or math.isnan(new.low)


def test_the_figure_of_the_rates_shows_the_best_trial_of_each_seed(studies: FakeGrid) -> None:
    page = write_report(studies.folder)
    table: Any = pd.read_csv(page.parent / "figures" / "loss_by_rate.csv")
    assert {*table["mark"]} == {"run", "tuned"}
    assert len(table[table["mark"] == "run"]) == 2 * 2 * 5 * TRIALS
    tuned = table[table["mark"] == "tuned"].set_index(["variant", "warmup"])["value"]
    for variant, warmup in itertools.product(("post_ln", "pre_ln"), (0, 60)):
        best = [min(ends_of(variant, warmup, seed)) for seed in range(1, 6)]
        assert tuned[variant, warmup] == pytest.approx(fmean(best))
    assert not (page.parent / "figures" / "rate_by_warmup.csv").exists()


def test_a_control_and_the_baseline_are_families_apart(studies: FakeGrid, oracle) -> None:
    change(studies, sensitivity={"reference_warmup": 60, "baseline": "pre_ln"})

    def tuned() -> dict[str, tuple[float, float]]:
        found = sensitivity_scores(read_results(studies.folder))
        return {s.variant: (s.p, s.p_holm) for s in found if s.score == "tuned"}

    assert max(p_holm / p for p, p_holm in tuned().values()) == pytest.approx(2)
    reference = {"reference_warmup": 60, "baseline": "pre_ln", "control": "pre_ln"}
    names = {PRESET: ["Post", "Pre"]}  # the report's names are no presets
    change(studies, sensitivity=reference, until=UNTIL, labels=names)
    assert all(p_holm == pytest.approx(p) for p, p_holm in tuned().values())
    page = write_report(studies.folder, figures=False)
    assert oracle.check(page.parent) == []
