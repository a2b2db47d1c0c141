"""Changes inside attention."""

from dataclasses import replace

from lightning_app.blocks.attention import AttentionSpec
from lightning_app.blocks.presets.norm_places import post_ln
from lightning_app.blocks.presets.registry import PRE, preset
from lightning_app.blocks.stack import Stack, StackSpec, around, carry_scores, same_block


@preset(
    equation="Pre-LN; A = softmax(N(q) N(k)^T / sqrt(d_k)) in every head",
    paper="Dehghani et al. 2023, ViT-22B (2302.05442); as in Wortsman et al. 2023 (2309.14322)",
    fixes="logits of attention that grow until a row is one-hot",
)
def qk_norm(stack: Stack) -> StackSpec:
    """Pre-LN with a norm over each head of queries and keys, gains learned."""
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

    The running mean in models of two stacks and the running sum in a single stack, as the authors
    trained translation and BERT. Their BERT has a LayerNorm on the embedding as well; here that is
    ``model.architecture.embedding_norm: layer_norm``, none by default.
    """
    kind = "mean" if stack.peer_depth else "sum"
    return carry_scores(post_ln(stack), kind)
