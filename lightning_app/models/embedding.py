"""The embedding of tokens and positions, and the output scores over the vocabulary."""

import math
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from lightning_app.blocks.linear import linear
from lightning_app.blocks.norm import Norm, build_norm
from lightning_app.models.positions import Positions


@dataclass(frozen=True, kw_only=True)
class EmbeddingSpec:
    """The specification of the token table and the positions."""

    vocab_size: int
    pad: int
    positions: Positions
    gain: float = 1.0
    """The factor on the table's initial values (T-Fixup)."""
    norm: Norm = "none"
    """The norm of the sum of token and position."""
    adds_positions: bool = True
    """Whether the position table is added here rather than before each step of a stack."""


@final
class Embedding(nn.Module):
    """``norm(sqrt(d) E[token] + PE(position) + S[segment])``; E serves inputs and output.

    E starts at N(0, 1/d), so that the sum starts with entries of variance one. PE is the table of
    the positions, zero if they enter attention instead. By default there is no norm; BERT's
    official code has a LayerNorm there, with dropout after it (Devlin et al. 2019,
    `embedding_postprocessor`). A norm turns the factor sqrt(d), which BERT lacks, into a weight of
    the token relative to its position. S exists only for pairs of texts: see `SegmentTable`.
    """

    def __init__(self, spec: EmbeddingSpec, model_dim: int, dropout: float) -> None:
        super().__init__()
        self.spec = spec
        self.model_dim = model_dim
        self.tokens = nn.Embedding(spec.vocab_size, model_dim, padding_idx=spec.pad)
        self.position_table = spec.positions.table() if spec.adds_positions else None
        self.segments: SegmentTable | None = None  # created by `add_next_sentence`
        self.norm = build_norm(spec.norm, model_dim)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self,
        tokens: Int[Tensor, "batch token"],
        start: int = 0,
        in_document: Int[Tensor, "batch token"] | None = None,
        segments: Int[Tensor, "batch token"] | None = None,
    ) -> Float[Tensor, "batch token model"]:
        """Embed `tokens`, the first at position `start`, or at the positions `in_document`.

        `segments` has 0 or 1 for each token; passed exactly if there is a table for it.

        Raises:
            UserError: for a text longer than a learned position table.
        """
        end = start + tokens.shape[1]
        self.spec.positions.check_length(end)
        embedded = self.tokens(tokens) * math.sqrt(self.model_dim)
        if self.position_table is not None:
            table = self.position_table(start, end, tokens.device)
            if in_document is not None:
                table = nn.functional.embedding(in_document, table)
            embedded = embedded + table.to(embedded.dtype)
        assert (segments is None) == (self.segments is None), "a table of segments reads them"
        if segments is not None and self.segments is not None:
            embedded = embedded + self.segments(segments).to(embedded.dtype)
        return self.dropout(self.norm(embedded))

    @property
    def longest(self) -> float:
        """The largest length of a text in tokens; finite for a learned table."""
        return self.spec.positions.longest

    def logits(self, states: Float[Tensor, "*shape model"]) -> Float[Tensor, "*shape vocabulary"]:
        """Return ``states E^T``, the scores over the vocabulary."""
        return linear(states, self.tokens.weight)


@final
class SegmentTable(nn.Module):
    """One vector per text of a pair, initially from N(0, 0.02^2) like learned positions.

    Devlin et al. 2019 (1810.04805). The authors truncate that distribution at two standard
    deviations.
    """

    def __init__(self, model_dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(2, model_dim))

    def forward(self, segments: Int[Tensor, "batch token"]) -> Float[Tensor, "batch token model"]:
        return nn.functional.embedding(segments, self.weight)


@final
class OutputTable(nn.Module):
    """An output table not shared with any input; its entries start at N(0, 1/d), like E's."""

    def __init__(self, vocab_size: int, model_dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, model_dim))
