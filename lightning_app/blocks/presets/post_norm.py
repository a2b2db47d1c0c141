"""Post-LN that is trainable at depth: by its skips, its initial values, or a second stream."""

from dataclasses import replace

from lightning_app.blocks.block import InitSpec
from lightning_app.blocks.presets.norm_places import post_ln
from lightning_app.blocks.presets.registry import POST, preset
from lightning_app.blocks.residual import Gain
from lightning_app.blocks.stack import Stack, StackSpec, around, same_block


def deepnorm_gains(stack: Stack) -> tuple[float, float]:
    """Return DeepNorm's alpha and beta (2203.00555, table of section 3).

    ===================================  ========================  =========================
    stack of depth L, peer of depth M    alpha                     beta
    ===================================  ========================  =========================
    one stack alone                      (2L)^(1/4)                (8L)^(-1/4)
    encoder of an encoder-decoder        0.81 (L^4 M)^(1/16)       0.87 (L^4 M)^(-1/16)
    decoder of an encoder-decoder        (3L)^(1/4)                (12L)^(-1/4)
    ===================================  ========================  =========================
    """
    depth, peer = stack.depth, stack.peer_depth
    if stack.cross:
        return (3 * depth) ** 0.25, (12 * depth) ** -0.25
    if peer == 0:
        return (2 * depth) ** 0.25, (8 * depth) ** -0.25
    root = (depth**4 * peer) ** (1 / 16)
    return 0.81 * root, 0.87 / root


@preset(
    equation="x' = N(alpha x + f(x)), alpha > 1; V, P, W1, W2 start smaller by beta",
    paper="Wang et al. 2022, DeepNet (2203.00555)",
    fixes="the size of the first updates of Post-LN, up to a thousand layers",
)
def deepnorm(stack: Stack) -> StackSpec:
    """Post-LN with a larger skip and smaller matrices, by the depth of both stacks.

    Matrices are Xavier normal: gain beta for values, outputs and the feed-forward, gain 1 for
    queries and keys. The encoder's beta is the paper's 0.87 (L^4 M)^(-1/16); one published
    implementation has 1.15 there.
    """
    alpha, beta = deepnorm_gains(stack)
    block = replace(
        around(replace(POST, skip=Gain(value=alpha))),
        init=InitSpec(distribution="normal", query_key=1.0, value=beta, output=beta, ff=beta),
    )
    return same_block(stack, block, final_norm="none")


@preset(
    equation="Post-LN; the layer's input joins its last sum: x' = N(y + FF(y) + x)",
    paper="Takase et al. 2022, B2T connection (2206.00330)",
    fixes="gradients of Post-LN that the norms weaken from layer to layer",
)
def b2t(stack: Stack) -> StackSpec:
    """Post-LN with a skip from the bottom of a layer to its last norm.

    Every matrix of a layer starts smaller by 1/sqrt(L), as in the authors' code.
    """
    scale = stack.depth**-0.5
    init = InitSpec(query_key=2**-0.5 * scale, value=2**-0.5 * scale, output=scale, ff=scale)
    block = replace(around(POST), bottom_to_top=True, init=init)
    return same_block(stack, block, final_norm="none")


@preset(
    equation="x' = N(omega * x + f(x)), omega_k^2 = 1 + sum_(j<k) Var f_j at the start",
    paper="Liu et al. 2020, Admin (2004.08249)",
    fixes="the share of each branch in the sum, which amplifies updates of Post-LN",
)
def admin(stack: Stack) -> StackSpec:
    """Post-LN with a learned vector on each skip, initialised by one profiling pass.

    See `lightning_app.models.admin_init`.
    """
    skip = Gain(learned=True, vector=True, profiled=True)
    return same_block(stack, around(replace(POST, skip=skip)), final_norm="none")


@preset(
    equation="o = f(x); r' = r + o; x' = N(x + o); the stack gives x + N(r)",
    paper="Xie et al. 2023, ResiDual (2304.14802)",
    fixes="vanishing gradients of Post-LN without the collapse of Pre-LN's deep layers",
)
def dual_stream(stack: Stack) -> StackSpec:
    """A Post-LN stream beside the plain sum of all branches. Not residual attention.

    The authors may scale the sum in half precision, which its norm undoes; in float32 and bfloat16
    it needs no scale.
    """
    return replace(post_ln(stack), dual_stream=True, final_norm="layer_norm")
