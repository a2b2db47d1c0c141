"""Outputs of norms that the backward pass computes again instead of keeping them.

A linear map keeps its input for the gradient of its weight. Where that input is the output of a
norm, autograd keeps two tensors of the size of the stream, input and output of the norm, although
the second one is a cheap pass over the first. The result is the same to the last bit.
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple, final

import torch
from torch import Tensor, nn

from lightning_app.blocks.norm import NORMS

LEAST = 2**18
"""With fewer entries in the stream, following the norms takes longer than the memory is worth."""


class _Again(NamedTuple):
    """What a norm's output is computed from, and the shape in which it was kept."""

    norm: nn.Module
    input: Tensor
    shape: torch.Size


@final
class NormOutputs:
    """The outputs of the norms in one forward pass, by the address of their memory."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[Tensor], nn.Module, Tensor]] = {}

    def follow(self, norm: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        """Note an output; a forward hook."""
        (x,) = inputs
        if output.dtype == x.dtype:
            self._known[_address(output)] = (weakref.ref(output), norm, x.detach())

    def pack(self, saved: Tensor) -> Tensor | _Again:
        """Return what autograd keeps instead of `saved`."""
        found = self._known.get(_address(saved))
        if found is None:
            return saved
        output, norm, x = found
        # Memory of an output that is gone may hold something else now.
        alive = output()
        if alive is None or saved.shape.numel() != alive.numel() or not saved.is_contiguous():
            return saved
        return _Again(norm, x, saved.shape)

    @staticmethod
    def unpack(packed: Tensor | _Again) -> Tensor:
        """Return what was saved; autograd itself connects it to the graph."""
        if isinstance(packed, Tensor):
            return packed
        with torch.no_grad():
            # Without the hooks of the module, which have seen this output.
            return packed.norm.forward(packed.input).view(packed.shape)

    def forget(self) -> None:
        """Free the inputs that nothing refers to."""
        self._known.clear()


def _address(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


def saves_memory(x: Tensor) -> bool:
    """Whether norms of a stream `x` are worth computing again: in training, on a CPU.

    Autocast is left alone, where a linear map keeps another tensor than the norm's output.
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
    """Let the backward pass of this context compute the outputs of the norms of `stack` again."""
    outputs = NormOutputs()
    norms = [part for part in stack.modules() if isinstance(part, NORMS)]
    # Before other hooks, which may return another output than that of the norm.
    handles = [norm.register_forward_hook(outputs.follow, prepend=True) for norm in norms]
    try:
        with torch.autograd.graph.saved_tensors_hooks(outputs.pack, outputs.unpack):
            yield
    finally:
        outputs.forget()
        for handle in handles:
            handle.remove()
