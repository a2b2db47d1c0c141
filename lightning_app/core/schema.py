"""Read plain values into dataclasses, strictly: the single reader for user input.

Fast to import: without torch, and pydantic only once something is read.
"""

import ast
import inspect
import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass, fields, is_dataclass
from datetime import timedelta
from functools import cache
from itertools import pairwise
from textwrap import dedent
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from lightning_app.core.errors import UserError, meant, named, nearest

if TYPE_CHECKING:
    from pydantic import TypeAdapter

T = TypeVar("T")

_ENTRY = " entry "
_LONGEST = 200
"""The largest number of characters of a value in a message."""


def read(kind: type[T], tree: object, source: str = "", at: str = "") -> T:
    """Return plain values as a dataclass; values that are left out have their defaults.

    Types are not converted: "1" is not a number, and 1 is not text. A whole number also
    serves as a float, and a list as a tuple.

    Args:
        kind: A dataclass, whose fields may be dataclasses. Unknown keys are refused, unless its
            attribute `EXTRA` is "ignore".
        tree: The values: a mapping as in JSON or YAML.
        source: The file for messages; empty if the caller adds it.
        at: The dotted key of the tree, for messages.

    Raises:
        UserError: in one line: the source, the dotted field, the expected and the actual value.
    """
    from pydantic import ValidationError

    with named(source) if source else nullcontext():
        try:
            return adapter(kind).validate_json(_json(tree, at))
        except ValidationError as error:
            raise UserError(_line(kind, error.errors(include_url=False), at)) from error


def as_plain(value: Any) -> Any:
    """Return a dataclass and everything inside it as plain values."""
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    if isinstance(value, Mapping):
        return {key: as_plain(part) for key, part in value.items()}
    return [as_plain(part) for part in value] if isinstance(value, list | tuple) else value


@cache
def adapter(kind: type) -> "TypeAdapter[Any]":
    """Return the reader of a dataclass, built once."""
    from pydantic import ConfigDict, TypeAdapter

    for part in parts_of(kind):
        config = ConfigDict(extra=getattr(part, "EXTRA", "forbid"), strict=True)
        part.__pydantic_config__ = config  # pyright: ignore[reportAttributeAccessIssue]
    return TypeAdapter(kind)


@cache
def hints_of(kind: type) -> Mapping[str, Any]:
    """Return the type of each field of a dataclass."""
    return get_type_hints(kind)


@cache
def docs_of(kind: type) -> Mapping[str, str]:
    """Return the text below each field of a dataclass and of its base classes."""
    docs: dict[str, str] = {}
    for owner in reversed(kind.__mro__):
        if not is_dataclass(owner):
            continue
        (node,) = ast.parse(dedent(inspect.getsource(owner))).body
        assert isinstance(node, ast.ClassDef)
        for field, text in pairwise(node.body):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
                name, doc = ast.unparse(field.target), ast.literal_eval(text.value)
                docs[name] = " ".join(doc.split())
    return docs


def kinds_of(hint: Any) -> tuple[Any, ...]:
    """Return the members of a union, or the type itself."""
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def part_of(hint: Any) -> Any:
    """Return the dataclass that a type is or has as a member, or None."""
    return next((kind for kind in kinds_of(hint) if is_dataclass(kind)), None)


def parts_of(kind: Any) -> set[type]:
    """Return a dataclass and all dataclasses in its fields, at any depth."""
    if is_dataclass(kind):
        inner = (part for hint in hints_of(kind).values() for part in parts_of(hint))  # pyright: ignore[reportArgumentType]
        return {kind, *inner}  # pyright: ignore[reportReturnType]
    return set().union(*(parts_of(part) for part in get_args(kind)))


def hint_at(kind: Any, path: list[str]) -> Any:
    """Return the type of the field at a path, None if no dataclass has it."""
    for name in path:
        part = part_of(kind)
        kind = None if part is None else hints_of(part).get(name)
    return kind


def check_keys(kind: Any, tree: Mapping[str, Any], at: str = "") -> None:
    """Refuse a key that a dataclass, or one in its fields, does not have.

    Raises:
        UserError: naming the key, and the nearest known one.
    """
    part = part_of(kind)
    if part is None:
        return
    for name, value in tree.items():
        hints = hints_of(part)
        if name not in hints:
            raise UserError(_unknown([*filter(None, [at]), str(name)], hints))
        if isinstance(value, Mapping):
            check_keys(hints[name], value, f"{at}.{name}" if at else name)


_RANGES: Mapping[str, Callable[[float], bool]] = {
    "at least 0": lambda x: x >= 0,
    "at least 1": lambda x: x >= 1,
    "above 0": lambda x: x > 0,
    "a number above 0": lambda x: 0 < x < math.inf,
    "at least 0 and less than 1": lambda x: 0 <= x < 1,
}


def check_range(config: object, words: str, *names: str) -> None:
    """Refuse fields of a dataclass that are not in the range of these words; null always is.

    Raises:
        ValueError: naming the field.
    """
    for name in names:
        value = getattr(config, name)
        if value is not None and not _RANGES[words](value):
            raise ValueError(f"{name} {value}: must be {words}")


def as_written(value: Any) -> str:
    """Format a value as in a file."""
    if isinstance(value, str):
        return repr(value)[:_LONGEST]
    try:
        return json.dumps(value)[:_LONGEST]
    except (TypeError, ValueError):
        return type(value).__name__


def expected(hint: Any) -> str:
    """Describe the values of a type in the words of a user."""
    words = [word for kind in kinds_of(hint) for word in _words(kind)]
    return " or ".join(dict.fromkeys(words))


