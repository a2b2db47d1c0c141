"""The tasks of GLUE (Wang et al. 2018, arXiv 1804.07461), and three ways to average their scores.

Papers average differently, so a mean is only comparable with means of the same name.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lightning_app.core.errors import UserError, nearest


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
        given = np.asarray(self.counts)
        if given.ndim != 2 or given.shape[0] != given.shape[1] or len(given) < 2:
            raise UserError(
                f"Confusion: counts has shape {given.shape}; a square matrix of at least 2 x 2 "
                f"is needed"
            )
        if not np.issubdtype(given.dtype, np.integer):
            raise UserError(f"Confusion: counts has type {given.dtype}; integers are needed")
        if given.min() < 0:
            raise UserError(f"Confusion: counts holds {given.min()}; counts are not negative")
        own = given.astype(np.int64)  # a copy, since the caller may keep changing its array
        own.flags.writeable = False
        object.__setattr__(self, "counts", own)

    @property
    def total(self) -> int:
        """Number of examples."""
        return int(self.counts.sum())

    def __add__(self, other: "Confusion") -> "Confusion":
        if self.counts.shape != other.counts.shape:
            raise UserError(
                f"Confusion: {len(self.counts)} classes plus {len(other.counts)} classes; both "
                f"need the same number"
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
            f"scores: {len(true)} labels but {len(predicted)} predictions; each example has both"
        )
    cells = np.bincount(true * classes + predicted, minlength=classes * classes)
    return Confusion(cells.reshape(classes, classes))


def _classes(name: str, values: ArrayLike, classes: int) -> NDArray[np.int64]:
    array = np.asarray(values)
    if array.size == 0 and array.ndim == 1:
        return np.zeros(0, dtype=np.int64)  # an empty list would be float64
    if array.ndim != 1:
        raise UserError(f"scores: {name} has shape {array.shape}; one class an example is needed")
    # A float would be truncated silently: a logit of 0.9 would become class 0.
    if not np.issubdtype(array.dtype, np.integer):
        raise UserError(f"scores: {name} has type {array.dtype}; classes are integers")
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
        raise UserError(f"scores: {name} has shape {array.shape}; one number an example is needed")
    array = array.astype(np.float64)
    wrong = np.flatnonzero(~np.isfinite(array))
    if len(wrong):
        raise UserError(
            f"scores: {name}[{wrong[0]}] is {array[wrong[0]]}; a correlation needs finite numbers"
        )
    return array


GlueMetric = Literal["accuracy", "f1", "matthews", "pearson", "spearman"]
SIGNED: tuple[GlueMetric, ...] = ("matthews", "pearson", "spearman")  # from -1 to 1, others 0 to 1


@dataclass(frozen=True, kw_only=True)
class GlueTask:
    """One task: its outputs, its inputs and its metrics."""

    name: str
    classes: int | None
    """Number of classes; None for regression to one number."""
    pair: bool
    """Whether an input consists of two texts."""
    metrics: tuple[GlueMetric, ...]
    """The metrics, in the order of the paper's Table 1."""
    own: GlueMetric
    """The metric to select and compare by. With two metrics: F1 or Pearson, as in Cramming
    (2212.14034)."""
    splits: tuple[str, ...]
    """The names of its evaluation sets, each scored separately."""


def _task(
    name: str,
    classes: int | None,
    pair: bool,
    *metrics: GlueMetric,
    own: GlueMetric | None = None,
    splits: tuple[str, ...] = (),
) -> GlueTask:
    return GlueTask(
        name=name,
        classes=classes,
        pair=pair,
        metrics=metrics,
        own=own or metrics[0],
        splits=splits or (name,),
    )


GLUE_TASKS: dict[str, GlueTask] = {
    task.name: task
    for task in (
        _task("CoLA", 2, False, "matthews"),
        _task("SST-2", 2, False, "accuracy"),
        _task("MRPC", 2, True, "accuracy", "f1", own="f1"),
        _task("STS-B", None, True, "pearson", "spearman"),
        _task("QQP", 2, True, "accuracy", "f1", own="f1"),
        _task("MNLI", 3, True, "accuracy", splits=("MNLI-m", "MNLI-mm")),
        _task("QNLI", 2, True, "accuracy"),
        _task("RTE", 2, True, "accuracy"),
    )
}
WNLI = (
    "WNLI is not offered: sentences of its dev set are in its training set with the other label, "
    "so that the constant answer (56.34 %) beats trained models"
)


