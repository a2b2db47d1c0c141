"""What a plug-in changes outside of itself: then it counts for every run."""

import builtins
import os
import sys
from collections.abc import Container, Mapping
from dataclasses import dataclass
from functools import cache
from types import CodeType, FunctionType
from typing import Any

OURS = __name__.partition(".")[0]

_LIBRARIES = ("torch", "numpy", "math", "random", "builtins")

PATCHABLE = (OURS, "lightning", "torchmetrics", "sacrebleu", "sentencepiece", *_LIBRARIES)
"""The packages whose functions, classes and constants a plug-in could replace for every run."""

_NUMERIC = ("torch.nn", "torch.optim", "torch.autograd", "torch.functional", "torch._tensor")
_NUMERIC += ("torch.utils.data", "torch.utils.checkpoint", "torch.amp", "torch.random", "torch.fft")
"""The parts of torch whose attributes are compared."""


def patchable() -> dict[tuple[str, ...], Any]:
    """Return the attributes of this package and of torch that numbers depend on, by their names."""
    found: dict[tuple[str, ...], Any] = {}
    for name, module in [*sys.modules.items()]:
        library = name.partition(".")[0] in _LIBRARIES
        if not _is_patchable(name) or (
            library and name not in _LIBRARIES and not name.startswith(_NUMERIC)
        ):
            continue
        for key, value in [*vars(module).items()]:
            found[name, key] = value
            if isinstance(value, dict) and key.startswith("_global_"):  # hooks of torch
                found[name, key, "[]"] = _Parts((*value, *value.values()))
            elif name.startswith(OURS) and _is_table(value):
                found |= {
                    (name, key, "[]", str(each)): of
                    for each, of in dict(value).items()
                    if not isinstance(of, type | FunctionType) or _is_patchable(of.__module__)
                }
            elif isinstance(value, FunctionType):
                _add_code(found, (name, key), value)
            elif isinstance(value, type) and value.__module__ == name:
                for each, of in [*vars(value).items()]:
                    found[name, key, each] = of
                    _add_code(found, (name, key, each), of)
    if (torch := sys.modules.get("torch")) is not None:
        for name in ("get_default_dtype", "get_float32_matmul_precision", "is_grad_enabled"):
            found["torch", f"{name}()"] = _Parts((getattr(torch, name)(),))
    return found


def _is_table(value: object) -> bool:
    """Whether a value is a dictionary or a table of parts, whose entries are kept objects."""
    return type(value) is dict or (
        isinstance(value, Mapping) and type(value).__module__.startswith(OURS)
    )


def _is_patchable(module: str) -> bool:
    return module.partition(".")[0] in PATCHABLE


def _add_code(found: dict[tuple[str, ...], Any], key: tuple[str, ...], value: object) -> None:
    if isinstance(value, FunctionType):
        parts = (value.__code__, value.__defaults__, value.__kwdefaults__)
        found[*key, "()"] = _Parts(parts)


@dataclass(frozen=True, eq=False)
class _Parts:
    """What a function or a container is made of: each must stay the same object."""

    values: tuple[Any, ...]

    def differs(self, other: "_Parts") -> bool:
        if len(self.values) != len(other.values):
            return True
        pairs = zip(self.values, other.values, strict=True)
        return any(a is not b and not (type(a) is type(b) is str and a == b) for a, b in pairs)


def _differs(value: Any, other: Any) -> bool:
    if isinstance(value, _Parts) and isinstance(other, _Parts):
        return value.differs(other)
    return value is not other


def steady() -> dict[tuple[str, ...], Any]:
    """Return the attributes; `_VARIES` in place of those that are other objects at each look."""
    first, second = patchable(), patchable()
    return {k: _VARIES if _differs(of, second.get(k)) else of for k, of in first.items()}


def changed(before: Mapping[tuple[str, ...], Any]) -> str:
    """Return the first attribute that has changed; empty if all are as before.

    Importing a module adds its name to the package around it, which changes nothing.
    """
    now = patchable()
    for key, value in before.items():
        other = now.get(key)
        if key[-1] in _BOOKKEEPING or key[:2] in (*_BY_LIGHTNING, *_OWN):
            continue
        if value is not _VARIES and _differs(value, other):
            return ".".join(key)
    modules = {key[0] for key in before}
    for key in now.keys() - before.keys():
        shadows = len(key) == 2 and hasattr(builtins, key[1])
        inside = len(key) == 3 and key[:2] in before
        if key[0] in modules and (shadows or inside) and key[-1] not in _BOOKKEEPING:
            return ".".join(key)
    return ""


_VARIES = object()

_BY_LIGHTNING = (("torch", "compile"), ("torch", "manual_seed"))
"""What Lightning replaces when it is imported."""

_OWN = ((f"{OURS}.plugins", "_LOADED"), (f"{OURS}.registry", "_LOOKUPS"))
"""What this package notes while a plug-in is loaded."""

_BOOKKEEPING = (
    *("__warningregistry__", "__annotations__", "__annotations_cache__", "__annotate__"),
    *("__abstractmethods__", "__slotnames__", "_abc_impl"),
)


def planted(files: Container[str], packages: Container[str]) -> str:
    """Return an attribute of this package, torch or Lightning that is code of a plug-in, or ''."""
    for key, value in patchable().items():
        if "[]" in key:  # a table, to which plug-ins add
            continue
        if isinstance(value, property):
            value = value.fget
        inner = value.__func__ if isinstance(value, staticmethod | classmethod) else value
        code = inner.values[0] if isinstance(inner, _Parts) and inner.values else None
        if isinstance(code, CodeType) and _real(code.co_filename) in files:
            return ".".join(key[:-1])
        made_in = inner.__module__ if isinstance(inner, type | FunctionType) else ""
        if str(made_in).partition(".")[0] in packages:
            return ".".join(key)
    return ""


@cache
def _real(path: str) -> str:
    return os.path.realpath(path)
