"""Terms that a part of a model adds to the loss, such as a penalty on its parameters."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import NamedTuple

from jaxtyping import Float
from torch import Tensor, nn


class Term(NamedTuple):
    """``weight * value``, to be added to the loss.

    Attributes:
        value: A scalar with a gradient, from the last forward pass or from parameters only.
        weight: The factor in the loss.
        over_tokens: Whether `value` is a sum over the tokens of the batch, which is divided like
            the loss; otherwise it is a penalty, the same on every rank, and is not divided.
    """

    value: Float[Tensor, ""]
    weight: float = 1.0
    over_tokens: bool = False


class AuxiliaryTerms(ABC):
    """A module that offers terms of the loss. Derive from it beside `nn.Module`."""

    def at_step(self, done: int, total: int) -> None:  # noqa: B027
        """Learn before each training step how many steps are `done` of the run's `total`.

        `total` is fixed when the run starts, also for the runs that go on from its checkpoints; it
        is below 1 where it is not known.
        """

    @abstractmethod
    def auxiliary_terms(self) -> Mapping[str, Term]:
        """Return the terms by name, after each forward pass of training."""


def auxiliary_terms(
    model: nn.Module, normalizer: Float[Tensor, ""]
) -> dict[str, Float[Tensor, ""]]:
    """Return the terms that all modules of `model` add to the loss, by name.

    Terms of one name are added together. `normalizer` is the number by which sums over tokens are
    divided.
    """
    found: dict[str, Tensor] = {}
    for module in model.modules():
        if isinstance(module, AuxiliaryTerms):
            for name, term in module.auxiliary_terms().items():
                value = term.weight * (term.value / normalizer if term.over_tokens else term.value)
                found[name] = found[name] + value if name in found else value
    return found


def at_step(model: nn.Module, done: int, total: int) -> None:
    """Run `at_step` of all modules of `model` that offer terms."""
    for module in model.modules():
        if isinstance(module, AuxiliaryTerms):
            module.at_step(done, total)
