"""Trees of settings: dotted keys, differences, labels of values and names of variants."""

import json
import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

from lightning_app.core.errors import UserError

SEED = "seed_everything"
LARGEST_SEED = (1 << 32) - 1  # of NumPy's generator, which Lightning seeds too
SECTIONS = (SEED, "trainer", "model", "data")
"""The sections of the config of a run."""

WARMUP = "model.schedule.warmup_steps"
RATE = "model.optimizer.lr"
BLOCK = "model.block."
PRESET = "model.block.preset"
CORPUS = "data.name"
ROOT = "data.root"

Labels = Mapping[str, Mapping[Hashable, str]]
"""The names of values by axis and `key_of`."""


def same(left: Any, right: Any) -> bool:
    """Whether two values of an axis are the same setting: 400 and 400.0 are, 1 and true are not."""
    return key_of(left) == key_of(right)


def key_of(value: Any) -> Hashable:
    """A key that is equal for values of an axis that mean the same setting."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return value  # exact even above 2**53; 400 and 400.0 are equal keys
    return json.dumps(value, sort_keys=True)


def label(value: Any) -> str:
    """A short text for the value of an axis: text as it is, the rest as compact JSON.

    Different numbers have different texts: six digits, or more if needed.
    """
    if isinstance(value, str):
        return value
    if isinstance(value, float):
        short, exact = f"{value:g}", repr(value)
        return short if float(short) == value and len(short) <= len(exact) else exact
    return json.dumps(value, separators=(",", ":"), sort_keys=True)


def lookup(tree: Any, key: str) -> Any:
    """The value at a dotted key, or None."""
    for part in key.split("."):
        tree = tree.get(part) if isinstance(tree, Mapping) else None
    return tree


def cell_setting(axes: Mapping[str, Any], config: Mapping[str, Any]) -> Callable[[str], Any]:
    """The values of the dotted fields of a cell: those of its axes, else those of `config`.

    `data.root` is null unless it is an axis: it is the location of files, not their content.
    """

    def setting(key: str) -> Any:
        if key in axes:
            return axes[key]
        for axis, value in axes.items():
            if key.startswith(f"{axis}."):
                return lookup(value, key.removeprefix(f"{axis}."))
        base = None if key == ROOT else lookup(config, key)
        inside = {axis: value for axis, value in axes.items() if axis.startswith(f"{key}.")}
        return [base, inside] if inside else base

    return setting


def variant(
    axes: Mapping[str, Any],
    config: Mapping[str, Any],
    labels: Labels | None = None,
    wiring: tuple[str, ...] = (BLOCK,),
) -> str:
    """The values of the axes of the wiring joined by "+": the preset as it is, others as
    `key=value`.

    These axes begin with one of `wiring`: those of the block, and those that a grid file lists in
    `variants`. A value in `labels` uses its name there; an empty name is omitted. If nothing
    remains, it is the preset of `config`.
    """
    names = labels or {}
    parts = [label(axes[PRESET])] if PRESET in axes else []
    for key in axes:
        if key in names and key.startswith(wiring):
            name = names[key][key_of(axes[key])]
            parts = [name] if key == PRESET else [*parts, name]
        elif key.startswith(wiring) and key != PRESET:
            parts.append(f"{key.removeprefix(BLOCK)}={label(axes[key])}")
    return "+".join(filter(None, parts)) or label(lookup(config, PRESET) or "base")


def group_name(axes: Mapping[str, Any], keys: Sequence[str], labels: Labels) -> str:
    """The values of the axes `keys`, by their names or as `key=value`; "all" without any."""
    parts = [
        labels.get(key, {}).get(key_of(axes[key])) or f"{key}={label(axes[key])}" for key in keys
    ]
    return ", ".join(parts) or "all"


def value_name(axis: str, value: Any, labels: Labels) -> str:
    """The name of a value of an axis, or its label if it has none."""
    return labels.get(axis, {}).get(key_of(value)) or label(value)


def named_values(
    labels: Mapping[str, Sequence[str]], axes: Mapping[str, Sequence[Any]]
) -> dict[str, dict[Hashable, str]]:
    """The names of `labels:` in a grid file, for the values of `axes`."""
    return {
        axis: dict(zip(map(key_of, axes[axis]), names, strict=True))
        for axis, names in labels.items()
        if len(axes.get(axis, ())) == len(names)
    }


Tree = Mapping[str, Any]


def canonical(value: Any) -> str:
    """The same text for equal plain values."""
    try:
        return json.dumps(value, sort_keys=True)
    except TypeError:  # keys of several kinds, as of an axis that follows one with null
        return json.dumps(_with_text_keys(value), sort_keys=True)


def _with_text_keys(value: Any) -> Any:
    if isinstance(value, Mapping):
        items = value.items()
        return {k if isinstance(k, str) else json.dumps(k): _with_text_keys(v) for k, v in items}
    return [*map(_with_text_keys, value)] if isinstance(value, list | tuple) else value


def changes(old: Tree, new: Tree, prefix: str = "") -> list[tuple[str, Any]]:
    """Dotted key and new value of every field in which two resolved configs differ."""
    pairs = []
    for key in new:
        before, after = old[key], new[key]
        if isinstance(before, dict) and isinstance(after, dict) and before.keys() == after.keys():
            pairs += changes(before, after, f"{prefix}{key}.")
        elif before != after or type(before) is not type(after):
            pairs.append((f"{prefix}{key}", after))
    return pairs


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


def check_numbers(tree: Mapping[str, Any]) -> None:
    """Refuse NaN, infinities, and integers of more than 64 bits, anywhere in the config."""
    from lightning_app.core.strict_yaml import check_size  # PyYAML: `ablate --help` needs none

    for field, value in _leaves(tree):
        if isinstance(value, float) and not math.isfinite(value):
            raise UserError(f"{field}: {value} is not a finite number")
        check_size(field, value)


def check_seed(seed: Any) -> None:
    """Refuse a value that is not a seed: to Lightning, true means any seed and false none."""
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed <= LARGEST_SEED:
        raise UserError(
            f"seed_everything: expected a whole number from 0 to {LARGEST_SEED}, found {seed!r}"
        )


def _leaves(value: Any, field: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield from _leaves(part, f"{field}.{key}" if field else str(key))
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _leaves(part, field)
    else:
        yield field, value
