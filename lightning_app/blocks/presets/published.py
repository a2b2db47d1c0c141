"""The presets of papers: first those that change the positions of norms, the skips and the initial
size of a branch, then those that change attention, and parallel and simplified blocks."""

import math
from dataclasses import replace
from typing import Literal

from lightning_app.blocks.attention import AttentionSpec, ShapingSpec
from lightning_app.blocks.block import BlockSpec, InitSpec
from lightning_app.blocks.presets.registry import ABSENT, POST, PRE, preset
from lightning_app.blocks.residual import Gain, ResidualSpec
from lightning_app.blocks.stack import (
    BranchRamp,
    Stack,
    StackSpec,
    around,
    carry_scores,
    differential_heads,
    ramped,
    same_block,
)


@preset(
    equation="x' = N(x + f(x))",
    paper="Vaswani et al. 2017 (1706.03762); Xiong et al. 2020 (2002.04745), table 1",
    fixes="the original block; needs warm-up",
)
def post_ln(stack: Stack) -> StackSpec:
    """``x' = N(x + f(x))`` for every sub-layer, with no norm after the last block.

    BERT's official code also has a LayerNorm on the embedding; here that is
    ``model.architecture.embedding_norm: layer_norm``; by default there is no such norm.
    """
    return same_block(stack, around(POST), final_norm="none")


@preset(
    equation="x' = x + f(N(x)); N after the last block",
    paper="Xiong et al. 2020 (2002.04745), table 1",
    fixes="gradients near the output that fall as 1/sqrt(depth); stable without warm-up",
)
def pre_ln(stack: Stack) -> StackSpec:
    """``x' = x + f(N(x))`` for every sub-layer, with a final norm in each stack."""
    return same_block(stack, around(PRE), final_norm="layer_norm")


@preset(
    equation="x' = x + N(f(N(x))); N on the embedding and after the last block",
    paper="Kim et al. 2025, Peri-LN (2502.02732)",
    fixes="activations of Pre-LN that grow with depth and training",
)
def peri_ln(stack: Stack) -> StackSpec:
    """Norms on both sides of every branch, and one on the input of the stack.

    Based on secondary sources.
    """
    return replace(sandwich_ln(stack), input_norm="layer_norm")


@preset(
    equation="x' = x + N(f(N(x))); N after the last block",
    paper="Ding et al. 2021, CogView (2105.13290)",
    fixes="overflow of branch outputs in half precision",
)
def sandwich_ln(stack: Stack) -> StackSpec:
    """Norms on both sides of every branch. Based on secondary sources."""
    block = around(replace(PRE, norm_branch="layer_norm"))
    return same_block(stack, block, final_norm="layer_norm")


@preset(
    equation="x' = x + N(P concat_h(g_h head_h)), then + W2 N(act(W1 u)); heads and u from N(x)",
    paper="Shleifer et al. 2021, NormFormer (2110.09456)",
    fixes="gradients of Pre-LN that are larger in early layers",
)
def normformer(stack: Stack) -> StackSpec:
    """Pre-LN with a learned gain per head, a norm after each attention and one inside the FF.

    The head gains come before the output projection, as in the paper; the published code applies
    them after it, although a column there no longer belongs to one head. Cross-attention is treated
    as self-attention is. The paper's learned vector on the feed-forward's skip, advised for small
    models, is the axis ``ff_skip: {value: 1, learned: true, vector: true}``.
    """
    normed = replace(PRE, norm_branch="layer_norm")
    block = around(normed, AttentionSpec(head_gain=True))
    block = replace(block, around_ff=PRE, ff_norm="layer_norm")
    return same_block(stack, block, final_norm="layer_norm")


def deepnorm_gains(stack: Stack) -> tuple[float, float]:
    """Return DeepNorm's alpha and beta (2203.00555, table of section 3).

    ===================================  ========================  =========================
    stack of depth L, peer of depth M    alpha                     beta
    ===================================  ========================  =========================
    single stack                         (2L)^(1/4)                (8L)^(-1/4)
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
    implementation uses 1.15 instead.
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

    Every matrix of a layer is initially scaled by 1/sqrt(L), as in the authors' code.
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

    See `lightning_app.models.initialization`.
    """
    skip = Gain(learned=True, vector=True, profiled=True)
    return same_block(stack, around(replace(POST, skip=skip)), final_norm="none")


