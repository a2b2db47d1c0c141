"""One block of a stack: its frozen specification, and the module that it describes."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import repeat
from typing import Any, Literal, NamedTuple, final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from lightning_app.blocks.attention import Attention, AttentionSpec
from lightning_app.blocks.feed_forward import Activation, FeedForward
from lightning_app.blocks.linear import Linear, SpectralLinear
from lightning_app.blocks.masks import Mask
from lightning_app.blocks.memory import LayerCache
from lightning_app.blocks.norm import BOUNDS, GAINED, Norm, built_aside, unit_rows
from lightning_app.blocks.placed import Placed
from lightning_app.blocks.residual import SUM, Residual, ResidualSpec
from lightning_app.blocks.streams import Stream, StreamRule, select_tokens
from lightning_app.blocks.windows import LocalMask

Layout = Literal["sequential", "parallel"]


@dataclass(frozen=True, kw_only=True)
class InitSpec:
    """Gains of a block's matrices over Xavier's (Glorot & Bengio 2010).

    ``uniform``: U(+-gain sqrt(6 / (fan_in + fan_out))); ``normal``: the same variance. Queries,
    keys and values have 1/sqrt(2), as one fused matrix of the three would, as in fairseq.
    `ff_outer` is the gain of the second matrix of the feed-forward; None means that of `ff`.
    """

    distribution: Literal["uniform", "normal"] = "uniform"
    query_key: float = 2**-0.5
    value: float = 2**-0.5
    output: float = 1.0
    ff: float = 1.0
    ff_outer: float | None = None
    branch_norm: float = 1.0
    """The gain of norms of branches, `norm_branch`."""
    cross: bool = True
    """Whether `value` and `output` also hold in cross-attention; if not, it has the defaults, but
    an `output` of zero holds everywhere."""

    def __post_init__(self) -> None:
        for name in ("query_key", "value", "output", "ff", "ff_outer", "branch_norm"):
            gain = getattr(self, name)
            if gain is not None and not 0.0 <= gain < math.inf:
                raise ValueError(f"init {name} {gain}: must be a number of at least 0")

    @property
    def outer(self) -> float:
        """The gain of the second matrix of the feed-forward."""
        return self.ff if self.ff_outer is None else self.ff_outer


@dataclass(frozen=True, kw_only=True)
class BlockSpec:
    """The specification of one block: everything that may differ between blocks.

    ``sequential``: self-attention, cross-attention if the stack has one, feed-forward, each inside
    its residual formula. ``parallel``: self-attention and feed-forward read one norm and join one
    skip, that of `around_ff`: ``y = skip * x + b_SA SA(u) + b_FF FF(u)``, ``u = norm(x)``; a
    cross-attention follows as a separate sub-layer.

    `bottom_to_top` adds the block's input to the sum of its last sub-layer (B2T).
    `share_branch_gain` uses one gain for all branches, that of `around_self` (ReZero).
    `ff_norm` sits between the feed-forward's activation and its second matrix (NormFormer), and
    `ff_scale` multiplies the results of its first matrices by learned vectors (nGPT).
    `unit_matrices` keeps the rows of matrices, columns of output matrices, at length 1 (nGPT).
    `sigma_reparam` gives every matrix a learned largest singular value (`SpectralLinear`).
    """

    around_self: ResidualSpec
    around_cross: ResidualSpec
    around_ff: ResidualSpec
    self_attention: AttentionSpec = AttentionSpec()
    cross_attention: AttentionSpec = AttentionSpec()
    ff_norm: Norm = "none"
    layout: Layout = "sequential"
    bottom_to_top: bool = False
    share_branch_gain: bool = False
    init: InitSpec = InitSpec()
    ff_scale: bool = False
    unit_matrices: bool = False
    sigma_reparam: bool = False

    def __post_init__(self) -> None:
        if self.cross_attention.shaping is not None:
            raise ValueError(
                "shaped_attention on cross-attention: the identity needs a square map; "
                "shape only self-attention"
            )
        if {self.cross_attention.value, self.cross_attention.output} != {"full"}:
            raise ValueError(
                "identity projections on cross-attention would tie two spaces; use 'full' there"
            )
        if self.cross_attention.value_carry != "none":
            raise ValueError(
                "value_carry on cross-attention: its values are those of another stack; carry only "
                "those of self-attention"
            )
        if self.cross_attention.attention != "softmax":
            raise ValueError(
                f"attention {self.cross_attention.attention} on cross-attention: replace only the "
                "softmax of self-attention"
            )
        for name in ("localised_span", "adaptive_span"):
            if getattr(self.cross_attention, name) is not None:
                raise ValueError(
                    f"{name} on cross-attention: the tokens of two texts have no distance; limit "
                    "only self-attention"
                )
        norms = {self.around_self.norm_branch, self.around_ff.norm_branch}
        if self.init.branch_norm != 1.0 and not norms <= {"none", *GAINED}:
            raise ValueError(
                f"norm {', '.join(sorted(norms))} with preset swin_v2, whose norms start at zero: "
                "it has no gain; use layer_norm or rms_norm"
            )
        self._check_rules()
        self._check_zeros()
        if self.unit_matrices:
            self._check_unit()
        if self.sigma_reparam:
            self._check_spectral()
        if self.layout == "parallel":
            self._check_parallel()
        if self.share_branch_gain:
            self._check_shared_gain()
        if self.bottom_to_top and self.around_ff.skip.absent:
            raise ValueError("ff_skip 0 with preset b2t: the block's input joins by that skip")
        shaping = self.self_attention.shaping
        skip = self.around_ff.skip if self.layout == "parallel" else self.around_self.skip
        for around in (self.around_self, self.around_ff):
            if around.branch.ramp and (skip.absent or self.around_ff.skip.absent):
                raise ValueError(
                    "branch_ramp without attention_skip or ff_skip: a layer would start with "
                    "nothing; use it with skips"
                )
        if self.drops and (skip.absent or self.around_ff.skip.absent):
            raise ValueError(
                "stochastic_depth without attention_skip or ff_skip: nothing would remain of a "
                "row that skips its branch; use it with skips"
            )
        if skip.absent and (shaping is None or not shaping.alpha > 0.0):
            field = "ff_skip" if self.layout == "parallel" else "attention_skip"
            raise ValueError(
                f"{field} 0 without shaped_attention (alpha > 0): every token collapses "
                "onto one direction; give the attention a skip or an identity part"
            )

    @property
    def keeps_skip_of_identity(self) -> bool:
        """Whether identity projections are combined with an attention skip: allowed, but worse."""
        skip = self.around_ff.skip if self.layout == "parallel" else self.around_self.skip
        kinds = {self.self_attention.value, self.self_attention.output}
        return "identity" in kinds and not skip.absent

    @property
    def drops(self) -> bool:
        """Whether rows of the batch skip branches in training (stochastic depth)."""
        return any(around.drop for around in (self.around_self, self.around_cross, self.around_ff))

    @property
    def zero_branches(self) -> Iterator[tuple[ResidualSpec, str]]:
        """Yield what is around each branch that starts at zero, and what makes it start there."""
        for around, gain in (
            (self.around_self, self.init.output),
            (self.around_cross, self.init.output),
            (self.around_ff, self.init.outer),
        ):
            if gain == 0.0:
                yield around, "zero_output"
            elif self.init.branch_norm == 0.0 and around.norm_branch != "none":
                yield around, "preset swin_v2"

    def _check_rules(self) -> None:
        """Refuse a rule of a plug-in where more than one skip and one branch are summed."""
        rule = self.around_ff.rule
        if rule == SUM:
            return
        if self.layout == "parallel":
            raise ValueError(
                f"residual_rule {rule} with layout parallel: a rule joins a skip with one branch, "
                "and that sum has two; use residual_rule sum"
            )
        if self.bottom_to_top:
            raise ValueError(
                f"residual_rule {rule} with preset b2t: a rule joins a skip with one branch, and "
                "its last sum has two skips; use residual_rule sum"
            )

    def _check_zeros(self) -> None:
        """Refuse branches that start at zero and then break, or have no gradient."""
        for around, zeros in self.zero_branches:
            joins = around
            if self.layout == "parallel" and around is self.around_self:
                joins = self.around_ff
            if self.init.output == 0.0 and self.self_attention.output != "full":
                reason = (
                    "output_projection or last_output_projection "
                    f"{self.self_attention.output}, no full matrix"
                )
            elif zeros == "zero_output" and around.norm_branch not in {"none", *BOUNDS}:
                reason = "norm_placement peri: a norm of zeros has a slope of 1 / sqrt(eps)"
            elif joins.skip.absent:
                reason = "attention_skip or ff_skip 0: the stream would be zero"
            elif around.branch.value == 0.0:
                reason = "attention_branch or ff_branch 0: two zeros have no gradient"
            else:
                continue
            raise ValueError(f"{zeros} with {reason}; use one of the two")

    @property
    def traits(self) -> Iterator[tuple[str, str]]:
        """What it needs of weights or does to them and to logits, with the field that says so."""
        if self.unit_matrices:
            yield "keeps_norms", "model.block.unit_matrices (as in preset ngpt)"
            yield "reads_whole", "model.block.unit_matrices (as in preset ngpt)"
        span = self.self_attention.adaptive_span
        follows = {
            "unit_matrices": self.unit_matrices,
            "sigma_reparam": self.sigma_reparam,
            "branch_ramp": self.around_self.branch.ramp or self.around_ff.branch.ramp,
            "adaptive_span": span is not None and span.dynamic_bias is None,
        }
        yield from (("follows_steps", f"model.block: {name}") for name in follows if follows[name])
        usual = {"qk_norm": "none", "scores": "dot", "score_cap": None, "carry": "none"}
        usual |= {"query_key_noise": 0.0, "attention": "softmax"}
        for attention in (self.self_attention, self.cross_attention):
            for name, wanted in usual.items():
                if (value := getattr(attention, name)) != wanted:
                    yield "other_logits", f"model.block: {name} {value}"
        for name in ("unit_matrices", "sigma_reparam"):  # which restore the size of a matrix
            if getattr(self, name):
                yield "other_logits", f"model.block: {name} true"

    def _check_unit(self) -> None:
        """Refuse matrices whose rows cannot have length 1, or that start with another size."""
        spec, start = self.self_attention, replace(self.init, branch_norm=1.0)
        refused = {
            "shaped_attention": spec.shaping is not None,
            f"value_projection or first_value_projection {spec.value}": spec.value != "full",
            f"output_projection or last_output_projection {spec.output}": spec.output != "full",
            "zero_output or preset deepnorm, b2t, t_fixup or sub_ln": start != InitSpec(),
        }
        for part in (name for name, used in refused.items() if used):
            raise ValueError(
                f"unit_matrices with {part}: its rows start with length 1; leave one of both out"
            )

    def _check_spectral(self) -> None:
        """Refuse matrices that start at zero, which have no direction, or that have no freedom."""
        spec, init = self.self_attention, self.init
        value, output = spec.value, spec.output
        refused = {
            "unit_matrices (as in preset ngpt)": self.unit_matrices,
            "shaped_attention with a centre (gamma)": spec.query_init == "zeros",
            f"value_projection or first_value_projection {value}": value.endswith("_plus"),
            f"output_projection or last_output_projection {output}": output.endswith("_plus"),
            "zero_output": 0.0 in (init.query_key, init.value, init.output, init.ff, init.outer),
        }
        for part in (name for name, used in refused.items() if used):
            raise ValueError(
                f"sigma_reparam with {part}: it divides every matrix by its largest singular "
                "value, and that matrix starts at zero or has a fixed size; use one of the two"
            )

    def _check_shared_gain(self) -> None:
        branches = {self.around_self.branch, self.around_cross.branch, self.around_ff.branch}
        if len(branches) > 1 or not self.around_self.branch.learned:
            raise ValueError(
                "share_branch_gain: attention_branch and ff_branch must be one learned gain with "
                "one start"
            )

    def _check_parallel(self) -> None:
        if self.bottom_to_top:
            raise ValueError(
                "layout parallel with preset b2t has no meaning: one sum has no lower skip to add"
            )
        if {self.around_self.norm_sum, self.around_ff.norm_sum} != {"none"}:
            raise ValueError(
                "layout parallel with norm_placement post has no meaning: its branches share one "
                "skip and one input norm; use norm_placement 'pre'"
            )
        if self.around_self.norm_input != self.around_ff.norm_input:
            raise ValueError("layout parallel: both branches read one norm of the input")
        if self.around_self.input_scale != self.around_ff.input_scale:
            raise ValueError("layout parallel: both branches read the input at one input_scale")
        if not self.around_self.skip.absent:
            raise ValueError(
                "attention_skip with layout parallel: its one skip is that of the feed-forward; "
                "set ff_skip"
            )


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The numbers that every block of a stack shares."""

    model_dim: int
    ff_dim: int
    num_heads: int
    kv_heads: int | None = None
    activation: Activation = "relu"
    activation_slope: float = 0.01
    dropout: float = 0.0
    attention_dropout: float = 0.0
    vocabulary: int | None = None
    """The number of different tokens, where a stack knows the ids of its tokens."""

    def __post_init__(self) -> None:
        if self.model_dim % self.num_heads:
            raise ValueError(
                f"model_dim {self.model_dim} is no multiple of num_heads {self.num_heads}"
            )
        if self.kv_heads is not None and (self.kv_heads < 1 or self.num_heads % self.kv_heads):
            raise ValueError(
                f"kv_heads {self.kv_heads}: must divide num_heads {self.num_heads}; null: as many"
            )

    def check(self, block: BlockSpec) -> None:
        """Raise a `ValueError` for a block whose parts need other numbers of heads."""
        value = block.self_attention.value
        for heads in (self.num_heads, self.kv_heads or self.num_heads):
            if block.self_attention.difference is not None and heads % 2:
                raise ValueError(
                    f"differential with {heads} heads: two maps make one head; use even num_heads "
                    "and kv_heads"
                )
        if self.kv_heads not in (None, self.num_heads) and value != "full":
            raise ValueError(
                f"kv_heads {self.kv_heads} with value_projection {value}: its values have as many "
                "heads as the queries; use value_projection full, or kv_heads null"
            )

    def attention(self, spec: AttentionSpec) -> Attention:
        sizes = (self.model_dim, self.num_heads, self.attention_dropout, self.kv_heads)
        return Attention(spec, *sizes, self.vocabulary)

    def residual(self, spec: ResidualSpec, stream: StreamRule | None) -> Residual:
        return Residual(spec, self.model_dim, self.dropout, stream)

    def feed_forward(self, norm: Norm, scaled: bool) -> FeedForward:
        sizes = (self.model_dim, self.ff_dim, self.activation)
        return FeedForward(*sizes, norm, self.activation_slope, scaled)


