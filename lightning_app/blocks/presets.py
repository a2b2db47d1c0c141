"""The named variants: one pure function each, from a stack to its specification.

A new mixture of old parts is one function here. Letters: x the stream, N a norm, SA self-attention,
CA cross-attention, FF the feed-forward, A the attention map, C its centre, n the layer from 1.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from lightning_app.blocks.attention import AttentionSpec, ShapingSpec
from lightning_app.blocks.block import BlockSpec
from lightning_app.blocks.norm import Norm
from lightning_app.blocks.residual import Gain, ResidualSpec

ABSENT = Gain(value=0.0)


@dataclass(frozen=True, kw_only=True)
class Stack:
    """Where blocks stand. `peer_depth` is the other stack's depth, 0 where there is none."""

    side: Literal["encoder", "decoder"]
    depth: int
    peer_depth: int = 0

    def __post_init__(self) -> None:
        if self.depth < 1:
            raise ValueError(f"{self.side}_depth {self.depth}: a stack has at least one block")


@dataclass(frozen=True, kw_only=True)
class StackSpec:
    """The resolved specification of a stack, one block a layer, and the norm after the last."""

    blocks: tuple[BlockSpec, ...]
    final_norm: Norm = "none"

    def __post_init__(self) -> None:
        """Refuse streams that explode: a sum over layers of (branch / skip)^2 over 1, no norm.

        SkipInit's 1 / sqrt(depth) and ReZero's 0 pass, as do blocks without a skip.
        """
        for name in ("around_self", "around_ff"):
            growth = 0.0
            for block in self.blocks:
                residual: ResidualSpec = getattr(block, name)
                # Both branches of a parallel block join the skip of the feed-forward.
                skip = (block.around_ff if block.layout == "parallel" else residual).skip
                if not residual.unnormalized or skip.absent or skip.value == 0.0:
                    continue
                growth += (residual.branch.value / skip.value) ** 2
            if growth > 1.0 + 1e-9:
                raise ValueError(
                    "norm_placement none with an ordinary attention_skip or ff_skip explodes at "
                    "initialisation; use it with skipless attention or branch gains that start at "
                    "1 / sqrt(depth) or less"
                )


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A named variant with what `ablate blocks` says of it."""

    name: str
    equation: str
    paper: str
    fixes: str
    build: Callable[[Stack], StackSpec]

    def __call__(self, stack: Stack) -> StackSpec:
        return self.build(stack)


_presets: dict[str, Preset] = {}
PRESETS: Mapping[str, Preset] = _presets


def preset(
    *, equation: str, paper: str, fixes: str
) -> Callable[[Callable[[Stack], StackSpec]], Preset]:
    """Register a function as a preset under its own name."""

    def register(build: Callable[[Stack], StackSpec]) -> Preset:
        name = getattr(build, "__name__")  # noqa: B009 - a Callable need not have a name
        _presets[name] = Preset(name=name, equation=equation, paper=paper, fixes=fixes, build=build)
        return _presets[name]

    return register


def same_block(stack: Stack, block: BlockSpec, final_norm: Norm) -> StackSpec:
    """Return a stack of `depth` equal blocks."""
    return StackSpec(blocks=(block,) * stack.depth, final_norm=final_norm)


def around(residual: ResidualSpec) -> BlockSpec:
    """Return a sequential block with `residual` around every sub-layer."""
    return BlockSpec(around_self=residual, around_cross=residual, around_ff=residual)


def carry_scores(spec: StackSpec, kind: Literal["none", "sum", "mean"]) -> StackSpec:
    """Return `spec` with residual scores in every chain: encoder self, decoder self, cross.

    ``mean`` divides the logits of layer n by n; the carry itself stays a sum.
    """

    def carried(attention: AttentionSpec, layer: int) -> AttentionSpec:
        divisor = float(layer) if kind == "mean" else 1.0
        return replace(attention, carry_scores=kind != "none", score_divisor=divisor)

    blocks = tuple(
        replace(
            block,
            self_attention=carried(block.self_attention, layer),
            cross_attention=carried(block.cross_attention, layer),
        )
        for layer, block in enumerate(spec.blocks, start=1)
    )
    return replace(spec, blocks=blocks)


@preset(
    equation="x' = N(x + f(x))",
    paper="Vaswani et al. 2017 (1706.03762); Xiong et al. 2020 (2002.04745), table 1",
    fixes="the original block; needs warm-up",
)
def post_ln(stack: Stack) -> StackSpec:
    """``x' = N(x + f(x))`` for every sub-layer, no norm after the last block."""
    return same_block(stack, around(ResidualSpec(norm_sum="layer_norm")), final_norm="none")


