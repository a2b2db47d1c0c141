"""The threshold of no answer, against the naive form of the published script and by brute force."""

import math
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_app.scores.squad import apply_null_threshold, best_threshold, score_v2
from tests.scores import naive_squad

Metric = Literal["exact", "f1"]
METRICS: tuple[Metric, Metric] = ("exact", "f1")

GOLDS = {"sure": ["dog"], "half": ["red dog"], "none": [], "hard": ["cat"], "no": []}
ANSWERS = {"sure": "dog", "half": "dog", "none": "bird", "hard": "cat", "no": "fish"}
DIFFERENCES = {"sure": -5.0, "half": -3.0, "none": -1.0, "hard": 2.0, "no": 4.0}


def test_above_the_threshold_is_no_answer_and_the_best_is_as_by_hand() -> None:
    predictions = apply_null_threshold(ANSWERS, DIFFERENCES, -1.0)
    assert predictions == {"sure": "dog", "half": "dog", "none": "bird", "hard": "", "no": ""}
    assert apply_null_threshold(ANSWERS, DIFFERENCES, -1.01)["none"] == ""
    assert apply_null_threshold(ANSWERS, DIFFERENCES) == predictions  # 0 unless given
    # From 2 of 5 right without answers: +1, +2/3 (F1) or 0 (exact), -1, +1, -1.
    best = best_threshold(GOLDS, ANSWERS, DIFFERENCES, "f1")
    assert best.score == pytest.approx(100 * (2 + 1 + 2 / 3) / 5)
    assert best.threshold == -3
    best = best_threshold(GOLDS, ANSWERS, DIFFERENCES, "exact")
    assert (best.score, best.threshold) == (60, -5)


QUESTION = st.tuples(
    st.lists(st.sampled_from(["dog", "red dog", "the cat"]), max_size=2),
    st.sampled_from(["dog", "a red dog", "bird", "the cat.", None]),
)


def inputs(
    questions: list[tuple[list[str], str | None]], differences: list[float]
) -> tuple[dict[str, list[str]], dict[str, str], dict[str, float]]:
    ids = [f"q{i:02}" for i in range(len(questions))]
    golds = {i: golds for i, (golds, _) in zip(ids, questions, strict=True)}
    answers = {i: answer or "" for i, (_, answer) in zip(ids, questions, strict=True)}
    paired = zip(ids, differences, strict=True)
    return golds, answers, {i: d if answers[i] else math.inf for i, d in paired}


@given(
    st.lists(QUESTION, min_size=1, max_size=8),
    st.permutations([-7.5, -4.0, -2.0, -0.5, 0.25, 1.0, 3.0, 8.0]),
)
def test_equal_to_the_script_for_distinct_differences(questions: list, order: list[float]) -> None:
    golds, answers, differences = inputs(questions, order[: len(questions)])
    raw = naive_squad.raw_v2(golds, answers)
    for metric, scores in zip(METRICS, raw, strict=True):
        ours = best_threshold(golds, answers, differences, metric)
        score, threshold = naive_squad.best_threshold(golds, answers, scores, differences)
        assert ours.score == pytest.approx(score)
        nothing = score_v2(golds, dict.fromkeys(golds, "")).every
        if score > getattr(nothing, metric) + 1e-6:
            assert ours.threshold == threshold
        else:
            assert threshold == 0  # where the script starts, no optimum if a difference is below
            assert ours.threshold < min(differences.values())


@given(
    st.lists(QUESTION, min_size=1, max_size=8),
    st.lists(st.integers(-2, 2).map(float), min_size=8, max_size=8),
)
def test_the_best_is_reached_and_nothing_is_better(questions: list, values: list[float]) -> None:
    """Ties included: the score at the threshold is the one that is promised."""
    golds, answers, differences = inputs(questions, values[: len(questions)])
    for metric in METRICS:
        ours = best_threshold(golds, answers, differences, metric)
        assert math.isfinite(ours.threshold)

        def at(threshold: float, metric: Metric = metric) -> float:
            predictions = apply_null_threshold(answers, differences, threshold)
            return getattr(score_v2(golds, predictions).every, metric)

        assert at(ours.threshold) == pytest.approx(ours.score)
        assert max(at(t) for t in (-9.0, -2.0, -1.0, 0.0, 1.0, 2.0)) == pytest.approx(ours.score)


def test_equal_differences_and_answers_without_words_or_none_at_all() -> None:
    # A collapsed model: the script would take the answered half of equal questions, 100 %.
    golds = {"a": ["dog"], "b": []}
    answers = {"a": "dog", "b": "dog"}
    differences = {"a": 1.0, "b": 1.0}
    assert naive_squad.best_threshold(golds, answers, {"a": 1.0, "b": 0.0}, differences) == (100, 1)
    assert best_threshold(golds, answers, differences, "f1").score == 50
    # The script takes 1 off for the text "the", which it scores as right elsewhere.
    golds, answers = {"a": [], "b": ["dog"]}, {"a": "the", "b": "dog"}
    best = best_threshold(golds, answers, {"a": 0.0, "b": 1.0}, "f1")
    assert (best.score, best.threshold) == (100, 1)
    golds, empty = {"a": [], "b": ["x"]}, {"a": "", "b": ""}
    best = best_threshold(golds, empty, dict.fromkeys("ab", math.inf), "f1")
    assert (best.score, best.threshold) == (50, 0)
    assert apply_null_threshold({"a": ""}, {"a": math.inf}, 1e9) == {"a": ""}
