"""The class of presets, and the decorator that registers one, also from outside the package."""

import inspect
import math
import traceback
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from functools import lru_cache
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from lightning_app.blocks.residual import Gain, ResidualSpec
from lightning_app.blocks.stack import Stack, StackSpec
from lightning_app.core.registry import Registry, require_known
from lightning_app.core.schema import hints_of, kinds_of


def check_spec(value: Any, kind: Any, key: str) -> None:
    """Refuse a value that is not exactly of a type, at any depth.

    A dataclass must be of exactly that class: nothing reads the fields that a subclass adds.
    Numbers must be finite, words listed in the type, and names registered.

    Raises:
        ValueError: naming the field, the value and what would be right.
    """
    kinds = kinds_of(kind)
    if any(_fits(value, option) for option in kinds):
        return
    if any(get_origin(option) is tuple for option in kinds) and type(value) is tuple:
        (option,) = (option for option in kinds if get_origin(option) is tuple)
        seen: set[int] = set()  # a stack repeats one block
        for i, part in enumerate(value):
            if id(part) not in seen:
                check_spec(part, get_args(option)[0], f"{key}[{i}]")
            seen.add(id(part))
        return
    for option in kinds:
        if is_dataclass(option) and type(value) is option:
            for field in fields(option):
                inner = f"{key}.{field.name}"
                field_value = getattr(value, field.name)
                check_spec(field_value, hints_of(option)[field.name], inner)
                if isinstance(field_value, str):
                    require_known(inner, field_value)
            return
    names = " or ".join(_named(option) for option in kinds)
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


ABSENT = Gain(value=0.0)
POST = ResidualSpec(norm_sum="layer_norm")
PRE = ResidualSpec(norm_input="layer_norm")


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A named variant with its description for `ablate blocks`."""

    name: str
    equation: str
    paper: str
    fixes: str
    build: Callable[[Stack], StackSpec]
    differs: str = ""
    """Parameters that the authors' code trains, but ours does not."""
    matched_by: str = ""
    """The axes of the block, in the form of a config, that make these parameters trainable here
    too."""

    def __call__(self, stack: Stack) -> StackSpec:
        """Return the specification of a stack, checked like a section of a config.

        Raises:
            ValueError: for a meaningless combination, and for a mistake in the preset of a
                plug-in, with its file and line.
        """
        if self.build.__module__.startswith(__name__.partition(".")[0] + "."):
            return _known(self, stack)
        try:
            return _checked(self, stack)
        except (Exception, SystemExit) as error:
            is_said = isinstance(error, ValueError) or "UserError" in type(error).__name__
            message = str(error) if is_said else f"{type(error).__name__}: {error}"
            raise ValueError(f"preset '{self.name}' ({self._place(error)}): {message}") from error

    def _place(self, error: BaseException) -> str:
        """Return the file of the preset, and the line in it that raised an error."""
        code = getattr(inspect.unwrap(self.build), "__code__", None)
        if code is None:
            return self.build.__module__
        lines = [
            frame.lineno
            for frame in traceback.extract_tb(error.__traceback__)
            if frame.filename == code.co_filename
        ]
        return f"{code.co_filename}, line {lines[-1] if lines else code.co_firstlineno}"

    @property
    def difference(self) -> str:
        """The difference from the authors' code, and the axes that remove it; empty if none."""
        if not self.differs:
            return ""
        axes = f"model.block: {{{self.matched_by}}}"
        return f"the authors' code also trains {self.differs}; here with {axes}"


def _checked(preset: Preset, stack: Stack) -> StackSpec:
    spec = preset.build(stack)
    check_spec(spec, StackSpec, "its value")
    if spec.depth != stack.depth:
        raise ValueError(f"it has {spec.depth} blocks in a stack of {stack.depth}")
    return spec


# Building and checking a specification takes a quarter of the time of building a small model.
# Presets of plug-ins are not kept: they may read something that changes.
_known = lru_cache(maxsize=256)(_checked)


PRESETS: Registry[Preset] = Registry("model.block.preset", resolved=True)
"""The presets by name; `preset` is the decorator that adds one."""


def preset(
    *, equation: str, paper: str, fixes: str, differs: str = "", matched_by: str = ""
) -> Callable[[Callable[[Stack], StackSpec]], Preset]:
    """Register a function as a preset under its own name."""

    def register(build: Callable[[Stack], StackSpec]) -> Preset:
        name = getattr(build, "__name__")  # noqa: B009 - a Callable need not have a name
        variant = Preset(
            name=name,
            equation=equation,
            paper=paper,
            fixes=fixes,
            build=build,
            differs=differs,
            matched_by=matched_by,
        )
        PRESETS.add(name, variant)
        return variant

    return register