@preset(
    equation="o = f(x); r' = r + o; x' = N(x + o); the stack gives x + N(r)",
    paper="Xie et al. 2023, ResiDual (2304.14802)",
    fixes="vanishing gradients of Post-LN without the collapse of Pre-LN's deep layers",
)
def dual_stream(stack: Stack) -> StackSpec:
    """A Post-LN stream alongside the plain sum of all branches. Not residual attention.

    The authors may scale the sum in half precision, which its norm cancels; in float32 and bfloat16
    it needs no scale.
    """
    return replace(post_ln(stack), dual_stream=True, final_norm="layer_norm")


@preset(
    equation="x' = x + a f(x), one a for each layer, 0 at the start",
    paper="Bachlechner et al. 2020, ReZero (2003.04887)",
    fixes="signal through depth without a norm: a layer starts as the identity",
)
def rezero(stack: Stack) -> StackSpec:
    """No norms; the sub-layers of a layer share one gain, as in the authors' code.

    ``share_branch_gain: false`` gives each its own gain, which is `skipinit`.
    """
    spec = skipinit(stack)
    return same_block(stack, replace(spec.blocks[0], share_branch_gain=True), final_norm="none")


@preset(
    equation="x' = x + a f(x), one a for each sub-layer, 0 at the start",
    paper="De & Smith 2020, SkipInit (2002.10444)",
    fixes="the same as ReZero, with one gain for each sub-layer",
)
def skipinit(stack: Stack) -> StackSpec:
    """SkipInit's scalar at the end of every residual branch, adapted from residual networks.

    Based on secondary sources.
    """
    gain = Gain(value=0.0, learned=True)
    return same_block(stack, around(ResidualSpec(branch=gain)), final_norm="none")


