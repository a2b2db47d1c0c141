"""The wiring of a block from the arguments of a call, checked like the section of a config."""

from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass, replace
from types import NoneType
from typing import Any, Literal, TypeVar, get_args, get_origin

from lightning_app.blocks.checked import check_spec
from lightning_app.blocks.config import BlockConfig
from lightning_app.config.sections import (
    as_written,
    hints_of,
    kinds_of,
    mapping_name,
    part_of,
    type_name,
)
from lightning_app.core.errors import UserError, nearest

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
    config: BlockConfig = _part(BlockConfig, "block", block)
    refused(lambda: check_spec(config, BlockConfig, "block"))
    return replace(config, **_arguments(BlockConfig, "", axes))


def refused(call: Callable[[], Found]) -> Found:
    """Return what `call` returns; a `ValueError` of a specification is a mistake in the call."""
    try:
        return call()
    except ValueError as error:
        raise UserError(str(error)) from error


def _part(kind: type, key: str, value: Any) -> Any:
    if isinstance(value, kind):
        return value
    if not isinstance(value, Mapping):
        raise UserError(f"{key}: expected {mapping_name(kind)}, found {as_written(str(value))}")
    given = _arguments(kind, f"{key}.", value)
    for field in fields(kind):
        if field.default is MISSING and field.name not in given:
            raise UserError(f"{key}: expected {mapping_name(kind)}; '{field.name}' is missing")
    try:
        return kind(**given)
    except ValueError as error:
        raise UserError(f"{key}: {error}") from error


def _arguments(kind: type, prefix: str, values: Mapping[str, Any]) -> dict[str, Any]:
    hints = hints_of(kind)
    for name in values:
        if name not in hints:
            raise UserError(f"unknown axis '{prefix}{name}'{nearest(str(name), hints)}")
    return {name: _value(f"{prefix}{name}", hints[name], value) for name, value in values.items()}


def _value(key: str, hint: Any, value: Any) -> Any:
    """Return `value` as the type of a field; a whole number also serves as a float."""
    part, kinds = part_of(hint), kinds_of(hint)
    if value is None and NoneType in kinds:
        return None
    if part is not None:
        return _part(part, key, value)
    for kind in kinds:
        if get_origin(kind) is Literal:
            if isinstance(value, str) and value in get_args(kind):
                return value
        elif kind is float and isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
        elif kind in (bool, int, str) and type(value) is kind:
            return value
    words = [word for kind in kinds if get_origin(kind) is Literal for word in get_args(kind)]
    expected = " or ".join(type_name(str(kind)) for kind in kinds if kind is not NoneType)
    found = as_written(str(value)) if not is_dataclass(value) else type(value).__name__
    raise UserError(f"{key}: expected {expected}, found {found}{nearest(str(value), words)}")
