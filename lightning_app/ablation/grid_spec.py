"""The grid file: where it lies, and what it says. Every check here needs no resolved config."""

import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_app.ablation.grid_checks import (
    check_checkpoints,
    check_metric,
    check_pruner,
    check_published,
    check_sensitivity,
)
from lightning_app.ablation.grid_yaml import load_yaml, mapping, read_text
from lightning_app.ablation.import_allowlist import check_imports
from lightning_app.bounds import check_numbers, check_seed
from lightning_app.errors import UserError, nearest
from lightning_app.grid_axes import SEED, key_of
from lightning_app.shipped import shipped_folder

_KEYS = ("name", "question", "base", "base_config", "axes", "exclude", "metric", "sensitivity")
_KEYS += ("pruner", "checkpoints", "published")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")


@dataclass(frozen=True, kw_only=True)
class GridSpec:
    """What a grid file says, with its base inlined.

    `axes` maps a dotted key of the run's config to its values. A cell that agrees with all of one
    entry of `exclude` is left out. `pruner` is the rule that ends hopeless cells early, None for
    none; `checkpoints` says which of a cell are kept once it is done. `published` holds figures of
    papers that the report puts beside ours. `source` is the file as messages name it.
    """

    source: str
    name: str
    question: str
    base_config: Mapping[str, Any]
    axes: Mapping[str, list[Any]]
    exclude: tuple[Mapping[str, Any], ...]
    metric: str
    mode: str
    sensitivity: Mapping[str, Any]
    pruner: str | None = None
    checkpoints: str = "all"
    published: tuple[Mapping[str, Any], ...] = ()

    def tree(self) -> dict[str, Any]:
        """What `grid.yaml` in the grid's folder holds. It can be read as a grid file itself."""
        return {
            "name": self.name,
            "question": self.question,
            "base_config": self.base_config,
            "axes": self.axes,
            "exclude": list(self.exclude),
            "metric": {"name": self.metric, "mode": self.mode},
            "sensitivity": self.sensitivity,
            "pruner": self.pruner,
            "checkpoints": self.checkpoints,
            "published": list(self.published),
        }


def find_grid(grid: str | Path) -> Path:
    """Return the path of a grid file: `grid` is a path, or the name of an ablation that ships.

    Raises `UserError` listing the names where there is neither.
    """
    path = Path(grid)
    if path.suffix in (".yaml", ".yml") or len(path.parts) != 1:
        if not path.is_file():
            raise UserError(f"{path}: no such grid file")
        return path
    shipped = _shipped()
    if path.name not in shipped:
        known = ", ".join(sorted(shipped)) or "none"
        hint = nearest(path.name, shipped)
        raise UserError(f"{grid}: neither a YAML file nor an ablation that ships ({known}){hint}")
    return shipped[path.name]


def _shipped() -> dict[str, Path]:
    return {path.stem: path for path in shipped_folder().glob("*.yaml")}


def read_spec(grid: str | Path) -> GridSpec:
    """Read and check a grid file. Raises `UserError` naming file, field and value."""
    path = find_grid(grid)
    text = read_text(path)
    tree = mapping(load_yaml(path, text), str(path), "the file")
    for key in tree:
        if key not in _KEYS:
            raise UserError(f"{path}: unknown key '{key}'{nearest(str(key), _KEYS)}")
    name = tree.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise UserError(
            f"{path}: name: expected letters, digits, '_', '-' and '.' (at most 64, a letter or "
            f"digit first), found {name!r}"
        )
    axes = _axes(path, tree.get("axes"))
    base_config = _base(path, tree)
    metric, mode = check_metric(path, tree.get("metric"), base_config, axes)
    sensitivity = check_sensitivity(path, tree.get("sensitivity"), axes)
    check_imports(str(path), base_config, axes)
    _check_numbers(path, base_config, axes)
    return GridSpec(
        source=str(path),
        name=name,
        question=_question(path, tree.get("question"), text),
        base_config=base_config,
        axes=axes,
        exclude=_exclude(path, tree.get("exclude"), axes),
        metric=metric,
        mode=mode,
        sensitivity=sensitivity,
        pruner=check_pruner(path, tree.get("pruner"), axes, metric, sensitivity),
        checkpoints=check_checkpoints(path, tree.get("checkpoints")),
        published=check_published(path, tree.get("published")),
    )