class Carries(NamedTuple):
    """The states that the two attention chains pass to the layer above; None without a chain.

    `values` are those of the first layer, if a layer above reads them.
    """

    self_attention: Any = None
    cross_attention: Any = None
    values: Float[Tensor, "batch head token dim"] | None = None


class CrossAttentionInput(NamedTuple):
    """The input of one cross-attention: keys and values from another stack, and their mask."""

    keys: Float[Tensor, "batch head source dim"]
    values: Float[Tensor, "batch head source dim"]
    mask: Mask


class Earlier(NamedTuple):
    """The inputs of a block in earlier segments, and how they enter the scores."""

    inputs: Float[Tensor, "batch memory model"]
    placed: Placed | None


class Call(NamedTuple):
    """The inputs of a block besides its stream: the layer, and the keys that queries may see.

    `layer` counts from 1. A block that serves several layers is called once per layer, so hooks
    identify a layer by its call, and `spec` is the specification of the layer: it differs from the
    block's only in the divisor of scores. `running` are the tokens that have not halted before this
    layer, None for all. `before` is the layer's memory of earlier segments. `kept` are flat indices
    into batch * token: after the map of the self-attention, the block continues with only these
    tokens, as one row. `carries_values`: whether a layer reads the values of the first.
    `tokens` are the ids of the newest tokens, None in a stack without a vocabulary.
    """

    layer: int
    mask: Mask | LocalMask
    placed: Placed | None = None
    source: CrossAttentionInput | None = None
    cache: LayerCache | None = None
    spec: BlockSpec | None = None
    running: Bool[Tensor, "batch token"] | None = None
    before: Earlier | None = None
    kept: Int[Tensor, " kept"] | None = None
    carries_values: bool = False
    tokens: Int[Tensor, "batch token"] | None = None


