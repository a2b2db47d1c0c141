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
    """Let `torch.nn.functional.linear`, which the peers call, choose the library as our maps do."""
    theirs = torch.nn.functional.linear

    def chosen(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        # Our map calls theirs where it does not take oneDNN.
        return (linear if takes_onednn(input, weight) else theirs)(input, weight, bias)

    with mock.patch.object(torch.nn.functional, "linear", chosen):
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
