"""The sections `model` and `data` of a config as our own classes, without Lightning."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from lightning_app.blocks.config import BlockConfig
from lightning_app.core.errors import UserError
from lightning_app.data.config import DataConfig
from lightning_app.models.heads import ArchitectureConfig
from lightning_app.models.loss import ObjectiveConfig
from lightning_app.models.optim import OptimizerConfig, ScheduleConfig
from lightning_app.plugins.own_class import OwnClass


@dataclass(frozen=True, kw_only=True)
class ModelConfig(OwnClass):
    """The `model` section of a run: the arguments of `TransformerModule`, documented there."""

    block: BlockConfig = BlockConfig()
    architecture: ArchitectureConfig = ArchitectureConfig()
    objective: ObjectiveConfig = ObjectiveConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    compile: Literal["none", "blocks"] = "none"
    init_from: str | None = None


@dataclass(frozen=True, kw_only=True)
class DataSection(DataConfig, OwnClass):
    """The `data` section of a run: the arguments of `TextDataModule`. Never made, read as types."""


PARTS: Mapping[str, type] = {"model": ModelConfig, "data": DataSection}


def model_config(section: Mapping[str, Any]) -> ModelConfig:
    """Return a complete `model` section as an object. Raises `UserError`."""
    return ModelConfig(**arguments("model", hints_of(ModelConfig), section))


@cache
def hints_of(kind: type) -> Mapping[str, Any]:
    """Return the type of each field of a dataclass."""
    return get_type_hints(kind)


def kinds_of(hint: Any) -> tuple[Any, ...]:
    """Return the members of a union, or the type itself."""
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def part_of(hint: Any) -> Any:
    """Return the dataclass that a type is or has as a member, or None."""
    return next((kind for kind in kinds_of(hint) if is_dataclass(kind)), None)


def parts_of(kind: type) -> set[type]:
    """Return a dataclass and all dataclasses in its fields, at any depth."""
    inner = (part_of(hint) for hint in hints_of(kind).values())
    return {kind}.union(*(parts_of(part) for part in inner if part is not None))


def arguments(
    key: str, hints: Mapping[str, Any], value: Any, expected: str = "a mapping"
) -> dict[str, Any]:
    """Convert the mapping `value` to arguments of the types `hints`.

    The parser accepts null for every field and any value for a mapping, so both are checked here.
    """
    if not isinstance(value, dict):
        raise UserError(f"{key}: expected {expected}, found {as_written(str(value))}")
    # A link of the parser writes its keys into a section even if the section is null.
    if absent := [name for name in hints if name != "return" and name not in value]:
        raise UserError(f"{key}: expected a mapping or no value; '{absent[0]}' is missing")
    return {name: _value(f"{key}.{name}", hints[name], part) for name, part in value.items()}


def _value(key: str, hint: Any, value: Any) -> Any:
    """Convert `value` to its type; parts are converted first, so that errors name their keys."""
    kinds, part = kinds_of(hint), part_of(hint)
    if value is None:
        if NoneType not in kinds:
            names = [mapping_name(k) if k is part else type_name(str(k)) for k in kinds]
            raise UserError(f"{key}: expected {' or '.join(names)}, found null")
        return None
    if part is None:
        return tuple(value) if get_origin(hint) is tuple else value
    inner = arguments(key, hints_of(part), value, mapping_name(part))
    try:
        return part(**inner)
    except ValueError as error:
        raise UserError(f"{key}: {error}") from error


def as_written(text: str) -> str:
    """Show a value in YAML form; its type is guessed from its text."""
    words = {"None": "null", "True": "true", "False": "false"}
    if re.fullmatch(r"[-+.\d]+(e[-+]?\d+)?|nan|-?inf|null|[\[{].*", text):
        return text
    return words.get(text, repr(text))


def mapping_name(kind: object) -> str:
    """Describe a mapping that is read as a `kind`, with its keys if they are few."""
    names = [f.name for f in fields(kind)] if is_dataclass(kind) else ["class_path", "init_args"]
    return "a mapping" if len(names) > 5 else f"a mapping {{{', '.join(names)}}}"


def type_name(kind: str) -> str:
    """Name a type in the words of a user."""
    if literal := re.search(r"Literal\[(.*)\]", kind):
        return f"one of {literal[1]}"
    name = kind.removeprefix("<class '").removesuffix("'>").rpartition(".")[2]
    words = {"NoneType": "null", "float": "a number", "int": "a whole number", "str": "a text"}
    return words.get(name, name)
