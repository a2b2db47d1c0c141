"""The forms in which one attention map is computed, and the mask that all of them read.

Shapes: query ``(batch, head, query, head_dim)``, key and value ``(batch, head, key, head_dim)``,
scores and maps ``(batch, head, query, key)``. A mask is True where attention is allowed.
"""

from typing import NamedTuple, final

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional as F

Heads = Float[Tensor, "batch head query dim"]
Scores = Float[Tensor, "batch head query key"]


@final
class Mask:
    """Which keys each query may see, with the centre C that follows from it; made once a batch."""

    def __init__(self, allowed: Bool[Tensor, "#batch 1 #query key"]) -> None:
        self.allowed = allowed
        # No `cached_property`: its lock in Python 3.11 breaks a compiled graph in two.
        self._centre: Tensor | None = None

    @property
    def centre(self) -> Float[Tensor, "#batch 1 #query key"]:
        """C: the softmax of the mask alone, the uniform map over the keys a query may see.

        He & Hofmann 2023 (2311.01906, footnote 3) define C as the map at ``Q K^T = 0``. Taking it
        of the mask itself keeps that true for causal and for padded batches alike. A score term
        that does not depend on the query would have to enter here too, or A = C no longer holds
        at the start; rotary positions turn zero queries into zero scores, so they need not.
        """
        if self._centre is None:
            allowed = self.allowed.to(torch.get_default_dtype())
            self._centre = allowed / allowed.sum(dim=-1, keepdim=True).clamp(min=1.0)
        return self._centre


def padding_mask(present: Bool[Tensor, "batch key"]) -> Mask:
    """Every query sees the keys that are present."""
    return Mask(present[:, None, None, :])


def causal_mask(length: int, device: torch.device) -> Mask:
    """Query i sees the keys 0..i. Padding on the right needs no more: no real token sees it."""
    return Mask(torch.ones(1, 1, length, length, dtype=torch.bool, device=device).tril())


def full_mask(length: int, device: torch.device) -> Mask:
    """The newest query of cached decoding sees every key there is."""
    return Mask(torch.ones(1, 1, 1, length, dtype=torch.bool, device=device))


class Rotation(NamedTuple):
    """Cosines and sines of the angles by which rotary positions turn the pairs of a head."""

    cos: Float[Tensor, "token pair"]
    sin: Float[Tensor, "token pair"]


def rotation(start: int, length: int, dim: int, device: torch.device) -> Rotation:
    """Return the angles ``i * 10000^(-2k/dim)`` of positions i = start .. start + length - 1."""
    position = torch.arange(start, start + length, device=device, dtype=torch.float64)
    rate = 10000.0 ** (torch.arange(0, dim, 2, device=device, dtype=torch.float64) / -dim)
    angle = torch.outer(position, rate)
    dtype = torch.get_default_dtype()
    return Rotation(angle.cos().to(dtype), angle.sin().to(dtype))


def rotate(x: Heads, by: Rotation) -> Heads:
    """Turn the pairs (2k, 2k+1) of each head by the angle of its token (Su et al. 2021, RoPE,
    2104.09864, equation 34), so that a query and a key meet at an angle of i - j alone."""
    even, odd = x[..., 0::2], x[..., 1::2]
    turned = torch.stack([even * by.cos - odd * by.sin, even * by.sin + odd * by.cos], dim=-1)
    return turned.flatten(-2).to(x.dtype)


def attend(
    query: Heads, key: Float[Tensor, "..."], value: Float[Tensor, "..."], mask: Mask, dropout: float
) -> Heads:
    """``softmax(Q K^T / sqrt(d_k) + mask) V`` (Vaswani et al. 2017, equation 1)."""
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask.allowed, dropout_p=dropout
    )


def attend_with_carry(
    query: Heads,
    key: Float[Tensor, "..."],
    value: Float[Tensor, "..."],
    mask: Mask,
    dropout: float,
    previous: Scores | None,
    divisor: float,
) -> tuple[Heads, Scores]:
    """Residual attention (He et al. 2021, RealFormer, 2012.11747, section 3.2).

    ``Z_n = Q K^T / sqrt(d_k) + Z_{n-1}``; the map is ``softmax(Z_n / divisor + mask)``.

    Returns the output and ``Z_n``: scaled, unmasked, a plain sum whatever the divisor. The sum is
    out of place, so the carry of the layer below stays intact, and in float32 under autocast,
    since it grows with depth.
    """
    kept = torch.promote_types(query.dtype, torch.float32)
    with torch.autocast(query.device.type, enabled=False):
        scores = query.to(kept) @ key.to(kept).transpose(-2, -1) * query.shape[-1] ** -0.5
        if previous is not None:
            scores = scores + previous
        logits = scores / divisor if divisor != 1.0 else scores
        # A finite fill keeps rows that see nothing (padding only) free of NaN.
        logits = logits.masked_fill(~mask.allowed, torch.finfo(kept).min)
        weights = F.dropout(logits.softmax(dim=-1), dropout).to(value.dtype)
    return weights @ value, scores


class QueryKeySums(NamedTuple):
    """Queries and keys of a position, summed over the layers so far; float32 at least."""

    query: Heads
    key: Float[Tensor, "batch head key dim"]


def attend_with_sums(
    query: Heads,
    key: Float[Tensor, "..."],
    value: Float[Tensor, "..."],
    mask: Mask,
    dropout: float,
    previous: QueryKeySums | None,
    divisor: float,
) -> tuple[Heads, QueryKeySums]:
    """``softmax((sum_i Q_i)(sum_i K_i)^T / (divisor sqrt(d_k)) + mask) V`` over layers i = 1 .. n.

    Su Jianlin's reading of residual attention. It adds the cross terms Q_i K_j^T, i != j, to
    RealFormer's running sum, and needs no map of the layers below: sums of queries and keys go up.
    """
    kept = torch.promote_types(query.dtype, torch.float32)
    sums = QueryKeySums(query.to(kept), key.to(kept))
    if previous is not None:
        sums = QueryKeySums(sums.query + previous.query, sums.key + previous.key)
    cooled = (sums.query / divisor if divisor != 1.0 else sums.query).to(value.dtype)
    return attend(cooled, sums.key.to(value.dtype), value, mask, dropout), sums


def shape_map(
    attended: Heads,
    value: Float[Tensor, "batch head key dim"],
    mask: Mask,
    alpha: Float[Tensor, "#head 1 1"],
    beta: Float[Tensor, "#head 1 1"],
    gamma: Float[Tensor, "#head 1 1"] | None,
) -> Heads:
    """``(alpha I + beta A - gamma C) V`` from ``A V``, without forming the shaped map.

    Without gamma there is no centre: ``(alpha I + beta A) V``, V-SkipInit (equation 4).

    He & Hofmann 2023, equation 6. The identity belongs to the newest queries: in cached decoding
    query i is key ``keys - queries + i``. Dropout acted on A alone; the authors' code drops
    entries of the whole map, which deletes tokens from the identity part.
    """
    own = value[:, :, value.shape[2] - attended.shape[2] :]
    shaped = alpha * own + beta * attended
    return shaped if gamma is None else shaped - gamma * (mask.centre.to(value.dtype) @ value)