def _base(path: Path, tree: Mapping[str, Any]) -> dict[str, Any]:
    if ("base" in tree) == ("base_config" in tree):
        raise UserError(f"{path}: expected one of 'base' (a file) and 'base_config' (a mapping)")
    if "base_config" in tree:
        return mapping(tree["base_config"], str(path), "base_config")
    if not isinstance(tree["base"], str):
        raise UserError(f"{path}: base: expected the path of a YAML file, found {tree['base']!r}")
    base = path.parent / tree["base"]
    if not base.is_file():
        raise UserError(f"{path}: base: no such file: {base}")
    return mapping(load_yaml(base, read_text(base)), str(base), "the file")


def _axes(path: Path, axes: Any) -> dict[str, list[Any]]:
    axes = mapping(axes, str(path), "axes")
    if not axes:
        raise UserError(f"{path}: axes: at least one axis is needed")
    for axis, values in axes.items():
        if not isinstance(values, list) or not values:
            raise UserError(f"{path}: axes: {axis}: expected a list of values, found {values!r}")
        for value in values:
            _check_value(path, axis, value)
        counts = Counter(map(key_of, values))
        twice = next((value for value in values if counts[key_of(value)] > 1), _check_value)
        if twice is not _check_value:
            raise UserError(f"{path}: axes: {axis}: value {twice!r} is given twice")
        inner = next((other for other in axes if other.startswith(f"{axis}.")), None)
        if inner:
            raise UserError(f"{path}: axes: {inner} lies inside of another axis, {axis}")
    return axes


def _check_value(path: Path, axis: str, value: Any) -> None:
    if isinstance(value, list):
        for item in value:
            _check_value(path, axis, item)
    elif isinstance(value, dict):
        for item in mapping(value, str(path), f"axes: {axis}").values():
            _check_value(path, axis, item)
    elif isinstance(value, float) and not math.isfinite(value):
        raise UserError(f"{path}: axes: {axis}: {value} is not a finite number")
    elif value is not None and not isinstance(value, bool | int | float | str):
        raise UserError(f"{path}: axes: {axis}: unexpected {type(value).__name__} {value!r}")


def _check_numbers(path: Path, base: Mapping[str, Any], axes: Mapping[str, list[Any]]) -> None:
    """Seeds are whole numbers as they are written, and no number is NaN or infinite."""
    try:
        check_numbers(base)
        for seed in [base[SEED]] if SEED in base else []:
            check_seed(seed)
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    try:
        for seed in axes.get(SEED, ()):
            check_seed(seed)
    except UserError as error:
        raise UserError(f"{path}: axes: {error}") from error


def _exclude(path: Path, exclude: Any, axes: Mapping[str, list[Any]]) -> tuple[dict[str, Any], ...]:
    if exclude is None:
        return ()
    if not isinstance(exclude, list):
        raise UserError(f"{path}: exclude: expected a list of mappings, found {exclude!r}")
    known = {axis: set(map(key_of, values)) for axis, values in axes.items()}
    for entry in exclude:
        if not mapping(entry, str(path), "exclude"):
            raise UserError(f"{path}: exclude: an empty entry would exclude every cell")
        for axis, value in entry.items():
            if axis not in axes:
                raise UserError(f"{path}: exclude: no axis '{axis}'{nearest(axis, axes)}")
            if key_of(value) not in known[axis]:
                hint = nearest(str(value), [str(each) for each in axes[axis]])
                raise UserError(f"{path}: exclude: {axis}: no value {value!r} on the axis{hint}")
    return tuple(exclude)


def _question(path: Path, question: Any, text: str) -> str:
    """The opening comment block, unless the file says it in a field."""
    if question is not None:
        if not isinstance(question, str):
            raise UserError(f"{path}: question: expected text, found {question!r}")
        return question
    lines = []
    for line in text.splitlines():
        if not line.startswith("#"):
            break
        lines.append(line.lstrip("#").strip())
    return "\n".join(lines).strip()
