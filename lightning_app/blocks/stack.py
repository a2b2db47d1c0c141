"""The specification of a stack of blocks, and its place in a model."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from lightning_app.blocks.attention import AttentionSpec, CarryKind, reads_tokens
from lightning_app.blocks.block import BlockSpec
from lightning_app.blocks.memory import MemorySpec
from lightning_app.blocks.norm import Norm, built_aside
from lightning_app.blocks.residual import LERP, SUM, ResidualSpec
from lightning_app.blocks.steps import HaltingSpec, check_growth, check_shared
from lightning_app.blocks.streams import (
    DUAL,
    PLAIN,
    STREAM_RULES,
    StreamKind,
    StreamPlace,
    StreamRule,
)

ResidualAttention = Literal["none", "sum", "mean", "qk_sum"]
Share = Literal["none", "all"]
StepSignal = Literal["none", "sinusoidal", "learned"]
NORMED = {DUAL: "dual_stream", "siamese": "siamese_norm"}
NORMS_AROUND = ("norm_input", "norm_sum", "norm_branch")


@dataclass(frozen=True, kw_only=True)
class Stack:
    """The place of a stack in a model.

    `causal`: a token attends to no later token. `cross`: each block has a cross-attention, which
    reads the states of another stack. `peer_depth` is that other stack's depth, or the depth of the
    stack that reads this one; 0 without one.
    """

    depth: int
    peer_depth: int = 0
    causal: bool = False
    cross: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.depth <= 10_000:
            raise ValueError(f"{self.name}_depth {self.depth}: a stack has 1 to 10,000 blocks")
        if self.cross and self.peer_depth < 1:
            raise ValueError(
                f"cross-attention with peer_depth {self.peer_depth}: it reads a stack of at least "
                "one block"
            )

    @property
    def name(self) -> str:
        """The name of this stack in a model: a causal stack is the decoder."""
        return "decoder" if self.causal else "encoder"

    @property
    def sub_layers(self) -> int:
        """The number of residual sub-layers: two for each block, three with cross-attention."""
        return self.depth * (3 if self.cross else 2)


RampOrder = Literal["deeper_later", "equal", "reverse"]


@dataclass(frozen=True, kw_only=True)
class BranchRamp:
    """The rise of every branch from nearly nothing to its size (ProRes, 2603.05369).

    The branches of layer l of L rise over ``steps l / L`` training steps (``deeper_later``), over
    ``steps`` (``equal``) or over ``steps (L + 1 - l) / L`` (``reverse``).
    """

    steps: int
    """The steps until all branches have their size."""
    order: RampOrder = "deeper_later"
    """Which layers rise first."""

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"branch_ramp steps {self.steps}: must be at least 1")

    def over(self, layer: int, depth: int) -> float:
        """Return the steps over which the branches of `layer`, from 1, rise."""
        shares = {"deeper_later": layer, "equal": depth, "reverse": depth + 1 - layer}
        return self.steps * shares[self.order] / depth


@dataclass(frozen=True, kw_only=True)
class StackSpec:
    """The resolved specification of a stack: one block per layer, plus the parts around the blocks.

    With h the sum of embeddings: the first block reads ``input_norm(h)``, and the stack returns
    ``final_norm(x)``. `stream` is the rule by which sub-layers read the stream and write to it,
    `streams` the number of its parallel states; `dual_stream` means the rule ``dual``, which
    returns ``x + final_norm(r)``, with r the input plus the sum of all branches (ResiDual).
    `embedding_gain` is a factor on the initial token
    embeddings, the same in every stack of a model, since they share one table.

    With `share` all, one block with one set of parameters serves every layer, and each layer is a
    step of the Universal Transformer (Dehghani et al. 2019, 1807.03819). Before each step
    `step_signal` adds positions and a signal of the step to the stream; with `halting`, each token
    stops after its own number of steps, and the stack returns ``final_norm`` of the average of its
    states.

    With `memory` each layer also reads its inputs from earlier segments (Transformer-XL).
    """

    blocks: tuple[BlockSpec, ...]
    final_norm: Norm = "none"
    input_norm: Norm = "none"
    stream: StreamKind = PLAIN
    streams: int = 1
    dual_stream: bool = False
    embedding_gain: float = 1.0
    share: Share = "none"
    step_signal: StepSignal = "none"
    halting: HaltingSpec | None = None
    memory: MemorySpec | None = None

    def __post_init__(self) -> None:
        if not 0.0 < self.embedding_gain < math.inf:
            raise ValueError(f"embedding_gain {self.embedding_gain}: must be a number above 0")
        check_growth(self.blocks)
        self._check_steps()
        self._check_chain()
        self._check_memory()
        first = self.blocks[0].self_attention.value_carry
        if first != "none" and not reads_tokens(first):
            raise ValueError("value_carry in the first layer: it has no layer before it")
        self._check_stream()

    def check_documents(self) -> None:
        """Refuse blocks whose effect depends on where a document lies in its row.

        Raises:
            ValueError: for blocks of queries, which are cut from the start of the row.
        """
        for block in self.blocks:
            span = block.self_attention.localised_span
            if span is not None and span.query_block > 1:
                raise ValueError(
                    f"intra_document_masking with localised_span query_block {span.query_block}: "
                    "blocks of queries are cut from the start of the window, not of a document; "
                    "use query_block 1"
                )

    def _check_stream(self) -> None:
        if self.dual_stream and self.stream not in (PLAIN, DUAL):
            raise ValueError(
                f"stream {self.stream} with dual_stream true: a stack has one stream rule; leave "
                "one of both out"
            )
        kind, rule = self.rule, STREAM_RULES[self.rule]
        if rule.several != (self.streams > 1):
            need = "expected at least 2" if rule.several else f"expected 1 with stream {kind}"
            raise ValueError(f"streams {self.streams}: {need}, the number of parallel states")
        if kind == PLAIN:
            return
        if kind != DUAL and (self.share == "all" or self.halting is not None):
            raise ValueError(f"stream {kind} with share all: its weights belong to one layer each")
        for block in self.blocks:
            self._check_block(block, kind, rule)

    @staticmethod
    def _check_block(block: BlockSpec, kind: StreamKind, rule: type[StreamRule]) -> None:
        """Refuse a block whose sums have no meaning under a stream rule."""
        if block.layout == "parallel":
            raise ValueError(
                f"stream {kind} with layout parallel: a stream rule takes one branch at a time"
            )
        zero = [reason for _, reason in block.zero_branches]
        zero += ["stochastic_depth"] if block.drops else []
        if 0.0 in (block.around_self.branch.value, block.around_ff.branch.value):
            zero.append("attention_branch or ff_branch 0 (as in presets rezero and skipinit)")
        for zeros in zero if kind == "attention" else ():
            raise ValueError(
                f"{zeros} with stream attention: its keys are norms of the branches, and that of a "
                "zero vector has a slope of 1 / sqrt(eps); use one of the two"
            )
        if block.bottom_to_top and kind != DUAL:
            raise ValueError(f"stream {kind} with preset b2t: two skips would join one stream")
        for around in (block.around_self, block.around_cross, block.around_ff):
            if around.rule == LERP or (kind == DUAL and around.rule != SUM):
                raise ValueError(
                    f"residual_rule {around.rule} with stream {kind} (as in preset "
                    f"{NORMED.get(kind, kind)}), whose states are sums; use residual_rule sum"
                )
            if kind != DUAL and around.skip.profiled:
                raise ValueError(
                    f"stream {kind} with profiled skips (preset admin): their start is that of "
                    "one sum of all branches"
                )
            plain = (around.skip.value, around.skip.learned, around.norm_sum, around.rule)
            if not rule.joins and plain != (1.0, False, "none", SUM):
                raise ValueError(
                    f"stream {kind} with attention_skip, ff_skip, norm_placement post or "
                    "residual_rule: it replaces the sum that these belong to"
                )
            if rule.norms_sum and around.norm_sum == "none":
                raise ValueError(
                    f"stream {kind} (as in preset {NORMED.get(kind, kind)}) is defined for "
                    "norm_placement post: without a norm of each sum its states would be equal"
                )

    @property
    def carries_values(self) -> bool:
        """Whether a layer reads the values of the first layer."""
        carries = {block.self_attention.value_carry for block in self.blocks} - {"none"}
        return not all(map(reads_tokens, carries))

    @property
    def rule(self) -> StreamKind:
        """The name of its stream rule."""
        return DUAL if self.dual_stream else self.stream

    @property
    def norm(self) -> Norm:
        """The type of its norms: of the final norm, or else of those of its first block."""
        norms = [self.final_norm, *(getattr(self.blocks[0].around_self, n) for n in NORMS_AROUND)]
        return next((kind for kind in norms if kind != "none"), "layer_norm")

    def stream_rules(self, model_dim: int, *, cross: bool) -> Iterator[StreamRule]:
        """Yield the stream rule of each sub-layer, and then that of the end of the stack."""
        per_layer = 3 if cross else 2
        for number in range(1, self.depth * per_layer + 2):
            layer = (number - 1) // per_layer + 1
            place = StreamPlace(
                model_dim=model_dim,
                number=number,
                layer=layer,
                ends_layer=number % per_layer == 0,
                sub_layers=self.depth * per_layer,
                streams=self.streams,
                norm=self.norm,
            )
            yield built_aside(partial(STREAM_RULES[self.rule], place))

    @property
    def depth(self) -> int:
        """The number of layers, which may share one block."""
        return len(self.blocks)

    def _check_steps(self) -> None:
        if self.share == "all":
            check_shared(self.blocks)
        halting = self.halting is not None
        if halting and any(block.self_attention.adaptive_span for block in self.blocks):
            raise ValueError(
                "halting with adaptive_span: tokens that have halted would move the spans; "
                "use one of the two"
            )
        for name, used in (("step_signal", self.step_signal != "none"), ("halting", halting)):
            if not used:
                continue
            if self.share == "none":
                raise ValueError(f"{name} without share all: a step is one run of a shared block")
            if self.rule == DUAL:
                raise ValueError(
                    f"{name} with preset dual_stream: it is defined for one stream, not for two"
                )

    def _check_memory(self) -> None:
        if self.memory is None:
            return
        if self.halting is not None:
            raise ValueError(
                "memory with halting: the steps of earlier tokens would be mixed with those of "
                "later ones; use one of the two"
            )
        for block in self.blocks:
            if block.self_attention.value_carry != "none":
                raise ValueError(
                    "memory with value_carry: neither values of the first layer nor ids of tokens "
                    "of earlier segments are kept; use one of the two"
                )
            if block.self_attention.localised_span is not None:
                raise ValueError(
                    "memory with localised_span: both say how far before its block a token sees; "
                    "use one of the two"
                )
            if block.self_attention.adaptive_span is not None:
                self.memory.check(block.self_attention.adaptive_span.longest)

    def _check_chain(self) -> None:
        """Refuse chains whose layers see different keys: a mask enters carried scores only once."""
        for part in ("self_attention", "cross_attention"):
            layers = [getattr(block, part) for block in self.blocks]
            if all(layer.carry == "none" for layer in layers):
                continue
            for name in ("localised_span", "adaptive_span", "sink"):
                if len({getattr(layer, name) for layer in layers}) > 1:
                    raise ValueError(
                        f"residual_attention: {name} differs between layers, and carried scores "
                        "need the same keys in every layer; use one for all layers"
                    )


def same_block(stack: Stack, block: BlockSpec, final_norm: Norm) -> StackSpec:
    """Return a stack of `depth` equal blocks."""
    return StackSpec(blocks=(block,) * stack.depth, final_norm=final_norm)


def around(residual: ResidualSpec, attention: AttentionSpec = AttentionSpec()) -> BlockSpec:
    """Return a sequential block with these in every sub-layer."""
    block = BlockSpec(around_self=residual, around_cross=residual, around_ff=residual)
    return replace(block, self_attention=attention, cross_attention=attention)


AROUND = ("around_self", "around_cross", "around_ff")
MAPS = ("self_attention", "cross_attention")


def with_each(
    blocks: tuple[BlockSpec, ...], names: tuple[str, ...], changed: Callable[[Any, int], Any]
) -> tuple[BlockSpec, ...]:
    """Return `blocks` with the parts of these names `changed`, by the layer from 1."""
    return tuple(
        replace(block, **{name: changed(getattr(block, name), layer) for name in names})
        for layer, block in enumerate(blocks, start=1)
    )


def ramped(blocks: tuple[BlockSpec, ...], ramp: BranchRamp) -> tuple[BlockSpec, ...]:
    """Return `blocks` with branches that rise."""

    def rising(around: ResidualSpec, layer: int) -> ResidualSpec:
        steps = ramp.over(layer, len(blocks))
        return replace(around, branch=replace(around.branch, ramp=steps))

    return with_each(blocks, AROUND, rising)


def dropped(blocks: tuple[BlockSpec, ...], last: float) -> tuple[BlockSpec, ...]:
    """Return `blocks` whose branches are dropped with a chance of ``last l / L`` in layer l."""

    def dropping(around: ResidualSpec, layer: int) -> ResidualSpec:
        return replace(around, drop=last * layer / len(blocks))

    return with_each(blocks, AROUND, dropping)


def differential_heads(blocks: tuple[BlockSpec, ...]) -> tuple[BlockSpec, ...]:
    """Return `blocks` with differential attention (2410.05258, section 2.1).

    In layer l ``lambda_0 = 0.8 - 0.6 exp(-0.3 (l - 1))``.
    """

    def subtracting(attention: AttentionSpec, layer: int) -> AttentionSpec:
        return replace(attention, difference=0.8 - 0.6 * math.exp(-0.3 * (layer - 1)))

    return with_each(blocks, MAPS, subtracting)


def carry_scores(spec: StackSpec, kind: ResidualAttention, temperature: float = 1.0) -> StackSpec:
    """Return `spec` with residual attention in every chain: encoder self, decoder self, cross.

    ``sum`` and ``mean`` carry the sum of scores, ``qk_sum`` sums of queries and of keys. Logits of
    layer n are divided by n (only with ``mean``) and by `temperature`.
    """
    carry: CarryKind = {"none": "none", "qk_sum": "qk_sum"}.get(kind, "scores")  # pyright: ignore[reportAssignmentType]

    def carrying(attention: AttentionSpec, layer: int) -> AttentionSpec:
        divisor = (layer if kind == "mean" else 1) * temperature
        return replace(attention, carry=carry, score_divisor=divisor)

    return replace(spec, blocks=with_each(spec.blocks, MAPS, carrying))
