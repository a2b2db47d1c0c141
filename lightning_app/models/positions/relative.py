"""Relative positions with learned biases inside self-attention (Dai et al. 2019, 1901.02860)."""

import math
from dataclasses import dataclass, replace
from typing import final

import torch
from jaxtyping import Float
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
    """

    def __init__(
        self, layers: int, model_dim: int, num_heads: int, *, shared: bool, zero: bool
    ) -> None:
        super().__init__()
        head_dim, pairs = model_dim // num_heads, 1 if shared else layers
        self.projections = nn.ModuleList(
            Linear(model_dim, model_dim, bias=False) for _ in range(layers)
        )
        self.biases = nn.ModuleList(
            ScoreBiases(num_heads, head_dim, zero=zero) for _ in range(pairs)
        )

    def forward(self, places: Places) -> "RelativeScores":
        (first,) = self.projections[:1]
        weight = first.weight
        assert isinstance(weight, Tensor)
        dim = weight.shape[1]
        rate = torch.exp(
            torch.arange(0, dim, 2, device=weight.device, dtype=torch.float64)
            * (-math.log(10000.0) / dim)
        )
        angle = torch.outer(places.newest.to(weight.device).double(), rate)
        # In the type of the weights, from angles of full precision.
        return RelativeScores(self, angle.sin().to(weight.dtype), angle.cos().to(weight.dtype))


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
        weight = self.term.projections[self.layer - 1].weight
        assert isinstance(weight, Tensor)
        shared = len(self.term.biases) == 1
        biases = self.term.biases[0 if shared else self.layer - 1]
        assert isinstance(biases, ScoreBiases)
        heads, dim = x.shape[1], x.shape[3]
        # (head * dim, model) -> (head, dim, model)
        a = (x + biases.position) @ weight.unflatten(0, (heads, dim))
        a_sin, a_cos = a.chunk(2, dim=-1)
        turned = [a_cos * self.sin - a_sin * self.cos, a_sin * self.sin + a_cos * self.cos]
        features = torch.cat([x + biases.content, *turned], dim=-1)
        # Attention divides by the root of the number of features; it is to be that of d_k.
        return (features * math.sqrt(features.shape[-1] / dim)).to(x.dtype)

    def keys(self, x: Float[Tensor, "batch head token dim"]) -> Tensor:
        sinusoids = torch.cat([self.sin, self.cos], dim=-1).to(x.dtype)
        return torch.cat([x, sinusoids.expand(*x.shape[:3], -1)], dim=-1)


@dataclass(frozen=True, kw_only=True)
class _ByDistance(Positions):
    """Dai et al. 2019, Transformer-XL (1901.02860), section 3.3."""

    def check(self) -> None:
        if self.model_dim % 2:
            raise ValueError(f"model_dim {self.model_dim}: relative positions need an even width")

    def check_stack(self, spec: StackSpec) -> None:
        if any(block.self_attention.carry == "qk_sum" for block in spec.blocks):
            raise ValueError(
                "positions relative with residual_attention qk_sum: sums over layers would add "
                "the sinusoids of a key once a layer; take residual_attention mean or sum"
            )

    def _term(self, spec: StackSpec, *, shared: bool) -> RelativeTerm:
        # With a centre the map has to be uniform at the start, which u and v would disturb.
        shapings = [block.self_attention.shaping for block in spec.blocks]
        zero = any(shaping is not None and shaping.centred for shaping in shapings)
        return RelativeTerm(
            len(spec.blocks), self.model_dim, self.num_heads, shared=shared, zero=zero
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
