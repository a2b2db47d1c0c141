"""The config of a block: a preset and the axes that override it."""

from dataclasses import dataclass, fields, replace
from typing import Literal

from lightning_app.blocks.attention import (
    Attending,
    AttentionSpec,
    OutputGate,
    Projection,
    ProjectionGains,
    Scores,
    ShapingSpec,
    Sink,
    ValueCarry,
    reads_tokens,
)
from lightning_app.blocks.block import BlockSpec, InitSpec, Layout
from lightning_app.blocks.memory import MemorySpec
from lightning_app.blocks.norm import Norm
from lightning_app.blocks.presets import ABSENT, PRESETS
from lightning_app.blocks.presets.registry import check_spec
from lightning_app.blocks.residual import Gain, ResidualSpec, Rule
from lightning_app.blocks.spans import AdaptiveSpan
from lightning_app.blocks.stack import (
    MAPS,
    BranchRamp,
    ResidualAttention,
    Share,
    Stack,
    StackSpec,
    StepSignal,
    carry_scores,
    differential_heads,
    dropped,
    ramped,
    with_each,
)
from lightning_app.blocks.steps import HaltingSpec
from lightning_app.blocks.streams import DUAL, STREAM_RULES, StreamKind
from lightning_app.blocks.windows import LocalisedSpan
from lightning_app.core.registry import require_known

Placement = Literal["post", "pre", "peri", "none"]
PLACES: dict[Placement, tuple[bool, bool, bool]] = {
    # norm_input, norm_branch, norm_sum
    "post": (False, False, True),
    "pre": (True, False, False),
    "peri": (True, True, False),
    "none": (False, False, False),
}


