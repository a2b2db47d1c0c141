"""Heads that predict alongside the output layer while a model trains (Al-Rfou et al. 2019)."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from lightning_app.blocks.norm import build_norm
from lightning_app.blocks.spans import AuxiliaryTerms, Term
from lightning_app.blocks.stack import StackSpec
from lightning_app.blocks.streams import DUAL, PLAIN, Stream
from lightning_app.core.errors import UserError
from lightning_app.models.initialization import initialize
from lightning_app.models.positions import OutputTable
from lightning_app.models.stack import stacks

Loss = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""Returns the training loss of (states, table, labels, counted), summed over the counted tokens."""

STEPS_UNKNOWN = (
    "trainer.max_steps: intermediate layers predict for a share of the steps of a run, and their "
    "number is not known when this one starts; set max_steps or max_epochs"
)


@dataclass(frozen=True, kw_only=True)
class AuxiliarySpec:
    """The auxiliary losses to train; a weight of 0 omits a loss.

    `intermediate`: the weight of the losses of the layers below the last. `second_target`: the
    weight of the prediction of the token after next, in every layer that predicts. `own_tables`:
    whether each head has its own output table, as in the paper; otherwise intermediate
    layers share the table of the output layer, and the second targets of all layers share one.
    """

    intermediate: float = 0.0
    second_target: float = 0.0
    own_tables: bool = False

    def __post_init__(self) -> None:
        for name in ("intermediate", "second_target"):
            if not 0.0 <= (weight := getattr(self, name)) < math.inf:
                raise ValueError(f"{name}_weight {weight}: must be at least 0; 0 means none")
        if self.own_tables and not self.intermediate:
            raise ValueError(
                "auxiliary_tables own: is for intermediate layers, but intermediate_weight is 0; "
                "take tied"
            )

    @property
    def absent(self) -> bool:
        """True if the last layer's loss is the only one."""
        return not (self.intermediate or self.second_target)

    def check(self, stack: str, spec: StackSpec, *, bounded: bool = True) -> None:
        """Refuse losses that are impossible for a model that predicts from `stack`.

        `bounded`: whether the number of steps of the run is known when it starts.

        Raises:
            UserError: naming field, value and what would be right.
        """
        why = ""
        if spec.depth == 1:
            why = f", and {stack}_depth 1 has no layer below the last; a depth of at least 2, or "
            why += "weight 0"
        elif spec.halting is not None:
            why = " with model.block.halting: a token predicts from the average of its steps, not "
            why += "from a layer; weight 0, or no halting"
        elif spec.rule not in (PLAIN, DUAL):
            why = f" with model.block.stream {spec.rule}: it has weights for the end of the stack "
            why += "only; weight 0, or another stream"
        if self.intermediate and why:
            raise UserError(f"model.objective.intermediate_weight: {self.intermediate}{why}")
        if self.intermediate and not bounded:
            raise UserError(STEPS_UNKNOWN)
        if self.second_target and stack == "encoder":
            raise UserError(
                f"model.objective.second_target_weight: {self.second_target}, and an encoder "
                "predicts no next token; 0 there, or a task with a decoder"
            )


