"""Rotary positions: queries and keys are rotated by their positions."""

from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lightning_app.blocks.placed import Placed


@final
@dataclass(frozen=True)
class Rotation(Placed):
    """Cosines and sines of the angles by which rotary positions rotate the pairs of a head."""

    cos: Float[Tensor, "*batch token pair"]
    sin: Float[Tensor, "*batch token pair"]

    def queries(
        self, x: Float[Tensor, "batch head token dim"]
    ) -> Float[Tensor, "batch head token dim"]:
        return rotate(x, self)

    def keys(
        self, x: Float[Tensor, "batch head token dim"]
    ) -> Float[Tensor, "batch head token dim"]:
        return rotate(x, self)


def rotation(position: Int[Tensor, " token"], dim: int) -> Rotation:
    """Return the angles ``i * 10000^(-2k/dim)`` of positions i."""
    rate = 10000.0 ** (torch.arange(0, dim, 2, device=position.device, dtype=torch.float64) / -dim)
    angle = torch.outer(position.double(), rate)
    dtype = torch.get_default_dtype()
    return Rotation(angle.cos().to(dtype), angle.sin().to(dtype))


def rotate(
    x: Float[Tensor, "batch head token dim"], by: Rotation
) -> Float[Tensor, "batch head token dim"]:
    """Rotate the pairs (2k, 2k+1) of each head by the angle of its token (Su et al. 2021, RoPE,
    2104.09864, equation 34), so that the score of a query and a key depends only on i - j."""
    even, odd = x[..., 0::2], x[..., 1::2]
    turned = torch.stack([even * by.cos - odd * by.sin, even * by.sin + odd * by.cos], dim=-1)
    return turned.flatten(-2).to(x.dtype)
