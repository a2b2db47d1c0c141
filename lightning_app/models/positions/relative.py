"""Relative positions with learned biases inside self-attention (Dai et al. 2019, 1901.02860)."""

import math
from dataclasses import dataclass, replace
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from lightning_app.blocks.learned import LearnedScalars
from lightning_app.blocks.linear import Linear
from lightning_app.blocks.placed import Placed, Places
from lightning_app.blocks.stack import StackSpec
from lightning_app.models.positions.base import POSITIONS, Positions


@final
class ScoreBiases(LearnedScalars):
    """u and v, one vector for each head, initially from N(0, 0.02^2)."""

    def __init__(self, num_heads: int, head_dim: int, *, zero: bool) -> None:
        super().__init__()
        self.zero = zero
        self.content = nn.Parameter(torch.empty(num_heads, 1, head_dim))
        self.position = nn.Parameter(torch.empty(num_heads, 1, head_dim))
        with torch.no_grad():
            self.reset()

    def reset(self) -> None:
        for bias in (self.content, self.position):
            nn.init.zeros_(bias) if self.zero else nn.init.normal_(bias, std=0.02)


@final
class RelativeTerm(nn.Module):
    """The scores of Transformer-XL, for every layer of a stack:

    ``S_ij = ((q_i + u) . k_j + (q_i + v) . W r_(i-j)) / sqrt(d_k)``

    with ``r_x = [sin(x w) ; cos(x w)]``, ``w_k = 10000^(-2k/d)``, one W a layer, u and v shared by
    the layers or one pair a layer. With ``a = W^T (q_i + v)`` in two halves and the angle ``g = i
    w``, the second product is an inner product with the sinusoids of j alone:

    ``a . r_(i-j) = [-a_s cos g + a_c sin g ; a_s sin g + a_c cos g] . r_j``

    So queries and keys have d features more, and every form of attention takes them as they are.

    With `clamp_length` c distances above c count as c, and in an encoder those below -c as -c, in
    evaluation alone. They are no difference of positions then, so that the second product is a term
    for each query and key.
    """

    def __init__(
        self,
        layers: int,
        model_dim: int,
        num_heads: int,
        *,
        shared: bool,
        zero: bool,
        clamp_length: int | None = None,
    ) -> None:
        super().__init__()
        self.clamp_length = clamp_length
        head_dim, pairs = model_dim // num_heads, 1 if shared else layers
        self.projections = nn.ModuleList(
            Linear(model_dim, model_dim, bias=False) for _ in range(layers)
        )
        self.biases = nn.ModuleList(
            ScoreBiases(num_heads, head_dim, zero=zero) for _ in range(pairs)
        )

    def forward(self, places: Places) -> Placed:
        if self.clamp_length is None or self.training:
            return RelativeScores(self, *self.sinusoids(places.newest))
        most = self.clamp_length
        # (#batch, #token, key), a later key at a distance below 0
        distance = places.newest[:, None] - places.keys[:, None]
        table = torch.cat(self.sinusoids(torch.arange(-most, most + 1)), dim=-1)
        return ClampedScores(self, distance.clamp(-most, most) + most, table)

    def sinusoids(
        self, places: Int[Tensor, " place"]
    ) -> tuple[Float[Tensor, "place half"], Float[Tensor, "place half"]]:
        """Return the sines and cosines at some places, in the type of the weights."""
        weight, _ = self.of(1)
        dim = weight.shape[-1]
        rate = torch.exp(
            torch.arange(0, dim, 2, device=weight.device, dtype=torch.float64)
            * (-math.log(10000.0) / dim)
        )
        # From angles of full precision.
        angle = torch.outer(places.to(weight.device).double(), rate)
        return angle.sin().to(weight.dtype), angle.cos().to(weight.dtype)

    def of(self, layer: int) -> tuple[Float[Tensor, "head dim model"], ScoreBiases]:
        """Return W, and u and v, of a layer, counted from 1."""
        weight = self.projections[layer - 1].weight
        assert isinstance(weight, Tensor)
        biases = self.biases[0 if len(self.biases) == 1 else layer - 1]
        assert isinstance(biases, ScoreBiases)
        return weight.unflatten(0, (len(biases.content), -1)), biases


