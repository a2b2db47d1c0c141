"""Branches that are small at the start, with or without a norm."""

from dataclasses import replace

from lightning_app.blocks.block import InitSpec
from lightning_app.blocks.presets.registry import PRE, preset
from lightning_app.blocks.residual import Gain, ResidualSpec
from lightning_app.blocks.stack import Stack, StackSpec, around, same_block


@preset(
    equation="x' = x + a f(x), one a for each layer, 0 at the start",
    paper="Bachlechner et al. 2020, ReZero (2003.04887)",
    fixes="signal through depth without a norm: a layer starts as the identity",
)
def rezero(stack: Stack) -> StackSpec:
    """No norms; the sub-layers of a layer share one gain, as in the authors' code.

    ``share_branch_gain: false`` gives each its own, which is `skipinit`.
    """
    spec = skipinit(stack)
    return same_block(stack, replace(spec.blocks[0], share_branch_gain=True), final_norm="none")


@preset(
    equation="x' = x + a f(x), one a for each sub-layer, 0 at the start",
    paper="De & Smith 2020, SkipInit (2002.10444)",
    fixes="the same as ReZero, with one gain for each sub-layer",
)
def skipinit(stack: Stack) -> StackSpec:
    """SkipInit's scalar at the end of every residual branch, carried over from residual networks.

    Known from secondary sources.
    """
    gain = Gain(value=0.0, learned=True)
    return same_block(stack, around(ResidualSpec(branch=gain)), final_norm="none")


@preset(
    equation="x' = x + diag(lambda) f(N(x)), lambda small at the start; N after the last block",
    paper="Touvron et al. 2021, CaiT (2103.17239)",
    fixes="deep Pre-LN: every layer starts close to the identity",
)
def layer_scale(stack: Stack) -> StackSpec:
    """Pre-LN with a learned vector on each branch: 0.1 to depth 18, 1e-5 to 24, 1e-6 beyond.

    Known from secondary sources.
    """
    start = 0.1 if stack.depth <= 18 else 1e-5 if stack.depth <= 24 else 1e-6
    gain = Gain(value=start, learned=True, vector=True)
    return same_block(stack, around(replace(PRE, branch=gain)), final_norm="layer_norm")


@preset(
    equation="x' = x + f(x); embeddings, V, P, W1, W2 start smaller",
    paper="Huang et al. 2020, T-Fixup (ICML 2020)",
    fixes="the need for both norm and warm-up, by the initial values alone",
)
def t_fixup(stack: Stack) -> StackSpec:
    """No norm; with N encoder and M decoder layers, over Xavier uniform:

    embeddings times (9N)^(-1/4); values, outputs and feed-forward times 0.67 N^(-1/4) in the
    encoder and (9M)^(-1/4) in the decoder. The paper does not treat a single stack: here it has the
    values of an encoder, causal or not, since its blocks have the same two sub-layers. The
    authors trained it in float32; half precision overflows.
    """
    scale = (9 * stack.depth) ** -0.25 if stack.cross else 0.67 * stack.depth**-0.25
    encoder_depth = stack.peer_depth if stack.cross else stack.depth
    block = replace(around(ResidualSpec()), init=InitSpec(value=scale, output=scale, ff=scale))
    spec = same_block(stack, block, final_norm="none")
    return replace(spec, embedding_gain=(9 * encoder_depth) ** -0.25)
