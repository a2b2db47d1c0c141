"""Multi-head attention: projections, carried scores, shaping."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, final

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_app.blocks.kernels.choose import (
    QueryKeySums,
    ScoreCarry,
    attend,
    attend_with_carry,
    attend_with_sums,
)
from lightning_app.blocks.kernels.stored import MapGains, Queries
from lightning_app.blocks.linear import Linear, is_followed, linear
from lightning_app.blocks.masks import Mask
from lightning_app.blocks.norm import BOUNDS, LearnedScalars, Norm, Scale, build_norm, built_aside
from lightning_app.blocks.placed import Heads, Placed
from lightning_app.blocks.residual import Gain, build_gain
from lightning_app.blocks.spans import AdaptiveSpan, DynamicSpanMask, SoftMask, SpanMask
from lightning_app.blocks.streams import States, select_tokens
from lightning_app.blocks.windows import LocalisedSpan, LocalMask, Window
from lightning_app.core.errors import UserError
from lightning_app.core.registry import Registry

Projection = Literal["full", "identity", "identity_plus", "orthogonal", "orthogonal_plus"]
QueryInit = Literal["xavier", "zeros"]
Scores = Literal["dot", "cosine", "cosine_features"]
Sink = Literal["none", "zero", "learned"]
CarryKind = Literal["none", "scores", "qk_sum"]
Carry = ScoreCarry | QueryKeySums
"""The kind of state that a chain of attentions passes from layer to layer; a module of `ATTENTIONS`
has one of its own."""


@dataclass(frozen=True, kw_only=True)
class ShapingSpec:
    """``A' = alpha I + beta A - gamma C`` (He & Hofmann 2023, 2311.01906, equation 6)."""

    alpha: float = 1.0
    """Weight of the identity I."""
    beta: float = 1.0
    """Weight of the softmax map A."""
    gamma: float | None = 1.0
    """Weight of the centre C, the map at zero scores; null leaves C out (V-SkipInit)."""
    learned: bool = True
    """Train the weights; they take no weight decay."""
    per_head: bool = True
    """One weight per head instead of one for all heads."""

    def __post_init__(self) -> None:
        for name, value in (("alpha", self.alpha), ("beta", self.beta), ("gamma", self.gamma)):
            if value is not None and not math.isfinite(value):
                raise ValueError(f"shaped_attention {name}: {value} is not a finite number")

    @property
    def centred(self) -> bool:
        """Whether the map subtracts the centre C, which requires queries that start at zero."""
        return self.gamma is not None and self.gamma != 0.0


@dataclass(frozen=True, kw_only=True)
class ProjectionGains:
    """a and b of a projection ``W = a W_0 + b dW``."""

    kept: Gain = Gain()
    """a, the gain of the fixed part W_0."""
    change: Gain = Gain()
    """b, the gain of the part dW, which starts at zero and is trained."""

    def __post_init__(self) -> None:
        if any(gain.vector or gain.profiled or gain.ramp for gain in (self.kept, self.change)):
            raise ValueError(
                "gains of a projection are scalars: vector, profiled and ramp do not apply"
            )


OutputGate = str
"""A name of `OUTPUT_GATES`, or ``none``."""

ValueCarry = str
"""A name of `VALUE_CARRIES`, or ``none``."""

OUTPUT_GATES: Registry[Callable[[int, int], nn.Module | None]] = Registry(
    "model.block.output_gate", slots=("output_gate",)
)
"""What acts on the heads before the output projection, by name; `OUTPUT_GATES.register` is the
decorator that adds a class.

A class is called with the width of the stream and the number of heads. Its module is called with
the heads, (batch, head, query, dim), and u, the input of the sub-layer that queries are projected
from, (batch, query, model), and returns heads. Set ``drawn_last = True`` in a class with matrices.
"""

VALUE_CARRIES: Registry[Callable[..., nn.Module | None]] = Registry(
    "model.block.value_carry", slots=("value_carry",)
)
"""How layers above the first combine their values with those of the first, by name;
`VALUE_CARRIES.register` is the decorator that adds a class.

A class is called with the width of the stream and the number of heads of values. Its module is
called with the values of the layer and those of the first layer, both (batch, head, token, dim),
and returns values. A class with ``reads_tokens = True`` is also called with the width of a head and
the size of the vocabulary, and serves the first layer, too. Its module is called with the values of
the layer, u, the input of the sub-layer, (batch, token, model), and the ids of its tokens.
"""

