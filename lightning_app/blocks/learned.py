"""Learned scalars: trained factors of a block, besides its matrices."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import ClassVar

import torch
from torch import Tensor, nn


class LearnedScalars(nn.Module, ABC):
    """The base of every module whose parameters are gains, weights of a map, spans and the like.

    Initial values, weight decay, the step of the optimizer, `ablate probe` and the gains that a
    run logs find them by this class, so a new subclass needs no registration. A probe calls a
    parameter ``gain`` by its module's name, and another one by its own (see `probes.gains`).
    """

    decays: ClassVar[bool] = False
    """Whether the parameters take weight decay. It would pull a block's wiring towards zero (He &
    Hofmann 2023, 2311.01906, appendix D)."""

    lr: float | None = None
    """The peak learning rate of the parameters; None for that of the optimizer."""

    def measured(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the names and values that a probe and the log of a run show."""
        yield from self.named_parameters(recurse=False)

    @abstractmethod
    def reset(self) -> None:
        """Set the parameters to their initial values."""

    def after_step(self) -> None:
        """Bring the parameters back into their range after a step of the optimizer."""


@torch.no_grad()
def after_step(model: nn.Module) -> None:
    """Run `after_step` of every learned scalar of `model`."""
    for module in model.modules():
        if isinstance(module, LearnedScalars):
            module.after_step()
