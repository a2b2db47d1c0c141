"""Linear maps with MKL or oneDNN, depending on which is faster on this processor.

PyTorch computes float32 products on a CPU with MKL, which does not use the 512-bit registers of AMD
processors. oneDNN, which is also part of PyTorch, uses them: it is 2.2 times as fast on an EPYC
with AVX-512. Both compute in plain float32 and differ only in rounding. The choice depends only on
processor, type and size, so that a resumed run computes the same bits on the same machine.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from typing import Any, final

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_app.blocks.norm import LearnedScalars

SMALL = 2**20
"""With fewer multiplications, a call of oneDNN costs more time than it saves."""
SMALL_TURNED = 2**21
"""The same limit for an `x` that oneDNN, unlike MKL, must first transpose in memory."""
SMALL_TURNED_ZEN_4 = 2**26
"""The same limit where oneDNN is hardly faster, because the 512 bits are two 256-bit units."""


_followed: ContextVar[bool] = ContextVar("followed", default=False)


@contextmanager
def followed() -> Iterator[None]:
    """Use only PyTorch's own operations, which `torch.vmap` can follow."""
    token = _followed.set(True)
    try:
        yield
    finally:
        _followed.reset(token)


def is_followed() -> bool:
    """Whether `torch.compile` or `torch.vmap` follows the operations: both know only PyTorch's."""
    return torch.compiler.is_compiling() or _followed.get()


@cache
def prefers_onednn() -> bool:
    """Whether float32 products are computed by oneDNN here: on AMD with AVX-512."""
    return (
        torch.backends.mkl.is_available()
        and torch.backends.mkldnn.is_available()
        and torch.backends.cpu.get_cpu_capability() == "AVX512"
        and "AuthenticAMD" in _processor()
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


@cache
def _processor() -> str:
    """Linux's description of the processors; empty on other systems."""
    information = Path("/proc/cpuinfo")
    if not information.is_file():
        return ""
    return information.read_text(encoding="ascii", errors="replace")


@cache
def _has_wide_units() -> bool:
    """Whether the processor has true 512-bit units, as AMD's do from Zen 5 on."""
    family = re.search(r"cpu family\s*: (\d+)", _processor())
    return family is not None and int(family[1]) >= 26


def float32_library() -> str:
    """The library that multiplies large float32 matrices on this machine's CPU."""
    if prefers_onednn():
        return "oneDNN"
    if torch.backends.mkl.is_available():
        return "MKL"
    match = re.search(r"BLAS_INFO=(\w+)", torch.__config__.show())
    name = match[1] if match else "unknown"
    return {"open": "OpenBLAS", "accelerate": "Accelerate"}.get(name, name)


def takes_onednn(x: Tensor, weight: Tensor) -> bool:
    """Whether `linear` computes ``x weight^T`` with oneDNN."""
    return (
        x.dtype == weight.dtype == torch.float32
        and x.device.type == "cpu"
        and not is_followed()
        and not torch.is_autocast_enabled("cpu")
        and prefers_onednn()
        and x.numel() * weight.shape[0] >= _smallest(turned=not x.is_contiguous())
    )


def _smallest(*, turned: bool) -> int:
    """The number of multiplications from which oneDNN is faster."""
    if not turned:
        return SMALL
    return SMALL_TURNED if _has_wide_units() else SMALL_TURNED_ZEN_4


def _onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


def linear(
    x: Float[Tensor, "*shape inner"],
    weight: Float[Tensor, "outer inner"],
    bias: Float[Tensor, " outer"] | None = None,
) -> Float[Tensor, "*shape outer"]:
    """``x W^T + b``."""
    if not takes_onednn(x, weight):
        return F.linear(x, weight, bias)
    if not torch.is_grad_enabled():
        return _onednn(x, weight, bias)
    return _LinearFunction.apply(x, weight, bias)  # pyright: ignore[reportReturnType]


def product(
    a: Float[Tensor, "row inner"], b: Float[Tensor, "inner column"]
) -> Float[Tensor, "row column"]:
    """``a b``."""
    return linear(a, b.t())


def gradient_of_weight(
    above: Float[Tensor, "token outer"], x: Float[Tensor, "token inner"]
) -> Float[Tensor, "outer inner"]:
    """``above^T x``, the gradient with respect to W; `above` is that of the product ``x W^T``.

    oneDNN copies its first operand if it is transposed, so the transposed gradient is computed
    where `x` is so much narrower than `above` that transposing the gradient back costs less.
    """
    (tokens, outer), inner = above.shape, x.shape[1]
    narrow = tokens * outer > (tokens + outer) * inner
    if narrow and takes_onednn(x.t(), above.t()):
        return product(x.t(), above).t().contiguous()
    return product(above.t(), x)


@final
class _LinearFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _onednn(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        # These products are differentiable, so that second derivatives exist.
        x, weight = ctx.saved_tensors
        rows, above = x.flatten(0, -2), grad.flatten(0, -2)
        wanted = ctx.needs_input_grad
        return (
            product(above, weight).view_as(x) if wanted[0] else None,
            gradient_of_weight(above, rows) if wanted[1] else None,
            above.sum(dim=0) if wanted[2] else None,
        )


class Linear(nn.Linear):
    """``x W^T + b``: the same as `torch.nn.Linear`, but faster on some processors."""

    def forward(self, input: Float[Tensor, "*shape inner"]) -> Float[Tensor, "*shape outer"]:
        return linear(input, self.matrix, self.bias)

    @property
    def matrix(self) -> Float[Tensor, "outer inner"]:
        """The matrix of the map: `weight`, unless another parameter sets its size."""
        return self.weight


@final
class SpectralSize(LearnedScalars):
    """gamma of a `SpectralLinear`, which sets its start by the matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(()))


@final
class SpectralLinear(Linear):
    """``x W'^T + b``, ``W' = gamma W / sigma_1(W)`` (Zhai et al. 2023, 2303.06296, code).

    gamma, a learned scalar, starts at sigma_1(W), so that W' is W at first. In training each call
    improves the estimate of sigma_1's vector by one power iteration, outside of the gradient.
    """

    vector: Tensor

    def __init__(self, other: nn.Linear) -> None:
        super().__init__(other.in_features, other.out_features, bias=other.bias is not None)
        self.weight, self.bias = other.weight, other.bias
        self.size = SpectralSize()
        self.register_buffer("vector", torch.ones(other.in_features))

    @torch.no_grad()
    def aim(self) -> Float[Tensor, ""]:
        """Set the vector to that of the largest singular value, and return this value."""
        _, sizes, rows = torch.linalg.svd(self.weight.double(), full_matrices=False)
        self.vector.copy_(rows[0])
        return sizes[0]

    @torch.no_grad()
    def start(self) -> None:
        """Let gamma be the largest singular value of the matrix."""
        self.size.gamma.copy_(self.aim())

    @property
    def matrix(self) -> Float[Tensor, "outer inner"]:
        # Sums of entries and not products of matrices, which autocast would round to bfloat16.
        weight = self.weight.to(torch.promote_types(self.weight.dtype, torch.float32))
        with torch.no_grad():
            left = F.normalize((weight * self.vector).sum(dim=1, keepdim=True), dim=0)
            right = F.normalize((weight * left).sum(dim=0), dim=0)
            if self.training:
                self.vector.copy_(right)
        return (weight * (self.size.gamma / (left * weight * right).sum())).to(self.weight.dtype)