Attending = str
"""A name of `ATTENTIONS`, or ``softmax``."""

ATTENTIONS: Registry[Callable[[int, int], nn.Module | None]] = Registry(
    "model.block.attention", slots=("attention",)
)
"""What self-attention does with queries, keys and values, by name; `ATTENTIONS.register` is the
decorator that adds a class.

A class is called with the width of the stream and the number of heads. Its module is called with
queries, keys and values, (batch, head, token, dim), the `Mask`, the state that the layer below
returned, None in the first layer, and the rate of dropout, 0 in evaluation. It returns the heads,
(batch, head, query, dim), and the state for the layer above, which layers of softmax pass on. In
cached decoding queries are the newest tokens, and keys all tokens so far. `Mask.logits` adds biases
of positions to scores, and hides keys.
"""


def reads_tokens(carry: ValueCarry) -> bool:
    """Return whether a value carry reads the ids of tokens instead of the first layer's values."""
    return getattr(VALUE_CARRIES[carry], "reads_tokens", False)


@OUTPUT_GATES.register("none")
@VALUE_CARRIES.register("none")
@ATTENTIONS.register("softmax")
def no_part(model_dim: int, num_heads: int) -> None:
    """Nothing."""


@OUTPUT_GATES.register("element")
@final
class ElementGate(nn.Module):
    """``heads * sigmoid(u W_g)``, a gate for each entry (Qiu et al. 2025, 2505.06708, G1)."""

    drawn_last = True

    def __init__(self, model_dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.matrix = Linear(model_dim, model_dim, bias=False)

    def forward(self, heads: Queries, u: Float[Tensor, "batch query model"]) -> Queries:
        return heads * split_heads(self.matrix(u), self.num_heads).sigmoid()


@OUTPUT_GATES.register("head")
@final
class GateOfHead(nn.Module):
    """``head_h * sigmoid(u w_h)``, one gate for each head and query (2505.06708, G1 headwise)."""

    drawn_last = True

    def __init__(self, model_dim: int, num_heads: int) -> None:
        super().__init__()
        self.matrix = Linear(model_dim, num_heads, bias=False)

    def forward(self, heads: Queries, u: Float[Tensor, "batch query model"]) -> Queries:
        return heads * self.matrix(u).sigmoid().transpose(1, 2).unsqueeze(-1)


@VALUE_CARRIES.register("half")
@final
class HalfOfFirst(nn.Module):
    """``(V_1 + V_n) / 2``, the constants of the published code (ResFormer, 2410.17897)."""

    def __init__(self, model_dim: int, num_heads: int) -> None:
        super().__init__()

    def forward(self, values: Heads, first: Heads) -> Heads:
        # Under autocast a first layer without a value matrix has values of another type.
        return torch.lerp(values, first.to(values.dtype), 0.5)


@VALUE_CARRIES.register("learned")
@final
class LearnedShares(LearnedScalars):
    """``l_1 V_1 + l_2 V_n``, both learned from 0.5 (Zhou et al. 2024, 2410.17897)."""

    def __init__(self, model_dim: int, num_heads: int) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.tensor(0.5))
        self.own = nn.Parameter(torch.tensor(0.5))

    def forward(self, values: Heads, first: Heads) -> Heads:
        return self.first * first + self.own * values


SHARED: ValueCarry = "shared"


