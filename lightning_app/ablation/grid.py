"""The grid file: where it lies, strict reading, and every check that needs no resolved config."""

import json
import math
import re
from collections import Counter
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from lightning_app.ablation.imports import check_imports
from lightning_app.bounds import check_numbers, check_seed, check_size
from lightning_app.errors import UserError, nearest
from lightning_app.shipped import shipped_folder
from lightning_app.task_facts import GENERAL, TASKS

SEED = "seed_everything"
WARMUP = "model.schedule.warmup_steps"
BLOCK = "model.block."
PRESET = "model.block.preset"

PRUNERS = ("median", "hyperband")
CHECKPOINTS = ("all", "last", "best", "none")

_KEYS = ("name", "question", "base", "base_config", "axes", "exclude", "metric", "sensitivity")
_KEYS += ("pruner", "checkpoints", "published")
_LEVELS = 20  # of nesting, far more than a config has
_VALUES = 1_000_000  # in a file with its anchors written out
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")


@dataclass(frozen=True, kw_only=True)
class Grid:
    """A grid file with its base inlined.

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


def read_grid(grid: str | Path) -> Grid:
    """Read and check a grid file. Raises `UserError` naming file, field and value."""
    path = find_grid(grid)
    text = _text(path)
    tree = _mapping(_load(path, text), str(path), "the file")
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
    metric, mode = _metric(path, tree.get("metric"))
    sensitivity = _sensitivity(path, tree.get("sensitivity"), axes)
    base_config = _base(path, tree)
    check_imports(str(path), base_config, axes)
    _check_numbers(path, base_config, axes)
    return Grid(
        source=str(path),
        name=name,
        question=_question(path, tree.get("question"), text),
        base_config=base_config,
        axes=axes,
        exclude=_exclude(path, tree.get("exclude"), axes),
        metric=metric,
        mode=mode,
        sensitivity=sensitivity,
        pruner=_pruner(path, tree.get("pruner"), axes, metric, sensitivity),
        checkpoints=_checkpoints(path, tree.get("checkpoints")),
        published=_published(path, tree.get("published")),
    )


def same(left: Any, right: Any) -> bool:
    """Whether two values of an axis mean the same setting: 400 and 400.0 do, 1 and true do not."""
    return key_of(left) == key_of(right)


def key_of(value: Any) -> Hashable:
    """What values of an axis that mean the same setting have in common."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    return json.dumps(value, sort_keys=True)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: invalid UTF-8 at byte {error.start}") from error
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error


