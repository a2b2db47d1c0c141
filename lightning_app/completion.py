"""Complete a config of plain values as LightningCLI's parser does, without importing it.

Nothing is guessed: every value whose meaning depends on the parser is left to it. So are all
mistakes, since the parser's message says what would be right.
"""

import json
import math
import re
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import MISSING, asdict, fields, is_dataclass
from functools import cache
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from lightning_app.names import SECTIONS
from lightning_app.sections import PARTS, hints_of, kinds_of, part_of
from lightning_app.task_facts import glue_task_of
from lightning_app.trainer_arguments import TRAINER_DEFAULTS, Argument, trainer_arguments

# Text that is no number, no YAML keyword and no path in a home folder; or a line of dashes.
_PLAIN = re.compile(r"(\.{0,2}/)*[A-Za-z_][\w./-]*|-{4,}")
_WORDS = {"null", "none", "true", "false", "yes", "no", "on", "off", "nan", "inf", "infinity"}


class _Unclear(Exception):
    """The parser must complete this config."""


def complete_plain(tree: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return `tree` with every default filled in, or None if the parser is needed."""
    try:
        if not set(tree) <= set(SECTIONS):
            raise _Unclear
        seed = tree.get("seed_everything", 1)
        if type(seed) is not int:
            raise _Unclear
        sections = {name: _section(kind, tree.get(name, {})) for name, kind in PARTS.items()}
        trainer = _trainer(tree.get("trainer", {}))
    except _Unclear:
        return None
    # The parser links these fields.
    objective = sections["model"]["objective"]
    sections["data"] |= {"task": objective["kind"], "next_sentence": objective["next_sentence"]}
    sections["data"] |= {"seed": seed, "init_from": sections["model"]["init_from"]}
    sections["model"] |= {
        "objective": {**objective, "glue": glue_task_of(sections["data"]["name"])}
    }
    # A copy, since the next config uses the same defaults.
    return deepcopy({"seed_everything": seed, "trainer": trainer, **sections})


def _section(kind: type, value: Any) -> dict[str, Any]:
    """Return a section or a part of one, complete."""
    if not isinstance(value, dict):
        raise _Unclear
    hints, defaults = hints_of(kind), _defaults(kind)
    if not set(value) <= set(hints) <= set(value) | set(defaults):
        raise _Unclear
    return {
        name: _value(hint, value[name], defaults.get(name)) if name in value else defaults[name]
        for name, hint in hints.items()
    }


@cache
def _defaults(kind: type) -> dict[str, Any]:
    """Return the plain defaults of the fields of a dataclass that have one."""
    found: dict[str, Any] = {}
    for field in fields(kind):
        if field.default_factory is not MISSING:
            found[field.name] = _plain(field.default_factory())
        elif field.default is not MISSING:
            found[field.name] = _plain(field.default)
    return found


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    if isinstance(value, dict):
        return {key: _plain(part) for key, part in value.items()}
    return list(value) if isinstance(value, tuple) else value


def _value(hint: Any, value: Any, default: Any) -> Any:
    kinds = kinds_of(hint)
    if value is None:
        if NoneType in kinds:
            return None
        raise _Unclear
    if part := part_of(hint):
        # A missing field of a part has its own default or that of the section around it.
        if default not in (None, _defaults(part)):
            raise _Unclear
        return _section(part, value)
    (kind, *others) = [each for each in kinds if each is not NoneType]
    if others:
        raise _Unclear
    if get_origin(kind) is Literal:
        if isinstance(value, str) and value in get_args(kind):
            return value
    elif get_origin(kind) is tuple:
        if type(value) is list and len(value) == len(get_args(kind)):
            return [
                _value(part, each, None) for part, each in zip(get_args(kind), value, strict=True)
            ]
    elif kind is float and _is_number(value):
        return float(value)
    elif type(value) is kind and kind in (int, bool, str) and (kind is not str or _is_plain(value)):
        return value
    raise _Unclear


def _is_number(value: Any) -> bool:
    exact = type(value) is int and abs(value) < 1 << 53
    return exact or (type(value) is float and math.isfinite(value))


def _is_plain(text: str) -> bool:
    return _PLAIN.fullmatch(text) is not None and text.lower() not in _WORDS


def _trainer(section: Any) -> dict[str, Any]:
    """Return the complete section `trainer`; the parser completes what is not plain, once."""
    known = trainer_arguments()
    if known is not None and isinstance(section, dict) and set(section) <= set(known):
        defaults = {name: argument.default for name, argument in known.items()}
        if all(_is_clear(known[name], value) for name, value in section.items()):
            return defaults | TRAINER_DEFAULTS | section
    try:
        text = json.dumps(section)
    except (TypeError, ValueError, RecursionError) as error:
        raise _Unclear from error
    if json.loads(text) != section:
        raise _Unclear
    return json.loads(_parsed(text))


def _is_clear(argument: Argument, value: Any) -> bool:
    """Whether the parser keeps a value as written, for every type that the argument allows."""
    kinds = argument.kinds
    if value is None:
        return "None" in kinds
    if type(value) is bool:
        return "bool" in kinds and not kinds & {"int", "float"}
    if type(value) is str:
        # If the argument may be an object, the parser reads a file of that name.
        return "str" in kinds and _is_plain(value) and not Path(value).exists()
    if type(value) is float:
        return "float" in kinds and math.isfinite(value)
    if type(value) is int and "float" in kinds and not _is_number(value):
        return False  # the parser turns it into the nearest float
    return type(value) is int and "int" in kinds and "bool" not in kinds


@cache
def _parsed(text: str) -> str:
    """Return a section `trainer`, given as JSON, completed by the parser."""
    from lightning_app.parser import parse_config

    return json.dumps(parse_config({"trainer": json.loads(text)})["trainer"])