@preset(
    equation="x' = x + diag(lambda) f(N(x)), lambda small at the start; N after the last block",
    paper="Touvron et al. 2021, CaiT (2103.17239)",
    fixes="deep Pre-LN: every layer starts close to the identity",
)
def layer_scale(stack: Stack) -> StackSpec:
    """Pre-LN with a learned vector on each branch: 0.1 up to depth 18, 1e-5 up to 24, 1e-6 beyond.

    Based on secondary sources.
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
    """No norms; with N encoder and M decoder layers, relative to Xavier uniform:

    embeddings times (9N)^(-1/4); values, outputs and feed-forward times 0.67 N^(-1/4) in the
    encoder and (9M)^(-1/4) in the decoder. The paper does not treat a single stack: here it uses
    the values of an encoder, causal or not, since its blocks have the same two sub-layers. The
    authors trained it in float32; half precision overflows.
    """
    scale = (9 * stack.depth) ** -0.25 if stack.cross else 0.67 * stack.depth**-0.25
    encoder_depth = stack.peer_depth if stack.cross else stack.depth
    block = replace(around(ResidualSpec()), init=InitSpec(value=scale, output=scale, ff=scale))
    spec = same_block(stack, block, final_norm="none")
    return replace(spec, embedding_gain=(9 * encoder_depth) ** -0.25)


@preset(
    equation="l <= max(1, floor(L/4)): x' = N(x + f(x)); else x + f(N(x)); N after the last block",
    paper="Li et al. 2024, Mix-LN (2412.13795)",
    fixes="deep layers of Pre-LN that contribute little",
)
def mix_ln(stack: Stack) -> StackSpec:
    """Post-LN in the first quarter of the layers, rounded down, and Pre-LN above.

    In the authors' code the number is set by hand; it uses Post-LN in 3 of 12 and 6 of 24 layers;
    that the paper rounds down is taken from secondary sources. It does not cover fewer than 4
    layers, where rounding down would leave `pre_ln`: we use Post-LN in the first layer. An encoder
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
    """Pre-LN with each norm divided by the square root of its layer, except the final norm.

    Based on secondary sources.
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

    Based on secondary sources.
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
    """Norms of queries, keys and values in every head, and one before feed-forward and skip.

    That norm applies to the sum of the last attention: in a decoder, which the paper does not
    cover, to that of cross-attention, whose heads are normalised as well. With a final norm. Based
    on secondary sources.
    """
    attention = AttentionSpec(qk_norm="layer_norm", value_norm="layer_norm")
    last = "around_cross" if stack.cross else "around_self"
    block = replace(around(ResidualSpec(), attention), **{last: POST})
    return same_block(stack, block, final_norm="layer_norm")


@preset(
    equation="Pre-LN; A = softmax(N(q) N(k)^T / sqrt(d_k)) in every head",
    paper="Dehghani et al. 2023, ViT-22B (2302.05442); as in Wortsman et al. 2023 (2309.14322)",
    fixes="logits of attention that grow until a row is one-hot",
)
def qk_norm(stack: Stack) -> StackSpec:
    """Pre-LN with a norm over each head of queries and keys, with learned gains."""
    block = around(PRE, AttentionSpec(qk_norm="layer_norm"))
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


@preset(
    equation="u = x + N(y); x' = N(x + f(N(u)) / sqrt(2 l)), y' = y + f(N(u)); end: N(x + N(y))",
    paper="Li et al. 2026, SiameseNorm (2602.08064)",
    fixes="the choice between Post-LN's normalised stream and Pre-LN's plain sum: it has both",
)
def siamese_norm(stack: Stack) -> StackSpec:
    """A normalised and a plain stream, read together by every sub-layer.

    As in the authors' vision model; its norms start at one in both streams. Their language model
    is wired otherwise in the half of the attention.
    """
    residual = ResidualSpec(norm_input="layer_norm", norm_sum="layer_norm")
    spec = same_block(stack, around(residual), final_norm="layer_norm")
    return replace(spec, stream="siamese")


@preset(
    equation="u = A_m^T H; H' = A_r^T H + B^T f(N(u)), H four states; N(sum of H) at the end",
    paper="Zhu et al. 2024, Hyper-Connections (2409.19606)",
    fixes="the trade-off between vanishing gradients and collapse that one stream has to make",
)
def hyper_connections(stack: Stack) -> StackSpec:
    """Pre-LN with four parallel states that every sub-layer mixes, by weights that depend on them.

    At the start it equals `pre_ln`. ``stream: hyper_static`` has fixed weights, and
    ``streams`` sets the number of states. The authors also scale output matrices by the number of
    states, in a direction that we could not verify: omitted.
    """
    return replace(pre_ln(stack), stream="hyper_dynamic", streams=4)


@preset(
    equation="u = h^T H; H' = M^T H + 2 sigmoid(..)^T f(N(u)), M doubly stochastic, H four states",
    paper="Xie et al. 2025, mHC (2512.24880)",
    fixes="products of mixing matrices that amplify hyper-connections in deep models",
)
def mhc(stack: Stack) -> StackSpec:
    """Hyper-connections whose states are mixed by doubly stochastic matrices.

    As in transformers' code of DeepSeek-V4, start included: there every mixing matrix is close to
    1/4 everywhere. No training code known to us starts so: that of mHC-lite mixes nearly by the
    identity. The paper starts otherwise too, and its values are not known to us.
    """
    return replace(pre_ln(stack), stream="hyper_manifold", streams=4)


@preset(
    equation="u = sum_i softmax_i(w . RMSNorm(v_i)) v_i, v_i the embedding and all f(N(u)) so far",
    paper="Kimi Team 2026, Attention Residuals (2603.15031)",
    fixes="branches that the growing sum of Pre-LN dilutes",
)
def attention_residuals(stack: Stack) -> StackSpec:
    """Pre-LN whose sub-layers read a softmax over depth in place of the sum, in the full form.

    At the start it equals `pre_ln`, since the norms cancel the difference between a
    mean and a sum. Not residual attention, which carries scores.
    """
    return replace(pre_ln(stack), stream="attention")


@preset(
    equation="Pre-LN; after layer i: x = sum_(j <= i) w_ij X_j, X_j the output of layer j",
    paper="Pagliardini et al. 2024, DenseFormer (2402.02622)",
    fixes="early states that later layers can reach only through the sum",
)
def denseformer(stack: Stack) -> StackSpec:
    """Pre-LN with a learned average over depth after every layer; at the start it is `pre_ln`."""
    return replace(pre_ln(stack), stream="average")


@preset(
    equation="Pre-LN; (concat_h(head_h) * sigmoid(u W_g)) P, u = N(x), in every attention",
    paper="Qiu et al. 2025, Gated Attention (2505.06708)",
    fixes="attention sinks, and large activations; said to tolerate larger rates",
)
def gated_attention(stack: Stack) -> StackSpec:
    """Pre-LN with a gate for each entry of the heads, which starts near 1/2.

    ``output_gate: head`` has one gate for each head. Cross-attention, which the paper does not
    have, is gated by the decoder's u.
    """
    block = around(PRE, AttentionSpec(output_gate="element"))
    return same_block(stack, block, final_norm="layer_norm")


@preset(
    equation="Pre-LN; V_n <- (V_1 + V_n) / 2 in self-attention from layer 2 on",
    paper="Zhou et al. 2024, ResFormer (2410.17897)",
    fixes="attention that concentrates on few tokens in deep layers",
)
def resformer(stack: Stack) -> StackSpec:
    """Pre-LN whose values are averaged with those of the first layer, as in the published code.

    ``value_carry: learned`` trains both shares.
    """
    first = around(PRE)
    other = replace(first, self_attention=AttentionSpec(value_carry="half"))
    blocks = (first, *(other,) * (stack.depth - 1))
    return StackSpec(blocks=blocks, final_norm="layer_norm")


@preset(
    equation="x' = x + N(f(x)); N after the last block; norms of queries and keys; N is RMSNorm",
    paper="Team OLMo 2025, OLMo 2 (2501.00656)",
    fixes="growth of the stream, without a norm on it",
)
def reordered_norm(stack: Stack) -> StackSpec:
    """Norms of every branch only, and of queries and keys.

    Theirs of queries and keys are over all heads together, ours over each head, which OLMo's code
    has as an option.
    """
    block = around(ResidualSpec(norm_branch="rms_norm"), AttentionSpec(qk_norm="rms_norm"))
    return same_block(stack, block, final_norm="rms_norm")


@preset(
    equation="x' = b x + a f(N(x)), a and b learned from 1; N after the last block",
    paper="Menghani et al. 2025, LAuReL-RW (2411.07501)",
    fixes="the equal weights of skip and branch",
)
def laurel(stack: Stack) -> StackSpec:
    """Pre-LN with a learned scalar on every skip and branch.

    The scalars are free and start at 1, which is ours. The paper advises to normalise them by a
    softmax or a sigmoid, so that they cannot grow without bound.
    """
    learned = Gain(learned=True)
    block = around(replace(PRE, skip=learned, branch=learned))
    return same_block(stack, block, final_norm="layer_norm")


@preset(
    equation="x' = x + f(N(x)) / sqrt(L); N after the last block",
    paper="Yang et al. 2023, depth-muP (2310.02244)",
    fixes="a stream whose variance grows with depth",
)
def inverse_sqrt_depth(stack: Stack) -> StackSpec:
    """Pre-LN with branches divided by the root of the depth, without depth-muP's rates."""
    branch = Gain(value=stack.depth**-0.5)
    return same_block(stack, around(replace(PRE, branch=branch)), final_norm="layer_norm")


