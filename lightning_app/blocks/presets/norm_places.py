"""The same norms at every sub-layer: after the sum, before the branch, or on both sides."""

from dataclasses import replace

from lightning_app.blocks.attention import AttentionSpec
from lightning_app.blocks.block import BlockSpec
from lightning_app.blocks.presets.registry import POST, PRE, preset
from lightning_app.blocks.stack import Stack, StackSpec, around, same_block


@preset(
    equation="x' = N(x + f(x))",
    paper="Vaswani et al. 2017 (1706.03762); Xiong et al. 2020 (2002.04745), table 1",
    fixes="the original block; needs warm-up",
)
def post_ln(stack: Stack) -> StackSpec:
    """``x' = N(x + f(x))`` for every sub-layer, no norm after the last block.

    BERT's official code has a LayerNorm on the embedding as well; here that is
    ``model.architecture.embedding_norm: layer_norm``, none by default.
    """
    return same_block(stack, around(POST), final_norm="none")


@preset(
    equation="x' = x + f(N(x)); N after the last block",
    paper="Xiong et al. 2020 (2002.04745), table 1",
    fixes="gradients near the output that fall as 1/sqrt(depth); stable without warm-up",
)
def pre_ln(stack: Stack) -> StackSpec:
    """``x' = x + f(N(x))`` for every sub-layer, one final norm in each stack."""
    return same_block(stack, around(PRE), final_norm="layer_norm")


@preset(
    equation="x' = x + N(f(N(x))); N on the embedding and after the last block",
    paper="Kim et al. 2025, Peri-LN (2502.02732)",
    fixes="activations of Pre-LN that grow with depth and training",
)
def peri_ln(stack: Stack) -> StackSpec:
    """Norms on both sides of every branch, and one on the input of the stack.

    Known from secondary sources.
    """
    return replace(sandwich_ln(stack), input_norm="layer_norm")


@preset(
    equation="x' = x + N(f(N(x))); N after the last block",
    paper="Ding et al. 2021, CogView (2105.13290)",
    fixes="overflow of branch outputs in half precision",
)
def sandwich_ln(stack: Stack) -> StackSpec:
    """Norms on both sides of every branch. Known from secondary sources."""
    block = around(replace(PRE, norm_branch="layer_norm"))
    return same_block(stack, block, final_norm="layer_norm")


@preset(
    equation="x' = x + N(P concat_h(g_h head_h)), then + W2 N(act(W1 u)); heads and u from N(x)",
    paper="Shleifer et al. 2021, NormFormer (2110.09456)",
    fixes="gradients of Pre-LN that are larger in early layers",
)
def normformer(stack: Stack) -> StackSpec:
    """Pre-LN with a learned gain for each head, a norm after each attention and one inside the FF.

    The head gains come before the output projection, as in the paper; the published code applies
    them after it, although a column there no longer belongs to one head. Cross-attention is treated
    as self-attention is. The paper's learned vector on the feed-forward's skip, advised for small
    models, is the axis ``ff_skip: {value: 1, learned: true, vector: true}``.
    """
    attention = AttentionSpec(head_gain=True)
    normed = replace(PRE, norm_branch="layer_norm")
    block = BlockSpec(
        around_self=normed,
        around_cross=normed,
        around_ff=PRE,
        self_attention=attention,
        cross_attention=attention,
        ff_norm="layer_norm",
    )
    return same_block(stack, block, final_norm="layer_norm")
