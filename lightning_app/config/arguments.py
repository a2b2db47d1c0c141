"""The arguments of a class that a config names: their types, defaults and checked values."""

import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from pydoc import ErrorDuringImport
from pydoc import locate as find_object
from types import NoneType
from typing import Any, get_type_hints

from lightning_app.config.schema import as_plain, as_written, expected, kinds_of, part_of, read
from lightning_app.errors import UserError, nearest

_PASSED_ON: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "DDPStrategy": ("torch.nn.parallel.DistributedDataParallel", ("module", "device_ids")),
    "EMAWeightAveraging": ("torch.optim.swa_utils.AveragedModel", ("model", "avg_fn")),
    "PyTorchProfiler": ("torch.profiler.profile", ()),
}
"""Where a class passes other arguments on: to what, and the arguments that it gives itself."""


def import_named(field: str, path: str) -> Any:
    """Import what a config of the user's own command line names.

    This is the one place of the program that imports a module because a config names it.

    Raises:
        UserError: if there is no such object, or its module cannot be imported.
    """
    names = [path]
    if "." not in path:  # a class of Lightning by its last word
        parts = ("callbacks", "loggers", "strategies", "plugins", "profilers", "accelerators")
        names = [f"lightning.pytorch.{part}.{path}" for part in parts]
    try:
        found = next((each for name in names if (each := find_object(name)) is not None), None)
    except ErrorDuringImport as error:
        raise UserError(f"{field}: {path!r} cannot be imported: {error.value}") from error
    if found is None:
        raise UserError(f"{field}: there is no {path!r}; a class by its import path, module.Name")
    return found


@dataclass(frozen=True)
class Arguments:
    """The arguments of a constructor: their types and defaults by name.

    `open` says whether it takes others, of which nothing is known.
    """

    hints: Mapping[str, Any]
    defaults: Mapping[str, Any]
    open: bool

    @staticmethod
    def of(kind: type) -> "Arguments":
        """Return the arguments of a class, with those that it passes on to another one."""
        hints, defaults, is_open = _signature(kind)
        inner = _PASSED_ON.get(kind.__name__)
        if inner is not None and is_open:
            others, more, _ = _signature(find_object(inner[0]))
            others = {name: hint for name, hint in others.items() if name not in inner[1]}
            hints, defaults = {**others, **hints}, {**more, **defaults}
        return Arguments(hints, defaults, is_open)

    def complete(self, key: str, given: Mapping[str, Any], *, imports: bool) -> dict[str, Any]:
        """Return plain arguments with every default, checked.

        Raises:
            UserError: for an unknown or a missing argument, and for a value of another type.
        """
        for name in given:
            if name not in self.hints and not self.open:
                raise UserError(f"unknown key '{key}.{name}'{nearest(name, self.hints)}")
        found = {}
        for name, hint in self.hints.items():
            if name in given:
                found[name] = _plain_value(f"{key}.{name}", hint, given[name], imports=imports)
            elif name in self.defaults:
                found[name] = _plain_default(f"{key}.{name}", self.defaults[name])
            else:
                raise UserError(f"{key}.{name}: no value is given, and there is no default")
        return {**found, **{name: given[name] for name in given if name not in found}}

    def values(self, key: str, given: Mapping[str, Any], *, imports: bool) -> dict[str, Any]:
        """Return complete arguments as the constructor takes them; defaults are left out."""
        return {
            name: _value(f"{key}.{name}", self.hints.get(name, Any), value, imports=imports)
            for name, value in given.items()
            if name not in self.defaults or not _is_default(value, self.defaults[name])
        }


def _signature(kind: Any) -> tuple[dict[str, Any], dict[str, Any], bool]:
    """Return types and defaults of the arguments of a class, and whether it takes others."""
    try:
        known = get_type_hints(kind.__init__)
    except (NameError, TypeError):
        known = {}
    hints, defaults, is_open = {}, {}, False
    for name, each in inspect.signature(kind).parameters.items():
        if each.kind is each.VAR_KEYWORD:
            is_open = True
        elif each.kind is not each.VAR_POSITIONAL:
            hints[name] = known.get(name, Any if each.annotation is each.empty else each.annotation)
            if each.default is not each.empty:
                defaults[name] = each.default
    return hints, defaults, is_open


def _plain_default(key: str, value: Any) -> Any:
    value = as_plain(value)
    if isinstance(value, timedelta | Path):
        return str(value)
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError) as error:
        raise UserError(
            f"{key}: its default {value!r} cannot be written to config.yaml, which holds only "
            "text, numbers, lists and mappings; give it a value"
        ) from error


def _is_default(value: Any, default: Any) -> bool:
    try:
        return type(value) is type(written := _plain_default("", default)) and value == written
    except UserError:
        return False


def _plain_value(key: str, hint: Any, value: Any, *, imports: bool) -> Any:
    """Return a value as the config holds it: a number as the type has it, the rest as written."""
    found = _value(key, hint, value, imports=imports)
    return found if isinstance(value, int | float) and isinstance(found, int | float) else value


def _value(key: str, hint: Any, value: Any, *, imports: bool) -> Any:
    """Return a plain value as an argument of a type.

    Raises:
        UserError: if it has another type.
    """
    from pydantic import ConfigDict, PydanticUserError, TypeAdapter, ValidationError

    if imports and isinstance(value, Mapping) and "class_path" in value:
        kind = import_named(key, value["class_path"])
        given = value.get("init_args") or {}
        return kind(**Arguments.of(kind).values(key, given, imports=imports))
    kinds, part = kinds_of(hint), part_of(hint)
    if part is not None and isinstance(value, Mapping):
        return read(part, value, at=key)
    if imports and isinstance(value, str) and any(_is_code(kind) for kind in kinds):
        return import_named(key, value)
    if timedelta in kinds and isinstance(value, str):
        return _duration(key, value)
    try:
        strict = ConfigDict(strict=True, arbitrary_types_allowed=True)
        adapter = TypeAdapter(hint, config=strict)
    except PydanticUserError:  # a dataclass, or a type of which pydantic knows nothing
        return value
    try:
        return adapter.validate_json(json.dumps(value))
    except ValidationError as error:
        said = " or ".join(expected(kind) for kind in kinds if kind is not NoneType)
        raise UserError(f"{key}: expected {said}, found {as_written(value)}") from error


def _is_code(kind: Any) -> bool:
    origin = getattr(kind, "__origin__", kind)
    return origin is Callable or getattr(origin, "__name__", "") in ("Callable", "type")


def _duration(key: str, text: str) -> timedelta:
    days, _, clock = text.rpartition(" day")
    words = clock.removeprefix("s").removeprefix(", ").split(":")
    try:
        hours, minutes, seconds = words
        return timedelta(
            days=int(days or 0), hours=int(hours), minutes=int(minutes), seconds=float(seconds)
        )
    except ValueError as error:
        raise UserError(f"{key}: expected a time HH:MM:SS, found {text!r}") from error
