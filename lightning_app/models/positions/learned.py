"""Learned tables of positions: one that is added to the embedding, or one before each layer."""

from typing import final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lightning_app.models.positions.base import (
    POSITIONS,
    LayerTable,
    Places,
    Positions,
    Table,
)


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
        return self.weight[start:end]


@final
class LearnedLayerTable(LayerTable):
    """One vector for each position before one layer, initially from N(0, 0.02^2)."""

    def __init__(self, max_positions: int, model_dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(max_positions, model_dim))
        nn.init.normal_(self.weight)

    def forward(self, places: Places) -> Float[Tensor, "*batch #token model"]:
        return nn.functional.embedding(places.absolute, self.weight)


@final
@POSITIONS.register("learned")
class Learned(Positions):
    """Devlin et al. 2019, BERT (1810.04805)."""

    absolute = True

    @property
    def longest(self) -> float:
        return float(self.max_positions)

    def table(self) -> LearnedTable:
        return LearnedTable(self.max_positions, self.model_dim)


@final
@POSITIONS.register("learned_per_layer")
class LearnedPerLayer(Positions):
    """Al-Rfou et al. 2019 (1808.04444): layer l reads ``x + P_l``, with a table P_l of its own.

    In a dual stream P_l is added to both parts, as positions of the embedding are. No dropout acts
    on it.
    """

    absolute = True

    @property
    def longest(self) -> float:
        return float(self.max_positions)

    def layer_tables(self, depth: int) -> list[LayerTable]:
        return [LearnedLayerTable(self.max_positions, self.model_dim) for _ in range(depth)]
