"""Scores of counts against hand-computed cases, scikit-learn, and the majorities of GLUE."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn import metrics

from lightning_app.tasks.glue import (
    accuracy,
    count_pairs,
    f1_of_class_1,
    majority_share,
    matthews_correlation,
)


def test_counts_are_labels_by_predictions() -> None:
    confusion = count_pairs([0, 0, 0, 1, 2], [0, 1, 1, 2, 0], 3)
    assert confusion.tolist() == [[1, 2, 0], [0, 0, 1], [1, 0, 0]]
    assert confusion.dtype == np.int64


def test_scores_of_a_case_by_hand() -> None:
    """tp 3, tn 4, fp 1, fn 2."""
    confusion = np.array([[4, 1], [2, 3]])
    assert accuracy(confusion) == 0.7
    assert f1_of_class_1(confusion) == 6 / 9
    assert matthews_correlation(confusion) == pytest.approx(10 / math.sqrt(4 * 5 * 5 * 6))
    assert majority_share(confusion) == 0.5


@pytest.mark.parametrize("constant", [0, 1])
def test_constant_predictions(constant: int) -> None:
    """CoLA's dev set: 721 of 1,043 sentences are acceptable."""
    labels = [1] * 721 + [0] * 322
    confusion = count_pairs(labels, [constant] * 1043, 2)
    assert matthews_correlation(confusion) == 0
    assert metrics.matthews_corrcoef(labels, [constant] * 1043) == 0
    assert majority_share(confusion) == 721 / 1043
    assert accuracy(confusion) == (721 if constant else 322) / 1043
    assert f1_of_class_1(confusion) == (2 * 721 / (1043 + 721) if constant else 0)


def test_the_majority_is_of_labels_not_of_predictions() -> None:
    assert majority_share(count_pairs([0, 0, 1, 2], [1, 1, 1, 1], 3)) == 0.5


def test_perfect_and_opposite_predictions() -> None:
    labels = [0, 1, 1, 0, 1]
    opposite = [1, 0, 0, 1, 0]
    assert matthews_correlation(count_pairs(labels, labels, 2)) == 1
    assert matthews_correlation(count_pairs(labels, opposite, 2)) == -1
    assert f1_of_class_1(count_pairs(labels, opposite, 2)) == 0


def test_f1_without_any_positive_is_0() -> None:
    assert f1_of_class_1(count_pairs([0, 0], [0, 0], 2)) == 0


PAIRS = st.lists(st.tuples(st.integers(0, 1), st.integers(0, 1)), min_size=1, max_size=60)


@given(PAIRS)
def test_equal_to_scikit_learn(pairs: list[tuple[int, int]]) -> None:
    labels, predictions = zip(*pairs, strict=True)
    confusion = count_pairs(labels, predictions, 2)
    expected = metrics.confusion_matrix(labels, predictions, labels=[0, 1])
    assert confusion.tolist() == expected.tolist()
    assert accuracy(confusion) == pytest.approx(metrics.accuracy_score(labels, predictions))
    # scikit-learn warns where F1 has the divisor 0, and of a single label.
    if 1 in {*labels, *predictions}:
        assert f1_of_class_1(confusion) == pytest.approx(metrics.f1_score(labels, predictions))
    if len({*labels, *predictions}) > 1:
        assert matthews_correlation(confusion) == pytest.approx(
            metrics.matthews_corrcoef(labels, predictions)
        )


def test_large_counts_do_not_overflow() -> None:
    """The product under the root is 1.6e39, far above int64."""
    n = 10**10 // 10
    assert matthews_correlation(np.array([[9 * n, n], [n, 9 * n]])) == pytest.approx(0.8)
    assert matthews_correlation(np.array([[9 * n, 0], [0, 7 * n]])) == 1
