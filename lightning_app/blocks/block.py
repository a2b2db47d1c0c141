"""One block of a stack: its frozen specification, its encoder form and its decoder form."""

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lightning_app.blocks.attention import Attention, AttentionSpec
from lightning_app.blocks.feed_forward import Activation, FeedForward
from lightning_app.blocks.kernels import Mask, Scores
from lightning_app.blocks.residual import Residual, ResidualSpec

Layout = Literal["sequential", "parallel"]


@dataclass(frozen=True, kw_only=True)
class BlockSpec:
    """Everything that tells one block from another.

    ``sequential``: self-attention, cross-attention (decoder), feed-forward, each inside its
    residual formula. ``parallel``: self-attention and feed-forward read one norm and join one
    skip, that of `around_ff`: ``y = skip * x + b_SA SA(u) + b_FF FF(u)``, ``u = norm(x)``; in a
    decoder the cross-attention follows as a sub-layer of its own.
    """

    around_self: ResidualSpec
    around_cross: ResidualSpec
    around_ff: ResidualSpec
    self_attention: AttentionSpec = AttentionSpec()
    cross_attention: AttentionSpec = AttentionSpec()
    layout: Layout = "sequential"

    def __post_init__(self) -> None:
        if self.cross_attention.shaping is not None:
            raise ValueError(
                "shaped_attention on cross-attention: the identity needs a square map; "
                "shape self-attention alone"
            )
        if {self.cross_attention.value, self.cross_attention.output} != {"full"}:
            raise ValueError(
                "identity projections on cross-attention would tie two spaces; use 'full' there"
            )
        if self.layout == "parallel":
            self._check_parallel()
        shaping = self.self_attention.shaping
        skip = self.around_ff.skip if self.layout == "parallel" else self.around_self.skip
        if skip.absent and (shaping is None or shaping.alpha == 0.0):
            field = "ff_skip" if self.layout == "parallel" else "attention_skip"
            raise ValueError(
                f"{field} 0 without shaped_attention (alpha > 0): every token collapses "
                "onto one direction; give the attention a skip or an identity part"
            )

    @property
    def keeps_skip_of_identity(self) -> bool:
        """Whether identity projections stand beside an attention skip: allowed, and worse."""
        skip = self.around_ff.skip if self.layout == "parallel" else self.around_self.skip
        kinds = {self.self_attention.value, self.self_attention.output}
        return "identity" in kinds and not skip.absent

    @property
    def built_around_ff(self) -> ResidualSpec:
        """`around_ff` as it is built: a parallel feed-forward reads the attention's norm."""
        if self.layout == "parallel":
            return replace(self.around_ff, norm_input="none")
        return self.around_ff

    def _check_parallel(self) -> None:
        if {self.around_self.norm_sum, self.around_ff.norm_sum} != {"none"}:
            raise ValueError(
                "layout parallel with norm_placement post has no meaning: its branches share one "
                "skip and one input norm; use norm_placement 'pre'"
            )
        if self.around_self.norm_input != self.around_ff.norm_input:
            raise ValueError("layout parallel: both branches read one norm of the input")
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
    activation: Activation = "relu"
    dropout: float = 0.0
    attention_dropout: float = 0.0

    def __post_init__(self) -> None:
        if self.model_dim % self.num_heads:
            raise ValueError(
                f"model_dim {self.model_dim} is no multiple of num_heads {self.num_heads}"
            )

    def attention(self, spec: AttentionSpec) -> Attention:
        return Attention(spec, self.model_dim, self.num_heads, self.attention_dropout)

    def residual(self, spec: ResidualSpec) -> Residual:
        return Residual(spec, self.model_dim, self.dropout)

    def feed_forward(self) -> FeedForward:
        return FeedForward(self.model_dim, self.ff_dim, self.activation)


class LayerCache(NamedTuple):
    """Keys and values of one decoder block in cached decoding, ``(batch, head, key, dim)``."""

    self_keys: Tensor
    self_values: Tensor
    cross_keys: Tensor
    cross_values: Tensor


class DecoderScores(NamedTuple):
    """The two score chains of a decoder; None where nothing is carried."""

    self_attention: Scores | None = None
    cross_attention: Scores | None = None


@final
class EncoderBlock(nn.Module):
    """Self-attention and feed-forward.

    ::

        sequential                                parallel
        x --norm-- SA --(+)--norm-- FF --(+)--    x --norm--+-- SA --+
        '------- skip ---' '------ skip --'       |         '-- FF --(+)--
                                                  '------ skip ------'
    """

    def __init__(self, spec: BlockSpec, sizes: Sizes) -> None:
        super().__init__()
        self.spec = spec
        self.self_attention = sizes.attention(spec.self_attention)
        self.feed_forward = sizes.feed_forward()
        self.around_self = sizes.residual(spec.around_self)
        self.around_ff = sizes.residual(spec.built_around_ff)

    def forward(
        self, x: Float[Tensor, "batch token model"], mask: Mask, scores: Scores | None
    ) -> tuple[Float[Tensor, "batch token model"], Scores | None]:
        u = self.around_self.enter(x)
        keys, values = self.self_attention.keys_values(u)
        attended, scores = self.self_attention(u, keys, values, mask, scores)
        if self.spec.layout == "parallel":
            x = self.around_ff.leave(x, self.feed_forward(u)) + self.around_self.leave(x, attended)
        else:
            x = self.around_self.leave(x, attended)
            x = self.around_ff.leave(x, self.feed_forward(self.around_ff.enter(x)))
        return x, scores


@final
class DecoderBlock(nn.Module):
    """Self-attention, cross-attention over the encoder's states, feed-forward.

    Sequential: SA, CA, FF in turn. Parallel: SA and FF join one sum, then CA.
    """

    def __init__(self, spec: BlockSpec, sizes: Sizes) -> None:
        super().__init__()
        self.spec = spec
        self.self_attention = sizes.attention(spec.self_attention)
        self.cross_attention = sizes.attention(spec.cross_attention)
        self.feed_forward = sizes.feed_forward()
        self.around_self = sizes.residual(spec.around_self)
        self.around_cross = sizes.residual(spec.around_cross)
        self.around_ff = sizes.residual(spec.built_around_ff)

    def forward(
        self,
        x: Float[Tensor, "batch query model"],
        mask: Mask,
        source_mask: Mask,
        scores: DecoderScores,
        cache: LayerCache,
    ) -> tuple[Float[Tensor, "batch query model"], DecoderScores, LayerCache]:
        """Run the block on the newest tokens `x`; `cache` holds what stands before them.

        In training the cache holds no self keys and `x` is the whole target.
        """
        u = self.around_self.enter(x)
        keys, values = self.self_attention.keys_values(u)
        if cache.self_keys.shape[2]:
            keys = torch.cat([cache.self_keys, keys], dim=2)
            values = torch.cat([cache.self_values, values], dim=2)
        attended, self_scores = self.self_attention(u, keys, values, mask, scores.self_attention)
        if self.spec.layout == "parallel":
            x = self.around_ff.leave(x, self.feed_forward(u)) + self.around_self.leave(x, attended)
        else:
            x = self.around_self.leave(x, attended)

        crossed, cross_scores = self.cross_attention(
            self.around_cross.enter(x),
            cache.cross_keys,
            cache.cross_values,
            source_mask,
            scores.cross_attention,
        )
        x = self.around_cross.leave(x, crossed)

        if self.spec.layout == "sequential":
            x = self.around_ff.leave(x, self.feed_forward(self.around_ff.enter(x)))
        cache = cache._replace(self_keys=keys, self_values=values)
        return x, DecoderScores(self_scores, cross_scores), cache
