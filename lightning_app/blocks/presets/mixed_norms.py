"""Norms that differ from layer to layer or from part to part of a block."""

from dataclasses import replace

from lightning_app.blocks.attention import AttentionSpec
from lightning_app.blocks.presets.registry import POST, PRE, preset
from lightning_app.blocks.residual import Gain, ResidualSpec
from lightning_app.blocks.stack import Stack, StackSpec, around, same_block


@preset(
    equation="l <= max(1, floor(L/4)): x' = N(x + f(x)); else x + f(N(x)); N after the last block",
    paper="Li et al. 2024, Mix-LN (2412.13795)",
    fixes="deep layers of Pre-LN that contribute little",
)
def mix_ln(stack: Stack) -> StackSpec:
    """Post-LN in the first quarter of layers, rounded down, and Pre-LN above.

    In the authors' code the number is set by hand; it runs 3 of 12 and 6 of 24 layers as Post-LN;
    that the paper rounds down is known from secondary sources. It does not treat fewer than 4
    layers, where rounding down would leave `pre_ln`: our choice is Post-LN in the first. An encoder
    and a decoder use their own depths; the authors have one stack.
    """
    first = max(1, stack.depth // 4)
    blocks = (around(POST),) * first + (around(PRE),) * (stack.depth - first)
    return StackSpec(blocks=blocks, final_norm="layer_norm")


@preset(
    equation="x' = x + f(N(x) / sqrt(l)); N after the last block",
    paper="Sun et al. 2025, LayerNorm scaling (2502.05795)",
    fixes="variance of Pre-LN that grows with depth",
)
def layer_norm_scaling(stack: Stack) -> StackSpec:
    """Pre-LN whose norms are divided by the root of their layer; the final one is not.

    Known from secondary sources.
    """
    blocks = tuple(
        around(replace(PRE, input_scale=layer**-0.5)) for layer in range(1, stack.depth + 1)
    )
    return StackSpec(blocks=blocks, final_norm="layer_norm")


@preset(
    equation="x' = N(alpha x + f(N(x))), alpha = sub-layers of the stack",
    paper="Keel (2601.19895)",
    fixes="Post-LN at great depth: norms no longer weaken the skip",
)
def keel(stack: Stack) -> StackSpec:
    """Norms before the branch and after the sum, and a skip gain equal to the number of sub-layers.

    Known from secondary sources.
    """
    residual = ResidualSpec(
        norm_input="layer_norm", norm_sum="layer_norm", skip=Gain(value=float(stack.sub_layers))
    )
    return same_block(stack, around(residual), final_norm="none")


@preset(
    equation="y = N(x + P concat_h(softmax(N(q) N(k)^T / sqrt(d_k)) N(v))); x' = y + FF(y)",
    paper="Zhuo et al. 2025, HybridNorm (2503.04598)",
    fixes="unstable attention by norms inside it, with the feed-forward of Post-LN",
)
def hybrid_norm(stack: Stack) -> StackSpec:
    """Norms of queries, keys and values in every head, and one before feed-forward and its skip.

    That norm is on the sum of the last attention: in a decoder, which the paper does not treat,
    on that of cross-attention, whose heads are normalised as well. A final norm. Known from
    secondary sources.
    """
    attention = AttentionSpec(qk_norm="layer_norm", value_norm="layer_norm")
    last = "around_cross" if stack.cross else "around_self"
    block = replace(
        around(ResidualSpec()), self_attention=attention, cross_attention=attention, **{last: POST}
    )
    return same_block(stack, block, final_norm="layer_norm")
