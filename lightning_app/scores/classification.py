"""Scores of classes from counts summable over ranks, and correlations of numbers. Needs NumPy."""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lightning_app.core.errors import UserError


@dataclass(frozen=True, eq=False)
class Confusion:
    """counts[i, j] = number of examples of label i with prediction j.

    The counts of several batches or ranks are added with `+`, so each example must be counted
    once: a row repeated by a sampler to fill a batch changes the score.

    Args:
        counts: a square matrix of non-negative integers; kept as int64 and read-only.

    Raises:
        UserError: if `counts` is not such a matrix.
    """

    counts: NDArray[np.int64]

    def __post_init__(self) -> None:
        array = np.asarray(self.counts)
        if array.ndim != 2 or array.shape[0] != array.shape[1] or len(array) < 2:
            raise UserError(
                f"Confusion: counts has shape {array.shape}; it must be a square matrix "
                f"of at least 2 x 2"
            )
        if not np.issubdtype(array.dtype, np.integer):
            raise UserError(f"Confusion: counts has type {array.dtype}; it must hold integers")
        if array.min() < 0:
            raise UserError(f"Confusion: counts holds {array.min()}; counts must not be negative")
        own = array.astype(np.int64)  # a copy, since the caller may keep changing its array
        own.flags.writeable = False
        object.__setattr__(self, "counts", own)

    @property
    def total(self) -> int:
        """Number of examples."""
        return int(self.counts.sum())

    def __add__(self, other: "Confusion") -> "Confusion":
        if self.counts.shape != other.counts.shape:
            raise UserError(
                f"Confusion: {len(self.counts)} classes plus {len(other.counts)} classes; the "
                f"numbers must be equal"
            )
        return Confusion(self.counts + other.counts)


def count_pairs(labels: ArrayLike, predictions: ArrayLike, classes: int) -> Confusion:
    """Return the confusion matrix of classes 0 to `classes` - 1; without pairs it is all zeros.

    Args:
        labels: the true class of each example, integers.
        predictions: the predicted class of each example (an argmax, not logits), integers.
        classes: number of classes, at least 2.

    Raises:
        UserError: if lengths differ, or a value is not one of the classes.
    """
    true = _classes("labels", labels, classes)
    predicted = _classes("predictions", predictions, classes)
    if len(true) != len(predicted):
        raise UserError(
            f"scores: {len(true)} labels but {len(predicted)} predictions; each example needs both"
        )
    cells = np.bincount(true * classes + predicted, minlength=classes * classes)
    return Confusion(cells.reshape(classes, classes))


def _classes(name: str, values: ArrayLike, classes: int) -> NDArray[np.int64]:
    array = np.asarray(values)
    if array.size == 0 and array.ndim == 1:
        return np.zeros(0, dtype=np.int64)  # an empty list would be float64
    if array.ndim != 1:
        raise UserError(
            f"scores: {name} has shape {array.shape}; it must hold one class per example"
        )
    # A float would be truncated silently: a logit of 0.9 would become class 0.
    if not np.issubdtype(array.dtype, np.integer):
        raise UserError(f"scores: {name} has type {array.dtype}; classes must be integers")
    wrong = np.flatnonzero((array < 0) | (array >= classes))
    if len(wrong):
        raise UserError(
            f"scores: {name}[{wrong[0]}] is {array[wrong[0]]}; the classes are 0 to {classes - 1}"
        )
    return array.astype(np.int64)


def accuracy(confusion: Confusion) -> float:
    """sum_i counts[i, i] / total, a fraction.

    Raises:
        UserError: if there are no examples.
    """
    return int(np.trace(confusion.counts)) / _total(confusion)


def majority_share(confusion: Confusion) -> float:
    """Accuracy of the best constant prediction: the largest count of a label / total.

    A run with this accuracy may have learned nothing (Mosbach et al. 2021, arXiv
    2006.04884). The labels are the evaluated ones, not those of the training set.

    Raises:
        UserError: if there are no examples.
    """
    return int(confusion.counts.sum(axis=1).max()) / _total(confusion)


