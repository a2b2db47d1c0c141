"""An encoder that predicts masked tokens, and of pairs of texts whether they follow each other."""

from typing import NamedTuple, final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_app.blocks.block import Sizes
from lightning_app.blocks.linear import Linear
from lightning_app.blocks.masks import Mask, full_mask, padding_mask
from lightning_app.blocks.norm import build_norm
from lightning_app.blocks.residual import Stream
from lightning_app.blocks.stack import StackSpec
from lightning_app.models.auxiliary_heads import AuxiliaryHeads
from lightning_app.models.embedding import Embedding, EmbeddingSpec
from lightning_app.models.initialization import initialize
from lightning_app.models.next_sentence import NextSentenceHead
from lightning_app.models.transformer import BlockStack


class MaskedStates(NamedTuple):
    """What the heads read.

    Attributes:
        predicted: The states that the output layer reads at the masked tokens.
        first: The state of the first token of each row; None where no head reads it.
    """

    predicted: Float[Tensor, "predicted model"]
    first: Float[Tensor, "batch model"] | None


@final
class MaskedLanguageModel(nn.Module):
    """An encoder that predicts masked tokens (Devlin et al. 2019, 1810.04805).

    The head is ``E N(gelu(W h + b)) + c`` at the predicted positions alone; E is the embedding.

    Rows are windows full of text. After `add_next_sentence` they are pairs of texts instead, with
    padding on the right, and `segments` says of which text each token is.
    """

    def __init__(self, encoder: StackSpec, sizes: Sizes, embedding: EmbeddingSpec) -> None:
        super().__init__()
        self.pad = embedding.pad
        self.embedding = Embedding(embedding, sizes.model_dim, sizes.dropout)
        self.encoder = BlockStack(encoder, sizes, embedding.positions)
        self.transform = Linear(sizes.model_dim, sizes.model_dim)
        self.norm = build_norm("layer_norm", sizes.model_dim)
        self.output_bias = nn.Parameter(torch.zeros(embedding.vocab_size))
        self.auxiliary: AuxiliaryHeads | None = None  # `add_heads` makes them
        self.next_sentence: NextSentenceHead | None = None  # `add_next_sentence` makes it
        initialize(self)

    def present(
        self,
        tokens: Int[Tensor, "batch token"],
        positions: Int[Tensor, " predicted"],
        segments: Int[Tensor, "batch token"] | None = None,
    ) -> dict[str, Bool[Tensor, "batch token"]]:
        """Return which tokens of each stack are no padding, given the inputs of `forward`."""
        return {"encoder": tokens != self.pad}

    def forward(
        self,
        tokens: Int[Tensor, "batch token"],
        positions: Int[Tensor, " predicted"],
        segments: Int[Tensor, "batch token"] | None = None,
    ) -> Float[Tensor, "predicted vocabulary"]:
        """Return logits at `positions`, flat indices into batch * token."""
        states = self.encoder(self.embedding(tokens, segments=segments), self._mask(tokens))
        return self.embedding.logits(self.finished(states, positions)) + self.output_bias

    def states(
        self,
        tokens: Int[Tensor, "batch token"],
        positions: Int[Tensor, " predicted"],
        seen: list[Stream] | None = None,
    ) -> Float[Tensor, "predicted model"]:
        """Return the states that the output layer reads at `positions`: see `states_of_heads`."""
        return self.states_of_heads(tokens, positions, None, seen).predicted

    def states_of_heads(
        self,
        tokens: Int[Tensor, "batch token"],
        positions: Int[Tensor, " predicted"],
        segments: Int[Tensor, "batch token"] | None = None,
        seen: list[Stream] | None = None,
    ) -> MaskedStates:
        """Return the states that the output layer reads at `positions`, and the first of each row.

        They are those of `forward`, where each block has the states of all tokens for the hooks of
        a probe. Here the last one goes on with the tokens alone that a head reads. The stream after
        each layer is appended to `seen`, with all tokens except after the last one.
        """
        rows, width = tokens.shape
        kept = positions
        if self.next_sentence is not None:
            kept = torch.cat([torch.arange(rows, device=tokens.device) * width, positions])
        x = self.embedding(tokens, segments=segments)
        (states,) = self.encoder(x, self._mask(tokens), kept=kept, seen=seen)
        if self.next_sentence is None:
            return MaskedStates(self._transformed(states), None)
        return MaskedStates(self._transformed(states[rows:]), states[:rows])

    def finished(
        self,
        states: Float[Tensor, "batch token model"],
        positions: Int[Tensor, " predicted"],
    ) -> Float[Tensor, "predicted model"]:
        """Return what the output layer reads at `positions` of a stack's `states`."""
        return self._transformed(states.flatten(0, 1).index_select(0, positions))

    def _mask(self, tokens: Int[Tensor, "batch token"]) -> Mask:
        """Windows are full; pairs have padding, which no token sees."""
        if self.next_sentence is None:
            return full_mask(tokens.shape[1], tokens.device)
        return padding_mask(tokens != self.pad)

    def _transformed(
        self, states: Float[Tensor, "predicted model"]
    ) -> Float[Tensor, "predicted model"]:
        return self.norm(F.gelu(self.transform(states)))
