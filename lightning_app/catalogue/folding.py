"""Layers of one form folded into one, and their numbers in few words."""

import math
from collections.abc import Sequence
from dataclasses import MISSING, fields, is_dataclass
from itertools import groupby
from typing import Any, Literal

from lightning_app.blocks.block import BlockSpec
from lightning_app.blocks.residual import Gain

Side = Literal["encoder", "decoder"]


def runs_of(blocks: Sequence[BlockSpec], side: Side) -> list[tuple[range, list[BlockSpec]]]:
    """Return consecutive blocks of one form, with the layers, from 1, that they stand in."""
    runs, layer = [], 1
    names = read(side)
    for _, equal in groupby(blocks, key=lambda block: [form(getattr(block, n)) for n in names]):
        run = list(equal)
        runs.append((range(layer, layer + len(run)), run))
        layer += len(run)
    return runs


def read(side: Side) -> list[str]:
    """Return the fields of a block that are read on `side`: an encoder has no cross-attention."""
    names = [field.name for field in fields(BlockSpec)]
    return [name for name in names if side == "decoder" or "cross" not in name]


def layer_names(first: int, last: int) -> str:
    return f"layer {first}" if first == last else f"layers {first}-{last}"


def form(part: Any) -> Any:
    """Return a specification without its numbers, but for gains of zero, which are absent."""
    if isinstance(part, Gain):
        return part.absent, part.learned, part.vector, part.profiled
    if is_dataclass(part):
        return tuple(form(getattr(part, field.name)) for field in fields(part))
    return None if isinstance(part, float) else (part is None, part)


def number(values: Sequence[float], layers: range) -> str:
    """Return a number that may depend on the layer n: ``0.71``, ``n``, ``1/sqrt(n)`` or a list."""
    if len(set(values)) == 1:
        return f"{values[0]:.4g}"
    if all(value == n for value, n in zip(values, layers, strict=True)):
        return "n"
    if all(math.isclose(value, n**-0.5) for value, n in zip(values, layers, strict=True)):
        return "1/sqrt(n)"
    shown = [f"{value:.4g}" for value in values]
    return ", ".join(shown if len(shown) <= 3 else [shown[0], "...", shown[-1]])


def phrase(parts: Sequence[Any], default: Any, layers: range, *, outer: bool = False) -> str:
    """Return one part of equal form in several layers: what differs from `default` in it."""
    first = parts[0]
    if isinstance(first, Gain):
        words = [name for name in ("learned", "vector", "profiled") if getattr(first, name)]
        return " ".join([number([part.value for part in parts], layers), *words])
    if is_dataclass(first):
        said = []
        for field in fields(first):
            values = [getattr(part, field.name) for part in parts]
            usual = getattr(default, field.name, MISSING)
            if any(value != usual for value in values):
                said.append(f"{field.name} {phrase(values, usual, layers)}")
        return ", ".join(said) if outer else f"({', '.join(said)})"
    if isinstance(first, bool):
        return "yes" if first else "no"
    return number(parts, layers) if isinstance(first, float) else str(first)
