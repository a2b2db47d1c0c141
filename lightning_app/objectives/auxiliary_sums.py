"""The sums of a batch, with those of the heads that predict beside the output layer."""

from collections.abc import Callable
from typing import Any

from jaxtyping import Bool, Float, Int
from torch import Tensor

from lightning_app.blocks.residual import Stream
from lightning_app.objectives.base import LossSums

Sums = Callable[[Tensor, Tensor, Tensor, Tensor], LossSums]
"""Returns the sums of (states, table, labels, counted) of tokens, such as `output_sums`."""


def sums_of_all_heads(
    sums: Sums,
    model: Any,
    states: Float[Tensor, "*text model"],
    labels: Int[Tensor, "*text"],
    counted: Bool[Tensor, "*text"],
    seen: list[Stream] | None,
    finish: Callable[[Tensor], Tensor] | None = None,
    documents: Int[Tensor, "*text"] | None = None,
) -> LossSums:
    """Return the sums of the output layer alone; leave the losses of other heads with the heads.

    Args:
        sums: What a head is trained on; the same for all heads.
        model: A model whose output table is that of its embedding.
        states: What the output layer reads.
        labels: What it predicts from them, in the order of the text along the last axis.
        counted: Which of the labels count.
        seen: The streams after the layers, from `watched`; None where no other head predicts.
        finish: Turns what a stack gives into states that the output layer reads; None where those
            are the same.
        documents: A number for the document of each label; None where a text is one document.
    """
    table = model.embedding.tokens.weight
    if seen is not None:
        model.auxiliary.score(
            lambda *of: sums(*of).loss, table, seen, states, labels, counted, finish, documents
        )
    return sums(states.flatten(0, -2), table, labels.flatten(), counted.flatten())