@dataclass(frozen=True, kw_only=True)
class BlockConfig:
    """A preset and the axes that override it; an omitted axis keeps the preset's value."""

    preset: str = "pre_ln"
    """A name that `ablate blocks` lists."""
    norm_placement: Placement | None = None
    """post: norm(x + f(x)); pre: x + f(norm(x)); peri: x + norm(f(norm(x))); none: x + f(x).
    With pre and peri a final norm follows the last block, and with every placement where the stream
    needs one at its end. The norms have the type that the preset has."""
    norm: Norm | None = None
    """The type of all norms of a stack: layer_norm, rms_norm or another name of `NORM_KINDS`."""
    residual_rule: Rule | None = None
    """The rule that joins the output of each sub-layer with the stream: sum, gpas, lerp, or another
    name of `RESIDUAL_RULES`, which a plug-in registers."""
    stream: StreamKind | None = None
    """The states that pass from sub-layer to sub-layer: plain (one), dual, siamese, hyper_static,
    hyper_dynamic, hyper_manifold, attention or average over depth, embedding (blended before each
    layer), or another name of `STREAM_RULES`, which a plug-in registers."""
    streams: int | None = None
    """The number of parallel states, for stream hyper_static, hyper_dynamic and hyper_manifold."""
    residual_attention: ResidualAttention | None = None
    """Carry scores from layer to layer: their sum, or divided by n in layer n (mean); qk_sum
    carries sums of queries and of keys."""
    residual_temperature: float | None = None
    """An additional divisor of the carried logits; needs residual attention."""
    query_key_noise: float | None = None
    """Experimental, training only: scale of the normal noise, truncated at 2, on queries and
    keys."""
    qk_norm: Norm | None = None
    """The norm of each head of queries and keys, with learned gains."""
    scores: Scores | None = None
    """dot: q k^T / sqrt(d_k); cosine: cos(q, k) times a learned factor per head, from 10 to at most
    100 (Swin Transformer V2); cosine_features: sqrt(d_k) cos(q, k) with a learned factor for each
    feature of both (nGPT)."""
    score_cap: float | None = None
    """c of c tanh(L / c), which bounds scores before the mask. Maps are then stored in every
    layer."""
    sink: Sink | None = None
    """A logit beside those of the keys in each softmax, whose weight is dropped: zero, or learned,
    one per head from 0."""
    output_gate: OutputGate | None = None
    """A gate on the heads before the output projection, in self- and cross-attention: none, head,
    element, or another name of `OUTPUT_GATES`, which a plug-in registers."""
    value_carry: ValueCarry | None = None
    """The use of the first layer's values above it: none, half (the mean of both), learned,
    shared (their own layer's are left out), or another name of `VALUE_CARRIES`, which a plug-in
    registers; one that reads tokens serves the first layer, too."""
    attention: Attending | None = None
    """softmax, or a name of `ATTENTIONS`, which a plug-in registers: what replaces the softmax in
    self-attention."""
    differential: bool | None = None
    """Pair the heads of every attention: each pair is the difference of two maps over values of
    twice the width (differential attention)."""
    shaped_attention: ShapingSpec | None = None
    """The weights of A' = alpha I + beta A - gamma C in self-attention."""
    value_projection: Projection | None = None
    """The value projection of self-attention, in every layer."""
    output_projection: Projection | None = None
    """The output projection of self-attention, in every layer."""
    first_value_projection: Projection | None = None
    """The value projection of the first layer, if it differs from the others."""
    last_output_projection: Projection | None = None
    """The output projection of the last layer, if it differs from the others."""
    value_gains: ProjectionGains | None = None
    """a and b of V = a W_0 + b dW, for identity_plus and orthogonal_plus."""
    output_gains: ProjectionGains | None = None
    """a and b of P = a W_0 + b dW."""
    tied_projections: bool | None = None
    """Start P from the transpose of V's orthogonal matrix, so that the two cancel; a first or last
    layer that is configured to differ is skipped."""
    layout: Layout | None = None
    """Self-attention and feed-forward one after the other, or in one sum."""
    attention_skip: Gain | None = None
    """The gain of the skip around self-attention; 0 removes it."""
    ff_skip: Gain | None = None
    """The gain of the skip around the feed-forward; in the parallel layout, the gain of the only
    skip."""
    attention_branch: Gain | None = None
    """The gain of the self-attention branch."""
    ff_branch: Gain | None = None
    """The gain of the feed-forward branch."""
    branch_ramp: BranchRamp | None = None
    """Let every branch rise from nearly nothing during the first steps of training; the run must
    have at least as many."""
    stochastic_depth: float | None = None
    """The chance in training that a row of the batch skips a branch of the last layer; in layer l
    of L it is l / L of that."""
    localised_span: LocalisedSpan | None = None
    """Blocks of queries that see themselves and the tokens before them, in self-attention."""
    adaptive_span: AdaptiveSpan | None = None
    """A learned span per head of self-attention."""
    zero_output: bool | None = None
    """Start the output projections of attention and the second feed-forward matrices at zero, so
    that every branch is zero at first; false: with their usual gains."""
    unit_matrices: bool | None = None
    """Divide rows of the matrices of attention and feed-forward (columns of output matrices),
    except gates, and of the embedding by their lengths, at the start and after each step (nGPT).
    Scores over the vocabulary then have learned factors, from 1. Needs weight_decay 0."""
    sigma_reparam: bool | None = None
    """Divide each matrix of attention and feed-forward by its largest singular value, and multiply
    it by a learned one that starts there (sigma-Reparam)."""
    share_branch_gain: bool | None = None
    """One learned gain for all branches of a layer instead of one per branch."""
    share: Share | None = None
    """all: one block with one set of parameters serves every layer of a stack (Universal
    Transformer); each layer is then one step."""
    step_signal: StepSignal | None = None
    """A signal added to the stream before each step, together with the positions, which the
    embedding then omits; needs share all."""
    halting: HaltingSpec | None = None
    """Adaptive computation time: each token stops after its own number of steps, at most the depth;
    needs share all."""
    memory: MemorySpec | None = None
    """Each layer also reads its inputs from earlier segments, as in Transformer-XL; only in a
    decoder-only model with data.order streams."""

    def __post_init__(self) -> None:
        if self.norm == "none":
            raise ValueError("norm none: the type of the norms; norm_placement none removes them")
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, str) and field.name != "preset":  # whose name `resolve` looks up
                require_known(f"model.block.{field.name}", value)

    def resolve(self, stack: Stack) -> StackSpec:
        """Return the specification of every layer of `stack`.

        Raises:
            UserError: for an unknown preset.
            ValueError: for an invalid combination; the message names the field.
        """
        check_spec(self, BlockConfig, "block")
        spec = PRESETS[self.preset](stack)
        last = len(spec.blocks) - 1
        blocks = tuple(
            self._block(block, spec.norm, first=layer == 0, last=layer == last)
            for layer, block in enumerate(spec.blocks)
        )
        if self.branch_ramp is not None:
            blocks = ramped(blocks, self.branch_ramp)
        if self.stochastic_depth is not None:
            blocks = dropped(blocks, self.stochastic_depth)
        if self.differential:
            blocks = differential_heads(blocks)
        self._check_gains(blocks)
        input_norm = spec.input_norm
        if self.norm_placement not in (None, "peri") and spec.blocks[0].around_self.is_peri:
            input_norm = "none"  # Peri-LN's
        spec = replace(
            spec,
            blocks=blocks,
            final_norm=self._kind(self._final_norm(spec)),
            input_norm=self._kind(input_norm),
            dual_stream=spec.dual_stream and self.stream in (None, DUAL),
        )
        return replace(
            self._carried(spec),
            memory=self._memory(stack),
            stream=self.stream or spec.stream,
            streams=self._streams(spec),
            share=self.share or spec.share,
            step_signal=self.step_signal or spec.step_signal,
            halting=self.halting or spec.halting,
        )

    def _final_norm(self, spec: StackSpec) -> Norm:
        before, rule = STREAM_RULES[spec.rule], STREAM_RULES[self.stream or spec.rule]
        norm = spec.final_norm
        if self.norm_placement is not None:
            norm = spec.norm if self.norm_placement in ("pre", "peri") else "none"
        elif before.norms_sum and not rule.norms_sum:  # there for the rule that is replaced
            norm = "none"
        return spec.norm if rule.norms_end and norm == "none" else norm

    def _streams(self, spec: StackSpec) -> int:
        if self.streams is not None:
            return self.streams
        if self.stream is None or self.stream == spec.stream:
            return spec.streams
        return 4 if STREAM_RULES[self.stream].several else 1

    def _memory(self, stack: Stack) -> MemorySpec | None:
        if self.memory is None or max(self.memory.lengths) == 0:
            return None
        if stack.cross or not stack.causal:
            raise ValueError(
                "memory: only for a model with only a decoder, which reads a text from its start; "
                "leave it out"
            )
        return self.memory

    def _check_gains(self, blocks: tuple[BlockSpec, ...]) -> None:
        for part, gains in (("value", self.value_gains), ("output", self.output_gains)):
            kinds = {getattr(block.self_attention, part) for block in blocks}
            if gains is not None and not any(kind.endswith("_plus") for kind in kinds):
                raise ValueError(
                    f"{part}_gains without a {part}_projection identity_plus or orthogonal_plus "
                    "in any layer have nothing to multiply"
                )

    def _carried(self, spec: StackSpec) -> StackSpec:
        temperature = 1.0 if self.residual_temperature is None else self.residual_temperature
        if self.residual_attention is not None:
            return carry_scores(spec, self.residual_attention, temperature)
        if self.residual_temperature is None:
            return spec

        def cooled(attention: AttentionSpec, layer: int) -> AttentionSpec:
            return replace(attention, score_divisor=attention.score_divisor * temperature)

        return replace(spec, blocks=with_each(spec.blocks, MAPS, cooled))

    def _block(self, block: BlockSpec, norm: Norm, *, first: bool, last: bool) -> BlockSpec:
        gains = self.attention_skip, self.attention_branch
        around_self = self._residual(block.around_self, norm, *gains)
        around_cross = self._residual(block.around_cross, norm, None, None)
        around_ff = self._residual(block.around_ff, norm, self.ff_skip, self.ff_branch)
        layout = self.layout or block.layout
        if layout != block.layout and self.attention_skip is None:
            # The layout changes: two skips become one, or one becomes two.
            skip = ABSENT if layout == "parallel" else block.around_ff.skip
            around_self = replace(around_self, skip=skip)
        names = ("share_branch_gain", "unit_matrices", "sigma_reparam")
        flags = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        if flags.get("share_branch_gain", block.share_branch_gain):  # the one gain is of all three
            around_cross = replace(around_cross, branch=around_self.branch)
        self_attention = self._both(self._self_attention(block.self_attention, first, last))
        return replace(
            block,
            around_self=around_self,
            around_cross=around_cross,
            around_ff=around_ff,
            self_attention=self_attention,
            cross_attention=self._both(block.cross_attention),
            ff_norm=self._kind(block.ff_norm),
            layout=layout,
            init=self._init(block.init),
            **flags,
        )

    def _init(self, init: InitSpec) -> InitSpec:
        if self.zero_output is None:
            return init
        if self.zero_output:
            return replace(init, output=0.0, ff_outer=0.0)
        return replace(init, output=init.output or 1.0, ff_outer=init.ff_outer or None)

    def _residual(
        self, residual: ResidualSpec, norm: Norm, skip: Gain | None, branch: Gain | None
    ) -> ResidualSpec:
        if branch is not None and not branch.ramp:  # the preset's, as in its other branches
            branch = replace(branch, ramp=residual.branch.ramp)
        if self.norm_placement is not None:
            kinds = [norm if placed else "none" for placed in PLACES[self.norm_placement]]
            names = ("norm_input", "norm_branch", "norm_sum")
            residual = replace(residual, **dict(zip(names, kinds, strict=True)))
            if residual.norm_input == "none":
                residual = replace(residual, input_scale=1.0)
        return replace(
            residual,
            norm_input=self._kind(residual.norm_input),
            norm_branch=self._kind(residual.norm_branch),
            norm_sum=self._kind(residual.norm_sum),
            skip=skip or residual.skip,
            branch=branch or residual.branch,
            rule=self.residual_rule or residual.rule,
        )

    def _kind(self, norm: Norm) -> Norm:
        return norm if norm == "none" or self.norm is None else self.norm

    def _both(self, attention: AttentionSpec) -> AttentionSpec:
        """Return `attention` with the axes that self- and cross-attention share."""
        noise = self.query_key_noise
        return replace(
            attention,
            qk_norm=self.qk_norm or self._kind(attention.qk_norm),
            value_norm=self._kind(attention.value_norm),
            output_norm=self._kind(attention.output_norm),
            query_key_noise=attention.query_key_noise if noise is None else noise,
            output_gate=self.output_gate or attention.output_gate,
            scores=self.scores or attention.scores,
            score_cap=attention.score_cap if self.score_cap is None else self.score_cap,
            sink=self.sink or attention.sink,
            difference=None if self.differential is False else attention.difference,
        )

    def _self_attention(self, attention: AttentionSpec, first: bool, last: bool) -> AttentionSpec:
        shaping, query_init = attention.shaping, attention.query_init
        if self.shaped_attention is not None:
            shaping = self.shaped_attention
            # The centre cancels the map at the start only where the scores are zero.
            query_init = "zeros" if shaping.centred else "xavier"
        value = self.value_projection or attention.value
        output = self.output_projection or attention.output
        tied = attention.tied if self.tied_projections is None else self.tied_projections
        if first and self.first_value_projection is not None:
            value = self.first_value_projection
            tied = tied and value.startswith("orthogonal")
        carry = self.value_carry or attention.value_carry
        if first and not reads_tokens(carry):
            carry = "none"
        if last and self.last_output_projection is not None:
            output = self.last_output_projection
            tied = tied and output.startswith("orthogonal")
        return replace(
            attention,
            shaping=shaping,
            query_init=query_init,
            value=value,
            value_gains=self.value_gains or attention.value_gains,
            output=output,
            output_gains=self.output_gains or attention.output_gains,
            tied=tied,
            value_carry=carry,
            attention=self.attention or attention.attention,
            localised_span=self.localised_span or attention.localised_span,
            adaptive_span=self.adaptive_span or attention.adaptive_span,
        )