@preset(
    equation="x' = x + f(N(x)); N after the last block",
    paper="Xiong et al. 2020 (2002.04745), table 1",
    fixes="gradients near the output that fall as 1/sqrt(depth); trains without warm-up",
)
def pre_ln(stack: Stack) -> StackSpec:
    """``x' = x + f(N(x))`` for every sub-layer, one final norm in each stack."""
    block = around(ResidualSpec(norm_input="layer_norm"))
    return same_block(stack, block, final_norm="layer_norm")


@preset(
    equation="Z_n = Q K^T / sqrt(d_k) + Z_(n-1); A_n = softmax(Z_n / n); x' = N(x + f(x))",
    paper="He et al. 2021, RealFormer (2012.11747), section 3.2",
    fixes="attention that each layer must find anew",
)
def realformer(stack: Stack) -> StackSpec:
    """Post-LN with residual attention in three chains.

    The running mean where there are two stacks and the running sum in an encoder alone, as the
    authors trained translation and BERT.
    """
    kind = "mean" if stack.peer_depth else "sum"
    return carry_scores(post_ln(stack), kind)


@preset(
    equation="x' = x + SA(u) + FF(u), u = N(x); N after the last block",
    paper="Wang & Komatsuzaki 2021, GPT-J; as in He & Hofmann 2023 (2311.01906), equation 7",
    fixes="depth in sequence: one norm and one sum a block",
)
def parallel(stack: Stack) -> StackSpec:
    """Pre-LN with self-attention and feed-forward in one sum.

    No paper says where cross-attention stands: here it follows as a Pre-LN sub-layer of its own.
    """
    spec = pre_ln(stack)
    block = spec.blocks[0]
    block = replace(block, around_self=replace(block.around_self, skip=ABSENT), layout="parallel")
    return same_block(stack, block, final_norm=spec.final_norm)


def _simplified(stack: Stack, *, skip_ff: Gain, layout: Literal["sequential", "parallel"]):
    """Skipless shaped attention with identity values and projections (He & Hofmann 2023).

    alpha = beta = gamma = 1 a head and trained, W_Q = 0, V = P = I but for the first layer's
    V = I + W; the feed-forward's gain is trained from 0.1 sqrt(18 / depth), the authors' 0.1 at
    depth 18. Cross-attention, which the paper does not have, stays an ordinary Pre-LN sub-layer.
    """
    pre = ResidualSpec(norm_input="layer_norm")
    ff_gain = Gain(value=0.1 * (18 / stack.depth) ** 0.5, learned=True)
    attention = AttentionSpec(
        shaping=ShapingSpec(), value="identity", output="identity", query_init="zeros"
    )
    block = BlockSpec(
        around_self=replace(pre, skip=ABSENT, branch=Gain(learned=True)),
        around_cross=pre,
        around_ff=replace(pre, skip=skip_ff, branch=ff_gain),
        self_attention=attention,
        layout=layout,
    )
    first = replace(block, self_attention=replace(attention, value="identity_plus"))
    return StackSpec(blocks=(first, *(block,) * (stack.depth - 1)), final_norm="layer_norm")


@preset(
    equation="y = concat_h((alpha_h I + beta_h A_h - gamma_h C) N(x)_h); x' = y + b FF(N(y))",
    paper="He & Hofmann 2023 (2311.01906), equations 12-13",
    fixes="the attention skip, the value and the projection matrices: shown to be removable",
)
def sas(stack: Stack) -> StackSpec:
    """The simplified attention sub-block: no attention skip, no V, no P."""
    return _simplified(stack, skip_ff=Gain(), layout="sequential")


@preset(
    equation="x' = concat_h((alpha_h I + beta_h A_h - gamma_h C) u_h) + b FF(u), u = N(x)",
    paper="He & Hofmann 2023 (2311.01906), section 4.3",
    fixes="every skip: the identity part of the map carries the signal",
)
def sas_p(stack: Stack) -> StackSpec:
    """The parallel simplified block: no skip at all."""
    return _simplified(stack, skip_ff=ABSENT, layout="parallel")


@preset(
    equation="x' = concat_h((alpha_h I + beta_h A_h - gamma_h C) x_h) + b FF(x)",
    paper="He & Hofmann 2023 (2311.01906), section 4.4",
    fixes="the norms inside the blocks",
)
def sas_p_no_norm(stack: Stack) -> StackSpec:
    """`sas_p` without its norms, but for the first block's and the final one.

    The authors' code keeps those two. Cross-attention stays ordinary, with its own norm.
    """
    spec = sas_p(stack)
    first, *rest = spec.blocks
    bare = tuple(
        replace(
            block,
            around_self=replace(block.around_self, norm_input="none"),
            around_ff=replace(block.around_ff, norm_input="none"),
        )
        for block in rest
    )
    return replace(spec, blocks=(first, *bare))
