"""Multi-head attention: projections, residual scores, shaping."""

from dataclasses import dataclass
from typing import Literal, final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lightning_app.blocks.kernels import Mask, Scores, attend, attend_with_carry, shape_map

Projection = Literal["full", "identity_plus", "identity"]
QueryInit = Literal["xavier", "zeros"]


@dataclass(frozen=True, kw_only=True)
class ShapingSpec:
    """``A' = alpha I + beta A - gamma C`` (He & Hofmann 2023, 2311.01906, equation 6)."""

    alpha: float = 1.0
    """Weight of the identity I."""
    beta: float = 1.0
    """Weight of the softmax map A."""
    gamma: float = 1.0
    """Weight of the centre C, the map at zero scores."""
    learned: bool = True
    """Train the three weights; they take no weight decay."""
    per_head: bool = True
    """One triple a head, else one for all heads."""


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """One attention map with its projections.

    `value` and `output`: ``full`` is ``u W + b``; ``identity_plus`` is ``u (I + W)`` with W
    starting at zero; ``identity`` is ``u``.
    """

    carry_scores: bool = False
    score_divisor: float = 1.0
    shaping: ShapingSpec | None = None
    value: Projection = "full"
    output: Projection = "full"
    query_init: QueryInit = "xavier"


@final
class IdentityPlus(nn.Module):
    """``u (I + W)``, W starting at zero (He & Hofmann 2023, the value matrix of layer 1)."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.change = nn.Linear(dim, dim, bias=False)

    def forward(self, u: Float[Tensor, "*shape model"]) -> Float[Tensor, "*shape model"]:
        return u + self.change(u)


def build_projection(kind: Projection, dim: int) -> nn.Module:
    """Return the value or output projection `kind` from and to `dim`."""
    match kind:
        case "full":
            return nn.Linear(dim, dim)
        case "identity_plus":
            return IdentityPlus(dim)
        case "identity":
            return nn.Identity()


@final
class Shaping(nn.Module):
    """The three weights of the shaped map, each of shape ``(head or 1, 1, 1)``."""

    def __init__(self, spec: ShapingSpec, num_heads: int) -> None:
        super().__init__()
        shape = (num_heads if spec.per_head else 1, 1, 1)
        self.start = {"alpha": spec.alpha, "beta": spec.beta, "gamma": spec.gamma}
        for name, value in self.start.items():
            tensor = torch.full(shape, value)
            if spec.learned:
                self.register_parameter(name, nn.Parameter(tensor))
            else:
                self.register_buffer(name, tensor)

    def forward(
        self,
        attended: Float[Tensor, "batch head query dim"],
        value: Float[Tensor, "batch head key dim"],
        mask: Mask,
    ) -> Float[Tensor, "batch head query dim"]:
        return shape_map(attended, value, mask, self.alpha, self.beta, self.gamma)  # pyright: ignore[reportArgumentType]


@final
class Attention(nn.Module):
    """Multi-head attention of queries from `u` over keys and values from the same or another text.

    ``concat_h(A'_h V_h) W_P`` with ``A' = A`` or the shaped map, and residual scores where the
    specification carries them. The caller makes keys and values (`keys_values`), so that cached
    decoding appends to them.
    """

    def __init__(self, spec: AttentionSpec, model_dim: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.spec = spec
        self.num_heads = num_heads
        self.dropout = dropout
        self.query = nn.Linear(model_dim, model_dim)
        self.key = nn.Linear(model_dim, model_dim)
        self.value = build_projection(spec.value, model_dim)
        self.output = build_projection(spec.output, model_dim)
        self.shaping = None if spec.shaping is None else Shaping(spec.shaping, num_heads)

    def _split(
        self, x: Float[Tensor, "batch token model"]
    ) -> Float[Tensor, "batch head token dim"]:
        return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)

    def keys_values(
        self, memory: Float[Tensor, "batch key model"]
    ) -> tuple[Float[Tensor, "batch head key dim"], Float[Tensor, "batch head key dim"]]:
        """Return keys and values of `memory`, split into heads."""
        return self._split(self.key(memory)), self._split(self.value(memory))

    def forward(
        self,
        u: Float[Tensor, "batch query model"],
        keys: Float[Tensor, "batch head key dim"],
        values: Float[Tensor, "batch head key dim"],
        mask: Mask,
        previous: Scores | None,
    ) -> tuple[Float[Tensor, "batch query model"], Scores | None]:
        """Return the sub-layer's output and, where scores are carried, their running sum."""
        query = self._split(self.query(u))
        dropout = self.dropout if self.training else 0.0
        scores = None
        if self.spec.carry_scores:
            heads, scores = attend_with_carry(
                query, keys, values, mask, dropout, previous, self.spec.score_divisor
            )
        else:
            heads = attend(query, keys, values, mask, dropout)
        if self.shaping is not None:
            heads = self.shaping(heads, values, mask)
        # (batch, head, query, dim) -> (batch, query, head * dim)
        return self.output(heads.transpose(1, 2).flatten(2)), scores
