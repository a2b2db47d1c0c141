"""The interface of a task: rows, batches, a model, a loss, scores, and views for probes."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any, NamedTuple, NotRequired, TypedDict, TypeVar, Unpack

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from lightning_app.blocks.config import BlockConfig
from lightning_app.core.errors import UserError
from lightning_app.data.batching import SplitRows
from lightning_app.data.config import DataConfig
from lightning_app.data.prepare import PreparedCorpus
from lightning_app.data.tokenizer import PAD, unigram_entropy
from lightning_app.models.auxiliary_heads import add_heads
from lightning_app.models.heads import ArchitectureConfig, build_model
from lightning_app.models.loss import Evaluated, LossSums, ObjectiveConfig, token_sums
from lightning_app.scores.task_facts import TASKS, TaskFacts


class Predictions(NamedTuple):
    """Logits and labels of the counted tokens of a batch, in batch order."""

    logits: Float[Tensor, "token vocabulary"]
    labels: Int[Tensor, " token"]


class Reading(TypedDict):
    """How one process reads a split: the arguments of `Task.rows`, by default as the only one."""

    seed: int | None
    rank: NotRequired[int]
    world_size: NotRequired[int]


class Task(ABC):
    """One task. `logits`, `sums` and the rest take the model that `build_model` returns.

    Attributes:
        pad: The token that fills short rows.
        hypotheses: The texts decoded from the test split; empty if nothing is decoded.
        targets: The texts with which they are compared.
        classifies: Whether outputs are right or wrong, so that there is an accuracy.
        signatures: How the scores of the test split were computed, by field of `result.json`.
    """

    pad = PAD
    classifies = True

    def __init__(self, config: ObjectiveConfig) -> None:
        self.config = config
        self.hypotheses: Sequence[str] = ()
        self.targets: Sequence[str] = ()
        self.signatures: Mapping[str, Any] = {}

    # Data

    @classmethod
    def rows(
        cls, corpus: PreparedCorpus, split: str, data: DataConfig, **part: Unpack[Reading]
    ) -> SplitRows:
        """Return the rows of a split as batches; the same each time if `seed` is None."""
        raise NotImplementedError

    @classmethod  # noqa: B027
    def check(cls, corpus: PreparedCorpus, data: DataConfig) -> None:
        """Refuse a corpus that cannot be read as configured in `data`, before a run begins.

        Raises:
            UserError: naming the field.
        """

    @classmethod
    def describe(cls, rows: Mapping[str, Any]) -> str:
        """Return the addition of all splits' rows to the description of the corpus."""
        return ""

    @classmethod
    def floor(cls, rows: SplitRows, evaluated: np.ndarray | None = None) -> float:
        """Return the loss (nats per token) of a model that ignores its input: `Monitored.floor`.

        Such a model knows how often each predicted token of `rows` occurs, counting only
        `evaluated` rows unless None.
        """
        return unigram_entropy(rows.targets(evaluated))

    # Model

    def build_model(
        self, architecture: ArchitectureConfig, block: BlockConfig, vocab_size: int
    ) -> nn.Module:
        """Return the model without auxiliary heads; see `built`."""
        return build_model(architecture, block, vocab_size, self.pad)

    def built(
        self,
        architecture: ArchitectureConfig,
        block: BlockConfig,
        vocab_size: int,
        source_vocab: int | None = None,
    ) -> nn.Module:
        """Return the model as a run trains it, with its initial values.

        It is that of `build_model`, unless sources have a vocabulary of their own.
        """

        def build() -> nn.Module:
            if source_vocab is None:
                model = self.build_model(architecture, block, vocab_size)
            elif type(self).build_model is Task.build_model:
                model = build_model(architecture, block, vocab_size, self.pad, source_vocab)
            else:
                raise UserError(
                    f"data.vocabularies is 'separate': the model of task {self.config.kind} reads "
                    "one vocabulary; use 'shared'"
                )
            add_heads(model, self.config.auxiliary())
            return model

        return architecture.built(build)

    # Training and evaluation

    @abstractmethod
    def logits(self, model: Any, batch: Any) -> Tensor:
        """Return the complete logits of every predicted token, for probes and other readers."""

    @abstractmethod
    def sums(self, model: Any, batch: Any) -> LossSums:
        """Return the sums over the predicted tokens of `batch`, differentiable once."""

    @abstractmethod
    def rows_of(self, batch: Any) -> Int[Tensor, " token"]:
        """Return the row of the split of each token in `sums`; -1 for blank rows."""

    def streams(self) -> Mapping[int, Any]:
        """Return the training state of each stream of text of this rank.

        Streams are numbered independently of the number of ranks. The state of all streams is
        part of a checkpoint: tensors and plain values, with the tensors on the CPU.
        """
        return {}

    def load_streams(self, streams: Mapping[int, Any]) -> None:  # noqa: B027
        """Restore the state of all streams; each rank takes its own."""

    evaluated: np.ndarray | None = None
    """The rows of the split that this evaluation reads, in any order; None: all."""

    def start_decoding(self) -> None:  # noqa: B027
        """Discard what an earlier evaluation decoded."""

    def decode(self, model: Any, batch: Any, stage: str) -> None:  # noqa: B027
        """Decode what `stage` (val or test) needs, and keep it."""

    def scores(self, stage: str, datamodule: Any, found: Evaluated) -> dict[str, float]:
        """Return additional scores of an evaluation, the same on every rank."""
        return {}

    @abstractmethod
    def predict(self, model: Any, batch: Any, datamodule: Any) -> list[tuple[int, Any]]:
        """Return (row of the split, text) for each row of `batch`, or the input of `answers`."""

    def answers(self, predicted: Mapping[int, Any], datamodule: Any) -> dict[int, str]:
        """Return the texts of the test split from the results of `predict` on all ranks, by row."""
        return dict(predicted)

    # For probes, pictures and benchmarks

    @abstractmethod
    def predictions(self, model: Any, batch: Any) -> Predictions:
        """Return the model's predictions at every counted token of `batch`."""

    @abstractmethod
    def alone(self, batch: Any, token: int) -> Any:
        """Return the row on which the prediction of `token` depends, as a batch.

        `token` counts the predictions of `batch`; the last prediction of the result is that one.
        """

    @abstractmethod
    def real_tokens(self, batch: Any) -> dict[str, Bool[Tensor, "row token"]]:
        """Return which tokens count in each stack: neither padding nor blank rows.

        In a stack that predicts, they are the tokens that predict another.
        """

    @abstractmethod
    def longest(self, batch: Any) -> Any:
        """Return the (first) longest row of a batch, as a batch without padding."""

    def texts(self, batch: Any) -> Sequence[Int[Tensor, "row token"]]:
        """Return the tokens that a model reads, one tensor per stack; the first sets the length."""
        return (batch.tokens,)

    def mean_loss(self, found: Predictions) -> Tensor:
        """Return the mean training loss of `found` in nats per token, freely differentiable."""
        every = torch.ones_like(found.labels, dtype=torch.bool)
        smoothing, z_loss = self.config.smoothing, self.config.z_loss
        sums = token_sums(found.logits, found.labels, every, smoothing, z_loss)
        return sums.loss / len(found.labels)


