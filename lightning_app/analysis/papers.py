"""Read and check `plan.json` and `grid.yaml` of a grid's folder."""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lightning_app.errors import UserError, named
from lightning_app.grid_folder import is_file_name
from lightning_app.identity.relevant import check_removed
from lightning_app.records import (
    Unsound,
    check_plan,
    is_count,
    is_text,
    read_json,
    read_yaml,
)

_LARGEST = 2**63  # the limit of a column of 64-bit integers
_PUBLISHED = ("paper", "setting", "variant", "metric")


def read_plan(path: Path) -> dict[str, Any]:
    """`plan.json`. Raises `UserError` naming the field that is wrong."""
    tree = read_mapping(path)
    try:
        check_plan(tree, path.parent)
    except Unsound as error:
        raise UserError(f"{path}: {error}") from error
    check = _Checker(path)
    check("name", tree, is_file_name, "the name of a folder")
    axes = check("axes", tree, lambda value: _is_mapping(value, _is_list), "lists by dotted key")
    with named(path):
        for key, values in axes.items():
            check_removed(key, values)
    cells = check("cells", tree, _is_list, "a list")
    for number, cell in enumerate(cells):
        check.within = f"cells[{number}]."
        if not isinstance(cell, dict):
            raise check.unexpected("", cell, "a cell")
        check("id", cell, is_text, "text")
        check("name", cell, is_file_name, "the name of a folder")
        known = check("axes", cell, lambda value: _is_mapping(value), "values by dotted key")
        if unknown := [key for key in known if key not in axes]:
            raise check.unexpected("axes", unknown[0], "an axis of the plan")
    for number, cell in enumerate(tree.get("waiting", ())):
        check.within = f"waiting[{number}]."
        check("name", cell, is_file_name, "the name of a folder")
    return tree


def read_grid_file(path: Path) -> dict[str, Any]:
    """`grid.yaml`. Raises `UserError` naming the field that is wrong."""
    tree = read_mapping(path)
    check = _Checker(path, optional=True)
    check("question", tree, is_text, "text")
    check("pruner", tree, is_text, "text")
    check("base_config", tree, _is_mapping, "a mapping")
    metric = check("metric", tree, _is_mapping, "a mapping") or {}
    scores = check("sensitivity", tree, _is_mapping, "a mapping") or {}
    published = check("published", tree, _is_list, "a list") or []
    check("labels", tree, lambda value: _is_mapping(value, _is_list), "lists by axis")
    check("factors", tree, lambda value: _is_mapping(value, is_text), "axes by name")
    check("compare", tree, _is_mapping, "baselines by axis")
    check.within = "metric."
    check("name", metric, is_text, "text")
    check("mode", metric, lambda value: value in ("min", "max"), "'min' or 'max'")
    check.within = "sensitivity."
    check("reference_warmup", scores, is_count, "a whole number")
    check("baseline", scores, is_text, "text")
    for number, figure in enumerate(published):
        check.within = f"published[{number}]."
        if not isinstance(figure, dict) or not all(is_text(figure.get(k)) for k in _PUBLISHED):
            raise check.unexpected("", figure, f"texts for {', '.join(_PUBLISHED)}")
        value = figure.get("value")
        if value != "diverged" and not _is_number(value):
            raise check.unexpected("value", value, "a number, or 'diverged'")
        check("data", figure, is_text, "text")
        check("warmup", figure, is_count, "a whole number")
        check("lr", figure, lambda value: _is_number(value) and value > 0, "a number above 0")
        check("note", figure, is_text, "text")
    return tree


def read_mapping(path: Path) -> dict[str, Any]:
    """A JSON or YAML file that holds a mapping. Raises `UserError` naming the file otherwise."""
    try:
        return read_json(path) if path.suffix == ".json" else read_yaml(path)
    except Unsound as error:
        raise UserError(f"{path}: {error}") from error


def number_of(path: Path, key: str, value: Any, kind: Callable[[Any], float]) -> Any:
    """A value of a config as a number of the given kind, None for null.

    YAML reads `1e-3` as text. Raises `UserError`.
    """
    try:
        found = None if value is None or isinstance(value, bool) else kind(value)
        if value is None or (found is not None and abs(found) < _LARGEST):
            return found
    except (TypeError, ValueError, OverflowError):
        pass  # the error is raised below
    raise UserError(f"{path}: {key}: expected a number, found {str(value)[:40]!r}")


class _Checker:
    """Check fields of a file; if they are `optional`, a missing one counts as null."""

    def __init__(self, path: Path, optional: bool = False) -> None:
        self._path = path
        self._optional = optional
        self.within = ""

    def __call__(
        self, field: str, tree: Mapping[str, Any], is_right: Callable[[Any], bool], wanted: str
    ) -> Any:
        if field not in tree and not self._optional:
            raise UserError(f"{self._path}: field '{self.within}{field}' is missing")
        value = tree.get(field)
        if not (self._optional and value is None) and not is_right(value):
            raise self.unexpected(field, value, wanted)
        return value

    def unexpected(self, field: str, value: Any, wanted: str) -> UserError:
        where = f"{self.within}{field}".rstrip(".")
        return UserError(f"{self._path}: {where}: expected {wanted}, found {str(value)[:40]!r}")


def _is_list(value: Any) -> bool:
    return isinstance(value, list)


def _is_mapping(value: Any, is_right: Callable[[Any], bool] = lambda value: True) -> bool:
    return isinstance(value, dict) and all(is_text(k) and is_right(v) for k, v in value.items())


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