class _Loader(yaml.SafeLoader):
    """Safe YAML without duplicate keys and dates, where 5e-4 is a number as in YAML 1.2."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            if key.value in seen:
                problem = f"key '{key.value}' stands twice"
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        value = super().construct_yaml_int(node)
        try:
            check_size("a value", value)
        except UserError as error:
            mark = node.start_mark
            raise yaml.constructor.ConstructorError(None, None, str(error), mark) from error
        return value


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)
_Loader.yaml_implicit_resolvers = {
    letter: [entry for entry in entries if entry[0] != "tag:yaml.org,2002:timestamp"]
    for letter, entries in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?[0-9][0-9_]*[eE][-+]?[0-9]+$"),
    list("-+0123456789"),
)


def _load(path: Path, text: str) -> Any:
    try:
        tree = yaml.load(text, Loader=_Loader)
        _check_extent(path, tree)
    except RecursionError as error:
        raise UserError(f"{path}: nested too deeply") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f" line {mark.line + 1}:" if mark else ""
        raise UserError(f"{path}:{line} {error.problem or error.context}") from error
    except (yaml.YAMLError, ValueError) as error:
        raise UserError(f"{path}: no valid YAML: {error}") from error
    return tree


def _check_extent(path: Path, tree: Any) -> None:
    """Refuse a file whose anchors write it out endlessly, or beyond what can be handled."""
    extents: dict[int, tuple[int, int] | None] = {}

    def extent(value: Any) -> tuple[int, int]:
        """Values written out, and levels."""
        if not isinstance(value, dict | list):
            return 1, 0
        if id(value) not in extents:
            extents[id(value)] = None
            parts = [
                extent(part) for part in (value.values() if isinstance(value, dict) else value)
            ]
            size = 1 + sum(size for size, _ in parts)
            extents[id(value)] = size, 1 + max((levels for _, levels in parts), default=0)
        known = extents[id(value)]
        if known is None:
            raise UserError(f"{path}: a value contains itself by its anchor")
        return known

    size, levels = extent(tree)
    if levels > _LEVELS:
        raise UserError(f"{path}: nested {levels} levels deep; at most {_LEVELS}")
    if size > _VALUES:
        raise UserError(f"{path}: comes to {size:,} values by its anchors; at most {_VALUES:,}")


def _mapping(value: Any, source: str, field: str) -> dict[str, Any]:
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise UserError(f"{source}: {field}: expected a mapping with text keys, found {value!r}")
    return value


def _base(path: Path, tree: Mapping[str, Any]) -> dict[str, Any]:
    if ("base" in tree) == ("base_config" in tree):
        raise UserError(f"{path}: expected one of 'base' (a file) and 'base_config' (a mapping)")
    if "base_config" in tree:
        return _mapping(tree["base_config"], str(path), "base_config")
    if not isinstance(tree["base"], str):
        raise UserError(f"{path}: base: expected the path of a YAML file, found {tree['base']!r}")
    base = path.parent / tree["base"]
    if not base.is_file():
        raise UserError(f"{path}: base: no such file: {base}")
    return _mapping(_load(base, _text(base)), str(base), "the file")


def _axes(path: Path, axes: Any) -> dict[str, list[Any]]:
    axes = _mapping(axes, str(path), "axes")
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
            raise UserError(f"{path}: axes: {axis}: value {twice!r} stands twice")
        inner = next((other for other in axes if other.startswith(f"{axis}.")), None)
        if inner:
            raise UserError(f"{path}: axes: {inner} lies inside of another axis, {axis}")
    return axes


def _check_value(path: Path, axis: str, value: Any) -> None:
    if isinstance(value, list):
        for item in value:
            _check_value(path, axis, item)
    elif isinstance(value, dict):
        for item in _mapping(value, str(path), f"axes: {axis}").values():
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
        if not _mapping(entry, str(path), "exclude"):
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


def _metric(path: Path, metric: Any) -> tuple[str, str]:
    if metric is None:
        return "val/nll", "min"
    metric = _fields(path, "metric", metric, ("name", "mode"))
    name, mode = metric.get("name", "val/nll"), metric.get("mode", "min")
    known = [*GENERAL, *(score.metric for task in TASKS.values() for score in task.scores)]
    if name not in known:
        hint = nearest(str(name), known)
        raise UserError(f"{path}: metric.name: no metric {name!r}{hint}")
    if mode not in ("min", "max"):
        raise UserError(f"{path}: metric.mode: expected 'min' or 'max', found {mode!r}")
    return name, mode


def _sensitivity(path: Path, sensitivity: Any, axes: Mapping[str, list[Any]]) -> dict[str, Any]:
    if sensitivity is None:
        return {}
    sensitivity = _fields(path, "sensitivity", sensitivity, ("reference_warmup", "baseline"))
    for field, axis in (("reference_warmup", WARMUP), ("baseline", PRESET)):
        if field not in sensitivity:
            continue
        value, kind = sensitivity[field], int if field == "reference_warmup" else str
        if not isinstance(value, kind) or isinstance(value, bool):
            what = "a whole number" if kind is int else "text"
            raise UserError(f"{path}: sensitivity.{field}: expected {what}, found {value!r}")
        if axis in axes and not any(same(value, known) for known in axes[axis]):
            known = [str(value) for value in axes[axis]]
            raise UserError(
                f"{path}: sensitivity.{field}: {value!r} is not on the axis {axis} "
                f"({', '.join(known)}){nearest(str(value), known)}"
            )
    return sensitivity


def _pruner(
    path: Path,
    pruner: Any,
    axes: Mapping[str, list[Any]],
    metric: str,
    sensitivity: Mapping[str, Any],
) -> str | None:
    """The pruner, which can only serve a grid that looks for its best cells."""
    if pruner is None:
        return None
    if pruner not in PRUNERS:
        hint = nearest(str(pruner), PRUNERS)
        raise UserError(f"{path}: pruner: expected {' or '.join(PRUNERS)}, found {pruner!r}{hint}")
    reason = "a pruned run has no final loss, so no sensitivity could be reported"
    if sensitivity:
        raise UserError(f"{path}: pruner: cannot stand beside 'sensitivity': {reason}")
    if len(axes.get(WARMUP, ())) > 1:
        raise UserError(f"{path}: pruner: cannot stand beside the axis {WARMUP}: {reason}")
    if not metric.startswith("val/"):
        raise UserError(
            f"{path}: pruner: judges cells by metric.name at each validation, where '{metric}' is "
            f"not known; expected one of val/..."
        )
    return pruner


def _checkpoints(path: Path, checkpoints: Any) -> str:
    if checkpoints is None:
        return "all"
    if checkpoints not in CHECKPOINTS:
        hint = nearest(str(checkpoints), CHECKPOINTS)
        known = ", ".join(CHECKPOINTS)
        raise UserError(
            f"{path}: checkpoints: expected one of {known}, found {checkpoints!r}{hint}"
        )
    return checkpoints


def _published(path: Path, published: Any) -> tuple[dict[str, Any], ...]:
    """Figures of papers: whose, in what setting, of which variant, and the number."""
    if published is None:
        return ()
    if not isinstance(published, list):
        raise UserError(f"{path}: published: expected a list of mappings, found {published!r}")
    return tuple(
        _figure(path, f"published entry {n}", entry) for n, entry in enumerate(published, 1)
    )


def _figure(path: Path, field: str, entry: Any) -> dict[str, Any]:
    for key, (what, holds) in _FIGURE.items():
        given = _fields(path, field, entry, tuple(_FIGURE)).get(key)
        needed = key not in ("warmup", "lr", "note")
        if given is None and needed:
            raise UserError(f"{path}: {field}: '{key}' is missing; expected {what}")
        if given is not None and not holds(given):
            raise UserError(f"{path}: {field}: {key}: expected {what}, found {given!r}")
    return dict(entry)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


_FIGURE = {
    "paper": ("the key of a paper or its citation", _is_text),
    "setting": ("what was trained and measured there, as text", _is_text),
    "variant": ("the name of a variant", _is_text),
    "warmup": (
        "a whole number of updates, or null where it is not said",
        lambda value: isinstance(value, int) and _is_number(value) and value >= 0,
    ),
    "lr": (
        "a number above 0, or null where it is not said",
        lambda value: _is_number(value) and value > 0,
    ),
    "metric": ("the name of a metric, such as test/bleu", _is_text),
    "value": (
        "a number, or 'diverged'",
        lambda value: _is_number(value) or value == "diverged",
    ),
    "note": ("text", _is_text),
}


def _fields(path: Path, field: str, value: Any, known: tuple[str, ...]) -> dict[str, Any]:
    for key in _mapping(value, str(path), field):
        if key not in known:
            raise UserError(f"{path}: {field}: unknown key '{key}'{nearest(key, known)}")
    return value