@final
class AuxiliaryHeads(nn.Module, AuxiliaryTerms):
    """The heads of the layers below the last, and of second targets; used only in training.

    With n layers, L_l the loss of layer l, M_l that of its second target (the token after next)
    and p the completed share of the run's steps (Al-Rfou et al. 2019, 1808.04444):

        L = L_n + v M_n + w sum_(l < n, p < l / (2 n)) (L_l + v M_l)

    with w the intermediate weight (1 in the paper) and v the second target's (0.5). So layer 1
    predicts for the shortest time, and none below the last after half of the run. The loss is a
    sum, not a mean, over the layers that still predict. L_l is the loss that the output layer is
    trained with, label smoothing included, and the logits of layer l are

        finish(N_l(x_l)) T_l^T

    N_l is a norm of its own where the stack ends in a norm; a dual stream has ``x_l + N_l(r_l)``.
    `finish` is the part of the output layer that follows the stack, shared with it: the transform
    and the bias of a masked language model. The tables T are tied or own, see `AuxiliarySpec`.

    A task calls `score` between the model's forward pass and `auxiliary_terms`. Where layer l no
    longer predicts, its head has no gradient, or in a distributed run a gradient of zeros, since
    DistributedDataParallel waits for every parameter.
    """

    def __init__(
        self, spec: AuxiliarySpec, stack: StackSpec, model_dim: int, vocab_size: int
    ) -> None:
        super().__init__()
        self.spec = spec
        self.depth = len(stack.blocks)
        below = self.depth - 1 if spec.intermediate else 0
        seconds = 0
        if spec.second_target:
            seconds = below + 1 if spec.own_tables else 1

        def tables(count: int) -> nn.ModuleList:
            return nn.ModuleList(OutputTable(vocab_size, model_dim) for _ in range(count))

        self.norms = nn.ModuleList(build_norm(stack.final_norm, model_dim) for _ in range(below))
        self.tables = tables(below if spec.own_tables else 0)
        self.second_tables = tables(seconds)  # in layer order, the last layer's last
        if spec.intermediate:  # other streams, whose ends have parameters, are refused with it
            *_, self.stream_end = stack.stream_rules(model_dim, cross=False)
        self._step = (0, 1)
        self._scored: tuple[Tensor, Tensor] | None = None
        initialize(self)

    def at_step(self, done: int, total: int) -> None:
        """Set the progress of the run: `done` of its `total` steps.

        Raises:
            UserError: if the number of steps is unknown.
        """
        if self.spec.intermediate and total < 1:
            raise UserError(STEPS_UNKNOWN)
        self._step = done, total

    @property
    def active(self) -> list[int]:
        """The layers below the last that still predict, from 1: ``done / total < l / (2 n)``."""
        done, total = self._step
        layers = range(1, len(self.norms) + 1)
        # In whole numbers, so that the step where a layer stops is exact.
        return [layer for layer in layers if 2 * self.depth * done < layer * total]

    def score(
        self,
        loss: Loss,
        table: Float[Tensor, "vocabulary model"],
        seen: list[Stream],
        last: Float[Tensor, "*text model"],
        labels: Int[Tensor, "*text"],
        counted: Bool[Tensor, "*text"],
        finish: Callable[[Tensor], Tensor] | None = None,
        documents: Int[Tensor, "*text"] | None = None,
    ) -> None:
        """Compute the losses of one forward pass in training.

        Args:
            loss: The loss of the output layer, summed over tokens.
            table: The table of the output layer.
            seen: The streams after the layers, from `watched`.
            last: The states that the output layer reads.
            labels: The labels to predict, in the order of the text along the last axis.
            counted: The labels that count.
            finish: Turns the states of a stack into those that the output layer reads; None if
                those are the same.
            documents: The number of the document of each label; None if each text is one document.
        """
        assert len(seen) == self.depth
        first = second = labels, counted
        if self.spec.second_target:
            second = after_next(labels, counted, documents)

        def summed(states: Tensor, own: Tensor, of: tuple[Tensor, Tensor]) -> Tensor:
            return loss(states.flatten(0, -2), own, *(each.flatten() for each in of))

        def weight(tables: nn.ModuleList, place: int) -> Tensor:
            found = tables[place]
            assert isinstance(found, OutputTable)
            return found.weight if found.logit_factor == 1.0 else found.logit_factor * found.weight

        below = ahead = torch.zeros((), device=last.device)
        for layer in self.active:
            states = self.stream_end.end(seen[layer - 1], self.norms[layer - 1])
            states = states if finish is None else finish(states)
            own = weight(self.tables, layer - 1) if self.spec.own_tables else table
            below = below + summed(states, own, first)
            if self.spec.second_target:
                own = weight(self.second_tables, layer - 1 if self.spec.own_tables else -1)
                below = below + self.spec.second_target * summed(states, own, second)
        if self.spec.second_target:
            ahead = summed(last, weight(self.second_tables, -1), second)
        self._scored = below, ahead

    def auxiliary_terms(self) -> Mapping[str, Term]:
        """Return the terms of the pass scored last; only once per pass.

        Raises:
            UserError: if the task scored nothing, so that the run would train without them.
        """
        if self._scored is None:
            raise UserError(
                f"model.objective: intermediate_weight {self.spec.intermediate} and "
                f"second_target_weight {self.spec.second_target}, and this task has no auxiliary "
                "losses; 0 for both"
            )
        (below, ahead), self._scored = self._scored, None
        terms: dict[str, Term] = {}
        if self.spec.intermediate:
            if torch.distributed.is_initialized():
                below = below + sum(part.flatten()[:0].sum() for part in self._idle())
            terms["intermediate"] = Term(below, self.spec.intermediate, over_tokens=True)
        if self.spec.second_target:
            terms["second_target"] = Term(ahead, self.spec.second_target, over_tokens=True)
        return terms

    def _idle(self) -> Iterator[nn.Parameter]:
        stopped = set(range(1, len(self.norms) + 1)) - set(self.active)
        for heads in (self.norms, self.tables, self.second_tables if self.spec.own_tables else ()):
            for layer, head in enumerate(heads, start=1):
                if layer in stopped:
                    yield from head.parameters()


def after_next(
    labels: Int[Tensor, "*text"],
    counted: Bool[Tensor, "*text"],
    documents: Int[Tensor, "*text"] | None = None,
) -> tuple[Int[Tensor, "*text"], Bool[Tensor, "*text"]]:
    """Return the second targets, each label's successor in its text, and which of them count.

    The last label of a text has none, nor has that of a document.
    """
    known = counted & counted.roll(-1, dims=-1)
    if documents is not None:
        known = known & (documents == documents.roll(-1, dims=-1))
    known[..., -1] = False
    return labels.roll(-1, dims=-1), known


def watched(heads: AuxiliaryHeads | None) -> list[Stream] | None:
    """Return the list in which a training forward pass collects its streams, otherwise None.

    It is also None in every evaluation, which never uses auxiliary losses.
    """
    if heads is None or not (heads.training and torch.is_grad_enabled()):
        return None
    return []


def add_heads(model: Any, spec: AuxiliarySpec) -> None:
    """Give `model` the heads of `spec`, after drawing its own initial values, which stay unchanged.

    Raises:
        UserError: if the model cannot have them.
    """
    if spec.absent:
        return
    if not hasattr(model, "auxiliary"):
        raise UserError(
            f"model.objective: {type(model).__name__} takes no auxiliary losses; 0 for "
            "intermediate_weight and second_target_weight"
        )
    name, stack = list(stacks(model).items())[-1]
    spec.check(name, stack.spec)
    embedding = model.embedding
    model.auxiliary = AuxiliaryHeads(
        spec, stack.spec, embedding.model_dim, embedding.spec.vocab_size
    )