@VALUE_CARRIES.register(SHARED)
@final
class OnlyFirst(nn.Module):
    """``V_1``: layers above the first have no value matrix (SVFormer, 2410.17897)."""

    def __init__(self, model_dim: int, num_heads: int) -> None:
        super().__init__()

    def forward(self, values: Heads, first: Heads) -> Heads:
        return first


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """One attention map with its projections.

    `value` and `output`, with u the input:

    - ``full``: ``u W + b``; ``orthogonal`` is the same with W orthogonal at the start
    - ``identity``: ``u``
    - ``identity_plus``, ``orthogonal_plus``: ``u (a W_0 + b dW)``, with dW zero at the start and
      W_0 the identity or an orthogonal matrix that is never trained (He & Hofmann 2023, section
      4.2); a and b are `value_gains` and `output_gains`

    `tied` starts the output from the transpose of the value's orthogonal matrix. `localised_span`
    and `adaptive_span` limit the keys that a query sees, in self-attention. `output_norm` is a norm
    of the joined heads before the output projection (Magneto, 2210.06423); `output_gate` acts on
    the heads before the output projection, and `value_carry` combines the values with those of the
    first layer.

    `scores`: ``dot`` is ``q k^T / sqrt(d_k)``, others are in `SCALES`. `score_cap` replaces each
    score L, biases of positions included, by ``c tanh(L / c)`` before the mask (Gemma 2,
    2408.00118). `sink` adds a logit to each row of the softmax and drops its column: ``zero`` is
    "softmax off by one", ``learned`` is one logit per head (gpt-oss, 2508.10925). `attention` names
    a module that replaces the softmax and all that acts on it.

    `difference` is lambda_0 of differential attention (`Difference`): pairs of heads then share
    values of twice the width.
    """

    carry: CarryKind = "none"
    score_divisor: float = 1.0
    qk_norm: Norm = "none"
    value_norm: Norm = "none"
    output_norm: Norm = "none"
    head_gain: bool = False
    query_key_noise: float = 0.0
    shaping: ShapingSpec | None = None
    value: Projection = "full"
    value_gains: ProjectionGains = ProjectionGains()
    output: Projection = "full"
    output_gains: ProjectionGains = ProjectionGains()
    tied: bool = False
    query_init: QueryInit = "xavier"
    localised_span: LocalisedSpan | None = None
    adaptive_span: AdaptiveSpan | None = None
    output_gate: OutputGate = "none"
    value_carry: ValueCarry = "none"
    scores: Scores = "dot"
    score_cap: float | None = None
    sink: Sink = "none"
    difference: float | None = None
    attention: Attending = "softmax"

    def __post_init__(self) -> None:
        _ = OUTPUT_GATES[self.output_gate], VALUE_CARRIES[self.value_carry]
        if ATTENTIONS[self.attention] is not no_part:
            self._check_own()
        if self.value_carry == SHARED and self.value != "full":
            raise ValueError(
                f"value_carry shared with value_projection {self.value}: only the first layer has "
                "a value matrix, which first_value_projection sets; use value_projection full"
            )
        if self.difference is not None:
            self._check_difference()
        if self.value_carry != "none" and self.value == "identity":
            raise ValueError(
                f"value_carry {self.value_carry} with value_projection identity: values are then "
                "the input of the layer; use full"
            )
        if self.output_norm != "none" and self.output == "identity":
            raise ValueError(
                f"output_norm {self.output_norm} with output_projection or last_output_projection "
                "identity: no matrix follows the norm; use full"
            )
        if self.qk_norm in (*BOUNDS, "l2"):
            raise ValueError(
                f"qk_norm {self.qk_norm}: it bounds entries or scores, and gives queries and keys "
                "no size to learn; use layer_norm or rms_norm, or scores cosine in place of l2"
            )
        if self.qk_norm != "none" and self.query_init == "zeros":
            raise ValueError(
                "qk_norm with queries that start at zero: the norm of a zero vector has no "
                "direction and a slope of 1 / sqrt(eps); drop qk_norm or the centre of "
                "shaped_attention (gamma)"
            )
        self._check_softmax()
        if not 0.0 < self.score_divisor < math.inf:
            raise ValueError(f"residual_temperature {self.score_divisor}: must be a number above 0")
        if self.score_divisor != 1.0 and self.carry == "none":
            raise ValueError("residual_temperature: nothing to divide without residual_attention")
        if not 0.0 <= self.query_key_noise < math.inf:
            raise ValueError(
                f"query_key_noise {self.query_key_noise}: must be a number of at least 0"
            )
        orthogonal = {"orthogonal", "orthogonal_plus"}
        if self.tied and not {self.value, self.output} <= orthogonal:
            raise ValueError(
                "tied_projections: value_projection and output_projection must both be orthogonal "
                "or orthogonal_plus"
            )
        if self.adaptive_span is not None:
            gamma = None if self.shaping is None else self.shaping.gamma
            self.adaptive_span.check(self.localised_span, self.carry != "none", gamma)

    def _check_own(self) -> None:
        """Refuse what acts on scores or maps, which an attention of one's own need not have."""
        for part, used in (
            ("residual_attention", self.carry != "none"),
            ("shaped_attention", self.shaping is not None),
            ("differential", self.difference is not None),
            ("score_cap", self.score_cap is not None),
            ("sink", self.sink != "none"),
            ("localised_span", self.localised_span is not None),
            ("adaptive_span", self.adaptive_span is not None),
        ):
            if used:
                raise ValueError(
                    f"attention {self.attention} with {part}, which belongs to the softmax; use "
                    "one of the two"
                )

    def _check_difference(self) -> None:
        """Refuse parts that act on one map per head."""
        for part, used in (
            ("residual_attention", self.carry != "none"),
            ("shaped_attention", self.shaping is not None),
            (f"value_projection or first_value_projection {self.value}", self.value != "full"),
            ("output_projection or last_output_projection identity", self.output == "identity"),
        ):
            if used:
                raise ValueError(
                    f"differential with {part}: each of its heads is the difference of two maps; "
                    "use one of the two"
                )

    def _check_softmax(self) -> None:
        """Refuse scores, caps and sinks that have no meaning beside other parts."""
        if self.scores != "dot" and self.qk_norm != "none":
            raise ValueError(
                f"scores {self.scores} with qk_norm {self.qk_norm}: both set the size of queries "
                "and keys; use qk_norm none"
            )
        if self.scores != "dot" and self.query_init == "zeros":
            raise ValueError(
                f"scores {self.scores} with queries that start at zero: a zero vector has no "
                "direction; use scores dot or drop the centre of shaped_attention (gamma)"
            )
        if self.score_cap is not None and not 0.0 < self.score_cap < math.inf:
            raise ValueError(f"score_cap {self.score_cap}: must be a number above 0")
        if self.score_cap is not None and self.carry != "none":
            raise ValueError(
                f"score_cap {self.score_cap} with residual_attention: scores are carried without "
                "a cap; use one of the two"
            )
        for name, value in (("score_cap", self.score_cap), ("sink", self.sink)):
            if value not in (None, "none") and self.shaping is not None:
                raise ValueError(
                    f"{name} {value} with shaped_attention: it shapes the map of a plain softmax; "
                    "use one of the two"
                )