_MAPS = (Linear, nn.Linear)  # the second in the gates of plug-ins


@final
class Block(nn.Module):
    """Self-attention, cross-attention if `cross` is set, feed-forward.

        sequential                                parallel
        x --norm-- SA --(+)--norm-- FF --(+)--    x --norm--+-- SA --+
        '------- skip ---' '------ skip --'       |         '-- FF --(+)--
                                                  '------ skip ------'

    Cross-attention follows self-attention; in the parallel layout it follows the only sum.
    `streams` are the stream rules of the sub-layers in their order, None for one plain state.
    """

    def __init__(
        self,
        spec: BlockSpec,
        sizes: Sizes,
        *,
        cross: bool = False,
        streams: Iterator[StreamRule] | None = None,
    ) -> None:
        super().__init__()
        rules = repeat(None) if streams is None else streams
        self.spec = spec
        self.self_attention = sizes.attention(spec.self_attention)
        self.cross_attention = sizes.attention(spec.cross_attention) if cross else None
        self.feed_forward = sizes.feed_forward(spec.ff_norm, spec.ff_scale)
        self.around_self = sizes.residual(spec.around_self, next(rules))
        self.around_cross = sizes.residual(spec.around_cross, next(rules)) if cross else None
        around_ff = spec.around_ff
        if spec.layout == "parallel":  # its feed-forward reads the attention's norm
            around_ff = replace(around_ff, norm_input="none")
        self.around_ff = sizes.residual(around_ff, next(rules))
        one_rule = getattr(self.around_self.rule, "one_per_block", False)
        for residual in (self.around_cross, self.around_ff):
            if residual is not None and spec.share_branch_gain:
                residual.branch = self.around_self.branch
            if residual is not None and one_rule:
                residual.rule = self.around_self.rule
        for part in (self.self_attention, self.cross_attention, self.feed_forward):
            gate = getattr(part, "output_gate", None)
            for owner in (part, gate) if spec.sigma_reparam else ():
                for name, child in [] if owner is None else [*owner.named_children()]:
                    if isinstance(child, nn.Linear) and type(child) in _MAPS:
                        setattr(owner, name, built_aside(partial(SpectralLinear, child)))

    def after_step(self) -> None:
        for path, part in self.named_modules() if self.spec.unit_matrices else ():
            gate = "output_gate" in path  # of length 1, its logits would stay within -1 and 1
            if isinstance(part, nn.Linear) and not gate and not path.startswith("around_"):
                unit_rows(part.weight, dim=0 if path.endswith((".output", ".outer")) else 1)

    @property
    def last_residual(self) -> Residual:
        """The norms and the residual connection around the last sub-layer."""
        if self.around_cross is not None and self.spec.layout == "parallel":
            return self.around_cross
        return self.around_ff

    def forward(self, stream: Stream, carries: Carries, call: Call) -> tuple[Stream, Carries]:
        """Run the block on the newest tokens of `stream`; a cache holds the earlier tokens."""
        start, spec = stream, call.spec or self.spec
        u = self.around_self.enter(self.around_self.stream.read(stream))
        query, keys, values = self.self_attention.queries_keys_values(u, call.placed)
        first = carries.values
        if call.carries_values and first is None:
            first = values
        elif self.self_attention.value_carry is not None and not self.self_attention.reads_tokens:
            assert first is not None
            values = self.self_attention.value_carry(values, first)
        if self.self_attention.value_carry is not None and self.self_attention.reads_tokens:
            values = self.self_attention.value_carry(values, u, call.tokens)
        if call.before is not None:
            earlier = self.around_self.enter(call.before.inputs)
            parts = self.self_attention.keys_values(earlier, call.before.placed), (keys, values)
            keys, values = (torch.cat(pair, dim=2) for pair in zip(*parts, strict=True))
        if call.cache is not None:
            keys, values = call.cache.append(keys, values)
        mask = call.mask
        if call.placed is not None and (added := call.placed.added(query)) is not None:
            mask = mask.with_score_bias(added)
        span = self.self_attention.span
        attended, self_carry = self.self_attention(
            query,
            keys,
            values,
            mask,
            carries.self_attention,
            divisor=spec.self_attention.score_divisor,
            kept=call.kept,
            spans=None if span is None else span(u),
            u=u,
        )
        if call.kept is not None:
            assert self.cross_attention is None
            start = stream = start.at(call.kept)
            u = select_tokens(u, call.kept)
        stream = self.around_self(stream, attended)
        if self.spec.layout == "parallel":
            stream = Stream(self.around_ff(start, self.feed_forward(u)).x + stream.x)

        cross_carry = None
        if self.cross_attention is not None:
            assert self.around_cross is not None
            assert call.source is not None
            u = self.around_cross.enter(self.around_cross.stream.read(stream))
            crossed, cross_carry = self.cross_attention(
                self.cross_attention.queries(u, None),
                *call.source,
                carries.cross_attention,
                divisor=spec.cross_attention.score_divisor,
                u=u,
            )
            stream = self.around_cross(stream, crossed)

        if self.spec.layout == "sequential":
            fed = self.feed_forward(self.around_ff.enter(self.around_ff.stream.read(stream)))
            if self.spec.bottom_to_top:
                # The last sub-layer's skip also carries the block's input (Takase et al. 2022).
                stream = stream._replace(x=stream.x + start.x)
            stream = self.around_ff(stream, fed)
        return stream, Carries(self_carry, cross_carry, first)