@preset(
    equation="x' = x + f(N(x)) / L; N after the last block",
    paper="Dey et al. 2025, CompleteP (2505.01618)",
    fixes="layers that change less the deeper a model is, and rates that depend on depth",
)
def inverse_depth(stack: Stack) -> StackSpec:
    """Pre-LN with branches divided by the depth, without CompleteP's rates and epsilon."""
    branch = Gain(value=1.0 / stack.depth)
    return same_block(stack, around(replace(PRE, branch=branch)), final_norm="layer_norm")


@preset(
    equation="Pre-LN; N(concat_h(A_h V_h)) P, W_2 N(act(W_1 u)); V, P, W_1, W_2 start larger by g",
    paper="Wang et al. 2022, Magneto (2210.06423)",
    fixes="updates that grow with depth, by norms inside sub-layers and a larger start",
)
def sub_ln(stack: Stack) -> StackSpec:
    """Pre-LN with a norm before each output matrix, cross-attention aside.

    The matrices V, P, W_1 and W_2 are g times as large at the start, again without those of
    cross-attention: with depths N and M of encoder and decoder g is ``sqrt(ln(3 M) ln(2 N) / 3)``
    in the encoder and ``sqrt(ln(3 M))`` in the decoder, and ``sqrt(ln(2 L))`` in a model of one
    stack.
    """
    g = math.log(2 * stack.depth)
    if stack.cross:
        g = math.log(3 * stack.depth)
    elif stack.peer_depth:
        g *= math.log(3 * stack.peer_depth) / 3
    g = g**0.5
    block = replace(
        around(PRE),
        self_attention=AttentionSpec(output_norm="layer_norm"),
        ff_norm="layer_norm",
        init=InitSpec(value=g * 2**-0.5, output=g, ff=g, cross=False),
    )
    return same_block(stack, block, final_norm="layer_norm")


