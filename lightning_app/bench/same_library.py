"""Linear maps of two models by one matrix library, so that only the form of the models differs."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from unittest import mock

import torch
from torch import Tensor

from lightning_app.blocks.linear import (
    float32_library,
    linear,
    mkl_products,
    prefers_onednn,
    takes_onednn,
)


@contextmanager
def onednn_everywhere() -> Iterator[None]:
    """Let the linear maps of the peers choose the library as ours do.

    They call `torch.nn.functional.linear`, and in GPT-2 `torch.addmm` with a transposed matrix.
    """
    theirs, added = torch.nn.functional.linear, torch.addmm

    def chosen(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        # Our map calls theirs where it does not take oneDNN.
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
    """Return a context for each library that can compute the linear maps of both models, by name.

    Empty where our models use the library of the peers.
    """
    if not prefers_onednn():
        return {}
    with mkl_products():
        other = float32_library()
    return {other: mkl_products, float32_library(): onednn_everywhere}
