"""Derivatives of a model's loss against differences of a reference."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests import tiny

Parameters = dict[str, np.ndarray[Any, np.dtype[np.float64]]]


def slope(loss: Callable[[Parameters], float], at: Parameters, along: Parameters) -> float:
    """Return the derivative of `loss` along a direction: central differences of fourth order."""
    step = 5e-5

    def shifted(by: float) -> float:
        moved = {name: value + by * along[name] for name, value in at.items() if name in along}
        return loss({**at, **moved})

    near = (shifted(step) - shifted(-step)) / (2 * step)
    far = (shifted(2 * step) - shifted(-2 * step)) / (4 * step)
    return (4 * near - far) / 3


def check_slopes(model: nn.Module, loss: Tensor, reference_loss: Callable[..., float]) -> None:
    """Compare autograd with differences of the reference, in directions over all parameters.

    Each direction is random in every parameter; the scale keeps the differences accurate.
    """
    names, parameters = zip(*model.named_parameters(), strict=True)
    gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
    at = tiny.numpy_parameters(model)
    assert reference_loss(at) == pytest.approx(loss.item(), rel=1e-11)
    for _ in range(3):
        directions = [0.02 * torch.randn(parameter.shape) for parameter in parameters]
        ours = sum(
            float((gradient * direction).sum())
            for gradient, direction in zip(gradients, directions, strict=True)
            if gradient is not None
        )
        along = {name: d.numpy() for name, d in zip(names, directions, strict=True)}
        assert ours == pytest.approx(slope(reference_loss, at, along), rel=1e-6)
