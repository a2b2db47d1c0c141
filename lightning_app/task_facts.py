"""What can be known of a task without torch. `lightning_app.tasks` holds the rest of it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from lightning_app.registry import Registry


class QualityMetric(NamedTuple):
    """A metric of quality beside the loss: its name in the results, its title, its unit.

    `mode` says whether `min` or `max` of it is best.
    """

    metric: str
    title: str
    unit: str
    mode: str = "max"


LOSS = "val/nll"
"""The loss without label smoothing (nats a predicted token) that every task reports."""


@dataclass(frozen=True, kw_only=True)
class Monitored:
    """What decides how good a run of a task is.

    Attributes:
        metric: The metric of the best checkpoint, and of a grid file that names none.
        mode: Whether `min` or `max` of the metric is best.
        loss: The loss (nats, lower is better) that judges how a run ended, and that the
            sensitivity analysis compares.
        floor: What the loss of a model that ignores its input is called; `Task.floor` computes
            it, and `unigram_entropy` in `result.json` holds it. A run that ends there has failed.
    """

    metric: str = LOSS
    mode: str = "min"
    loss: str = LOSS
    floor: str = "unigram entropy"


@dataclass(frozen=True, kw_only=True)
class TaskFacts:
    """What configs, plans and reports ask of a task.

    Attributes:
        title: The name of the task in running text.
        architecture: The `model.architecture.kind` that it trains.
        pairs: Whether its corpus holds pairs of a source and a target line; otherwise it holds
            lines of one language.
        length: The field of `data` that bounds the tokens of a text.
        marks: Tokens that the task adds to such a text: 2 for a begin mark and an end mark.
        monitored: The metric that is monitored, the loss and its floor.
        scores: The metrics of quality that a report shows, the first one preferred.
        method: A sentence for the text of the method, with fields of the config in braces.
        module: Where the class of the task is; empty for ``lightning_app.tasks.<name>``.
    """

    title: str
    architecture: str
    pairs: bool = False
    length: str = "window"
    marks: int = 0
    monitored: Monitored = Monitored()
    scores: tuple[QualityMetric, ...] = ()
    method: str = ""
    module: str = ""


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
        scores=(
            QualityMetric("test/bleu", "Test BLEU", "BLEU (0 to 100)"),
            QualityMetric("val/bleu", "Validation BLEU", "BLEU (0 to 100)"),
            QualityMetric("test/sacrebleu", "Test sacreBLEU", "BLEU (0 to 100)"),
        ),
    ),
)
TASKS.add(
    "masked_lm",
    TaskFacts(
        title="masked language modelling",
        architecture="encoder",
        scores=(QualityMetric("val/accuracy", "Validation accuracy", "accuracy of masked tokens"),),
        method="Text is packed into windows of {data.window} tokens, of which a share of "
        "{data.mask_probability} is predicted.",
    ),
)


def task_facts(name: object) -> TaskFacts:
    """Return the facts of a task, also of one whose module is not imported here.

    A report of its runs then shows its name and its losses.
    """
    if isinstance(name, str) and name in TASKS:
        return TASKS[name]
    return TaskFacts(title=str(name).replace("_", " "), architecture="")
