"""Tokens and positions in, scores over the vocabulary out."""

import math
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F


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
class Embedding(nn.Module):
    """``sqrt(d) E[token] + PE(position)``, with E shared by every input and the output.

    E starts at N(0, 1/d), so that the sum starts with entries of variance one.
    """

    def __init__(self, vocab_size: int, model_dim: int, pad: int, dropout: float) -> None:
        super().__init__()
        self.model_dim = model_dim
        self.tokens = nn.Embedding(vocab_size, model_dim, padding_idx=pad)
        self.dropout = nn.Dropout(dropout)
        # Grown on demand: sentences at inference may be longer than any in training.
        # No buffer: distributed training would broadcast tables of other lengths.
        self.positions = torch.empty(0, model_dim)

    def forward(
        self, tokens: Int[Tensor, "batch token"], start: int = 0
    ) -> Float[Tensor, "batch token model"]:
        """Embed `tokens`, the first of which stands at position `start`."""
        end = start + tokens.shape[1]
        if self.positions.shape[0] < end or self.positions.device != tokens.device:
            length = max(end, 2 * self.positions.shape[0], 256)
            self.positions = sinusoids(length, self.model_dim, tokens.device)
        embedded = self.tokens(tokens) * math.sqrt(self.model_dim)
        return self.dropout(embedded + self.positions[start:end].to(embedded.dtype))

    def logits(self, states: Float[Tensor, "*shape model"]) -> Float[Tensor, "*shape vocabulary"]:
        """Return ``states E^T``, the scores over the vocabulary."""
        return F.linear(states, self.tokens.weight)
