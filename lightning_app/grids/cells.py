"""The cells of a grid: the combinations of its axes, their configs and their names."""

import re
from collections.abc import Hashable, Iterator, Mapping
from functools import reduce
from itertools import product
from typing import Any

from lightning_app.config.grid import GridSpec
from lightning_app.config.tree import BLOCK, SEED, WARMUP, Tree, key_of, label, replaced, variant

_LONGEST = 120  # characters of a run's name before its id; file systems allow 255


def combinations(spec: GridSpec) -> Iterator[dict[str, Any]]:
    """Yield the axes' values of every cell that is not excluded: seeds slowest, then file order."""
    excluded: dict[tuple[str, ...], set[tuple[Hashable, ...]]] = {}
    for entry in spec.exclude:
        excluded.setdefault(tuple(entry), set()).add(tuple(map(key_of, entry.values())))
    order = sorted(spec.axes.keys() - spec.linked.keys(), key=list(spec.axes).index)
    order.sort(key=lambda axis: axis != SEED)
    follow = {
        axis: dict(zip(map(key_of, spec.axes[other]), values, strict=True))
        for axis, (other, values) in spec.linked.items()
    }
    for values in product(*(spec.axes[axis] for axis in order)):
        chosen = dict(zip(order, values, strict=True))
        for axis, known in follow.items():
            chosen[axis] = known[key_of(chosen[spec.linked[axis].axis])]
        axes = {axis: chosen[axis] for axis in spec.axes}
        if not any(
            tuple(key_of(axes[axis]) for axis in names) in keys for names, keys in excluded.items()
        ):
            yield axes


def cell_tree(base_config: Tree, axes: Mapping[str, Any]) -> dict[str, Any]:
    """The unresolved config of a cell: the grid's base with the values of the axes set."""
    return reduce(lambda tree, key: replaced(tree, key, axes[key]), axes, dict(base_config))


def cell_name(spec: GridSpec, axes: Mapping[str, Any], identity: str) -> str:
    """`<variant>-<short axes>-<id8>`, of characters that every file system takes."""
    return f"{name_without_id(spec, axes)}-{identity[:8]}".lstrip(".-")


def name_without_id(spec: GridSpec, axes: Mapping[str, Any]) -> str:
    """`<variant>-<short axes>`, for a cell whose id is not known yet."""
    shown = [key for key in axes if not key.startswith(BLOCK)]
    parts = [variant(axes, spec.base_config)]
    parts += [f"{_short(key, shown)}{label(axes[key])}" for key in shown]
    name = re.sub(r"[^A-Za-z0-9_.+=-]+", "_", "-".join(parts))
    return name[:_LONGEST]


def _short(key: str, keys: list[str]) -> str:
    """The last word of a dotted key, or as many as distinguish it from the other keys."""
    if key in (SEED, WARMUP):
        return "seed" if key == SEED else "warmup"
    words = key.split(".")
    for count in range(1, len(words)):
        short = ".".join(words[-count:])
        if sum(other.endswith(f".{short}") for other in keys) == 1:
            return short
    return key
