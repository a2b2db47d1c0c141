"""Layers as steps: the halting of tokens, the growth of the stream, and shared layers."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Literal, NamedTuple, final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from lightning_app.blocks.block import BlockSpec
from lightning_app.blocks.linear import Linear
from lightning_app.blocks.residual import GPAS, SUM
from lightning_app.blocks.spans import AuxiliaryTerms, Term


@dataclass(frozen=True, kw_only=True)
class HaltingSpec:
    """When a token halts, and the cost of its steps (Graves 2016, 1603.08983)."""

    ponder_weight: float = 0.01
    """tau, the weight of the ponder cost in the loss."""
    epsilon: float = 0.01
    """A token halts when its probabilities sum to 1 - epsilon, so that one step can be enough."""
    bias: float = 1.0
    """b_h at the start: a token then halts after 2 steps on average."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.ponder_weight < math.inf:
            raise ValueError(
                f"halting.ponder_weight {self.ponder_weight}: must be a number of at least 0"
            )
        if not 0.0 < self.epsilon < 1.0:
            raise ValueError(f"halting.epsilon {self.epsilon}: must be above 0 and less than 1")
        if not math.isfinite(self.bias):
            raise ValueError(f"halting.bias {self.bias}: must be a finite number")


class Pondering(NamedTuple):
    """The state of every token between two steps.

    Attributes:
        running: The tokens that have not halted.
        given: ``sum h_n`` over the steps so far, of running tokens.
        steps: N, the number of steps so far.
        remainder: R of the halted tokens; 0 for the others.
        average: ``sum p_n s_n`` over the steps so far.
    """

    running: Bool[Tensor, "batch token"]
    given: Float[Tensor, "batch token"]
    steps: Int[Tensor, "batch token"]
    remainder: Float[Tensor, "batch token"]
    average: Float[Tensor, "batch token model"]

    @classmethod
    def start(cls, x: Float[Tensor, "batch token model"]) -> "Pondering":
        """Return the state before the first step on `x`; sums are in float32 at least."""
        nothing = torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32))
        none = nothing[..., 0]
        return cls(none == 0, none, none.long(), none, nothing)


class StepCounts(NamedTuple):
    """Sums over the counted tokens of one pass: steps, tokens at the maximum of steps, tokens."""

    steps: Int[Tensor, ""]
    at_limit: Int[Tensor, ""]
    tokens: Int[Tensor, ""]


@final
class Halting(nn.Module, AuxiliaryTerms):
    """The halting unit ``h_n = sigmoid(s_n W_h + b_h)`` and Graves' average of the states.

        N   = min(maximum, first n with h_1 + .. + h_n >= 1 - epsilon)
        p_n = h_n for n < N,  p_N = R = 1 - (h_1 + .. + h_(N-1))
        s   = sum_n p_n s_n,  ponder cost of the token: N + R

    s_n is the state after step n. A token that has halted keeps its state (Dehghani et al. 2019,
    1807.03819, section 2.3), which other tokens attend to. N is treated as constant in the
    gradient.

    The ponder cost is a sum over the tokens of `counted`, which the caller sets before each forward
    pass of training; like the loss it is divided by the predicted tokens of the global batch.
    """

    def __init__(self, spec: HaltingSpec, model_dim: int) -> None:
        super().__init__()
        self.spec = spec
        self.unit = Linear(model_dim, 1)
        self.counted: Bool[Tensor, "batch token"] | None = None
        self._cost: Tensor | None = None
        self._steps: Tensor | None = None
        self._limit = 0

    def forward(
        self, before: Pondering, state: Float[Tensor, "batch token model"], *, last: bool
    ) -> Pondering:
        """Return the state of every token after one more step, which returned `state`.

        Args:
            before: The state of every token before the step.
            state: s_n; for halted tokens the state that they keep.
            last: Whether this is the last step, at which every token halts.
        """
        h = self.unit(state).squeeze(-1).to(before.given.dtype).sigmoid()
        given = before.given + h
        ends = torch.ones_like(before.running) if last else given >= 1.0 - self.spec.epsilon
        remainder = 1.0 - before.given
        weight = torch.where(ends, remainder, h) * before.running
        return Pondering(
            running=before.running & ~ends,
            given=given,
            steps=before.steps + before.running,
            remainder=before.remainder + remainder * (ends & before.running),
            average=before.average + weight.unsqueeze(-1) * state,
        )

    def finish(self, pondering: Pondering, limit: int) -> None:
        """Store the cost of a training pass with at most `limit` steps."""
        if self.training:
            self._cost = pondering.steps + pondering.remainder
            self._steps, self._limit = pondering.steps, limit

    def auxiliary_terms(self) -> dict[str, Term]:
        """Return the ponder cost of the last forward pass; only once per pass."""
        assert self.counted is not None, "the tokens that count are set before the pass"
        assert self._cost is not None, "each pass of training has its cost once"
        cost = (self._cost * self.counted).sum()
        self._cost = None
        return {"ponder": Term(cost, weight=self.spec.ponder_weight, over_tokens=True)}

    def step_counts(self) -> StepCounts:
        """Return the steps of the counted tokens in the last forward pass of training."""
        assert self.counted is not None
        assert self._steps is not None
        steps = self._steps[self.counted]
        return StepCounts(
            steps=steps.sum(),
            at_limit=(steps == self._limit).sum(),
            tokens=self.counted.sum(),
        )