@preset(
    equation="x' = x + min(1, t L / (l T)) f(N(x)) in step t, T = 100; N after the last block",
    paper="Chen et al. 2026, ProRes (2603.05369)",
    fixes="deep layers that learn before the layers below them have settled",
)
def prores(stack: Stack) -> StackSpec:
    """Pre-LN whose branches rise from nearly nothing, the deeper the later.

    ``branch_ramp: {steps: T, order: equal}`` sets T and the order of layers, and adds the rise to
    any other preset. Theirs has 1,000 steps for each layer, in runs of 100,000; T = 100 is meant
    for runs of some hundred steps. Their first step has factors of 0, ours those of step 1.
    """
    spec = pre_ln(stack)
    return replace(spec, blocks=ramped(spec.blocks, BranchRamp(steps=100)))


@preset(
    equation="y = x + f(N(x)); x' = y - silu(g) stop(y), g from 0; N after the last block",
    paper="Chen et al. 2025, GPAS (2506.22049)",
    fixes="activations of Pre-LN that grow, without shrinking gradients",
)
def gpas(stack: Stack) -> StackSpec:
    """Pre-LN whose sums are scaled without their gradients, by one learned gate per block."""
    return same_block(stack, around(replace(PRE, rule="gpas")), final_norm="layer_norm")


@preset(
    equation="Pre-LN; P = 0 and W_2 = 0 at the start",
    paper="Jordan et al. 2024, modded-nanogpt (code)",
    fixes="branches that disturb the stream before they have learned anything",
)
def zero_output(stack: Stack) -> StackSpec:
    """Pre-LN whose branches start at zero by their output matrices.

    ``zero_output: true`` does the same to other presets. In the first step only P and W_2 have a
    gradient.
    """
    block = replace(around(PRE), init=InitSpec(output=0.0, ff_outer=0.0))
    return same_block(stack, block, final_norm="layer_norm")


@preset(
    equation="x = lambda_l x + mu_l x_0 before layer l; Pre-LN; norms of q, k; P = W_2 = 0 first",
    paper="Karpathy 2025, nanochat (code)",
    fixes="slow starts and growing logits, as found by speed records of small language models",
)
def speedrun(stack: Stack) -> StackSpec:
    """The block of nanochat: RMSNorm without gains, and zero outputs, over a blended embedding.

    Its other choices are in ``model.architecture``: ``{activation: relu_squared, positions: rope,
    tie_embeddings: false, logit_cap: 15}``. Left out are value embeddings, the factor 1.2 on
    queries and keys, the blend of neighbouring tokens, the subtraction of a learned share of the
    middle layer's state at the end, 0.2 at the start, local windows, and rates of their own for
    lambda and mu; biases of matrices stay. Left out too are its initial values U(+-sqrt(3 / width))
    of queries, keys and values, 0.4 times that of W_1, N(0, 0.8^2) of embeddings and N(0, 0.001^2)
    of the output.
    """
    attention = AttentionSpec(qk_norm="rms_norm_plain")
    block = around(ResidualSpec(norm_input="rms_norm_plain"), attention)
    block = replace(block, init=InitSpec(output=0.0, ff_outer=0.0))
    return StackSpec(
        blocks=(block,) * stack.depth,
        final_norm="rms_norm_plain",
        input_norm="rms_norm_plain",
        stream="embedding",
    )


