"""Presets that change what attention computes, and parallel and simplified blocks."""

from dataclasses import replace
from typing import Literal

from lightning_app.blocks.attention import AttentionSpec, ShapingSpec
from lightning_app.blocks.block import BlockSpec
from lightning_app.blocks.presets.norms import post_ln
from lightning_app.blocks.presets.registry import ABSENT, PRE, preset
from lightning_app.blocks.residual import Gain
from lightning_app.blocks.stack import Stack, StackSpec, around, carry_scores, same_block


@preset(
    equation="Pre-LN; A = softmax(N(q) N(k)^T / sqrt(d_k)) in every head",
    paper="Dehghani et al. 2023, ViT-22B (2302.05442); as in Wortsman et al. 2023 (2309.14322)",
    fixes="logits of attention that grow until a row is one-hot",
)
def qk_norm(stack: Stack) -> StackSpec:
    """Pre-LN with a norm over each head of queries and keys, with learned gains."""
    attention = AttentionSpec(qk_norm="layer_norm")
    block = replace(around(PRE), self_attention=attention, cross_attention=attention)
    return same_block(stack, block, final_norm="layer_norm")


@preset(
    equation="Z_n = Q K^T / sqrt(d_k) + Z_(n-1); A_n = softmax(Z_n / n); x' = N(x + f(x))",
    paper="He et al. 2021, RealFormer (2012.11747), section 3.2",
    fixes="attention that each layer must learn from scratch",
)
def realformer(stack: Stack) -> StackSpec:
    """Post-LN with residual attention in three chains.

    Uses the running mean in models of two stacks and the running sum in a single stack, as the
    authors trained translation and BERT. Their BERT also has a LayerNorm on the embedding; here
    that is
    ``model.architecture.embedding_norm: layer_norm``; by default there is no such norm.
    """
    kind = "mean" if stack.peer_depth else "sum"
    return carry_scores(post_ln(stack), kind)


@preset(
    equation="x' = x + SA(u) + FF(u), u = N(x); N after the last block",
    paper="Wang & Komatsuzaki 2021, GPT-J; as in He & Hofmann 2023 (2311.01906), equation 7",
    fixes="sequential depth: one norm and one sum in each block",
)
def parallel(stack: Stack) -> StackSpec:
    """Pre-LN with self-attention and feed-forward in one sum.

    No paper defines the place of cross-attention: here it follows as a separate Pre-LN sub-layer.
    """
    block = replace(around(PRE), around_self=replace(PRE, skip=ABSENT), layout="parallel")
    return same_block(stack, block, final_norm="layer_norm")


# The authors' code: github.com/bobby-he/simplified_transformers. All of these gains start at 1.
FF_SKIP = "the gain of the feed-forward's skip"
FIRST_VALUE = "both gains of the first layer's V = a I + b dW"
LEARNED_FF_SKIP = "ff_skip: {learned: true}"
LEARNED_VALUE_GAINS = "value_gains: {kept: {learned: true}, change: {learned: true}}"


def _skipless(stack: Stack, attention: AttentionSpec, *, ff_skip: Gain) -> BlockSpec:
    """Return a Pre-LN block without an attention skip (He & Hofmann 2023, 2311.01906).

    The branch gains are trained; the feed-forward's starts at 0.1 sqrt(18 / L), the authors' 0.1 at
    depth 18. Cross-attention, which the paper does not have, stays an ordinary Pre-LN sub-layer.
    """
    ff_gain = Gain(value=0.1 * (18 / stack.depth) ** 0.5, learned=True)
    return BlockSpec(
        around_self=replace(PRE, skip=ABSENT, branch=Gain(learned=True)),
        around_cross=PRE,
        around_ff=replace(PRE, skip=ff_skip, branch=ff_gain),
        self_attention=attention,
    )


@preset(
    equation="y = P concat_h((alpha_h I + beta_h A_h) V_h), V_h from N(x); x' = y + b FF(N(y))",
    paper="He et al. 2023 (2302.10322), as in He & Hofmann 2023 (2311.01906), equation 4",
    fixes="the attention skip alone; the start from which the simplified blocks were found",
    differs=FF_SKIP,
    matched_by=LEARNED_FF_SKIP,
)
def v_skipinit(stack: Stack) -> StackSpec:
    """Value-SkipInit: alpha = 1, beta = 0 per head, trained; V and P free, initially orthogonal.

    The authors' script also keeps the centre C and zero queries, which are not in equation
    4.
    """
    shaping = ShapingSpec(alpha=1.0, beta=0.0, gamma=None)
    attention = AttentionSpec(shaping=shaping, value="orthogonal", output="orthogonal")
    block = _skipless(stack, attention, ff_skip=Gain())
    return same_block(stack, block, final_norm="layer_norm")


def _simplified(
    stack: Stack, *, ff_skip: Gain, layout: Literal["sequential", "parallel"]
) -> StackSpec:
    """Skipless shaped attention with identity values and projections (He & Hofmann 2023).

    alpha = beta = gamma = 1 per head, trained; W_Q = 0, V = P = I except for the first layer's
    V = I + W.
    """
    attention = AttentionSpec(
        shaping=ShapingSpec(), value="identity", output="identity", query_init="zeros"
    )
    block = replace(_skipless(stack, attention, ff_skip=ff_skip), layout=layout)
    first = replace(block, self_attention=replace(attention, value="identity_plus"))
    return StackSpec(blocks=(first, *(block,) * (stack.depth - 1)), final_norm="layer_norm")


@preset(
    equation="y = concat_h((alpha_h I + beta_h A_h - gamma_h C) N(x)_h); x' = y + b FF(N(y))",
    paper="He & Hofmann 2023 (2311.01906), equations 12-13",
    fixes="the attention skip, the value and the projection matrices: shown to be removable",
    differs=f"{FF_SKIP} and {FIRST_VALUE}",
    matched_by=f"{LEARNED_FF_SKIP}, {LEARNED_VALUE_GAINS}",
)
def sas(stack: Stack) -> StackSpec:
    """The simplified attention sub-block: no attention skip, no V, no P."""
    return _simplified(stack, ff_skip=Gain(), layout="sequential")


@preset(
    equation="x' = concat_h((alpha_h I + beta_h A_h - gamma_h C) u_h) + b FF(u), u = N(x)",
    paper="He & Hofmann 2023 (2311.01906), section 4.3",
    fixes="every skip: the identity part of the map carries the signal",
    differs=FIRST_VALUE,
    matched_by=LEARNED_VALUE_GAINS,
)
def sas_p(stack: Stack) -> StackSpec:
    """The parallel simplified block: no skip at all."""
    return _simplified(stack, ff_skip=ABSENT, layout="parallel")


@preset(
    equation="x' = concat_h((alpha_h I + beta_h A_h - gamma_h C) x_h) + b FF(x)",
    paper="He & Hofmann 2023 (2311.01906), section 4.4",
    fixes="the norms inside the blocks",
    differs=FIRST_VALUE,
    matched_by=LEARNED_VALUE_GAINS,
)
def sas_p_no_norm(stack: Stack) -> StackSpec:
    """`sas_p` without norms, except the first block's and the final one.

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
