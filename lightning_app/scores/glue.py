"""The tasks of GLUE (Wang et al. 2018, arXiv 1804.07461), and three ways to average their scores.

Papers average differently, so a mean is only comparable with means of the same name.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Literal

from lightning_app.core.errors import UserError

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
        UserError: if a score is not a fraction.
    """
    items = GLUE_AVERAGES[name]
    for split, metric in chain(*items):
        value, low = scores[split][metric], -1 if metric in SIGNED else 0
        if not low <= value <= 1:  # also refuses NaN
            raise UserError(
                f"glue: {split} {metric} is {value}; it must be from {low} to 1"
            )
    means = [math.fsum(scores[split][m] for split, m in item) / len(item) for item in items]
    return math.fsum(means) / len(means)
