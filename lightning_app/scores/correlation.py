"""Pearson's and Spearman's correlation of predictions and labels, 0 where they are undefined."""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lightning_app.errors import UserError

# Relative spread below which the deviations from the mean are rounding errors of float64.
ROUNDING = 1e-12


def pearson(labels: ArrayLike, predictions: ArrayLike) -> float:
    """r = sum (x - mean x) (y - mean y) / (|x - mean x| |y - mean y|), from -1 to 1.

    0 where one side is constant (up to rounding): SciPy and torchmetrics give NaN there, Cramming
    reports -1.

    Args:
        labels: the true value of each example.
        predictions: the predicted value of each example.

    Raises:
        UserError: lengths differ, no values, or a value that is not finite.
    """
    x, y = _pairs(labels, predictions)
    if any(np.ptp(side) <= ROUNDING * np.abs(side).max() for side in (x, y)):
        return 0.0
    dx, dy = _direction(x), _direction(y)
    return max(-1.0, min(1.0, float(dx @ dy)))


def spearman(labels: ArrayLike, predictions: ArrayLike) -> float:
    """Pearson's correlation of the ranks, ties with their mean rank; 0 where one side is constant.

    Args:
        labels: the true value of each example.
        predictions: the predicted value of each example.

    Raises:
        UserError: lengths differ, no values, or a value that is not finite.
    """
    from scipy import stats  # costs 50 MB and a second, so only where it is needed

    x, y = _pairs(labels, predictions)
    if np.ptp(x) == 0 or np.ptp(y) == 0:
        return 0.0
    return pearson(stats.rankdata(x), stats.rankdata(y))


def _direction(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return (x - mean x) / |x - mean x|."""
    scaled = x / np.abs(x).max()  # squares of large values overflow
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
        raise UserError(f"scores: {name} has shape {array.shape}; one number an example is needed")
    array = array.astype(np.float64)
    wrong = np.flatnonzero(~np.isfinite(array))
    if len(wrong):
        raise UserError(
            f"scores: {name}[{wrong[0]}] is {array[wrong[0]]}; a correlation needs finite numbers"
        )
    return array
