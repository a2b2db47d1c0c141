"""The position-wise feed-forward sub-layer."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_app.blocks.linear import Linear
from lightning_app.blocks.norm import Norm, Scale, build_norm
from lightning_app.core.registry import Registry

Activation = str
"""A name of `ACTIVATIONS`."""

Function = Callable[[Tensor, float], Tensor]


@dataclass(frozen=True)
class Nonlinearity:
    """The computation between the two matrices of a feed-forward.

    `function` takes the inner states and the slope of the config. If it is `gated`, its result is
    multiplied by a third matrix of the same size.
    """

    function: Function
    gated: bool = False


ACTIVATIONS: Registry[Nonlinearity] = Registry("model.architecture.activation")
"""The activations by name; `activation` is the decorator that adds a function."""


def activation(name: str, *, gated: bool = False) -> Callable[[Function], Function]:
    """Return the decorator that makes a function of inner states and slope the activation `name`.

    Raises:
        ValueError: raised by the decorator, for a function whose arguments are not exactly these
            two.
    """

    def add(function: Function) -> Function:
        try:
            inspect.signature(function).bind(None, 0.0)
        except TypeError as error:
            raise ValueError(
                f"model.architecture.activation: '{name}' is called with two arguments, the inner "
                f"states and the slope; {error}"
            ) from error
        ACTIVATIONS.add(name, Nonlinearity(function, gated))
        return function

    return add


@activation("relu")
def _relu(x: Tensor, slope: float) -> Tensor:
    return F.relu(x)


@activation("geglu", gated=True)
@activation("gelu")
def _gelu(x: Tensor, slope: float) -> Tensor:
    return F.gelu(x)


@activation("swiglu", gated=True)
def _silu(x: Tensor, slope: float) -> Tensor:
    return F.silu(x)


@activation("relu_squared")
def _relu_squared(x: Tensor, slope: float) -> Tensor:
    return F.relu(x).square()


@activation("leaky_relu")
def _leaky_relu(x: Tensor, slope: float) -> Tensor:
    return F.leaky_relu(x, slope)


@final
class FeedForward(nn.Module):
    """``W2 N(act(W1 x + b1)) + b2`` (Vaswani et al. 2017, 1706.03762, equation 2).

    N is NormFormer's norm of the inner states (Shleifer et al. 2021, 2110.09456), otherwise the
    identity.
    ``geglu`` is ``gelu(W1 x + b1) * (W3 x + b3)``, a third matrix of the same size, and ``swiglu``
    the same with silu (Shazeer 2020, 2002.05202); ``relu_squared`` is ``max(W1 x + b1, 0)^2`` (So
    et al. 2021, 2109.08668). `slope` is the slope of ``leaky_relu`` below zero. If
    `scaled`, the results of W1 and W3 are multiplied by learned vectors from sqrt(d) (nGPT).
    """

    def __init__(
        self,
        model_dim: int,
        ff_dim: int,
        activation: Activation,
        norm: Norm = "none",
        slope: float = 0.01,
        scaled: bool = False,
    ) -> None:
        super().__init__()
        self.activation = activation
        self.nonlinearity = ACTIVATIONS[activation]
        self.slope = slope
        self.inner = Linear(model_dim, ff_dim)
        self.gate = Linear(model_dim, ff_dim) if self.nonlinearity.gated else None
        scale = Scale if scaled else nn.Identity
        self.scale_inner = scale(ff_dim, start=model_dim**0.5)
        self.scale_gate = None if self.gate is None else scale(ff_dim, start=model_dim**0.5)
        self.norm_inner = build_norm(norm, ff_dim)
        self.outer = Linear(ff_dim, model_dim)

    def forward(self, x: Float[Tensor, "batch token model"]) -> Float[Tensor, "batch token model"]:
        inner = self.nonlinearity.function(self.scale_inner(self.inner(x)), self.slope)
        if self.gate is not None and self.scale_gate is not None:
            inner = inner * self.scale_gate(self.gate(x))
        return self.outer(self.norm_inner(inner))