def check_growth(blocks: Sequence[BlockSpec]) -> None:
    """Refuse streams that explode: added variance or amplification of more than e along a stack.

    SkipInit's 1 / sqrt(depth), ReZero's 0 and T-Fixup's small matrices pass, as do blocks
    without a skip, and any skip where a norm follows the sum.

    Raises:
        ValueError: naming the fields that make the stream explode.
    """
    for part in ("around_self", "around_ff"):
        if sum(growth(block, part) for block in blocks) > 1.0 + 1e-9:
            raise ValueError(
                "the stream explodes at initialisation: norm_placement none with an ordinary "
                "attention_skip or ff_skip, or a skip well over 1 without a norm of the sum "
                "(norm_placement post); use skipless attention, attention_branch and ff_branch "
                "that start at 1 / sqrt(depth) or less, or preset t_fixup"
            )


def growth(block: BlockSpec, part: Literal["around_self", "around_ff"]) -> float:
    """Return the variance that a branch adds to the stream at the start, relative to the stream's.

    ``(branch / skip)^2`` times the squared gains of the branch's two matrices, unless a norm of
    the branch bounds it, plus the ``ln skip^2`` by which a skip above 1 amplifies the stream
    itself; 0 where a norm of any sum of the block, or a missing skip, bounds the stream, and where
    a plug-in's rule joins the two, about which nothing is known.
    """
    residual = block.around_self if part == "around_self" else block.around_ff
    # Both branches of a parallel block join the skip of the feed-forward.
    skip = block.around_ff.skip if block.layout == "parallel" else residual.skip
    sums = {block.around_self.norm_sum, block.around_cross.norm_sum, block.around_ff.norm_sum}
    if sums != {"none"} or skip.value == 0.0 or residual.rule not in (SUM, GPAS):
        return 0.0
    # B2T's last sum adds the block's input a second time.
    twice = block.bottom_to_top and part == "around_ff"
    kept = abs(skip.value) + (1.0 if twice else 0.0)
    amplified = max(0.0, math.log(kept**2))
    if not residual.unnormalized:
        return amplified
    if part == "around_self":
        attention = block.self_attention
        gains = block.init.value if attention.value == "full" else 1.0
        gains *= block.init.output if attention.output == "full" else 1.0
    else:
        gains = block.init.ff * block.init.outer
    return (residual.branch.value * gains / kept) ** 2 + amplified


def check_shared(blocks: Sequence[BlockSpec]) -> None:
    """Refuse layers that one block cannot serve.

    They may differ in the divisor of their carried scores, which the stack passes to the block with
    each call.

    Raises:
        ValueError: naming the field in which two layers differ.
    """
    first, *others = (_undivided(block) for block in blocks)
    for layer, other in enumerate(others, start=2):
        for name, one, another in _differences(first, other):
            raise ValueError(
                f"share all: layers 1 and {layer} differ in {name}, {one} and {another}, and one "
                "block serves all layers; take a preset or axes with equal layers, or share none"
            )
    residuals = (first.around_self, first.around_cross, first.around_ff)
    if len(blocks) > 1 and any(residual.skip.profiled for residual in residuals):
        raise ValueError(
            "share all: profiled skips (preset admin) have a start for each layer, and one block "
            "serves all layers; take another preset, or share none"
        )


def _undivided(block: BlockSpec) -> BlockSpec:
    return replace(
        block,
        self_attention=replace(block.self_attention, score_divisor=1.0),
        cross_attention=replace(block.cross_attention, score_divisor=1.0),
    )


def _differences(one: Any, another: Any, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield (dotted name, value, other value) of every field in which two parts differ."""
    for field in fields(one):
        mine, theirs = getattr(one, field.name), getattr(another, field.name)
        if is_dataclass(mine) and type(mine) is type(theirs):
            yield from _differences(mine, theirs, f"{prefix}{field.name}.")
        elif mine != theirs:
            yield f"{prefix}{field.name}", mine, theirs
