"""What is wrong with one file of a run, if anything: JSON records, tables, configs."""

import csv
import json
import math
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml

_YAML: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # 6 times as fast where it is built


class Unsound(Exception):
    """A file does not hold what it should; the message says why."""


def read_record(path: Path) -> dict[str, Any]:
    """Read a JSON object without NaN and infinities. Raises `Unsound`."""

    def refuse(word: str) -> float:
        raise Unsound(f"holds {word}, which is no JSON")

    def finite(text: str) -> float:
        number = float(text)
        if not math.isfinite(number):
            raise Unsound(f"holds the number {text}, which is too large")
        return number

    try:
        text = path.read_bytes().decode()
        tree = json.loads(text, parse_constant=refuse, parse_float=finite)
    except (ValueError, RecursionError) as error:
        raise Unsound(f"torn or damaged: no valid JSON ({error})") from error
    if not isinstance(tree, dict):
        raise Unsound(f"expected a JSON object, found {type(tree).__name__}")
    return tree


def read_yaml(path: Path) -> dict[str, Any]:
    """Read a YAML mapping whose last line is whole. Raises `Unsound`."""
    data = path.read_bytes()
    if not data.endswith(b"\n"):
        raise Unsound("torn or damaged: its last line has no end")
    try:
        tree = yaml.load(data.decode(), Loader=_YAML)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise Unsound(f"torn or damaged: no valid YAML ({reason})") from error
    if not isinstance(tree, dict):
        raise Unsound(f"expected a YAML mapping, found {type(tree).__name__}")
    return tree


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_time(value: Any) -> bool:
    try:
        return datetime.fromisoformat(value).tzinfo is not None
    except (TypeError, ValueError):
        return False


def _is_metrics(value: Any) -> bool:
    return isinstance(value, dict) and all(v is None or _is_number(v) for v in value.values())


def _is_divergence(value: Any) -> bool:
    if value is None:
        return True
    if not isinstance(value, dict) or not {"step", "rule", "last_finite_loss"} <= value.keys():
        return False
    loss = value["last_finite_loss"]
    return (
        _is_count(value["step"])
        and isinstance(value["rule"], str)
        and (loss is None or _is_number(loss))
    )


# What later reads rely on: for each field whether a value will do, and what would.
_Fields = Mapping[str, tuple[Callable[[Any], bool], str]]
_COMMON: _Fields = {
    "schema": (lambda value: value in (1, 2) and value is not True, "1 or 2"),
    "name": (lambda value: isinstance(value, str), "text"),
    "seconds": (lambda value: _is_number(value) and value >= 0, "a number from 0"),
    "attempt": (lambda value: _is_count(value) and value > 0, "a whole number from 1"),
    "started": (_is_time, "a time with its zone"),
    "finished": (_is_time, "a time with its zone"),
}
_RESULT: _Fields = {
    **_COMMON,
    "status": (lambda value: value in ("ok", "diverged"), "ok or diverged"),
    "diverged": (_is_divergence, "null or step, rule and last_finite_loss"),
    "metrics": (_is_metrics, "numbers by name"),
    "unigram_entropy": (lambda value: _is_number(value) and value > 0, "a number above 0"),
    "steps": (_is_count, "a whole number from 0"),
}
_PRUNED: _Fields = {
    **_COMMON,
    "status": (lambda value: value == "pruned", "pruned"),
    "step": (_is_count, "a whole number from 0"),
    "value": (lambda value: value is None or _is_number(value), "a number or null"),
}


def check_result(tree: Mapping[str, Any], identity: str) -> None:
    """Check what `result.json` holds, for the cell with this id. Raises `Unsound`."""
    _check(tree, _RESULT, identity)
    if (tree["status"] == "diverged") != (tree["diverged"] is not None):
        raise Unsound(f"status '{tree['status']}' and the field diverged contradict each other")


def check_pruned(tree: Mapping[str, Any], identity: str) -> None:
    """Check what `pruned.json` holds, for the cell with this id. Raises `Unsound`."""
    _check(tree, _PRUNED, identity)


def _check(tree: Mapping[str, Any], fields: _Fields, identity: str) -> None:
    for name in ("id", *fields):
        if name not in tree:
            raise Unsound(f"field '{name}' is missing")
    if tree["id"] != identity:
        raise Unsound(f"id: {tree['id']!r} is not the planned {identity}")
    for name, (is_right, wanted) in fields.items():
        if not is_right(tree[name]):
            raise Unsound(f"{name}: expected {wanted}, found {str(tree[name])[:40]!r}")


def torn_table(data: bytes) -> int | None:
    """The length of the whole lines of a table that ends in the midst of one, else None."""
    whole = data.rfind(b"\n") + 1
    return whole if 0 < whole < len(data) else None


def check_table(data: bytes) -> None:
    """Check the lines of `metrics.csv`: numbers in named columns, a step in each. `Unsound`."""
    if not data.endswith(b"\n"):
        raise Unsound("torn or damaged: no whole line")
    try:
        header, *rows = csv.reader(data.decode().splitlines(), strict=True)
    except (ValueError, csv.Error) as error:
        raise Unsound("torn or damaged: no table of numbers") from error
    if "step" not in header or len(set(header)) < len(header):
        raise Unsound("torn or damaged: its first line does not name the columns")
    step = header.index("step")
    for number, row in enumerate(rows, start=2):
        try:
            values = [float(value) for value in row if value]
            int(float(row[step]))
        except (ValueError, OverflowError, IndexError) as error:
            raise Unsound(f"damaged: line {number} is no row of numbers") from error
        if len(row) != len(header) or not values:
            fields = f"{len(row)} fields instead of {len(header)}"
            raise Unsound(f"damaged: line {number} has {fields}")
