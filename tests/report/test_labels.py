"""The rules of labels: p values and verdicts, against SciPy, enumeration and hand."""

# pyright: reportAttributeAccessIssue=false
# SciPy's results of tests carry their fields at run time only.

import math
import re
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks import false_labels
from lightning_app.report import verdicts as rules
from lightning_app.report.headline import answer
from lightning_app.report.pairs import NEVER, Score
from lightning_app.report.results import read_results
from lightning_app.report.statistics import (
    corrected,
    failures_p,
    no_less_than_failures,
    permutation_p,
    seeds_to_decide,
    sign_flip_p,
)
from lightning_app.report.verdicts import Verdict, verdict_document, verdicts
from lightning_app.report.warmup import sensitivity_scores
from tests.report.conftest import PRESET, RATE, SEED, WARMUP, arm, change, stalls

H = 4.5


def test_an_arm_that_always_fails_has_a_bound_of_its_own() -> None:
    """`2 / 4^n` with fewer than 5 planned seeds; a p value of losses is no smaller."""
    assert failures_p([4, 4, 4], [0, 3, 1], 4, 3) == 2 / 64
    assert failures_p([0, 0, 3], [4, 4, 4], 4, 4) == 2 / 64
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
    assert math.isnan(sign_flip_p([1.0] * 5))  # at least 2 / 2^5
    assert math.isnan(sign_flip_p([1.0] * 17))


def judged(*rows: Score, matters: float = 0.0, **more: Any) -> list[Verdict]:
    """The verdicts on some arms of a grid, whose measures are a family of Holm's correction."""
    fields = {"pruner": None, "searched": False, "asks_warmup": True, "reference_warmup": 60}
    grid: Any = SimpleNamespace(**fields | {"scored": (), "matters": matters} | more)
    scores = corrected(rows, lambda row: None if row.score == "stall_difference" else row.score)
    return verdicts(grid, scores)


OFTEN, SELDOM = stalls(0.4, 0.01), stalls(-0.4, 0.01)  # fails without warm-up, with it
MAYBE, MAYBE_NOT = stalls(0.2, 0.051), stalls(-0.2, 0.051)  # by chance, too
CUT: dict[str, Any] = {"inner": False}  # the best rate is at an end


VERDICTS = [
    (arm(0.5, 0.2), None, 0.1, "gains"),
    (arm(0.25, 0.2), None, 0.1, "slightly gains"),
    (arm(0.25, 0.2), None, 0.0, "gains"),
    (arm(0.15, 0.2), None, 0.1, "undecided"),
    (arm(-0.15, 0.2), None, 0.1, "undecided"),
    (arm(-0.3, 0.2), None, 0.1, "loses"),
    (arm(0.5, 0.2), MAYBE, 0.1, "gains"),
    (arm(-0.3, 0.2), MAYBE, 0.1, "loses"),
    (arm(0.02, 0.05), None, 0.08, "no need"),
    (arm(0.02, 0.05), None, 0.06, "undecided"),
    (arm(-0.02, 0.05), None, 0.06, "undecided"),
    (arm(0.0, 0.001), None, 0.0, "undecided"),
    (arm(0.05, 0.02), None, 0.08, "no need"),
    (arm(-0.05, 0.02), None, 0.08, "no need"),
    (arm(0.02, 0.05, **CUT), None, 0.08, "undecided"),
    (arm(0.05, 0.02, **CUT), None, 0.08, "slightly gains"),
    (arm(-0.05, 0.02, **CUT), None, 0.08, "loses"),
    (arm(0.02, 0.05), MAYBE, 0.08, "undecided"),
    (arm(0.02, 0.05), MAYBE_NOT, 0.08, "no need"),
    (arm(0.02, 0.05), SELDOM, 0.08, "no need"),
    (arm(0.5, 0.2), OFTEN, 0.1, "needs"),
    (arm(0.15, 0.2), OFTEN, 0.1, "needs"),
    (arm(0.02, 0.05), OFTEN, 0.08, "needs"),
    (arm(0.4, 0.0), OFTEN, 0.1, "needs"),
    (arm(-0.3, 0.2), OFTEN, 0.1, "mixed"),
    (arm(0.5, 0.2), SELDOM, 0.1, "mixed"),
    (arm(0.5, 0.2), MAYBE_NOT, 0.1, "gains"),
    (arm(0.15, 0.2), SELDOM, 0.1, "loses"),
    (arm(-0.3, 0.2), SELDOM, 0.1, "loses"),
    (arm(-0.4, 0.0), SELDOM, 0.1, "loses"),
    (arm(0.4, 0.0), MAYBE, 0.1, "undecided"),
    (arm(0.4, 0.0), None, 0.9, "undecided"),
    (arm(0.5, 0.001, 2), None, 0.9, "undecided"),
    (arm(0.5, 0.0, 1), None, 0.9, "undecided"),
    (arm(0.5, 0.2, never=True), OFTEN, 0.1, "never learned"),
    (arm(0.5, 0.2, note=NEVER, never=True), None, 0.1, "never learned"),
]


