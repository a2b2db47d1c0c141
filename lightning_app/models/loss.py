"""The objective of a task and the sums of a batch, including those of auxiliary heads."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lightning_app.blocks.residual import Stream
from lightning_app.models.auxiliary_heads import AuxiliarySpec
from lightning_app.models.search import SearchConfig
from lightning_app.scores.task_facts import DEFAULT_TASK, TASKS


@dataclass(frozen=True, kw_only=True)
class ObjectiveConfig:
    """The training objective and its evaluation."""

    kind: str = DEFAULT_TASK
    """The task: translation needs an encoder_decoder, masked_lm, glue and squad an encoder,
    causal_lm a decoder."""
    label_smoothing: float | None = None
    """Share of the target's probability spread evenly over the vocabulary, in the loss only. null:
    0.1, and 0 for causal_lm, glue and squad."""
    intermediate_weight: float = 0.0
    """Weight of the losses of layers below the last: layer l of n also predicts until l / (2n) of
    the steps are done (Al-Rfou et al. 2019: 1); 0: none."""
    second_target_weight: float = 0.0
    """Weight of the prediction of the token after next in a decoder (Al-Rfou et al.: 0.5)."""
    auxiliary_tables: Literal["tied", "own"] = "tied"
    """Output tables of intermediate layers: the last layer's, or one per layer."""
    next_sentence: bool = False
    """Whether masked_lm also predicts whether the second of two texts follows the first in its
    document (BERT); it then reads pairs of texts instead of windows."""
    glue: str | None = None
    """Set from data.name: the GLUE task whose labels are predicted; null for other tasks."""
    beam: int = 5
    """Beams of the final test and of `ablate translate`; 1 is greedy search."""
    length_penalty: float = 1.0
    """Exponent of the length in a hypothesis' score (fairseq's lenpen)."""
    validation_bleu: int = 0
    """Decode this many validation sentences greedily at each validation, for val/bleu."""
    evaluate_test: bool = True
    """Evaluate the test split when `fit` ends: test/nll, and for translation both BLEUs."""

    def __post_init__(self) -> None:
        _ = TASKS[self.kind]
        if not 0.0 <= self.smoothing < 1.0:
            raise ValueError(
                f"label_smoothing {self.label_smoothing}: must be at least 0 and less than 1"
            )
        self.auxiliary()
        if self.next_sentence and not TASKS[self.kind].masks:
            raise ValueError(
                f"next_sentence true: only kind masked_lm has it; kind {self.kind} takes false"
            )
        self._check_labels()
        if self.validation_bleu < 0:
            raise ValueError(
                f"validation_bleu {self.validation_bleu}: must be at least 0 sentences"
            )
        if self.beam < 1:
            raise ValueError(f"beam {self.beam}: must be at least 1, which is greedy search")

    def _check_labels(self) -> None:
        if not TASKS[self.kind].labelled:
            return
        if not self.auxiliary().absent:
            raise ValueError(
                f"intermediate_weight {self.intermediate_weight}, second_target_weight "
                f"{self.second_target_weight}: only for kinds that predict tokens; kind "
                f"{self.kind} takes 0 for both"
            )
        if TASKS[self.kind].labelled == "answers" and self.smoothing:
            raise ValueError(
                f"label_smoothing {self.smoothing}: kind {self.kind} predicts places in a text, of "
                "which each row has a different number; it must be 0"
            )
        if self.glue == "STS-B" and self.smoothing:
            raise ValueError(
                f"label_smoothing {self.smoothing}: the labels of STS-B are scores, not classes; "
                "it must be 0"
            )

    @property
    def smoothing(self) -> float:
        """`label_smoothing`, or the task's if it is null."""
        if self.label_smoothing is None:
            return TASKS[self.kind].label_smoothing
        return self.label_smoothing

    def auxiliary(self) -> AuxiliarySpec:
        """Return the losses trained in addition to the last layer's."""
        return AuxiliarySpec(
            intermediate=self.intermediate_weight,
            second_target=self.second_target_weight,
            own_tables=self.auxiliary_tables == "own",
        )

    def search(self, beam: int | None = None) -> SearchConfig:
        """Return how the test is decoded, with another `beam` unless it is None."""
        return SearchConfig(beam=beam or self.beam, length_penalty=self.length_penalty)


