"""Encoders that predict masked tokens and next sentences, classify texts, and mark answers."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple, final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_app.blocks.block import Sizes
from lightning_app.blocks.linear import Linear
from lightning_app.blocks.masks import Mask, full_mask, padding_mask
from lightning_app.blocks.norm import build_norm
from lightning_app.blocks.spans import AuxiliaryTerms, Term
from lightning_app.blocks.stack import StackSpec
from lightning_app.blocks.streams import Stream
from lightning_app.models.auxiliary_heads import AuxiliaryHeads
from lightning_app.models.initialization import initialize
from lightning_app.models.positions import Embedding, EmbeddingSpec, PerToken, SegmentTable
from lightning_app.models.stack import BlockStack

NEXT, RANDOM = 0, 1  # the labels of pairs, as in the authors' code

Predicted = Int[Tensor, " predicted"]
"""Flat indices into batch * token."""


class PairScores(NamedTuple):
    """The scores of pairs in an evaluation: `nll` in nats, and whether the likelier label is right.

    Without gradients.
    """

    nll: Float[Tensor, " pair"]
    correct: Bool[Tensor, " pair"]


@final
class NextSentenceHead(nn.Module, AuxiliaryTerms):
    """``z = W2 tanh(W1 h + b1) + b2`` of the state h of the first token, the mark before the pair.

    z has two entries: NEXT if the second text follows the first in its document, RANDOM if it
    comes from another document. The loss is the mean over pairs of ``-log softmax(z)[label]``,
    without label smoothing, added to the loss of masked words with weight 1 (Devlin et al. 2019,
    1810.04805, section 3.1 and appendix A.2; google-research/bert, `modeling.py` and
    `run_pretraining.py`). `tanh(W1 h + b1)` is BERT's pooler. The stack's final norm, if any,
    applies to h.

    A task calls `score` between the model's forward pass and `auxiliary_terms`.
    """

    def __init__(self, model_dim: int) -> None:
        super().__init__()
        self.pooler = Linear(model_dim, model_dim)
        self.output = Linear(model_dim, 2)
        self._loss: Tensor | None = None
        initialize(self)

    def forward(self, first: Float[Tensor, "pair model"]) -> Float[Tensor, "pair 2"]:
        """Return z for the states of the first tokens."""
        return self.output(torch.tanh(self.pooler(first)))

    def score(
        self,
        first: Float[Tensor, "pair model"],
        labels: Int[Tensor, " pair"],
        counted: Bool[Tensor, " pair"],
        pairs: Int[Tensor, ""],
        tokens: Int[Tensor, ""],
    ) -> PairScores:
        """Return the scores of all pairs; with gradients, store the loss of those that count.

        Args:
            first: The states of the first tokens of all pairs.
            labels: NEXT or RANDOM.
            counted: The pairs that count in the loss; blank rows do not.
            pairs: The number of pairs of the global batch.
            tokens: The tokens it predicts. A step divides by them, so the sum over pairs
                is multiplied by them and divided by `pairs`.
        """
        logits = self(first)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        nll = F.cross_entropy(logits, labels, reduction="none")
        if torch.is_grad_enabled():
            self._loss = (nll * counted).sum() * tokens.to(nll) / pairs.to(nll)
        with torch.no_grad():
            return PairScores(nll.detach(), logits.argmax(dim=1) == labels)

    def auxiliary_terms(self) -> Mapping[str, Term]:
        """Return the loss of the pass scored last; only once per pass."""
        assert self._loss is not None, "the task scores every batch of training"
        loss, self._loss = self._loss, None
        return {"next_sentence": Term(loss, over_tokens=True)}


def add_next_sentence(model: Any) -> None:
    """Give a `MaskedLanguageModel` the head and the table of segments.

    They are drawn after the other initial values, which equal those of the model without them.
    """
    model.embedding.segments = SegmentTable(model.embedding.model_dim)
    initialize(model.embedding.segments)
    model.next_sentence = NextSentenceHead(model.embedding.model_dim)


class MaskedStates(NamedTuple):
    """The inputs of the heads.

    Attributes:
        predicted: The states that the output layer reads at the masked tokens.
        first: The state of the first token of each row; None if no head reads it.
    """

    predicted: Float[Tensor, "predicted model"]
    first: Float[Tensor, "batch model"] | None


class _WithEncoder(nn.Module):
    """A stack that reads whole rows."""

    def __init__(self, encoder: StackSpec, sizes: Sizes, embedding: EmbeddingSpec) -> None:
        super().__init__()
        self.pad = embedding.pad
        self.embedding = Embedding(embedding, sizes.model_dim, sizes.dropout)
        known = replace(sizes, vocabulary=embedding.vocab_size)
        self.encoder = BlockStack(encoder, known, embedding.positions)

    def present(self, tokens: PerToken, *_: Any) -> dict[str, Bool[Tensor, "batch token"]]:
        """Return which tokens of each stack are not padding, from the inputs of `forward`."""
        return {"encoder": tokens != self.pad}


@final
class MaskedLanguageModel(_WithEncoder):
    """An encoder that predicts masked tokens (Devlin et al. 2019, 1810.04805).

    The head is ``E N(gelu(W h + b)) + c`` at the predicted positions only; E is the embedding.

    Rows are windows full of text. After `add_next_sentence` they are pairs of texts instead, with
    padding on the right, and `segments` gives the text of each token.
    """

    def __init__(self, encoder: StackSpec, sizes: Sizes, embedding: EmbeddingSpec) -> None:
        super().__init__(encoder, sizes, embedding)
        self.transform = Linear(sizes.model_dim, sizes.model_dim)
        self.norm = build_norm("layer_norm", sizes.model_dim)
        self.output_bias = nn.Parameter(torch.zeros(embedding.vocab_size))
        self.auxiliary: AuxiliaryHeads | None = None  # created by `add_heads`
        self.next_sentence: NextSentenceHead | None = None  # created by `add_next_sentence`
        initialize(self)

    def forward(
        self, tokens: PerToken, positions: Predicted, segments: PerToken | None = None
    ) -> Float[Tensor, "predicted vocabulary"]:
        """Return logits at `positions`, flat indices into batch * token."""
        x = self.embedding(tokens, segments=segments)
        states = self.encoder(x, self._mask(tokens), tokens=tokens)
        return self.embedding.logits(self.finished(states, positions), self.output_bias)

    def states_of_heads(
        self,
        tokens: PerToken,
        positions: Predicted,
        segments: PerToken | None = None,
        seen: list[Stream] | None = None,
    ) -> MaskedStates:
        """Return the states that the output layer reads at `positions`, and the first of each row.

        They equal those of `forward`, where each block has the states of all tokens for the hooks
        of a probe. Here the last block continues with only the tokens that a head reads. The stream
        after each layer is appended to `seen`, with all tokens except after the last one.
        """
        rows, width = tokens.shape
        kept = positions
        if self.next_sentence is not None:
            kept = torch.cat([torch.arange(rows, device=tokens.device) * width, positions])
        x = self.embedding(tokens, segments=segments)
        (states,) = self.encoder(x, self._mask(tokens), kept=kept, seen=seen, tokens=tokens)
        if self.next_sentence is None:
            return MaskedStates(self._transformed(states), None)
        return MaskedStates(self._transformed(states[rows:]), states[:rows])

    def finished(
        self, states: Float[Tensor, "batch token model"], positions: Predicted
    ) -> Float[Tensor, "predicted model"]:
        """Return the output layer's input at `positions` of a stack's `states`."""
        return self._transformed(states.flatten(0, 1).index_select(0, positions))

    def _mask(self, tokens: PerToken) -> Mask:
        """Windows are full; pairs have padding, which no token sees."""
        if self.next_sentence is None:
            return full_mask(tokens.shape[1], tokens.device)
        return padding_mask(tokens != self.pad)

    def _transformed(
        self, states: Float[Tensor, "predicted model"]
    ) -> Float[Tensor, "predicted model"]:
        return self.norm(F.gelu(self.transform(states)))


STD, CUT = 0.02, 2.0
"""The output layer starts at N(0, STD^2), truncated at CUT standard deviations, as in BERT's
code."""


class _TextEncoder(_WithEncoder):
    """An encoder of rows of one or two texts, whose subclass has the layer `output`.

    Rows have padding on the right, which no token sees.
    """

    output: Linear

    def __init__(self, encoder: StackSpec, sizes: Sizes, embedding: EmbeddingSpec) -> None:
        super().__init__(encoder, sizes, embedding)
        self.embedding.segments = SegmentTable(sizes.model_dim)
        self.embedding.logit_scale = None  # there are no scores over the vocabulary

    def _initialize(self) -> None:
        initialize(self)
        nn.init.trunc_normal_(self.output.weight, std=STD, a=-CUT * STD, b=CUT * STD)


@final
class TextClassifier(_TextEncoder):
    """``z = W2 D(tanh(W1 h + b1)) + b2``; h is the state of the first token, the mark of the row.

    `tanh(W1 h + b1)` is BERT's pooler, D dropout (Devlin et al. 2019, 1810.04805, section 4.1;
    google-research/bert, `run_classifier.py`). z has one entry per class, or a single one for a
    score. The stack's final norm, if any, applies to h.
    """

    def __init__(
        self, encoder: StackSpec, sizes: Sizes, embedding: EmbeddingSpec, outputs: int
    ) -> None:
        super().__init__(encoder, sizes, embedding)
        self.pooler = Linear(sizes.model_dim, sizes.model_dim)
        self.dropout = nn.Dropout(sizes.dropout)
        self.output = Linear(sizes.model_dim, outputs)
        self._initialize()

    def forward(self, tokens: PerToken, segments: PerToken) -> Float[Tensor, "batch output"]:
        """Return z of each row; `segments` has 0 or 1 for the text of each token."""
        x = self.embedding(tokens, segments=segments)
        states = self.encoder(x, padding_mask(tokens != self.pad), tokens=tokens)
        return self._read(states[:, 0])

    def outputs(self, tokens: PerToken, segments: PerToken) -> Float[Tensor, "batch output"]:
        """Return z of each row, as `forward` does.

        In `forward` each block has the states of all tokens for the hooks of a probe. Here the last
        block continues with only the first token of each row, which is all that the pooler reads.
        """
        rows, width = tokens.shape
        first = torch.arange(rows, device=tokens.device) * width
        x = self.embedding(tokens, segments=segments)
        (states,) = self.encoder(x, padding_mask(tokens != self.pad), kept=first, tokens=tokens)
        return self._read(states)

    def _read(self, first: Float[Tensor, "batch model"]) -> Float[Tensor, "batch output"]:
        return self.output(self.dropout(torch.tanh(self.pooler(first))))


@final
class SpanPredictor(_TextEncoder):
    """``z_i = W h_i + b``: two logits of token i, for the first and the last token of the answer.

    Devlin et al. 2019, 1810.04805, section 4.2; google-research/bert, `run_squad.py`. W is
    2 x model, h_i the state of token i; the stack's final norm, if any, applies to it.

    Padding has the logits -inf, so a row has the same probabilities in every batch, unlike in
    the authors' code, whose softmax includes the padding.
    """

    def __init__(self, encoder: StackSpec, sizes: Sizes, embedding: EmbeddingSpec) -> None:
        super().__init__(encoder, sizes, embedding)
        self.output = Linear(sizes.model_dim, 2)
        self._initialize()

    def forward(self, tokens: PerToken, segments: PerToken) -> Float[Tensor, "batch 2 token"]:
        """Return the logits of the first and the last token of the answer, at each token.

        `segments` has 0 or 1 for the text of each token.
        """
        real = tokens != self.pad
        x = self.embedding(tokens, segments=segments)
        states = self.encoder(x, padding_mask(real), tokens=tokens)
        logits = self.output(states).mT
        return logits.masked_fill(~real[:, None], -math.inf)
