"""A number of tokens, summed over the batches of an evaluation and over all ranks."""

from typing import final

import torch
from jaxtyping import Int
from torch import Tensor
from torchmetrics import Metric


@final
class TokenCount(Metric):
    """The sum of counts, an exact integer on every device and with every precision of the model.

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
