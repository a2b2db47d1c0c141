"""What a call gives to blocks and stacks: their wiring, embedded texts, and which tokens count."""

from collections.abc import Callable, Mapping
from dataclasses import is_dataclass, replace
from typing import Any, TypeVar

from torch import Tensor

from lightning_app.blocks.block_config import BlockConfig
from lightning_app.blocks.checked import check_spec
from lightning_app.blocks.masks import Mask
from lightning_app.config.schema import as_plain, as_written, check_keys, hints_of, read
from lightning_app.errors import UserError

Wiring = str | Mapping[str, Any] | BlockConfig
"""A preset by name, or a preset with axes: as in the section `model.block` of a config."""

Found = TypeVar("Found")


def wiring(block: Wiring, axes: Mapping[str, Any]) -> BlockConfig:
    """Return the config of `block` with the `axes` set on top of it.

    Raises:
        UserError: naming the axis, the value and what would be right.
    """
    if isinstance(block, str):
        block = {"preset": block}
    if isinstance(block, BlockConfig):
        config = block
    elif isinstance(block, Mapping):
        config = _read(block, "block")
    else:
        raise UserError(f"block: expected a preset or a mapping, found {as_written(block)}")
    refused(lambda: check_spec(config, BlockConfig, "block"))
    given = _read(axes, "")
    return replace(config, **{name: getattr(given, name) for name in axes})


def refused(call: Callable[[], Found]) -> Found:
    """Return what `call` returns; a `ValueError` of a specification is a mistake in the call."""
    try:
        return call()
    except ValueError as error:
        raise UserError(str(error)) from error


def _read(values: Mapping[str, Any], at: str) -> BlockConfig:
    """Read axes as a config has them, of which some may be specifications already."""
    check_keys(BlockConfig, values, at)
    for name, value in values.items():
        if is_dataclass(value):
            refused(
                lambda name=name, value=value: check_spec(value, hints_of(BlockConfig)[name], name)
            )
    return read(BlockConfig, as_plain(values), at=at)


def self_mask(x: Tensor, dim: int, present: Tensor | None, *, causal: bool) -> Mask:
    """Return the keys that each token of `x` may attend to in self-attention.

    Args:
        x: (batch, token, dim).
        dim: The width of the stream.
        present: (batch, token) bool, True at real tokens and False at padding; None without any.
        causal: Whether a token attends to no later one.

    Raises:
        UserError: for a wrong shape or type.
    """
    _check_states("x", x, dim)
    _check_present("present", present, x)
    seen = None if present is None else present[:, None, None, :]
    return Mask(x.shape[1], x.device, seen=seen, causal=causal)


def memory_mask(x: Tensor, memory: Tensor, dim: int, present: Tensor | None) -> Mask:
    """Return the keys of `memory` that each token of `x` may attend to in cross-attention."""
    _check_states("memory", memory, dim)
    if memory.shape[0] != x.shape[0]:
        raise UserError(f"memory: expected a batch of {x.shape[0]}, as x has, found {len(memory)}")
    _check_present("memory_present", present, memory)
    seen = None if present is None else present[:, None, None, :]
    return Mask(memory.shape[1], memory.device, seen=seen)


def check_memory(memory: Tensor | None, present: Tensor | None, *, cross: bool) -> None:
    """Refuse a memory without cross-attention, and cross-attention without one."""
    if cross and memory is None:
        raise UserError("memory: missing; cross=True reads the states of another stack")
    if not cross and (memory is not None or present is not None):
        raise UserError("memory: there is no cross-attention; build it with cross=True")


def _check_states(name: str, x: Tensor, dim: int) -> None:
    if x.dim() != 3 or x.shape[2] != dim:
        found = tuple(x.shape)
        raise UserError(f"{name}: expected the shape (batch, token, {dim}), found {found}")


def _check_present(name: str, present: Tensor | None, x: Tensor) -> None:
    if present is None:
        return
    shape, kind = tuple(present.shape), str(present.dtype).removeprefix("torch.")
    if shape != x.shape[:2] or kind != "bool":
        raise UserError(
            f"{name}: expected bool of the shape {tuple(x.shape[:2])}, True at real tokens and "
            f"False at padding, found {kind} of the shape {shape}"
        )
