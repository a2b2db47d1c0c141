"""Facts about a task, without torch. `lightning_app.tasks` holds the rest."""

import math
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Literal, NamedTuple

from lightning_app.core.errors import UserError
from lightning_app.core.registry import Registry

GlueMetric = Literal["accuracy", "f1", "matthews", "pearson", "spearman"]
SIGNED: tuple[GlueMetric, ...] = ("matthews", "pearson", "spearman")  # from -1 to 1, others 0 to 1


@dataclass(frozen=True)
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


GLUE_TASKS: dict[str, GlueTask] = {
    task.name: task
    for task in (
        GlueTask("CoLA", 2, False, ("matthews",), "matthews", ("CoLA",)),
        GlueTask("SST-2", 2, False, ("accuracy",), "accuracy", ("SST-2",)),
        GlueTask("MRPC", 2, True, ("accuracy", "f1"), "f1", ("MRPC",)),
        GlueTask("STS-B", None, True, ("pearson", "spearman"), "pearson", ("STS-B",)),
        GlueTask("QQP", 2, True, ("accuracy", "f1"), "f1", ("QQP",)),
        GlueTask("MNLI", 3, True, ("accuracy",), "accuracy", ("MNLI-m", "MNLI-mm")),
        GlueTask("QNLI", 2, True, ("accuracy",), "accuracy", ("QNLI",)),
        GlueTask("RTE", 2, True, ("accuracy",), "accuracy", ("RTE",)),
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
            raise UserError(f"glue: {split} {metric} is {value}; it must be from {low} to 1")
    means = [math.fsum(scores[split][m] for split, m in item) / len(item) for item in items]
    return math.fsum(means) / len(means)


class QualityMetric(NamedTuple):
    """A quality metric besides the loss: its name in the results, its title, its unit.

    `mode` says whether `min` or `max` is best. `scale` is the factor by which papers multiply it:
    100 for a share printed in percent. `counts` is what it averages over, a key of
    `rulers.RULERS`; the default is for a metric about which nothing is known.
    """

    metric: str
    title: str
    unit: str
    mode: str = "max"
    scale: float = 1.0
    counts: str = "anything"


LOSS = "val/nll"
"""The loss without label smoothing (nats per predicted token), reported by every task."""


@dataclass(frozen=True, kw_only=True)
class Monitored:
    """The metric that ranks the runs of a task, and related facts.

    Attributes:
        metric: The metric of the best checkpoint, and the default of a grid file.
        mode: Whether `min` or `max` of the metric is best.
        loss: The loss (nats, lower is better) that judges how a run ended, and that the
            sensitivity analysis compares.
        floor: The name of the loss of a model that ignores its input; `Task.floor` computes
            it, and `unigram_entropy` in `result.json` holds it. A run that ends there has failed.
        counts: What the metric and the loss average over, as in `QualityMetric.counts`.
    """

    metric: str = LOSS
    mode: str = "min"
    loss: str = LOSS
    floor: str = "unigram entropy"
    counts: str = "anything"


@dataclass(frozen=True, kw_only=True)
class TaskFacts:
    """What configs, plans and reports need to know about a task.

    Attributes:
        title: The name of the task in running text.
        architecture: The `model.architecture.kind` that it trains.
        pairs: Whether its corpus holds pairs of a source and a target line; otherwise it holds
            lines of one language.
        running_text: Whether those lines are a running text, including blank lines.
        labelled: The labels of its corpus: `numbers` (one or two texts and a
            class or a score) or `answers` (a question and the answers in its context); empty for
            text without labels. Only a task with labels can start from another run
            (`model.init_from`).
        label_smoothing: The label smoothing if a config has null.
        length: The field of `data` that limits the tokens of a text.
        marks: The number of tokens added to such a text: 2 for a begin mark and an end mark.
        masks: Whether it predicts masked tokens. Only such a task can mask whole words, or predict
            next sentences.
        monitored: The monitored metric, the loss and its floor.
        scores: The quality metrics that a report shows, the preferred one first.
        by_corpus: The published scores of each corpus, by `data.name`: the first is the one to
            compare by. A report judges runs by it if the grid file names no metric other than
            the loss.
        method: A sentence for the description of the method, with config fields in braces.
        module: The module of the task's class; empty for ``lightning_app.tasks.<name>``.
    """

    title: str
    architecture: str
    pairs: bool = False
    running_text: bool = False
    labelled: Literal["", "numbers", "answers"] = ""
    label_smoothing: float = 0.1
    length: str = "window"
    marks: int = 0
    masks: bool = False
    monitored: Monitored = Monitored()
    scores: tuple[QualityMetric, ...] = ()
    by_corpus: Mapping[str, tuple[QualityMetric, ...]] = field(default_factory=dict)
    method: str = ""
    module: str = ""

    def in_windows(self, next_sentence: bool) -> bool:
        """Whether batches consist of whole windows of `data.window` tokens."""
        return self.running_text or next_sentence


DEFAULT_TASK = "translation"

STACKS: Mapping[str, tuple[str, ...]] = {
    "encoder_decoder": ("encoder", "decoder"),
    "encoder": ("encoder",),
    "decoder": ("decoder",),
}
"""The stacks of each `model.architecture.kind`."""

GENERAL = {
    **dict.fromkeys((LOSS, "val/perplexity", "test/nll", "test/perplexity"), "min"),
    **dict.fromkeys(("val/accuracy", "test/accuracy", "train/tokens_per_second"), "max"),
}
"""The metrics that every task reports, and whether `min` or `max` of each is best."""

TASKS: Registry[TaskFacts] = Registry("model.objective.kind")
"""The tasks by name, the values of `model.objective.kind`."""

TASKS.add(
    DEFAULT_TASK,
    TaskFacts(
        title="translation",
        architecture="encoder_decoder",
        pairs=True,
        length="max_length",
        marks=2,
        monitored=Monitored(counts="tokens"),
        scores=tuple(  # references are lines of the corpus, whatever the tokenizer
            QualityMetric(name, title, "BLEU (0 to 100)", counts="lines")
            for name, title in (
                ("test/bleu", "Test BLEU"),
                ("val/bleu", "Validation BLEU"),
                ("test/sacrebleu", "Test sacreBLEU"),
            )
        ),
    ),
)


AVERAGE = "average/"
"""The beginning of the name of a metric of the weights that `LastAverage` averages."""


def known_metrics() -> dict[str, str]:
    """The metrics of all tasks, and whether `min` or `max` of each is best."""
    scores = {score.metric: score.mode for task in TASKS.values() for score in task.scores}
    return GENERAL | scores


NEXT_SENTENCE = (
    QualityMetric(
        "val/nsp_accuracy",
        "Validation accuracy of next sentences",
        "accuracy of next sentences",
        counts="tokens",  # pairs hold as many tokens as fit into a window
    ),
    QualityMetric(
        "val/nsp_nll", "Validation loss of next sentences", "nats a pair", "min", counts="tokens"
    ),
)
"""The metrics that a masked language model reports only if it predicts next sentences."""

TASKS.add(
    "masked_lm",
    TaskFacts(
        title="masked language modelling",
        architecture="encoder",
        masks=True,
        label_smoothing=0.0,
        monitored=Monitored(counts="tokens"),
        scores=(
            QualityMetric(
                "val/accuracy", "Validation accuracy", "accuracy of masked tokens", counts="tokens"
            ),
            *NEXT_SENTENCE,
        ),
        method="Text is packed into windows of {data.window} tokens, of which a share of "
        "{data.mask_probability} is predicted.",
    ),
)


TASKS.add(
    "causal_lm",
    TaskFacts(
        title="causal language modelling",
        architecture="decoder",
        running_text=True,
        label_smoothing=0.0,
        monitored=Monitored(counts="tokens"),
        scores=tuple(
            QualityMetric(f"{split}/{name}", f"{title} {words}", unit, "min", counts="bytes")
            for name, words, unit in (
                ("bits_per_byte", "bits per byte", "bits a byte"),
                ("word_perplexity", "perplexity a word", "perplexity"),
            )
            for split, title in (("val", "Validation"), ("test", "Test"))
        ),
        method="Text is packed into windows of {data.window} tokens, whose every token is "
        "predicted from those before it.",
    ),
)

GLUE_CORPORA: Mapping[str, str] = {
    "cola": "CoLA",
    "sst2": "SST-2",
    "mrpc": "MRPC",
    "stsb": "STS-B",
    "qqp": "QQP",
    "mnli": "MNLI",
    "qnli": "QNLI",
    "rte": "RTE",
}
"""The GLUE task of each labelled corpus; the keys are values of `data.name`."""

_OF_GLUE = {
    name: QualityMetric(f"val/{name}", title, unit, scale=100.0, counts="rows")
    for name, title, unit in (
        ("accuracy", "accuracy", "accuracy, a fraction"),
        ("f1", "F1 of class 1", "F1, a fraction"),
        ("matthews", "Matthews correlation", "Matthews correlation"),
        ("pearson", "Pearson correlation", "Pearson correlation"),
        ("spearman", "Spearman correlation", "Spearman correlation"),
    )
}


def _published_scores(task: GlueTask) -> tuple[QualityMetric, ...]:
    """The scores of a GLUE task, its own first; those of a second set follow the first set's."""
    names = (task.own, *(name for name in task.metrics if name != task.own))
    metrics = tuple(_OF_GLUE[name] for name in names)
    if len(task.splits) == 1:
        return metrics
    second = (each._replace(metric=each.metric.replace("val/", "test/")) for each in metrics)
    return (*metrics, *second)


TASKS.add(
    "glue",
    TaskFacts(
        title="fine-tuning on GLUE",
        architecture="encoder",
        labelled="numbers",
        label_smoothing=0.0,
        monitored=Monitored(floor="loss of the best constant output", counts="rows"),
        scores=tuple(_OF_GLUE[name] for name in ("matthews", "f1", "pearson", "spearman")),
        by_corpus={
            corpus: _published_scores(GLUE_TASKS[name]) for corpus, name in GLUE_CORPORA.items()
        },
        method="Texts are cut to {data.window} tokens, and rows of similar length make a batch.",
    ),
)

_OF_SQUAD = tuple(
    QualityMetric(name, title, unit, counts="rows")
    for name, title, unit in (
        ("val/f1", "F1 of answers", "F1, percent"),
        ("val/exact_match", "Exact match of answers", "exact match, percent"),
    )
)

TASKS.add(
    "squad",
    TaskFacts(
        title="fine-tuning on SQuAD",
        architecture="encoder",
        labelled="answers",
        label_smoothing=0.0,
        monitored=Monitored(floor="loss of the best constant output", counts="tokens"),
        scores=_OF_SQUAD,
        by_corpus={"squad1": _OF_SQUAD, "squad2": _OF_SQUAD},
        method="Contexts are read in windows, with the question {data.window} tokens long, whose "
        "starts are {data.context_stride} tokens apart.",
    ),
)


def glue_task_of(corpus: str) -> str | None:
    """Return the GLUE task whose labels a corpus has; None for other corpora."""
    return GLUE_CORPORA.get(corpus)


def fill_by_task(objective: MutableMapping[str, Any]) -> None:
    """Replace null in a section `model.objective` by the default of its task."""
    if objective["label_smoothing"] is None and objective["kind"] in TASKS:
        objective["label_smoothing"] = TASKS[objective["kind"]].label_smoothing


def task_facts(name: object) -> TaskFacts:
    """Return the facts of a task, even if its module is not imported here.

    A report of its runs then shows its name and its losses.
    """
    if isinstance(name, str) and name in TASKS:
        return TASKS[name]
    return TaskFacts(title=str(name).replace("_", " "), architecture="")
