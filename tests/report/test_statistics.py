"""Intervals and tests against SciPy, against enumeration, and against the truth."""

# pyright: reportAttributeAccessIssue=false
# SciPy's results of tests carry their fields at run time only.

import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from sacrebleu.metrics.bleu import BLEU
from scipy import stats

from benchmarks import coverage
from lightning_app.report.statistics import (
    Estimate,
    bleu_difference,
    corrected,
    holm_values,
    seeds_to_decide,
    t_interval,
    t_intervals,
    wilson_interval,
    wilson_intervals,
    within,
)


def test_t_and_wilson_are_scipys():
    draws = np.random.default_rng(3).lognormal(0.2, 0.5, (50, 7)) - 1.2
    low, high, p = t_intervals(draws)
    test = stats.ttest_1samp(draws, 0, axis=1)
    ends = test.confidence_interval(0.95)
    assert low == pytest.approx(ends.low)
    assert high == pytest.approx(ends.high)
    assert p == pytest.approx(test.pvalue)
    assert t_interval(list(draws[4])) == pytest.approx((low[4], high[4], p[4]))
    for no_spread in ([1.0], [0.3, 0.1 + 0.2, 0.3]):
        assert all(math.isnan(value) for value in t_interval(no_spread))
    for count in (1, 3, 5, 10, 40):
        low, high = wilson_intervals(np.arange(count + 1), count)
        for failed in range(count + 1):
            ends = stats.binomtest(failed, count).proportion_ci(0.95, "wilson")
            assert (low[failed], high[failed]) == pytest.approx((ends.low, ends.high))
            assert wilson_interval(failed, count) == (low[failed], high[failed])
    assert wilson_interval(0, 1) == pytest.approx((0.0, 0.793450), abs=1e-6)


def test_holm_is_the_closed_test_of_bonferroni():
    """Holm 1979: p of a hypothesis is the largest Bonferroni p of all sets that hold it."""
    draw = np.random.default_rng(5)
    for _ in range(20):
        p = draw.uniform(0, 0.6, 5) ** 2
        sets = [s for size in range(1, 6) for s in itertools.combinations(range(5), size)]
        of_set = {s: min(1.0, len(s) * p[list(s)].min()) for s in sets}
        closed = [max(of_set[s] for s in sets if i in s) for i in range(5)]
        assert holm_values(p) == pytest.approx(closed)
    rows = [[0.04, math.nan, 0.01, 0.03], [math.nan, math.nan, 0.5, 0.2]]
    wanted = [[0.06, math.nan, 0.03, 0.06], [math.nan, math.nan, 0.5, 0.4]]
    assert holm_values(rows) == pytest.approx(np.array(wanted), nan_ok=True)
    assert np.isnan(holm_values([math.nan, math.nan])).all()
    assert holm_values([]).size == 0


def row_of(values: Any, least: float = 0.0) -> Estimate:
    """A comparison with these values of the seeds, and a p value of at least this."""
    low, high, p = t_interval(values)
    p = max(p, least) if len(values) > 2 else math.nan
    pairs = tuple(enumerate(values))
    return Estimate(estimate=float(np.mean(values)), low=low, high=high, p=p, values=pairs)


def family_of(rng: np.random.Generator) -> list[Estimate]:
    """Some comparisons: with equal values, equal p values of failures, and without p values."""
    rows: list[Estimate] = []
    for kind in rng.choice(["plain", "tie", "raised", "mixed", "two"], rng.integers(1, 9)):
        effect, spread = rng.choice([0.0, 0.5, 1.0]), rng.uniform(0.05, 0.5)
        count = 2 if kind == "two" else rng.integers(3, 9)
        row = row_of(rng.normal(effect, spread, count), 0.03 * (kind == "raised"))
        if kind == "tie" and rows:
            row = rows[-1]
        rows.append(replace(row, low=math.nan, p=math.nan) if kind == "mixed" else row)
    return rows


def interval_at(level: float, row: Estimate) -> tuple[float, float]:
    values = [value for _, value in row.values]
    low, high = stats.t.interval(level, len(values) - 1, np.mean(values), stats.sem(values))
    return float(low), float(high)


@pytest.mark.parametrize("seed", range(4))
def test_the_interval_that_decides_leaves_out_zero_where_the_test_does(seed: int):
    """Its level is that of Holm's step, which equal p values share, or of the first step."""
    rng, seen = np.random.default_rng(seed), set()
    for _ in range(150):
        rows = family_of(rng)
        every = sum(row.p >= 0 or len(row.values) > 2 for row in rows)
        left = {row.p: every - sum(other.p < row.p for other in rows) for row in rows}
        for row, found in zip(rows, corrected(rows, lambda row: "all"), strict=True):
            steps = [min(1.0, left[other.p] * other.p) for other in rows if other.p <= row.p]
            assert found.p_holm == pytest.approx(max(steps, default=math.nan), nan_ok=True)
            decided, ends = found.p_holm < 0.05, (math.nan, math.nan)
            if row.p >= 0:
                ends = interval_at(1 - 0.05 / (left[row.p] if decided else every), row)
            if not (decided or ends[0] < 0 < ends[1]):  # the p value is that of failures
                ends = math.nan, math.nan
            assert (found.holm_low, found.holm_high) == pytest.approx(ends, nan_ok=True)
            assert (found.holm_low > 0 or found.holm_high < 0) == decided
            seen.add((decided, row.p >= 0, math.isnan(found.holm_low)))
    assert len(seen) == 4
    alone = family_of(rng)
    assert corrected(alone, lambda row: None) == alone