def glue_task(name: str) -> GlueTask:
    """Return the task with this name.

    Raises:
        UserError: if there is no such task, or it is WNLI.
    """
    if name.upper() == "WNLI":
        raise UserError(f"glue: task '{name}': {WNLI}")
    if name not in GLUE_TASKS:
        raise UserError(
            f"glue: task '{name}' is unknown; tasks are {', '.join(GLUE_TASKS)}"
            f"{nearest(name, GLUE_TASKS)}"
        )
    return GLUE_TASKS[name]


Part = tuple[str, GlueMetric]  # a split's score on a metric
Item = tuple[Part, ...]  # parts of equal weight; an average is the mean over its items

_PAIRS: dict[str, Item] = {
    name: tuple((split, metric) for split in task.splits for metric in task.metrics)
    for name, task in GLUE_TASKS.items()
}
_MNLI_TWICE: tuple[Item, ...] = ((("MNLI-m", "accuracy"),), (("MNLI-mm", "accuracy"),))

GLUE_AVERAGES: dict[str, tuple[Item, ...]] = {
    # The leaderboard's rule: all metrics and both MNLI sets count within their task. The
    # leaderboard's numbers include WNLI as the ninth task; without it there are eight.
    "glue": tuple(_PAIRS.values()),
    # He et al. 2021 (arXiv 2012.11747), Table 3, "overall": as above, but MNLI is two items.
    "realformer": (*(item for name, item in _PAIRS.items() if name != "MNLI"), *_MNLI_TWICE),
    # Geiping and Goldstein 2023 (arXiv 2212.14034), and He and Hofmann 2024 (SAS): nine numbers.
    "cramming": (
        *(((name, task.own),) for name, task in GLUE_TASKS.items() if name != "MNLI"),
        *_MNLI_TWICE,
    ),
}


def glue_average(name: str, scores: Mapping[str, Mapping[str, float]]) -> float:
    """mean over items of (mean over the item's parts), a fraction.

    Args:
        name: `glue`, `realformer` or `cramming`.
        scores: by split and metric, such as `scores["MNLI-m"]["accuracy"]`; fractions, not
            percentages. Metrics that this average does not use may be present.

    Raises:
        UserError: if a score is missing, unknown, not finite or not a fraction, or the average is
            unknown.
    """
    if name not in GLUE_AVERAGES:
        raise UserError(
            f"glue: average '{name}' is unknown; averages are {', '.join(GLUE_AVERAGES)}"
            f"{nearest(name, GLUE_AVERAGES)}"
        )
    _check_scores(scores)
    items = GLUE_AVERAGES[name]
    missing = [
        f"{split} {metric}"
        for item in items
        for split, metric in item
        if metric not in scores.get(split, {})
    ]
    if missing:
        raise UserError(
            f"glue: average '{name}' of {len(items)} items misses {', '.join(missing)}; "
            f"a mean over fewer items is a different number"
        )
    means = [math.fsum(scores[split][m] for split, m in item) / len(item) for item in items]
    return math.fsum(means) / len(means)


def _check_scores(scores: Mapping[str, Mapping[str, float]]) -> None:
    by_split = {split: task for task in GLUE_TASKS.values() for split in task.splits}
    for split, by_metric in scores.items():
        if split.upper() == "WNLI":
            raise UserError(f"glue: scores of '{split}': {WNLI}")
        if split not in by_split:
            raise UserError(
                f"glue: scores of '{split}' are unknown; splits are {', '.join(by_split)}"
                f"{nearest(split, by_split)}"
            )
        metrics = by_split[split].metrics
        for metric, value in by_metric.items():
            if metric not in metrics:
                raise UserError(
                    f"glue: {split} has no score '{metric}'; it has {', '.join(metrics)}"
                )
            low = -1 if metric in SIGNED else 0
            if not low <= value <= 1:  # also refuses NaN
                raise UserError(f"glue: {split} {metric} is {value}; it must be from {low} to 1")
