"""An encoder that marks the first and the last token of an answer (Devlin et al. 2019)."""

import math
from typing import final

from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from lightning_app.blocks.block import Sizes
from lightning_app.blocks.linear import Linear
from lightning_app.blocks.masks import padding_mask
from lightning_app.blocks.stack import StackSpec
from lightning_app.models.classifier import CUT, STD
from lightning_app.models.embedding import Embedding, EmbeddingSpec, SegmentTable
from lightning_app.models.initialization import initialize
from lightning_app.models.transformer import BlockStack


@final
class SpanPredictor(nn.Module):
    """``z_i = W h_i + b``: two logits of token i, for the first and the last one of the answer.

    Devlin et al. 2019, 1810.04805, section 4.2; google-research/bert, `run_squad.py`. W is
    2 x model, h_i the state of token i; a norm at the end of the stack acts on it.

    Rows have padding on the right, which no token sees and which has the logits -inf. So a row has
    the same probabilities in every batch, other than in the authors' code, whose softmax has the
    padding in it.
    """

    def __init__(self, encoder: StackSpec, sizes: Sizes, embedding: EmbeddingSpec) -> None:
        super().__init__()
        self.pad = embedding.pad
        self.embedding = Embedding(embedding, sizes.model_dim, sizes.dropout)
        self.embedding.segments = SegmentTable(sizes.model_dim)
        self.encoder = BlockStack(encoder, sizes, embedding.positions)
        self.output = Linear(sizes.model_dim, 2)
        initialize(self)
        nn.init.trunc_normal_(self.output.weight, std=STD, a=-CUT * STD, b=CUT * STD)

    def present(
        self, tokens: Int[Tensor, "batch token"], segments: Int[Tensor, "batch token"]
    ) -> dict[str, Bool[Tensor, "batch token"]]:
        """Return which tokens of each stack are no padding, given the inputs of `forward`."""
        return {"encoder": tokens != self.pad}

    def forward(
        self, tokens: Int[Tensor, "batch token"], segments: Int[Tensor, "batch token"]
    ) -> Float[Tensor, "batch 2 token"]:
        """Return the logits of the first and the last token of the answer, at each token.

        `segments` has 0 or 1 for the text that a token is of.
        """
        real = tokens != self.pad
        states = self.encoder(self.embedding(tokens, segments=segments), padding_mask(real))
        logits = self.output(states).mT
        return logits.masked_fill(~real[:, None], -math.inf)