@final
class _SplitHeads(torch.autograd.Function):
    """``(batch, token, part * head * dim)`` as views ``(batch, head, token, dim)``, one per part.

    The backward pass copies each gradient once, from any layout in memory.
    """

    @staticmethod
    def forward(ctx: Any, joined: Tensor, parts: int, num_heads: int) -> tuple[Tensor, ...]:
        ctx.shape, ctx.split = joined.shape, (parts, num_heads, -1)
        ctx.set_materialize_grads(False)
        # (batch, token, part, head, dim) -> (part, batch, head, token, dim)
        return joined.unflatten(-1, ctx.split).permute(2, 0, 3, 1, 4).unbind()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        like = next((grad for grad in grads if grad is not None), None)
        if like is None:
            return None, None, None
        joined = like.new_empty(ctx.shape)
        split = joined.unflatten(-1, ctx.split).permute(2, 0, 3, 1, 4)
        for part, grad in enumerate(grads):
            split[part].zero_() if grad is None else split[part].copy_(grad)
        return joined, None, None


def project(u: States, num_heads: int, *projections: nn.Module) -> list[Heads]:
    """Return each projection of `u`, split into heads; the linear ones are one product.

    Their parameters stay separate for checkpoints and initialisation: concatenating the weights
    side by side costs little compared with the product.
    """
    full = [layer for layer in projections if isinstance(layer, Linear)]
    weight = torch.cat([layer.matrix for layer in full])
    biased = all(layer.bias is not None for layer in full)
    bias = torch.cat([layer.bias for layer in full]) if biased else None
    parts = iter(_split_heads(linear(u, weight, bias), len(full), num_heads))
    return [
        next(parts) if isinstance(layer, Linear) else split_heads(layer(u), num_heads)
        for layer in projections
    ]


