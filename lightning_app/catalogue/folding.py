"""Group equal layers, and describe their numbers and other fields in a short text."""

import math
from collections.abc import Collection, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from itertools import groupby
from typing import Any, Literal

from lightning_app.blocks.block import BlockSpec
from lightning_app.blocks.residual import Gain

Side = Literal["encoder", "decoder", "decoder alone"]
"""A stack in a model; the decoder alone has no cross-attention."""


def runs_of(blocks: Sequence[BlockSpec], side: Side) -> list[tuple[range, list[BlockSpec]]]:
    """Group consecutive blocks of the same form: (layers counted from 1, blocks) of each group."""
    runs, layer = [], 1
    for _, equal in groupby(blocks, key=lambda block: (type(block), *_forms(block, side))):
        run = list(equal)
        runs.append((range(layer, layer + len(run)), run))
        layer += len(run)
    return runs


def used_fields(block: BlockSpec, side: Side) -> list[Field[Any]]:
    """Return the fields that a stack of `side` uses: only some have cross-attention."""
    return [field for field in fields(block) if side == "decoder" or "cross" not in field.name]


def layer_names(first: int, last: int) -> str:
    return f"layer {first}" if first == last else f"layers {first}-{last}"


def form(part: Any) -> Any:
    """Return a specification without its numbers, but with the mark of an absent (zero) gain."""
    if is_dataclass(part):
        inner = tuple(form(getattr(part, field.name)) for field in fields(part))
        return type(part), isinstance(part, Gain) and part.absent, *inner
    return None if isinstance(part, float) else (part is None, part)


def _forms(block: BlockSpec, side: Side) -> list[Any]:
    return [form(getattr(block, field.name)) for field in used_fields(block, side)]


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


def changed_fields(
    parts: Sequence[Any], layers: range, known: Collection[str] = (), default: Any = MISSING
) -> list[str]:
    """Return `name value` for each field in which parts of one form differ from `default`.

    Fields in `known` are left out: the caller shows them in another form. So a field without its
    own drawing is still shown. Without a `default`, each field is compared with its own default.
    """
    shown = []
    for field in fields(parts[0]):
        values = [getattr(part, field.name) for part in parts]
        own = default is MISSING
        usual = _default_of(field) if own else getattr(default, field.name, MISSING)
        if field.name not in known and any(value != usual for value in values):
            shown.append(f"{field.name} {phrase(values, usual, layers)}")
    return shown


def phrase(parts: Sequence[Any], default: Any, layers: range, *, outer: bool = False) -> str:
    """Describe a value of the same form in several layers by its differences from `default`."""
    first = parts[0]
    if isinstance(first, Gain):
        flags = ("learned", "vector", "profiled")
        words = [name for name in flags if getattr(first, name)]
        words += changed_fields(parts, layers, known=("value", *flags))
        return " ".join([number([part.value for part in parts], layers), *words])
    if is_dataclass(first):
        changed = ", ".join(changed_fields(parts, layers, default=default))
        return changed if outer else f"({changed})"
    if isinstance(first, bool):
        return "yes" if first else "no"
    return number(parts, layers) if isinstance(first, float) else str(first)


def _default_of(field: Field[Any]) -> Any:
    return field.default if field.default_factory is MISSING else field.default_factory()
