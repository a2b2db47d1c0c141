"""Check a specification written in Python as strictly as a section of a config."""

import math
from dataclasses import fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from lightning_app.core.registry import require_known

_hints = cache(get_type_hints)


def check_spec(value: Any, kind: Any, key: str) -> None:
    """Refuse a value that is not exactly of a type, at any depth.

    A dataclass must be of exactly that class: nothing reads the fields that a subclass adds.
    Numbers must be finite, words listed in the type, and names registered.

    Raises:
        ValueError: naming the field, the value and what would be right.
    """
    kinds = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    if any(_fits(value, each) for each in kinds):
        return
    if any(get_origin(each) is tuple for each in kinds) and type(value) is tuple:
        (each,) = (each for each in kinds if get_origin(each) is tuple)
        seen: set[int] = set()  # a stack repeats one block
        for i, part in enumerate(value):
            if id(part) not in seen:
                check_spec(part, get_args(each)[0], f"{key}[{i}]")
            seen.add(id(part))
        return
    for each in kinds:
        if is_dataclass(each) and type(value) is each:
            for field in fields(each):
                inner = f"{key}.{field.name}"
                found = getattr(value, field.name)
                check_spec(found, _hints(each)[field.name], inner)
                if isinstance(found, str):
                    require_known(inner, found)
            return
    names = " or ".join(_named(each) for each in kinds)
    shown = repr(value) if isinstance(value, str | int | float | None) else type(value).__name__
    raise ValueError(f"{key}: expected {names}, found {shown}")


def _fits(value: Any, kind: Any) -> bool:
    """Whether a value without parts is of a type; a whole number also serves as a float."""
    if get_origin(kind) is Literal:
        return type(value) is str and value in get_args(kind)
    if kind is float:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return is_number and math.isfinite(value)
    return kind in (int, bool, str, NoneType) and type(value) is kind


def _named(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return f"one of {', '.join(map(repr, get_args(kind)))}"
    words = {float: "a finite number", int: "a whole number", str: "a text", NoneType: "None"}
    words[bool] = "True or False"
    if get_origin(kind) is tuple:
        return f"a tuple of {get_args(kind)[0].__name__}"
    return words.get(kind) or str(getattr(kind, "__name__", kind))