class LossSums(NamedTuple):
    """Sums over the predicted tokens of one rank's share of a batch, scalars.

    `loss` is the training loss, `nll` the unsmoothed negative log-likelihood, both in nats.
    The rest is not needed in a training step and exists only without gradients: `correct` counts
    the tokens with the highest probability, `by_token` (2, token) has the `nll` of each token and
    1 if it counts, otherwise 0.
    """

    loss: Tensor
    nll: Tensor
    correct: Tensor | None
    tokens: Tensor
    by_token: Tensor | None = None


class Evaluated(NamedTuple):
    """The evaluation of a split: the sum of `nll` in nats and the number of predicted tokens."""

    nll: float
    tokens: int


def token_sums(
    logits: Float[Tensor, "token vocabulary"],
    labels: Int[Tensor, " token"],
    counted: Bool[Tensor, " token"],
    label_smoothing: float,
) -> LossSums:
    """Sum the losses of the `counted` tokens.

    ``loss = (1 - e) nll + e mean_v(-log p_v)`` with ``e`` the label smoothing (Szegedy et al.
    2016, 1512.00567). This is the plain form, differentiable any number of times; training takes
    the same sums from `output_sums`, which never holds the logits of a whole batch.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    log_probs = logits.log_softmax(dim=-1)
    nll = -log_probs.gather(1, labels[:, None]).squeeze(1)
    loss = nll
    if label_smoothing:
        loss = (1.0 - label_smoothing) * nll - label_smoothing * log_probs.mean(dim=-1)
    return counted_sums(loss, nll, counted, lambda: logits.argmax(dim=-1) == labels)


def counted_sums(
    loss: Float[Tensor, " token"],
    nll: Float[Tensor, " token"],
    counted: Bool[Tensor, " token"],
    right: Callable[[], Bool[Tensor, " token"]],
) -> LossSums:
    """Return the sums over the `counted` tokens; `right` is called only without gradients."""
    correct = by_token = None
    if not torch.is_grad_enabled():
        correct = (right() & counted).sum()
        by_token = torch.stack([nll * counted, counted.to(nll)])
    return LossSums(
        loss=(loss * counted).sum(),
        nll=(nll.detach() * counted).sum(),
        correct=correct,
        tokens=counted.sum(),
        by_token=by_token,
    )


Sums = Callable[[Tensor, Tensor, Tensor, Tensor], LossSums]
"""Returns the sums of (states, table, labels, counted) over tokens, such as `output_sums`."""


def sums_of_all_heads(
    sums: Sums,
    model: Any,
    states: Float[Tensor, "*text model"],
    labels: Int[Tensor, "*text"],
    counted: Bool[Tensor, "*text"],
    seen: list[Stream] | None,
    finish: Callable[[Tensor], Tensor] | None = None,
    documents: Int[Tensor, "batch row"] | None = None,
) -> LossSums:
    """Return the sums of only the output layer; store the losses of other heads in the heads.

    Args:
        sums: The training sums of a head; the same for all heads.
        model: A model whose output table is its embedding.
        states: The input of the output layer.
        labels: The labels to predict, in the order of the text along the last axis.
        counted: The labels that count.
        seen: The streams after the layers, from `watched`; None if no other head predicts.
        finish: Turns the states of a stack into those that the output layer reads; None if those
            are the same.
        documents: The number of the document of each label; None if each text is one document.
    """
    table = model.embedding.tokens.weight
    if seen is not None:
        model.auxiliary.score(
            lambda *of: sums(*of).loss, table, seen, states, labels, counted, finish, documents
        )
    return sums(states.flatten(0, -2), table, labels.flatten(), counted.flatten())