@final
@dataclass(frozen=True)
class RelativeScores(Placed):
    """The features of the newest tokens of one pass; `at` gives those of a layer."""

    term: RelativeTerm
    sin: Float[Tensor, "token half"]
    cos: Float[Tensor, "token half"]
    layer: int = 1

    def at(self, layer: int) -> "RelativeScores":
        return replace(self, layer=layer)

    def queries(self, x: Float[Tensor, "batch head token dim"]) -> Tensor:
        weight, biases = self.term.of(self.layer)
        a = (x + biases.position) @ weight
        a_sin, a_cos = a.chunk(2, dim=-1)
        turned = [a_cos * self.sin - a_sin * self.cos, a_sin * self.sin + a_cos * self.cos]
        features = torch.cat([x + biases.content, *turned], dim=-1)
        # Attention divides by the root of the number of features; it is to be that of d_k.
        return (features * math.sqrt(features.shape[-1] / x.shape[-1])).to(x.dtype)

    def keys(self, x: Float[Tensor, "batch head token dim"]) -> Tensor:
        sinusoids = torch.cat([self.sin, self.cos], dim=-1).to(x.dtype)
        return torch.cat([x, sinusoids.expand(*x.shape[:3], -1)], dim=-1)


@final
@dataclass(frozen=True)
class ClampedScores(Placed):
    """The scores of one pass where large distances count as one; `at` gives those of a layer.

    `distance` holds the row of `table` of each distance.
    """

    term: RelativeTerm
    distance: Int[Tensor, "#batch #token key"]
    table: Float[Tensor, "distance model"]
    layer: int = 1

    def at(self, layer: int) -> "ClampedScores":
        return replace(self, layer=layer)

    def queries(self, x: Float[Tensor, "batch head token dim"]) -> Tensor:
        return (x + self.term.of(self.layer)[1].content).to(x.dtype)

    def added(self, query: Float[Tensor, "batch head token dim"]) -> Tensor:
        weight, biases = self.term.of(self.layer)
        x = query - biases.content + biases.position
        # (head, dim, model) -> (head, dim, distance)
        by_distance = x @ (weight @ self.table.T) / math.sqrt(x.shape[-1])
        # The newest tokens of all beams have one distance to a key.
        index = self.distance[:, None].expand(*x.shape[:3], -1)
        return by_distance.gather(3, index).to(query.dtype)


@dataclass(frozen=True, kw_only=True)
class _ByDistance(Positions):
    """Dai et al. 2019, Transformer-XL (1901.02860), section 3.3."""

    clamps = True

    def check(self) -> None:
        if self.model_dim % 2:
            raise ValueError(f"model_dim {self.model_dim}: relative positions need an even width")

    def check_stack(self, spec: StackSpec) -> None:
        if any(block.self_attention.carry == "qk_sum" for block in spec.blocks):
            raise ValueError(
                "positions relative with residual_attention qk_sum: sums over layers would add "
                "the sinusoids of a key once a layer; take residual_attention mean or sum"
            )
        if self.clamp_length is not None:
            self._check_clamped(spec)

    def _check_clamped(self, spec: StackSpec) -> None:
        for attention in (block.self_attention for block in spec.blocks):
            if attention.shaping is not None and attention.shaping.centred:
                raise ValueError(
                    f"clamp_length {self.clamp_length} with a shaped_attention gamma: the centre "
                    "would move with the term of large distances; leave clamp_length out"
                )
            if attention.localised_span is not None or attention.adaptive_span is not None:
                raise ValueError(
                    f"clamp_length {self.clamp_length} with localised_span or adaptive_span: a "
                    "span hides large distances already; leave clamp_length out"
                )

    def _term(self, spec: StackSpec, *, shared: bool) -> RelativeTerm:
        # With a centre the map has to be uniform at the start, which u and v would disturb.
        shapings = [block.self_attention.shaping for block in spec.blocks]
        zero = any(shaping is not None and shaping.centred for shaping in shapings)
        return RelativeTerm(
            len(spec.blocks),
            self.model_dim,
            self.num_heads,
            shared=shared,
            zero=zero,
            clamp_length=self.clamp_length,
        )


@final
@POSITIONS.register("relative")
class Relative(_ByDistance):
    """u and v are shared by all layers of a stack, as in the authors' code."""

    def placing(self, spec: StackSpec) -> RelativeTerm:
        return self._term(spec, shared=True)


@final
@POSITIONS.register("relative_untied")
class RelativeUntied(_ByDistance):
    """Each layer has u and v of its own."""

    def placing(self, spec: StackSpec) -> RelativeTerm:
        return self._term(spec, shared=False)
