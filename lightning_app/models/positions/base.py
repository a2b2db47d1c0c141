"""Positions: how the order of tokens enters a model; `model.architecture.positions` selects one."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lightning_app.blocks.placed import Placed, Places
from lightning_app.blocks.stack import StackSpec
from lightning_app.errors import UserError
from lightning_app.registry import Registry

POSITIONS: Registry["type[Positions]"] = Registry("model.architecture.positions")
"""The positions by name; `POSITIONS.register` is the decorator that adds a class."""


class Table(nn.Module, ABC):
    """Positions that are added to the embedding of each token."""

    @abstractmethod
    def forward(
        self, start: int, end: int, device: torch.device
    ) -> Float[Tensor, "position model"]:
        """Return the rows of the positions start .. end - 1."""


class LayerTable(nn.Module, ABC):
    """Positions that are added to the stream before one layer."""

    @abstractmethod
    def forward(self, places: Places) -> Float[Tensor, "*batch #token model"]:
        """Return the rows of the newest tokens."""


Place = Callable[[Places], Placed]


@dataclass(frozen=True, kw_only=True)
class Positions:
    """One kind of positions; this base ignores order. A subclass overrides what it uses."""

    absolute: ClassVar[bool] = False
    """Whether a token enters a model with its position in the text."""
    clamps: ClassVar[bool] = False
    """Whether `clamp_length` has a meaning."""

    model_dim: int
    num_heads: int
    max_positions: int
    clamp_length: int | None = None

    def check(self) -> None:
        """Refuse sizes that these positions cannot have.

        Raises:
            ValueError: naming the field and what would be right.
        """

    @property
    def longest(self) -> float:
        """The largest number of tokens of a text."""
        return math.inf

    def check_length(self, tokens: int) -> None:
        """Refuse a text of more tokens than there are positions.

        Raises:
            UserError: naming the field and both numbers.
        """
        if tokens > self.longest:
            raise UserError(
                f"model.architecture.max_positions is {self.max_positions}, and a text has "
                f"{tokens} tokens; learned positions end there"
            )

    def table(self) -> Table | None:
        """Return the table that is added to the embedding, or None."""
        return None

    def layer_tables(self, depth: int) -> list[LayerTable]:
        """Return the tables that are added to the stream before each layer of a stack, or none."""
        return []

    def check_stack(self, spec: StackSpec) -> None:
        """Refuse a stack with which these positions have no meaning.

        Raises:
            ValueError: naming the field and what would be right.
        """

    def placing(self, spec: StackSpec) -> Place | None:
        """Return the term of the scores of self-attention, given the places of a pass.

        A function, or a module where it has parameters; None where positions do not enter there.
        Each stack has its own, and calls it once for each pass, for all layers.
        """
        return None