def _split_heads(joined: Tensor, parts: int, num_heads: int) -> tuple[Tensor, ...]:
    if is_followed():
        return joined.unflatten(-1, (parts, num_heads, -1)).permute(2, 0, 3, 1, 4).unbind()
    return _SplitHeads.apply(joined, parts, num_heads)  # pyright: ignore[reportReturnType]


def split_heads(x: States, num_heads: int) -> Heads:
    """Return the heads of `x`, a view."""
    return x.unflatten(-1, (num_heads, -1)).transpose(1, 2)


def spread_heads(x: Float[Tensor, "batch group token dim"], num_heads: int) -> Heads:
    """Return `x` with a head per query head: neighbours share the keys and values of one group."""
    groups = x.shape[1]
    return x if groups == num_heads else x.repeat_interleave(num_heads // groups, dim=1)


@final
class AnchoredProjection(nn.Module):
    """``u (a W_0 + b dW)``: W_0 is fixed, dW starts at zero and is trained, a and b are gains.

    W_0 is the identity if `initial` is None, else an orthogonal buffer.
    """

    initial: Tensor | None

    def __init__(self, dim: int, gains: ProjectionGains, *, orthogonal: bool) -> None:
        super().__init__()
        self.register_buffer("initial", torch.eye(dim) if orthogonal else None)
        self.change = Linear(dim, dim, bias=False)
        self.kept = build_gain(gains.kept, dim)
        self.departure = build_gain(gains.change, dim)

    def forward(self, u: Float[Tensor, "*shape model"]) -> Float[Tensor, "*shape model"]:
        kept = u if self.initial is None else linear(u, self.initial)
        return self.kept(kept) + self.departure(self.change(u))


def build_projection(
    kind: Projection, gains: ProjectionGains, dim: int, outer: int | None = None
) -> nn.Module:
    """Return the value or output projection of type `kind`, ``dim -> dim``.

    `outer` is another width of the result, for ``full``.
    """
    match kind:
        case "full" | "orthogonal":
            return Linear(dim, outer or dim)
        case "identity":
            return nn.Identity()
        case "identity_plus" | "orthogonal_plus":
            return AnchoredProjection(dim, gains, orthogonal=kind == "orthogonal_plus")


@final
class UnusedValues(nn.Module):
    """In place of a value matrix where values are those of the first layer: entries of `u`, which
    nothing reads."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def forward(self, u: Float[Tensor, "*shape model"]) -> Float[Tensor, "*shape value"]:
        return u[..., : self.size]


@final
class Shaping(LearnedScalars):
    """The weights of the shaped map, each of shape ``(head or 1, 1, 1)``; gamma may be None."""

    alpha: Tensor
    beta: Tensor
    gamma: Tensor | None

    def __init__(self, spec: ShapingSpec, num_heads: int) -> None:
        super().__init__()
        shape = (num_heads if spec.per_head else 1, 1, 1)
        starts = {"alpha": spec.alpha, "beta": spec.beta, "gamma": spec.gamma}
        for name, value in starts.items():
            tensor = None if value is None else torch.full(shape, float(value))
            if spec.learned:
                self.register_parameter(name, None if tensor is None else nn.Parameter(tensor))
            else:
                self.register_buffer(name, tensor)

    @property
    def gains(self) -> MapGains:
        return MapGains(self.alpha, self.beta, self.gamma)


@final
class HeadGain(LearnedScalars):
    """``g_h head_h`` before the output projection; g starts at one (NormFormer, 2110.09456)."""

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(num_heads, 1, 1))

    def forward(self, heads: Queries) -> Queries:
        return self.gain * heads


@final
class CosineScale(LearnedScalars):
    """Queries of scaled cosine attention (Liu et al. 2021, Swin Transformer V2, 2111.09883).

    Scores are ``cos(q, k) exp(min(s_h, ln 100))``, s_h from ln 10: this multiplies ``q / |q|`` by
    the factor and by sqrt(d_k), by which attention divides. Relative positions add their terms
    to the result.
    """

    def __init__(self, num_heads: int, head_dim: int) -> None:
        super().__init__()
        self.log_scale = nn.Parameter(torch.full((num_heads, 1, 1), math.log(10.0)))

    def forward(self, x: Float[Tensor, "*batch dim"]) -> Float[Tensor, "*batch dim"]:
        scale = self.log_scale.clamp(max=math.log(100.0)).exp() * x.shape[-1] ** 0.5
        return x * scale.to(x.dtype)


@final
class FeatureScale(Scale):
    """Queries of ``sqrt(d_k) (s q / |q|) . (s k / |k|)``, s a vector per head from 1 (nGPT)."""

    def __init__(self, num_heads: int, head_dim: int) -> None:
        super().__init__(num_heads, 1, head_dim, stored=(num_heads * head_dim) ** -0.5)

    def forward(self, x: Float[Tensor, "*batch dim"]) -> Float[Tensor, "*batch dim"]:
        # Both factors s, before any rotation, and d_k, by whose root attention divides.
        return x * (self.factor.square() * x.shape[-1]).to(x.dtype)


SCALES = {"cosine": CosineScale, "cosine_features": FeatureScale}


@final
class SinkLogit(LearnedScalars):
    """The logit of each head that its softmax sees beside those of the keys; it starts at zero."""

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.sink_logit = nn.Parameter(torch.zeros(num_heads, 1, 1))


@final
class Difference(LearnedScalars):
    """``(1 - lambda_0) N(A_1 V - lambda A_2 V)`` of two maps (Ye et al. 2024, 2410.05258).

    ``lambda = exp(q_1 . k_1) - exp(q_2 . k_2) + lambda_0`` with four vectors per layer, from
    N(0, 0.1^2), that all heads share. N is an RMSNorm over one head.
    """

    drawn_last = True

    def __init__(self, start: float, head_dim: int) -> None:
        super().__init__()
        self.start = start
        self.vectors = nn.Parameter(torch.zeros(2, 2, head_dim))
        self.norm = build_norm("rms_norm", 2 * head_dim)

    def reset(self) -> None:
        nn.init.normal_(self.vectors, std=0.1)

    @property
    def weight_of_second(self) -> Float[Tensor, ""]:
        query, key = self.vectors.to(torch.promote_types(self.vectors.dtype, torch.float32))
        first, second = (query * key).sum(dim=-1).exp()
        return first - second + self.start

    def measured(self) -> Iterator[tuple[str, Tensor]]:
        yield "lambda", self.weight_of_second

    def forward(
        self, heads: Float[Tensor, "batch map query wide"]
    ) -> Float[Tensor, "batch head query wide"]:
        first, second = heads.unflatten(1, (-1, 2)).unbind(dim=2)
        joined = torch.addcmul(first, second, self.weight_of_second.to(heads.dtype), value=-1.0)
        return self.norm(joined) * (1.0 - self.start)


@final
class Attention(nn.Module):
    """Multi-head attention of queries over keys and values from the same or another text.

    ``concat_h(A'_h V_h) W_P`` with ``A' = A`` or the shaped map. Noise (in training
    only), the norm over each head, and the transformation by positions are applied to queries and
    keys in this order. The caller computes queries, keys and values before the call, so that cached
    decoding can append to keys and values. With fewer `kv_heads` than `num_heads`, a head of keys
    and values serves several neighbouring heads of queries (Ainslie et al. 2023, 2305.13245).
    """

    def __init__(
        self,
        spec: AttentionSpec,
        model_dim: int,
        num_heads: int,
        dropout: float,
        kv_heads: int | None = None,
        vocabulary: int | None = None,
    ) -> None:
        super().__init__()
        self.spec = spec
        self.num_heads = num_heads
        self.kv_heads = kv_heads or num_heads
        assert spec.value == "full" or self.kv_heads == num_heads
        # Two maps make one head if their difference is taken.
        maps = 1 if spec.difference is None else 2
        self.value_heads, heads = self.kv_heads // maps, num_heads // maps
        self.dropout = dropout
        outer = model_dim // num_heads * self.kv_heads
        self.query = Linear(model_dim, model_dim)
        self.key = Linear(model_dim, outer)
        self.value = build_projection(spec.value, spec.value_gains, model_dim, outer)
        value_norm = spec.value_norm
        if spec.value_carry == SHARED:  # the first layer's values, which have their norm
            self.value, value_norm = UnusedValues(outer), "none"
        self.output = build_projection(spec.output, spec.output_gains, model_dim)
        self.query_norm = build_norm(spec.qk_norm, model_dim // num_heads)
        self.key_norm = build_norm(spec.qk_norm, model_dim // num_heads)
        if spec.scores != "dot":
            scale = SCALES[spec.scores](num_heads, model_dim // num_heads)
            self.key_norm = build_norm("l2", model_dim // num_heads)
            self.query_norm = nn.Sequential(self.key_norm, scale)
        self.sink = SinkLogit(num_heads) if spec.sink == "learned" else None
        self.value_norm = build_norm(value_norm, model_dim // heads)
        self.output_norm = build_norm(spec.output_norm, model_dim)
        self.shaping = None if spec.shaping is None else Shaping(spec.shaping, num_heads)
        self.head_gain = HeadGain(heads) if spec.head_gain else None
        self.difference = None
        if spec.difference is not None:
            self.difference = Difference(spec.difference, model_dim // num_heads)
        gate, carry = OUTPUT_GATES[spec.output_gate], VALUE_CARRIES[spec.value_carry]
        self.output_gate = built_aside(lambda: gate(model_dim, heads))
        self.reads_tokens = reads_tokens(spec.value_carry)
        table = (model_dim // heads, vocabulary) if self.reads_tokens else ()
        if self.reads_tokens and vocabulary is None:
            raise UserError(
                f"value_carry {spec.value_carry}: it reads the ids of tokens, which a stack "
                "or block outside a model has not; take another one"
            )
        self.value_carry = built_aside(lambda: carry(model_dim, self.value_heads, *table))
        self.own = built_aside(lambda: ATTENTIONS[spec.attention](model_dim, num_heads))
        self.span: SoftMask | None = None
        if (span := spec.adaptive_span) is not None and span.dynamic_bias is None:
            self.span = SpanMask(span, num_heads)
        elif span is not None:
            self.span = DynamicSpanMask(span, model_dim, num_heads)

    @property
    def window(self) -> Window | None:
        """The keys around each query that it may see; None if there is no limit."""
        span = self.span or self.spec.localised_span
        return None if span is None else span.window

    def whole_mask(self, mask: Mask | LocalMask, spans: Tensor | None) -> Mask:
        """Return the mask of this layer's maps over whole texts, for probes."""
        if isinstance(mask, Mask):
            return mask
        return mask.whole if self.span is None else self.span.over_whole(mask, spans)

    def _disturbed(self, x: Heads) -> Heads:
        if not (self.spec.query_key_noise and self.training):
            return x
        # Drawn in the order (batch, token, model).
        noise = nn.init.trunc_normal_(torch.empty_like(x.transpose(1, 2).flatten(2)), a=-2.0, b=2.0)
        return x + self.spec.query_key_noise * split_heads(noise, x.shape[1])

    def queries(
        self, u: Float[Tensor, "batch query model"], placed: Placed | None
    ) -> Float[Tensor, "batch head query feature"]:
        """Return the queries of `u` for the scores, split into heads."""
        query = split_heads(self.query(u), self.num_heads)
        query = self.query_norm(self._disturbed(query))
        return query if placed is None else placed.queries(query)

    def queries_keys_values(
        self, u: States, placed: Placed | None
    ) -> tuple[
        Float[Tensor, "batch head token feature"],
        Float[Tensor, "batch group token feature"],
        Float[Tensor, "batch pair token wide"],
    ]:
        """Return queries, keys and values of one text, in one product if all are full."""
        if self.kv_heads == self.num_heads:
            query, key, value = project(u, self.num_heads, self.query, self.key, self.value)
        else:
            query = split_heads(self.query(u), self.num_heads)
            key, value = project(u, self.kv_heads, self.key, self.value)
        query = self.query_norm(self._disturbed(query))
        key = self.key_norm(self._disturbed(key))
        if placed is not None:
            query, key = placed.queries(query), placed.keys(key)
        return query, key, self._values(value)

    def _values(
        self, value: Float[Tensor, "batch group token dim"]
    ) -> Float[Tensor, "batch pair token wide"]:
        if self.value_heads != self.kv_heads:
            # Neighbours make one head of values.
            value = split_heads(value.transpose(1, 2).flatten(2), self.value_heads)
        return self.value_norm(value)

    def keys_values(
        self, memory: Float[Tensor, "batch key model"], placed: Placed | None
    ) -> tuple[Float[Tensor, "batch group key feature"], Float[Tensor, "batch pair key wide"]]:
        """Return the keys for the scores and the values of `memory`, split into heads."""
        key, value = project(memory, self.kv_heads, self.key, self.value)
        key = self.key_norm(self._disturbed(key))
        key = key if placed is None else placed.keys(key)
        return key, self._values(value)

    def forward(
        self,
        query: Float[Tensor, "batch head query feature"],
        keys: Float[Tensor, "batch group key feature"],
        values: Float[Tensor, "batch pair key wide"],
        mask: Mask | LocalMask,
        carry: Any,
        divisor: float | None = None,
        kept: Int[Tensor, " kept"] | None = None,
        spans: Float[Tensor, "#batch head #query 1"] | None = None,
        u: Float[Tensor, "batch query model"] | None = None,
    ) -> tuple[Float[Tensor, "batch query model"] | Float[Tensor, "1 kept model"], Any]:
        """Return the sub-layer's output and the state that the chain passes to the layer above.

        Logits are divided by `divisor`; None means that of the specification. The output is
        that of the queries `kept` only, unless None: see `select_tokens`. A chain's state has the
        maps that a `LocalMask` computes. `spans` are the queries' spans, from `span`. `u` is what
        the queries were projected from, for an output gate.
        """
        local = mask if isinstance(mask, LocalMask) else None
        if isinstance(mask, LocalMask):
            query, keys, values = mask.queries(query), mask.keys(keys), mask.keys(values)
            mask = mask.mask if self.span is None else self.span.over(mask, spans)
        assert local is not None or not (self.span or self.spec.localised_span)
        keys, values = (spread_heads(x, self.num_heads) for x in (keys, values))
        if self.spec.sink != "none":
            # A key of zeros has score 0 for every query, and a value of zeros drops its column.
            keys, values = (F.pad(x, (0, 0, 0, 1)) for x in (keys, values))
            mask = mask.with_sink(None if self.sink is None else self.sink.sink_logit)
        dropout = self.dropout if self.training else 0.0
        divisor = self.spec.score_divisor if divisor is None else divisor
        gains = None if self.shaping is None else self.shaping.gains
        match self.spec.carry:
            case "none" if self.own is not None:
                assert isinstance(mask, Mask)
                heads, carry = self.own(query, keys, values, mask, carry, dropout)
            case "none":
                heads = attend(query, keys, values, mask, dropout, gains, self.spec.score_cap)
            case "scores":
                assert not isinstance(carry, QueryKeySums)
                heads, carry = attend_with_carry(
                    query, keys, values, mask, dropout, carry, divisor, gains
                )
            case "qk_sum":
                assert carry is None or isinstance(carry, QueryKeySums)
                heads, carry = attend_with_sums(
                    query, keys, values, mask, dropout, carry, divisor, gains
                )
        if local is not None:
            heads = local.unfolded(heads)
        if self.difference is not None:
            heads = self.difference(heads)
        if self.head_gain is not None:
            heads = self.head_gain(heads)
        if self.output_gate is not None:
            assert u is not None
            heads = self.output_gate(heads, u)
        # (batch, head, query, dim) -> (batch, query, head * dim)
        joined = heads.transpose(1, 2).flatten(2)
        if kept is not None:
            joined = select_tokens(joined, kept)
        return self.output(self.output_norm(joined)), carry
