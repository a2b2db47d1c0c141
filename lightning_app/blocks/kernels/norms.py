"""Norm outputs that the backward pass recomputes instead of keeping.

A linear map keeps its input for the gradient of its weight. Where that input is the output of a
norm, autograd keeps two tensors of the size of the stream, input and output of the norm, although
the output can be recomputed by one cheap pass over the input. The result is bit-identical.
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple, final

import torch
from torch import Tensor, nn

from lightning_app.blocks.norm import NORMS

LEAST = 2**18
"""With fewer entries in the stream, tracking the norms takes more time than the saved memory is
worth."""


class _Again(NamedTuple):
    """The inputs from which a norm's output is recomputed, and the shape in which it was kept."""

    norm: nn.Module
    input: Tensor
    shape: torch.Size


@final
class NormOutputs:
    """The outputs of the norms in one forward pass, by the address of their memory."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[Tensor], nn.Module, Tensor]] = {}

    def follow(self, norm: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        """Record an output; a forward hook."""
        (x,) = inputs
        if output.dtype == x.dtype:
            self._known[_address(output)] = (weakref.ref(output), norm, x.detach())

    def pack(self, saved: Tensor) -> Tensor | _Again:
        """Return what autograd keeps instead of `saved`."""
        found = self._known.get(_address(saved))
        if found is None:
            return saved
        output, norm, x = found
        # The memory of a freed output may hold something else by now.
        alive = output()
        if alive is None or saved.shape.numel() != alive.numel() or not saved.is_contiguous():
            return saved
        return _Again(norm, x, saved.shape)

    @staticmethod
    def unpack(packed: Tensor | _Again) -> Tensor:
        """Return the saved tensor; autograd itself connects it to the graph."""
        if isinstance(packed, Tensor):
            return packed
        with torch.no_grad():
            # Bypass the module's hooks, which have already seen this output.
            return packed.norm.forward(packed.input).view(packed.shape)

    def forget(self) -> None:
        """Free the inputs that nothing refers to."""
        self._known.clear()


def _address(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


def saves_memory(x: Tensor) -> bool:
    """Whether recomputing the norms of a stream `x` pays off: in training, on a CPU.

    Not under autocast, where a linear map keeps another tensor than the norm's output.
    """
    return (
        x.device.type == "cpu"
        and x.numel() >= LEAST
        and torch.is_grad_enabled()
        and not torch.is_autocast_enabled("cpu")
        and not torch.compiler.is_compiling()
    )


@contextmanager
def recomputed_norms(stack: nn.Module) -> Iterator[None]:
    """Let backward passes in this context recompute the outputs of the norms of `stack`."""
    outputs = NormOutputs()
    norms = [part for part in stack.modules() if isinstance(part, NORMS)]
    # Must run before other hooks, which may replace the norm's output.
    handles = [norm.register_forward_hook(outputs.follow, prepend=True) for norm in norms]
    try:
        with torch.autograd.graph.saved_tensors_hooks(outputs.pack, outputs.unpack):
            yield
    finally:
        outputs.forget()
        for handle in handles:
            handle.remove()
