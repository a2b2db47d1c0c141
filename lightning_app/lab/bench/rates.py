"""The rates of a processor, and whether all products use one library.

The linear maps of two models can be computed by one matrix library, so that only the form of the
models differs. How fast this device multiplies matrices and how many multiplications a workload
makes give the share of the measured rate that the workload reaches: it shows how much of its time
goes to something other than products and, unlike a ratio to a library whose products are computed
by another matrix library, can be compared between processors.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from lightning_app.blocks.linear import (
    float32_library,
    linear,
    mkl_products,
    prefers_onednn,
    takes_onednn,
)
from lightning_app.lab.bench.measure import Clock, Run, Spread


@contextmanager
def onednn_everywhere() -> Iterator[None]:
    """Make the linear maps of the peers choose the library as ours do.

    They call `torch.nn.functional.linear`, and in GPT-2 `torch.addmm` with a transposed matrix.
    """
    theirs, added = torch.nn.functional.linear, torch.addmm

    def chosen(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        # Our map calls theirs if it does not use oneDNN.
        return (linear if takes_onednn(input, weight) else theirs)(input, weight, bias)

    def chosen_added(bias: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        if takes_onednn(x, weight.t()):
            return linear(x, weight.t(), bias)
        return added(bias, x, weight)

    with (
        mock.patch.object(torch.nn.functional, "linear", chosen),
        mock.patch.object(torch, "addmm", chosen_added),
    ):
        yield


def same_library() -> dict[str, Callable[[], AbstractContextManager[None]]]:
    """Return a context per library that can compute the linear maps of both models, by name.

    It is empty if our models use the library of the peers.
    """
    if not prefers_onednn():
        return {}
    with mkl_products():
        other = float32_library()
    return {other: mkl_products, float32_library(): onednn_everywhere}


Sizes = tuple[int, int, int]
"""Rows, inner size and columns of a product."""

LINEAR_MAP: Sizes = (1024, 512, 1024)
"""As large as the linear maps of a 6+6 model of width 512."""
LARGE: Sizes = (8192, 8192, 8192)
"""Large enough to occupy a whole GPU."""
ROUNDS = 9
FLOAT32, BFLOAT16 = "float32", "bfloat16"

Rates = dict[str, float]


def matmul_rates(device: torch.device, sizes: Sizes | None = None) -> Rates:
    """Return the median rate of a large product (FLOP/s) per type and library of `device`.

    On a CPU the keys are ``float32 LIBRARY`` for every library that our models may use here, and
    ``bfloat16``; on a GPU ``float32`` and ``bfloat16``. The product has the sizes `sizes`: by
    default those of a linear map on a CPU, and large ones on a GPU.
    """
    sizes = sizes or (LINEAR_MAP if device.type == "cpu" else LARGE)
    rates = {BFLOAT16: _rate(device, torch.bfloat16, sizes)}
    if device.type != "cpu":
        return {FLOAT32: _rate(device, torch.float32, sizes), **rates}
    rates[f"{FLOAT32} {float32_library()}"] = _rate(device, torch.float32, sizes)
    if prefers_onednn():
        with mkl_products():
            rates[f"{FLOAT32} {float32_library()}"] = _rate(device, torch.float32, sizes)
    return dict(sorted(rates.items()))


def _rate(device: torch.device, dtype: torch.dtype, sizes: Sizes) -> float:
    rows, inner, columns = sizes
    x = torch.randn(rows, inner, device=device, dtype=dtype)
    weight = torch.randn(columns, inner, device=device, dtype=dtype)
    clock = Clock(device)
    with torch.no_grad():
        seconds = [clock.seconds(lambda: linear(x, weight)) for _ in range(ROUNDS + 2)][2:]
    return 2 * rows * inner * columns / Spread.of(seconds).median


def rate_in_force(rates: Rates, device: str, *, bf16: bool) -> float:
    """Return the rate of the products that our models compute now on `device`."""
    if bf16:
        return rates[BFLOAT16]
    return rates[f"{FLOAT32} {float32_library()}" if device == "cpu" else FLOAT32]


def product_flops(run: Run) -> int:
    """Return the floating-point operations of all matrix products in one `run`.

    A product of m x k by k x n matrices counts 2 m k n. Attention counts whole maps, even if it
    is causal, as PyTorch's own counter does, and products that a backward pass recomputes count
    again.
    """
    with FlopCounterMode(display=False, custom_mapping=_MORE) as counter:
        run()
    return counter.get_total_flops()


Shape = Sequence[int]


def _linear(x: Shape, weight: Shape, *others: Any, **named: Any) -> int:
    return 2 * math.prod(x) * weight[0]


def _added_product(total: Shape, a: Shape, b: Shape, **named: Any) -> int:
    return 2 * math.prod(a) * b[1]


def _attention(query: Shape, key: Shape, value: Shape, *others: Any, **named: Any) -> int:
    """``Q K^T`` and the product of the map with V."""
    return 2 * math.prod(query[:-1]) * key[-2] * (query[-1] + value[-1])


def _attention_backward(
    gradient: Shape, query: Shape, key: Shape, value: Shape, *others: Any, **named: Any
) -> int:
    """``Q K^T`` again, the gradients of Q and K; those of the map and of V."""
    return 2 * math.prod(query[:-1]) * key[-2] * (3 * query[-1] + 2 * value[-1])


# The operators unknown to PyTorch's counter.
_MORE: dict[Any, Callable[..., int]] = {
    torch.ops.aten.addmm_: _added_product,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}
if hasattr(torch.ops.mkldnn, "_linear_pointwise"):
    _MORE[torch.ops.mkldnn._linear_pointwise] = _linear
