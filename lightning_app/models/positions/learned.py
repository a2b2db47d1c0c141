"""A learned table of positions, added to the embedding."""

from typing import final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lightning_app.errors import UserError
from lightning_app.models.positions.base import POSITIONS, Positions, Table


@final
class LearnedTable(Table):
    """One vector for each position, initially from N(0, 0.02^2) (Devlin et al. 2019)."""

    def __init__(self, max_positions: int, model_dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(max_positions, model_dim))
        nn.init.normal_(self.weight)

    def forward(
        self, start: int, end: int, device: torch.device
    ) -> Float[Tensor, "position model"]:
        if end > len(self.weight):
            raise UserError(
                f"model.architecture.max_positions is {len(self.weight)}, and a text has {end} "
                "tokens; learned positions end there"
            )
        return self.weight[start:end]


@final
@POSITIONS.register("learned")
class Learned(Positions):
    """Devlin et al. 2019, BERT (1810.04805)."""

    @property
    def longest(self) -> float:
        return float(self.max_positions)

    def table(self) -> LearnedTable:
        return LearnedTable(self.max_positions, self.model_dim)
