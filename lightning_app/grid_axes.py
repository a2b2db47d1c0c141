"""The axes of a grid: the keys with a special meaning, equal values, names of variants."""

import json
from collections.abc import Hashable, Mapping
from typing import Any

SEED = "seed_everything"
WARMUP = "model.schedule.warmup_steps"
RATE = "model.optimizer.lr"
BLOCK = "model.block."
PRESET = "model.block.preset"


def same(left: Any, right: Any) -> bool:
    """Whether two values of an axis mean the same setting: 400 and 400.0 do, 1 and true do not."""
    return key_of(left) == key_of(right)


def key_of(value: Any) -> Hashable:
    """A key that is equal for values of an axis that mean the same setting."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    return json.dumps(value, sort_keys=True)


def label(value: Any) -> str:
    """A short text for the value of an axis: text as it is, the rest as compact JSON."""
    if isinstance(value, str):
        return value
    if isinstance(value, float):
        return f"{value:g}"
    return json.dumps(value, separators=(",", ":"), sort_keys=True)


def lookup(tree: Any, key: str) -> Any:
    """The value at a dotted key, or None."""
    for part in key.split("."):
        tree = tree.get(part) if isinstance(tree, Mapping) else None
    return tree


def variant(axes: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    """The values of the block's axes joined by "+": the preset alone, others as `key=value`.

    If no axis varies the block, it is the preset of `config`.
    """
    others = [key for key in axes if key.startswith(BLOCK) and key != PRESET]
    parts = [label(axes[PRESET])] if PRESET in axes else []
    parts += [f"{key.removeprefix(BLOCK)}={label(axes[key])}" for key in others]
    return "+".join(parts) or label(lookup(config, PRESET) or "base")