@pytest.mark.parametrize(("row", "failures", "matters", "word"), VERDICTS)
def test_the_word_of_an_arm(row: Score, failures: Score | None, matters: float, word: str) -> None:
    (found,) = judged(row, *filter(None, [failures]), matters=matters)
    assert (found.kind, found.word, found.variant) == ("arm", word, "v")
    ends = (row.low, row.high) if row.seeds > 2 else (math.nan, math.nan)
    assert (found.low, found.high) == pytest.approx(ends, nan_ok=True)
    assert found.failures == pytest.approx(failures.estimate if failures else math.nan, nan_ok=True)
    known = word == "undecided" and not math.isnan(row.low)
    limit = matters if row.inner else 0.0
    assert found.enough == (seeds_to_decide(row, limit) if known else None)
    assert {"word", "low", "enough"} <= verdict_document(found).keys()


def test_each_word_of_the_rules_has_a_case() -> None:
    words = re.findall(r"^- `([a-z ]+)`:", rules.__doc__ or "", re.MULTILINE)
    assert {*words} == {word for *_, word in VERDICTS}


@pytest.mark.parametrize(
    ("centre", "half", "matters", "word"),
    [
        (0.5, 0.2, 0.1, "larger"),
        (0.15, 0.05, 0.11, "larger"),
        (-0.5, 0.2, 0.1, "smaller"),
        (0.02, 0.05, 0.08, "no difference"),
        (0.02, 0.05, 0.0, "undecided"),
        (0.1, 0.2, 0.1, "undecided"),
    ],
)
def test_the_word_of_two_families(centre: float, half: float, matters: float, word: str) -> None:
    (found,) = judged(arm(centre, half, score="family_difference"), matters=matters)
    assert (found.kind, found.word) == ("difference", word)


def test_verdicts_are_those_of_the_family_of_arms() -> None:
    first, other = arm(0.5, 0.2), arm(0.03, 0.029, name="w")
    assert [verdict.word for verdict in judged(first, other)] == ["gains", "gains"]
    one, two = judged(first, other, matters=0.06)
    assert (one.word, two.word) == ("gains", "slightly gains")  # within 0.06 at 95 % alone
    assert judged(other, matters=0.06)[0].word == "no need"
    assert one.low < 0.3
    assert two.low == pytest.approx(0.001)


@pytest.mark.parametrize(("stalled", "word"), [(0.0, "no need"), (0.2, "undecided")])
def test_no_mean_over_arms_shows_that_warm_up_is_not_needed_where_one_fails(stalled, word) -> None:
    over = arm(0.02, 0.05, name="all variants", score="pooled", stalled=stalled)
    found = judged(arm(0.3, 0.2), over, matters=0.08)
    assert [verdict.kind for verdict in found] == ["pooled", "arm"]
    assert found[0].word == word
    often = judged(arm(0.3, 0.2), arm(0.3, 0.2, score="pooled"), OFTEN)
    assert [verdict.word for verdict in often] == ["gains", "needs"]


@pytest.mark.parametrize(
    ("file", "some"),
    [
        ({}, True),
        ({"refine": {"budget": 24}}, True),
        ({"search": {"fields": {RATE: {"low": 0.0, "high": 1.0}}, "budget": 24}}, False),
        ({"pruned": 3}, False),
        ({"sensitivity": {"reference_warmup": 0, "baseline": "pre_ln"}}, False),
    ],
)
def test_a_grid_whose_runs_were_chosen_or_ended_by_results_has_no_verdicts(make_grid, file, some):
    def outcome(at: Mapping[str, Any]) -> float:
        return 2.0 + 0.3 * (at[WARMUP] == 0) + 0.01 * (at[SEED] * (3 + at[WARMUP]) % 7)

    axes = {PRESET: ["pre_ln", "sas"], WARMUP: [0, 60], RATE: [0.001, 0.002], SEED: [1, 2, 3]}
    fake = make_grid(outcome, axes, curves=False)
    if "pruned" in file:
        fake.prune(file["pruned"])
    else:
        change(fake, **file)
    grid = read_results(fake.folder)
    scores = sensitivity_scores(grid)
    words = {verdict.variant: verdict.word for verdict in verdicts(grid, scores)}
    assert words == (dict.fromkeys(("all variants", "pre_ln", "sas"), "gains") if some else {})
    assert bool(answer(grid, scores)) == some


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
        for score in sensitivity_scores(read_results(folder)):
            variant, name = score.variant, score.score
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
    # Runs that stall above a largest rate of their seed, alike with and without warm-up.
    rng = np.random.default_rng(1)
    for spread in (0.25, 1.0, 2.0):
        for seeds in (3, 5, 10):
            row = false_labels.failure_rates(spread, 1, seeds, 400, rng)
            assert row.false <= 0.06 + 2 * 0.012, row
