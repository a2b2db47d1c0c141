"""The ruler of a metric: only values that count the same things are compared, ranked or averaged.

Nats per token under two tokenizers are as different as prices in two currencies: the tokenizer with
more tokens per word has the smaller number. A ruler is the unit of a metric and what it averages
over, as config fields with their values.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from lightning_app.config.classes import OWN_CLASS
from lightning_app.config.tree import key_of, label, lookup
from lightning_app.core.errors import UserError, nearest
from lightning_app.scores.task_facts import (
    AVERAGE,
    DEFAULT_TASK,
    GENERAL,
    TASKS,
    QualityMetric,
    known_metrics,
    task_facts,
)

_TEXT = (
    TASKS.field,
    *("data.class_path", "data.init_args", "data.name", "data.root", "data.train_from_dev"),
    *("data.source_language", "data.target_language", "data.document_separator"),
    "trainer.overfit_batches",
)
_TOKENIZER = (  # and what trains it
    *("data.tokenizer", "data.tokenizer_file", "data.vocab_size", "data.splits.train"),
    "data.vocabularies",
)
_LENGTHS = (
    *_TOKENIZER,
    *("data.window", "data.context_stride", "data.evaluation_stride", "data.evaluation_streams"),
    *("data.order", "model.objective.next_sentence"),
)
_TOKENS = (
    *_LENGTHS,
    *("data.intra_document_masking", "data.mask_probability", "data.whole_word"),
)
_SEARCH = {
    "val": ("model.objective.validation_bleu",),
    "test": ("model.objective.beam", "model.objective.length_penalty"),
}

RULERS: Mapping[str, tuple[str, ...]] = {
    "rows": (),
    "lines": (),
    "bytes": ("data.evaluation_stride", "data.evaluation_streams"),
    "tokens": _TOKENS,
    "speed": _TOKENIZER,
    "anything": (*_TOKENS, "model.class_path"),
}
"""What a metric counts, and the config fields that change it.

`rows` with labels, `lines` of references, `bytes` (and words) of a text, `tokens` of one tokenizer
in windows, or those of training for a `speed`; `anything` for a plug-in's metric that does not
declare it. The fields of the evaluated text apply to all of them: `ruler` adds those.
"""

RAW = ("bytes", "lines")
"""Units counted in the text itself, so that runs with different tokenizers can be compared."""

_READ = {  # by the model in evaluation only; each with the field that it belongs to
    "model.architecture.clamp_length": "model.architecture.positions",
    "model.block.memory.evaluation_length": "model.block.memory.length",
}

EVALUATION = (
    *_READ,
    *("data.evaluation_stride", "data.evaluation_streams", "data.splits.valid", "data.splits.test"),
    *(f"model.objective.{name}" for name in ("beam", "length_penalty", "validation_bleu")),
    *("model.objective.evaluate_test", "trainer.limit_val_batches", "trainer.limit_test_batches"),
    *("trainer.val_check_interval", "trainer.check_val_every_n_epoch"),
    "trainer.num_sanity_val_steps",
)
"""Fields that change the evaluation but not the training, so that they are no treatment."""

BUDGET = (
    *("trainer.max_steps", "trainer.max_epochs", "trainer.limit_train_batches"),
    *("trainer.accumulate_grad_batches", "data.tokens_per_batch"),
    *("model.schedule.batch_warmup_steps", "model.schedule.batch_start"),
)
"""The fields that change how much a run reads."""

Setting = Callable[[str], Any]
"""Returns the value of a dotted field of a resolved config."""


def ruler(setting: Setting, metric: str) -> dict[str, Any]:
    """Return the ruler of a metric in a run: the fields on which it depends, with their values.

    Values of a metric can be compared, ranked or averaged only between runs with the same ruler.
    """
    metric = metric.removeprefix(AVERAGE)
    split = "test" if metric.startswith("test/") else "val"
    limit = f"trainer.limit_{split}_batches"
    counts = unit_of(setting, metric)
    fields = [*_TEXT, f"data.splits.{'valid' if split == 'val' else split}", *RULERS[counts]]
    if counts in ("lines", "anything"):
        fields += _SEARCH[split]
    items = {field: setting(field) for field in fields}
    if counts != "speed":
        for field, key in _READ.items():  # with another value of `key`, it is part of a treatment
            base, value = setting(key), setting(field)
            follows = value is None and field.endswith(".evaluation_length")
            items[f"{field} at {key.rpartition('.')[2]} {label(base)}"] = base if follows else value
    part = setting(limit)
    items[limit] = None if isinstance(part, float) and part == 1.0 else part  # the whole split
    if items[limit] is not None:
        # The limit counts batches; which rows these hold depends on the lengths in tokens.
        items |= {field: setting(field) for field in ("data.tokens_per_batch", *_LENGTHS)}
    return items


def in_raw_text(setting: Setting, metric: str) -> list[QualityMetric]:
    """Return the task's metrics that can compare runs for which `metric` counts other tokens.

    Metrics of the same split come first, and BLEU on plain text before BLEU on tokenised text.
    """
    facts = task_facts(setting(TASKS.field) or DEFAULT_TASK)
    metric = metric.removeprefix(AVERAGE)
    loss = metric in (*GENERAL, facts.monitored.metric, facts.monitored.loss)
    if not loss or unit_of(setting, metric) not in ("tokens", "anything"):
        return []
    scores = [score for score in facts.scores if score.counts in RAW]
    split = metric.partition("/")[0]

    return sorted(
        (score for score in scores if "perplexity" not in score.metric),
        key=lambda s: (s.metric.endswith("/bleu"), not s.metric.startswith(f"{split}/")),
    )


def unit_of(setting: Setting, metric: str) -> str:
    """Return the ruler of a metric of the task of a run, a key of `RULERS`."""
    facts = task_facts(setting(TASKS.field) or DEFAULT_TASK)
    scores = (*facts.by_corpus.get(str(setting("data.name")), ()), *facts.scores)
    units, metric = {s.metric: s.counts for s in scores}, metric.removeprefix(AVERAGE)
    if metric in units:
        return units[metric]
    if metric.startswith("train/"):
        return "speed"
    is_loss = metric in GENERAL or metric in (facts.monitored.metric, facts.monitored.loss)
    return facts.monitored.counts if is_loss else "anything"


_SHOWN = "the "
"""The prefix of ruler entries taken from a result: computed numbers."""
_NEAR = 1e-5  # the relative difference of two computed numbers that are meant to be equal


def differences(rulers: Sequence[Mapping[str, Any]]) -> str:
    """Return the fields in which rulers differ, with their values; empty if they agree.

    Entries taken from results are named only if no config field explains the difference.
    """
    if all(fields == rulers[0] for fields in rulers):
        return ""  # as nearly always
    varied = _varied(rulers)
    parts = []
    for name in varied:
        *most, last = (_text(name, value) for value in _distinct(name, rulers))
        parts.append(f"{name} is {', '.join(most)} and {last}")
    return "; ".join(parts)


def names_of(rulers: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a name for each ruler from the fields that differ; "" if there is only one."""
    kinds: list[Mapping[str, Any]] = []
    places = []
    for fields in rulers:
        matches = (n for n, other in enumerate(kinds) if not differences([fields, other]))
        places.append(next(matches, len(kinds)))
        if places[-1] == len(kinds):
            kinds.append({})
        kinds[places[-1]] = {**fields, **kinds[places[-1]]}
    varied = _varied(kinds)
    names = [
        ", ".join(f"{name}={_text(name, kind.get(name))}" for name in varied) for kind in kinds
    ]
    return [names[place] for place in places]


