"""The head that says whether the second of two texts follows the first (Devlin et al. 2019)."""

from collections.abc import Mapping
from typing import Any, NamedTuple, final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_app.blocks.auxiliary import AuxiliaryTerms, Term
from lightning_app.blocks.linear import Linear
from lightning_app.models.embedding import SegmentTable
from lightning_app.models.initialization import initialize

NEXT, RANDOM = 0, 1  # the labels of pairs, as in the authors' code


class PairScores(NamedTuple):
    """The scores of pairs in an evaluation: `nll` in nats, and whether the likelier label is right.

    Without gradients.
    """

    nll: Float[Tensor, " pair"]
    correct: Bool[Tensor, " pair"]


@final
class NextSentenceHead(nn.Module, AuxiliaryTerms):
    """``z = W2 tanh(W1 h + b1) + b2`` of the state h of the first token, the mark before the pair.

    z has two entries: NEXT where the second text follows the first in its document, RANDOM where it
    is of another document. The loss is the mean over pairs of ``-log softmax(z)[label]``, without
    label smoothing, added to that of masked words with weight 1 (Devlin et al. 2019, 1810.04805,
    section 3.1 and appendix A.2; google-research/bert, `modeling.py` and `run_pretraining.py`).
    `tanh(W1 h + b1)` is BERT's pooler. The norm at the end of the stack, if it has one, acts on h.

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
        """Return the scores of all pairs; with gradients, leave the loss of those that count.

        Args:
            first: The states of the first tokens of all pairs.
            labels: NEXT or RANDOM.
            counted: Which pairs count in the loss; a blank row does not.
            pairs: The number of pairs of the global batch.
            tokens: The tokens that it predicts. A step divides by them, so that the sum over pairs
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
        """Return the loss of the pass that was scored last, once."""
        assert self._loss is not None, "the task scores every batch of training"
        loss, self._loss = self._loss, None
        return {"next_sentence": Term(loss, over_tokens=True)}


def add_next_sentence(model: Any) -> None:
    """Give a `MaskedLanguageModel` the head and the table of segments.

    They are drawn after the other initial values, which are those of the model without them.
    """
    model.embedding.segments = SegmentTable(model.embedding.model_dim)
    initialize(model.embedding.segments)
    model.next_sentence = NextSentenceHead(model.embedding.model_dim)
