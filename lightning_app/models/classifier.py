"""An encoder whose first state gives the label of one or two texts (Devlin et al. 2019)."""

from typing import final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from lightning_app.blocks.block import Sizes
from lightning_app.blocks.linear import Linear
from lightning_app.blocks.masks import padding_mask
from lightning_app.blocks.stack import StackSpec
from lightning_app.models.embedding import Embedding, EmbeddingSpec, SegmentTable
from lightning_app.models.initialization import initialize
from lightning_app.models.transformer import BlockStack

STD, CUT = 0.02, 2.0
"""The output layer starts at N(0, STD^2), cut at CUT standard deviations, as in BERT's code."""


@final
class TextClassifier(nn.Module):
    """``z = W2 D(tanh(W1 h + b1)) + b2``; h is the state of the first token, the mark of the row.

    `tanh(W1 h + b1)` is BERT's pooler, D dropout (Devlin et al. 2019, 1810.04805, section 4.1;
    google-research/bert, `run_classifier.py`). z has one entry for each class, or one for a score.
    The norm at the end of the stack, if it has one, acts on h.

    Rows have padding on the right, which no token sees.
    """

    def __init__(
        self, encoder: StackSpec, sizes: Sizes, embedding: EmbeddingSpec, outputs: int
    ) -> None:
        super().__init__()
        self.pad = embedding.pad
        self.embedding = Embedding(embedding, sizes.model_dim, sizes.dropout)
        self.embedding.segments = SegmentTable(sizes.model_dim)
        self.encoder = BlockStack(encoder, sizes, embedding.positions)
        self.pooler = Linear(sizes.model_dim, sizes.model_dim)
        self.dropout = nn.Dropout(sizes.dropout)
        self.output = Linear(sizes.model_dim, outputs)
        initialize(self)
        nn.init.trunc_normal_(self.output.weight, std=STD, a=-CUT * STD, b=CUT * STD)

    def present(
        self, tokens: Int[Tensor, "batch token"], segments: Int[Tensor, "batch token"]
    ) -> dict[str, Bool[Tensor, "batch token"]]:
        """Return which tokens of each stack are no padding, given the inputs of `forward`."""
        return {"encoder": tokens != self.pad}

    def forward(
        self, tokens: Int[Tensor, "batch token"], segments: Int[Tensor, "batch token"]
    ) -> Float[Tensor, "batch output"]:
        """Return z of each row; `segments` has 0 or 1 for the text that a token is of."""
        x = self.embedding(tokens, segments=segments)
        states = self.encoder(x, padding_mask(tokens != self.pad))
        return self._read(states[:, 0])

    def outputs(
        self, tokens: Int[Tensor, "batch token"], segments: Int[Tensor, "batch token"]
    ) -> Float[Tensor, "batch output"]:
        """Return z of each row, as `forward` does.

        There each block has the states of all tokens for the hooks of a probe. Here the last one
        goes on with the first token of each row alone, which is all that the pooler reads.
        """
        rows, width = tokens.shape
        first = torch.arange(rows, device=tokens.device) * width
        x = self.embedding(tokens, segments=segments)
        (states,) = self.encoder(x, padding_mask(tokens != self.pad), kept=first)
        return self._read(states)

    def _read(self, first: Float[Tensor, "batch model"]) -> Float[Tensor, "batch output"]:
        return self.output(self.dropout(torch.tanh(self.pooler(first))))
