"""Tokens and positions in, scores over the vocabulary out."""

import math
from dataclasses import dataclass
from typing import Literal, final

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from lightning_app.blocks.linear import linear
from lightning_app.blocks.norm import Norm, build_norm
from lightning_app.errors import UserError

Positions = Literal["sinusoidal", "learned", "rope"]


def sinusoids(length: int, dim: int, device: torch.device) -> Float[Tensor, "{length} {dim}"]:
    """``PE(i, 2k) = sin(i / 10000^(2k/d))``, ``PE(i, 2k+1) = cos(same)`` (Vaswani et al. 2017)."""
    position = torch.arange(length, device=device, dtype=torch.float64)[:, None]
    rate = torch.exp(
        torch.arange(0, dim, 2, device=device, dtype=torch.float64) * (-math.log(10000.0) / dim)
    )
    angle = position * rate
    table = torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(1)
    return table[:, :dim].to(torch.get_default_dtype())


@dataclass(frozen=True, kw_only=True)
class EmbeddingSpec:
    """The table of tokens and how positions enter."""

    vocab_size: int
    pad: int
    positions: Positions = "sinusoidal"
    max_positions: int = 1024
    gain: float = 1.0
    """Factor on the table's initial values (T-Fixup)."""
    norm: Norm = "none"
    """On the sum of token and position."""


@final
class Embedding(nn.Module):
    """``norm(sqrt(d) E[token] + PE(position))``, with E shared by every input and the output.

    E starts at N(0, 1/d), so that the sum starts with entries of variance one. PE is the
    sinusoids, a learned table that starts at N(0, 0.02^2), or zero where attention rotates
    queries and keys instead. The norm is none by default; BERT's official code has a LayerNorm
    there, with dropout after it (Devlin et al. 2019, `embedding_postprocessor`). A norm makes the
    factor sqrt(d), which BERT has not, a weight of the token beside its position.
    """

    def __init__(self, spec: EmbeddingSpec, model_dim: int, dropout: float) -> None:
        super().__init__()
        self.spec = spec
        self.model_dim = model_dim
        self.tokens = nn.Embedding(spec.vocab_size, model_dim, padding_idx=spec.pad)
        learned = spec.positions == "learned"
        self.position_table = nn.Embedding(spec.max_positions, model_dim) if learned else None
        self.norm = build_norm(spec.norm, model_dim)
        self.dropout = nn.Dropout(dropout)
        # Grown on demand: sentences at inference may be longer than any in training.
        # No buffer: distributed training would broadcast tables of other lengths.
        self.positions = torch.empty(0, model_dim)

    def forward(
        self, tokens: Int[Tensor, "batch token"], start: int = 0
    ) -> Float[Tensor, "batch token model"]:
        """Embed `tokens`, the first of which stands at position `start`.

        Raises:
            UserError: for a text longer than a learned table has positions.
        """
        end = start + tokens.shape[1]
        embedded = self.tokens(tokens) * math.sqrt(self.model_dim)
        match self.spec.positions:
            case "sinusoidal":
                table = self._sinusoids(end, tokens.device)[start:end]
                embedded = embedded + table.to(embedded.dtype)
            case "learned":
                assert self.position_table is not None
                if end > self.spec.max_positions:
                    raise UserError(
                        f"model.architecture.max_positions is {self.spec.max_positions}, and a "
                        f"text has {end} tokens; learned positions end there"
                    )
                embedded = embedded + self.position_table.weight[start:end]
            case "rope":
                pass
        return self.dropout(self.norm(embedded))

    @property
    def longest(self) -> float:
        """Tokens of a text that the positions allow for; a learned table ends."""
        return float(self.spec.max_positions) if self.spec.positions == "learned" else math.inf

    def _sinusoids(self, end: int, device: torch.device) -> Float[Tensor, "position model"]:
        if self.positions.shape[0] < end or self.positions.device != device:
            length = max(end, 2 * self.positions.shape[0], 256)
            self.positions = sinusoids(length, self.model_dim, device)
        return self.positions

    def logits(self, states: Float[Tensor, "*shape model"]) -> Float[Tensor, "*shape vocabulary"]:
        """Return ``states E^T``, the scores over the vocabulary."""
        return linear(states, self.tokens.weight)