def _varied(rulers: Sequence[Mapping[str, Any]]) -> list[str]:
    names = dict.fromkeys(name for fields in rulers for name in fields)
    varied = [name for name in names if len(_distinct(name, rulers)) > 1]
    return [name for name in varied if not name.startswith(_SHOWN)] or varied


def _distinct(name: str, rulers: Iterable[Mapping[str, Any]]) -> list[Any]:
    """The distinct values of a field in the rulers that have it; NaN does not count."""
    distinct: list[Any] = []
    shown = name.startswith(_SHOWN)
    for value in (ruler[name] for ruler in rulers if name in ruler):
        if shown and math.isnan(value):
            continue
        if not any(_alike(value, other, shown) for other in distinct):
            distinct.append(value)
    return distinct


def _alike(one: Any, other: Any, shown: bool) -> bool:
    return math.isclose(one, other, rel_tol=_NEAR) if shown else key_of(one) == key_of(other)


def _text(name: str, value: Any) -> str:
    return f"{value:.6g}" if name.startswith(_SHOWN) and value is not None else label(value)


@dataclass(frozen=True, kw_only=True)
class MetricChoice:
    """The rule for the best run of a grid."""

    name: str | None = None
    """A metric, such as val/nll; null: the one that the task monitors."""
    mode: Literal["min", "max"] | None = None
    """Which value is best; null: the metric's own direction."""
    matters: float | None = None
    """The smallest difference of the metric that matters, in its unit; null: none is named."""

    def __post_init__(self) -> None:
        check_matters(self.matters)
        if self.matters and (self.name or "").endswith("perplexity"):
            raise ValueError("matters: perplexity is no scale of differences; rank by val/nll")


def check_matters(value: float | None) -> None:
    if value is not None and not 0 < value < math.inf:
        raise ValueError(f"matters: expected a number above 0, found {value!r}")


def check_metric(
    metric: MetricChoice | None, base: Mapping[str, Any], axes: Mapping[str, list[Any]]
) -> tuple[str, str]:
    """The metric, by default the one that the task monitors, and its direction."""
    metric = metric or MetricChoice()
    kinds = axes.get(TASKS.field) or [lookup(base, TASKS.field) or DEFAULT_TASK]
    monitored, *others = dict.fromkeys(task_facts(kind).monitored for kind in kinds)
    if others and metric.name is None:
        raise UserError(f"metric.name: missing; the tasks of {TASKS.field} do not agree")
    name = monitored.metric if metric.name is None else metric.name
    # A class of a plug-in may log its own metrics.
    has_own = any(path is not None for path in axes.get(OWN_CLASS, [lookup(base, OWN_CLASS)]))
    logged = name.startswith(("val/", "test/")) and has_own
    best = known_metrics() | {monitored.metric: monitored.mode}
    if name not in best and not logged:
        raise UserError(f"metric.name: no metric {name!r}{nearest(name, best)}")
    default = best.get(name)
    if metric.mode not in (None, default or metric.mode):
        raise UserError(f"metric.mode: {metric.mode}; expected {default}, which is best of {name}")
    mode = metric.mode or default
    if mode is None:
        raise UserError(
            f"metric.mode: missing; only {OWN_CLASS} knows whether min or max of {name!r} is best"
            f"{nearest(name, best)}"
        )
    return name, mode