def test_what_is_within_a_limit():
    rows = corrected([row_of([0.5, 0.51, 0.52]), row_of([0.02, 0.03, 0.07])], lambda row: "all")
    for row in rows:
        low, high = interval_at(0.975, row)
        edge = max(-low, high)
        assert within(row, edge + 1e-9)
        assert not within(row, edge - 1e-9)
    assert not within(replace(rows[0], holm_low=math.nan), 9.0)


@pytest.mark.parametrize("matters", [0.0, 0.1, 0.4])
def test_how_many_seeds_would_decide(matters: float):
    """Against a search with SciPy: the interval leaves out zero, or lies within what matters."""
    rng, seen = np.random.default_rng(7), set()
    for _ in range(60):
        values = rng.normal(rng.choice([0.0, 0.2, 0.5]), rng.choice([0.1, 0.3, 0.6]), 4)
        row = replace(row_of(values), level=1 - 0.05 / rng.integers(1, 9))
        wanted = 41
        for count in range(40, 4, -1):
            error = np.std(values, ddof=1) / math.sqrt(count)
            ends = stats.t.interval(row.level, count - 1, row.estimate, error)
            if ends[0] > 0 or ends[1] < 0 or max(-ends[0], ends[1]) <= matters:
                wanted = count
        assert seeds_to_decide(row, matters) == wanted
        seen.add(wanted)
    assert {5, 41} < seen
    assert seeds_to_decide(row_of([0.0, 1.0]), 0.0) == 11  # 2.228 * 0.7071 / sqrt(11)


SENTENCES = [f"the {a} saw the {b} in the garden" for a in ("dog", "cat") for b in "abcde"]


def test_bleu_by_enumeration():
    first = [text.replace("garden", "park") if i % 3 else text for i, text in enumerate(SENTENCES)]
    second = [text.replace("saw", "sees a") if i % 2 else text for i, text in enumerate(SENTENCES)]
    metric = BLEU(lowercase=True)

    def score(texts: list[str]) -> float:
        return metric.corpus_score(texts, [SENTENCES]).score

    seen = abs(score(first) - score(second))
    larger = 0
    for swap in itertools.product((False, True), repeat=10):
        one = [b if s else a for s, a, b in zip(swap, first, second, strict=True)]
        two = [a if s else b for s, a, b in zip(swap, first, second, strict=True)]
        larger += abs(score(one) - score(two)) > seen + 1e-9
    found = bleu_difference(first, second, SENTENCES, trials=4000)
    assert (found.first, found.second) == pytest.approx((score(first), score(second)))
    assert found.difference == pytest.approx(score(first) - score(second))
    assert found.p == pytest.approx(larger / 1024, abs=0.03)  # about 4 standard errors
    assert "ar:4000" in found.signature
    assert found == bleu_difference(first, second, SENTENCES, trials=4000)


def test_bleu_of_a_run_against_itself_is_no_finding_and_tokens_no_reason_to_warn(caplog):
    found = bleu_difference(SENTENCES, SENTENCES, SENTENCES, trials=100)
    assert found.difference == 0.0
    assert found.p == 1.0
    one = [SENTENCES[0].replace("saw", "heard"), *SENTENCES[1:]]
    assert bleu_difference(one, SENTENCES, SENTENCES, trials=100).p == 1.0
    with pytest.raises(ValueError, match="10, 9 and 10"):
        bleu_difference(SENTENCES, SENTENCES[1:], SENTENCES)
    lines = [f"{sentence} ." for sentence in SENTENCES * 10]
    assert len(lines) >= 100
    bleu_difference(lines, lines[1:] + lines[:1], lines, tokenize="none", trials=10)
    assert caplog.messages == []
    bleu_difference(lines, lines[1:] + lines[:1], lines, tokenize="13a", trials=10)
    assert "tokenized period" in caplog.text  # here it may be a mistake


def test_coverage_in_short():
    """Tails of 4 standard errors. That of one arm's mean loss holds less under skew.

    Wilson's interval holds on average; intervals over mixed endings do not.
    """
    rng = np.random.default_rng(11)
    for kind in coverage.KINDS:
        for seeds in coverage.SEEDS:
            for row in coverage.intervals(kind, seeds, 1000, rng, rest=False):
                alone = row.what.startswith("loss of one arm") and kind == "skewed"
                lowest = 0.90 if alone else coverage.LOW
                assert lowest - 4 * row.error < row.rate < coverage.HIGH + 4 * row.error, row
                if kind == "normal" and row.what.endswith(", t"):
                    assert abs(row.rate - 0.95) < 4 * row.error, row
    for seeds in coverage.SEEDS:
        _, exact = coverage.wilson_coverage(seeds)
        assert 0.95 < exact.mean() < 0.96
        assert 0.82 < exact.min() < 0.84
    whole, alike = coverage.mixtures(5, 0.1, 1000, np.random.default_rng(13))
    assert whole.rate < 0.5
    assert alike.holds


def test_savings_and_what_does_not_matter_in_short():
    rng = np.random.default_rng(14)
    curves = next(iter(coverage.of_study(coverage.STUDY, "spline").values()))
    truth = coverage.drawn(curves, 5, (1000, 50), rng)[0].mean()
    low, high, _ = t_intervals(coverage.drawn(curves, 5, (1000, 5), rng)[0])
    row = coverage.covered("T", "normal", 5, (low[:, None], high[:, None]), truth)
    assert coverage.LOW - 4 * row.error < row.rate < coverage.HIGH + 4 * row.error
    assert np.mean([row.rate for row in coverage.no_needs(30, rng)]) < 0.05