class EncoderTask(Task):
    """A task whose model is an encoder.

    Attributes:
        last: What `scores` needs from each row of the batch evaluated last, by row of the split;
            `sums` stores it without gradients.
        scored: The same for all batches of this evaluation on this rank.
    """

    def __init__(self, config: ObjectiveConfig) -> None:
        super().__init__(config)
        self.last: dict[int, Any] = {}
        self.scored: dict[int, Any] = {}

    def start_decoding(self) -> None:
        self.scored = {}

    def decode(self, model: Any, batch: Any, stage: str) -> None:
        """Keep what is known of the batch evaluated last, which is this one."""
        self.scored |= self.last

    def real_tokens(self, batch: Any) -> dict[str, Bool[Tensor, "row token"]]:
        return {"encoder": (batch.index >= 0)[:, None] & (batch.tokens != self.pad)}


_CLASSES: dict[str, type[Task]] = {}
Given = TypeVar("Given", bound=type[Task])


def task(name: str, facts: TaskFacts | None = None) -> Callable[[Given], Given]:
    """Return the decorator that makes a class the task `name`.

    Args:
        name: The value of `model.objective.kind`.
        facts: The facts of a task from outside the package; the package's own are in
            `TASKS`, which is read before the class is imported.

    Raises:
        ValueError: if another task has this name.
    """

    def add(cls: Given) -> Given:
        if facts is not None:
            TASKS.add(name, facts)
        elif cls.__module__ != _module_of(name):
            raise ValueError(f"{TASKS.field}: '{name}' is already registered, or has no facts")
        _CLASSES[name] = cls
        return cls

    return add


def task_class(name: str) -> type[Task]:
    """Return the class of a task.

    Raises:
        UserError: if there is no such task.
    """
    _ = TASKS[name]
    if name not in _CLASSES:
        import_module(_module_of(name))
    return _CLASSES[name]


def _module_of(name: str) -> str:
    module = TASKS[name].module if name in TASKS else ""
    return module or f"lightning_app.tasks.{name}"


def build_task(config: ObjectiveConfig) -> Task:
    """Return the task that `config` names."""
    return task_class(config.kind)(config)


def join_ranks(parts: Mapping[int, Any]) -> dict[int, Any]:
    """Merge the ranks' values by number, each number once."""
    if not torch.distributed.is_initialized():
        return dict(parts)
    gathered: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(gathered, parts)
    return {number: value for part in gathered for number, value in part.items()}


def to_device(batch: Any, device: torch.device, *, non_blocking: bool = False) -> Any:
    """Return a batch, a named tuple of tensors or None, on `device`."""
    return batch._make(
        None if part is None else part.to(device, non_blocking=non_blocking) for part in batch
    )