def f1_of_class_1(confusion: Confusion) -> float:
    """F1 = 2 tp / (2 tp + fp + fn) of class 1, a fraction; 0 if the divisor is 0.

    Raises:
        UserError: if there are no examples, or not two classes.
    """
    _, fp, fn, tp = _two_classes(confusion, "F1 of class 1")
    divisor = 2 * tp + fp + fn
    return 2 * tp / divisor if divisor else 0.0


def matthews_correlation(confusion: Confusion) -> float:
    """(tp tn - fp fn) / sqrt((tp + fp) (tp + fn) (tn + fp) (tn + fn)), from -1 to 1.

    0 if the root is 0, so also for constant predictions, as in scikit-learn. torchmetrics 1.9
    returns a limit there instead: 0.026 for a model that accepts every sentence of CoLA's dev set.
    Matthews 1975.

    Raises:
        UserError: if there are no examples, or not two classes.
    """
    tn, fp, fn, tp = _two_classes(confusion, "the Matthews correlation")
    # Python integers: the product of four counts overflows int64 from 55,000 examples.
    squared = (tp + fp) * (tp + fn) * (tn + fp) * (tn + fn)
    if not squared:
        return 0.0
    return max(-1.0, min(1.0, (tp * tn - fp * fn) / math.sqrt(squared)))


def _total(confusion: Confusion) -> int:
    if not confusion.total:
        raise UserError("scores: total is 0 examples; a score needs at least one")
    return confusion.total


def _two_classes(confusion: Confusion, score: str) -> tuple[int, int, int, int]:
    """Return tn, fp, fn, tp."""
    if len(confusion.counts) != 2:
        raise UserError(f"scores: {score} of {len(confusion.counts)} classes; it needs 2 classes")
    _total(confusion)
    (tn, fp), (fn, tp) = confusion.counts.tolist()
    return tn, fp, fn, tp


# Relative spread below which deviations from the mean are float64 rounding errors.
ROUNDING = 1e-12


def pearson(labels: ArrayLike, predictions: ArrayLike) -> float:
    """r = sum (x - mean x) (y - mean y) / (|x - mean x| |y - mean y|), from -1 to 1.

    0 if one side is constant (up to rounding); SciPy and torchmetrics return NaN there, Cramming
    reports -1.

    Args:
        labels: the true value of each example.
        predictions: the predicted value of each example.

    Raises:
        UserError: if lengths differ, there are no values, or a value is not finite.
    """
    x, y = _pairs(labels, predictions)
    if any(np.ptp(side) <= ROUNDING * np.abs(side).max() for side in (x, y)):
        return 0.0
    dx, dy = _direction(x), _direction(y)
    return max(-1.0, min(1.0, float(dx @ dy)))


def spearman(labels: ArrayLike, predictions: ArrayLike) -> float:
    """Pearson's correlation of the ranks, with mean ranks for ties; 0 if one side is constant.

    Arguments and errors are as in `pearson`.
    """
    from scipy import stats  # costs 50 MB and a second, so imported only here

    x, y = _pairs(labels, predictions)
    if np.ptp(x) == 0 or np.ptp(y) == 0:
        return 0.0
    return pearson(stats.rankdata(x), stats.rankdata(y))


def _direction(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return (x - mean x) / |x - mean x|."""
    scaled = x / np.abs(x).max()  # squares of large values would overflow
    deviations = scaled - scaled.mean()
    return deviations / np.linalg.norm(deviations)


def _pairs(
    labels: ArrayLike, predictions: ArrayLike
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    x, y = _numbers("labels", labels), _numbers("predictions", predictions)
    if len(x) != len(y):
        raise UserError(f"scores: {len(x)} labels but {len(y)} predictions; each example has both")
    if not len(x):
        raise UserError("scores: labels has 0 values; a correlation needs at least one pair")
    return x, y


def _numbers(name: str, values: ArrayLike) -> NDArray[np.float64]:
    array = np.asarray(values)
    # A column (n, 1) against a row (n,) would broadcast to n x n pairs.
    if array.ndim != 1:
        raise UserError(
            f"scores: {name} has shape {array.shape}; it must hold one number per example"
        )
    array = array.astype(np.float64)
    wrong = np.flatnonzero(~np.isfinite(array))
    if len(wrong):
        raise UserError(
            f"scores: {name}[{wrong[0]}] is {array[wrong[0]]}; a correlation needs finite numbers"
        )
    return array
