"""The sums of a validation over batches and ranks. Slow to import: torchmetrics."""

from typing import Any, final

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torchmetrics import Metric


@final
class TokenCount(Metric):
    """A sum of counts, an exact integer on every device and in every precision of the model.

    A sum in float32 stops being exact at 2^24, one in bfloat16 at 2^8.
    """

    def __init__(self) -> None:
        super().__init__()
        self.total: Tensor
        self.add_state("total", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, count: Int[Tensor, ""]) -> None:
        self.total += count

    def compute(self) -> Tensor:
        return self.total


PARTS = 50


@final
class PartSums(Metric):
    """Sums of losses and tokens over `PARTS` parts of a split, each of consecutive rows.

    Neighbouring rows often come from the same text and are alike. A part of consecutive rows keeps
    them together, so that the differences between parts show how much another sample of texts
    would change a mean. With R rows, row r is in part ``r PARTS // R``, whatever the batches and
    the number of ranks.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sums: Tensor
        self.add_state("sums", torch.zeros(2, PARTS), dist_reduce_fx="sum")

    def update(
        self, by_token: Float[Tensor, "2 token"], rows: Int[Tensor, " token"], size: int
    ) -> None:
        """Add the tokens of a batch.

        Args:
            by_token: The loss of each token in nats, and 1 if it counts, otherwise 0; a token that
                does not count has the loss 0.
            rows: The row of the split for each token; arbitrary for tokens that do not count.
            size: The number of rows of the split.
        """
        parts = rows.clamp(min=0) * PARTS // size
        # Token by token, a float32 sum would stop growing at 2^24 tokens.
        self.sums += torch.zeros_like(self.sums).index_add_(1, parts, by_token.to(self.sums))

    def compute(self) -> dict[str, list[Any]]:
        """Return `nll` and `tokens` of each part that has tokens, in the order of the split."""
        nll, tokens = self.sums[:, self.sums[1] > 0].tolist()
        return {"nll": nll, "tokens": [int(count) for count in tokens]}
