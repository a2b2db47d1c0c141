"""Sinusoidal positions, added to the embedding."""

import math
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from lightning_app.models.positions.base import POSITIONS, Positions, Table


def sinusoids(length: int, dim: int, device: torch.device) -> Float[Tensor, "{length} {dim}"]:
    """``PE(i, 2k) = sin(i / 10000^(2k/d))``, ``PE(i, 2k+1) = cos(same)`` (Vaswani et al. 2017)."""
    position = torch.arange(length, device=device, dtype=torch.float64)[:, None]
    rate = torch.exp(
        torch.arange(0, dim, 2, device=device, dtype=torch.float64) * (-math.log(10000.0) / dim)
    )
    angle = position * rate
    table = torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(1)
    return table[:, :dim].to(torch.get_default_dtype())


@final
class Sinusoids(Table):
    """The sinusoids of all positions that were needed so far."""

    def __init__(self, model_dim: int) -> None:
        super().__init__()
        self.model_dim = model_dim
        # Grown on demand: sentences at inference may be longer than any in training.
        # Not a buffer: distributed training would broadcast tables of different lengths.
        self.rows = torch.empty(0, model_dim)

    def forward(
        self, start: int, end: int, device: torch.device
    ) -> Float[Tensor, "position model"]:
        if self.rows.shape[0] < end or self.rows.device != device:
            length = max(end, 2 * self.rows.shape[0], 256)
            self.rows = sinusoids(length, self.model_dim, device)
        return self.rows[start:end]


@final
@POSITIONS.register("sinusoidal")
class Sinusoidal(Positions):
    """Vaswani et al. 2017 (1706.03762), section 3.5."""

    absolute = True

    def check(self) -> None:
        if self.model_dim % 2:
            raise ValueError(f"model_dim {self.model_dim}: sinusoidal positions need an even width")

    def table(self) -> Sinusoids:
        return Sinusoids(self.model_dim)