@preset(
    equation="x' = x + g N(f(x)), g from 0; N after the last block; scores cos(q, k) exp(s)",
    paper="Liu et al. 2021, Swin Transformer V2 (2111.09883)",
    fixes="activations and scores that grow in deep models",
)
def swin_v2(stack: Stack) -> StackSpec:
    """Norms of every branch, whose gains start at zero, and scaled cosines as scores.

    As in the authors' code, without their windows and biases of positions; their keys have no bias.
    """
    block = around(ResidualSpec(norm_branch="layer_norm"), AttentionSpec(scores="cosine"))
    block = replace(block, init=InitSpec(branch_norm=0.0))
    return same_block(stack, block, final_norm="layer_norm")


@preset(
    equation="x' = N(x + a (N(f(x)) - x)), N(x) is x of length 1, as are rows of matrices; cosines",
    paper="Loshchilov et al. 2024, nGPT (2410.01131); here with biases and tied embeddings",
    fixes="vectors and matrices whose lengths drift; said to need neither warm-up nor decay",
)
def ngpt(stack: Stack) -> StackSpec:
    """States and rows of matrices of length 1, with learned sizes where they matter.

    As in the authors' code: a from 0.05, factors of the features of queries and keys, of the
    feed-forward's inner states and of the scores over the vocabulary, and a projection of the
    matrices before training and after each step. Differences: matrices keep their biases and start
    as Xavier's, the sum of embedding and positions is normed, with rope the factors of queries and
    keys act before the rotation, and the head of masked words is as usual. Their model has
    ``{activation: swiglu, positions: rope, tie_embeddings: false}``, no dropout and no decay.
    """
    residual = ResidualSpec(norm_branch="l2", norm_sum="l2", rule="lerp")
    block = around(residual, AttentionSpec(scores="cosine_features"))
    block = replace(block, ff_scale=True, unit_matrices=True)
    return StackSpec(blocks=(block,) * stack.depth, input_norm="l2")


@preset(
    equation="Pre-LN; head = (1 - c) N(A_1 V - l A_2 V), l learned from c, which grows with depth",
    paper="Ye et al. 2024, Differential Transformer (2410.05258)",
    fixes="attention to tokens that do not matter",
)
def differential(stack: Stack) -> StackSpec:
    """Pre-LN whose heads are differences of two maps, in all attentions.

    As in the authors' code: half as many heads, with values of twice the width, and c =
    0.8 - 0.6 exp(-0.3 (l - 1)) in layer l. Theirs is a decoder with RMSNorm, SwiGLU and no biases.
    """
    spec = pre_ln(stack)
    return replace(spec, blocks=differential_heads(spec.blocks))


@preset(
    equation="Post-LN; every matrix W of a block is g W / s(W), s its largest singular value",
    paper="Zhai et al. 2023, sigma-Reparam (2303.06296)",
    fixes="maps of attention that collapse onto few keys; said to need no warm-up in translation",
)
def sigma_reparam(stack: Stack) -> StackSpec:
    """Post-LN with a learned largest singular value for each matrix of attention and feed-forward.

    As in the authors' code, g starts at s(W), so that the model starts as Post-LN; s is estimated
    by one power iteration in each step. Their image model also has no norms: that is the axis
    ``sigma_reparam: true`` on another preset.
    """
    spec = post_ln(stack)
    blocks = tuple(replace(block, sigma_reparam=True) for block in spec.blocks)
    return replace(spec, blocks=blocks)