def _words(kind: Any) -> Iterator[str]:
    origin = get_origin(kind)
    if origin is Literal:
        yield from (as_written(word) for word in get_args(kind))
    elif is_dataclass(kind):
        names = [field.name for field in fields(kind)]
        yield "a mapping" if len(names) > 5 else f"a mapping {{{', '.join(names)}}}"
    elif origin is tuple and (count := len(get_args(kind))) and get_args(kind)[-1] is not Ellipsis:
        yield f"a list of {count} values"
    elif origin in (list, tuple):
        yield "a list"
    elif origin is not None and issubclass(origin, Mapping):
        yield "a mapping"
    else:
        words = {NoneType: "null", float: "a number", int: "a whole number", str: "a text"}
        words |= {timedelta: "a time HH:MM:SS"}
        yield {**words, bool: "true or false"}.get(kind, getattr(kind, "__name__", str(kind)))


def _json(tree: object, at: str) -> str:
    try:
        return json.dumps(tree)
    except (TypeError, ValueError) as error:
        raise UserError(
            f"{at or 'the config'} holds a value that is no text, number, list or mapping ({error})"
        ) from error


@dataclass(frozen=True, kw_only=True)
class _Mistake:
    """A mistake reported by pydantic: its place, as field names, and what is allowed there."""

    type: str
    path: tuple[str, ...]
    hint: Any
    value: Any
    text: str


def _line(kind: Any, errors: Any, at: str) -> str:
    """Describe the most helpful mistake: an unknown key, a wrong value, a missing key."""
    mistakes = [_mistake(kind, error) for error in errors]
    unknown = [each for each in mistakes if each.type == "unexpected_keyword_argument"]
    wrong = [each for each in mistakes if each.type != "missing"]
    first = (unknown or wrong or mistakes)[0]
    within = [each for each in mistakes if each.path[: len(first.path)] == first.path]
    if not unknown:
        first = max(within, key=lambda each: len(each.path))
    path = [*filter(None, [at]), *first.path]
    key = _key(path) or "the file"
    if unknown:
        return _unknown(path, hints_of(first.hint))
    if first.type == "value_error":  # its message names the field
        text = first.text.removeprefix("Value error, ")
        is_field = is_dataclass(first.hint) and text.partition(":")[0] in hints_of(first.hint)  # pyright: ignore[reportArgumentType]
        return f"{key}{'.' if is_field else ': '}{text}" if path else text
    if first.type == "missing":
        return f"{key}: no value is given, and there is no default"
    if first.type.startswith(("greater_than", "less_than")):
        limit = first.text.removeprefix("Input should be ")
        return f"{key}: expected {expected(first.hint)} {limit}, found {as_written(first.value)}"
    words = [str(word) for each in kinds_of(first.hint) for word in get_args(each)]
    hint = nearest(first.value, words) if isinstance(first.value, str) and words else ""
    return f"{key}: expected {expected(first.hint)}, found {as_written(first.value)}{hint}"


def _mistake(kind: Any, error: Any) -> _Mistake:
    """Follow the place of a mistake along the types; the names of union members are not keys."""
    path: list[str] = []
    hint, whole = kind, kind
    kept, place = error["type"], list(error["loc"])
    if kept == "missing" and isinstance(place[-1], int):  # a list with too few values
        kept = "too_short"
        place.pop()
    for part in place:
        members = [each for each in kinds_of(hint) if each is not NoneType]
        if len(members) > 1:
            hint = next((each for each in members if _tag(each) == part), None)
            if hint is None:
                break
            continue
        (member,) = members
        if isinstance(part, int):
            path.append(f"{_ENTRY}{part + 1}")
            inner = get_args(member) or (Any,)
            hint = inner[min(part, len(inner) - 1)]
            hint = inner[0] if hint is Ellipsis else hint
        else:
            path.append(part)
            if is_dataclass(member):
                hint = hints_of(member).get(part, member)  # pyright: ignore[reportArgumentType]
            else:
                hint = (get_args(member) or (Any,))[-1]
        whole = hint
    return _Mistake(
        type=kept, path=tuple(path), hint=whole, value=error["input"], text=error["msg"]
    )


def _key(path: list[str]) -> str:
    """Write a path as in messages: `data.columns`, `exclude entry 2.warmup`."""
    dotted = "".join(part if part.startswith(_ENTRY) else f".{part}" for part in path)
    return dotted.removeprefix(".")


def _tag(kind: Any) -> str:
    """Return pydantic's name for a dataclass, list or mapping in a union."""
    origin = get_origin(kind)
    if origin in (list, dict):
        inner = [_tag(each).lower() if each is Any else _tag(each) for each in get_args(kind)]
        return f"{origin.__name__}[{','.join(inner)}]"
    return "any" if kind is Any else getattr(kind, "__name__", "")


OTHER_NAMES = {"learning_rate": "lr", "batch_size": "tokens_per_batch"}


def _unknown(path: list[str], allowed: Mapping[str, Any]) -> str:
    """Describe an unknown key; the hint is the same key further inside, or a similar one beside it.

    A similar key of another section would mislead.
    """
    *within, last = path
    word = OTHER_NAMES.get(last, last)
    inside = [_key([*within, key]) for key in _inside(allowed) if key.rpartition(".")[2] == word]
    nearby = [key for key in inside if key.count(".") == min(each.count(".") for each in inside)]
    return f"unknown key '{_key(path)}'{meant(nearby[:3]) or nearest(last, allowed)}"


def _inside(hints: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name, hint in hints.items():
        yield f"{prefix}{name}"
        if part := part_of(hint):
            yield from _inside(hints_of(part), f"{prefix}{name}.")
