"""Configs as trees of mappings: dotted keys, differences, and a canonical text."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

Tree = Mapping[str, Any]


def canonical(value: Any) -> str:
    """The same text for equal plain values."""
    return json.dumps(value, sort_keys=True)


def changes(old: Tree, new: Tree, prefix: str = "") -> list[tuple[str, Any]]:
    """Dotted key and new value of every field in which two resolved configs differ."""
    found = []
    for key in new:
        before, after = old[key], new[key]
        if isinstance(before, dict) and isinstance(after, dict) and before.keys() == after.keys():
            found += changes(before, after, f"{prefix}{key}.")
        elif before != after or type(before) is not type(after):
            found.append((f"{prefix}{key}", after))
    return found


def replaced(tree: Tree, dotted: str, value: Any) -> dict[str, Any]:
    """A tree with another value at a dotted key; the rest is shared."""
    key, _, rest = dotted.partition(".")
    inner = tree.get(key)
    if rest:
        value = replaced(inner if isinstance(inner, Mapping) else {}, rest, value)
    return {**tree, key: value}


def keys_of(tree: Tree, prefix: str = "") -> Iterator[str]:
    """The dotted key of every field, including fields that are mappings."""
    for key, value in tree.items():
        yield f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from keys_of(value, f"{prefix}{key}.")
