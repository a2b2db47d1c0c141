"""Read and check the other files of a run: tables of numbers by step, and texts."""

import csv
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from lightning_app.records import Unsound, bytes_of, read_json
from lightning_app.run_folder import (
    BLOCK,
    ENVIRONMENT,
    HYPOTHESES,
    METRICS,
    PROBES,
    REFERENCES,
)

PROBED = ("step", "quantity", "stack", "layer", "head", "value")
_LONGEST_LINE = 1 << 20  # bytes
_LAST_STEP = 2**53  # up to here every integer is a float


Curve = dict[int, float]  # by optimizer step


def read_curves(path: Path, wanted: Callable[[str], bool]) -> dict[str, Curve]:
    """The `wanted` columns of a checked `metrics.csv` by name; the last value of a step counts.

    Steps are optimizer steps from 1, in ascending order.
    """
    names, *rows = _rows(path.read_bytes())
    columns = [(place, name) for place, name in enumerate(names) if wanted(name)]
    found: dict[str, Curve] = {name: {} for _, name in columns}
    at = names.index("step")
    for row in rows:
        for place, name in columns:
            if row[place]:
                found[name][int(float(row[at]))] = float(row[place])
    return {name: dict(sorted(curve.items())) for name, curve in found.items()}


class Place(NamedTuple):
    """The place that a probed number describes. Layer 0 is the input of the first layer, 1.

    `layer` is None for a quantity of a stack or of the model, `head` None for all heads.
    """

    quantity: str
    stack: str
    layer: int | None = None
    head: int | None = None


def probed_values(path: Path) -> Iterator[tuple[int, Place, float]]:
    """The rows of a checked `probes.csv`: step, place and value."""
    names, *rows = _rows(path.read_bytes())
    at, name, *others, value = map(names.index, PROBED)
    for row in rows:
        stack, layer, head = (row[other] for other in others)
        place = Place(row[name], stack, _whole(layer), _whole(head))
        yield int(row[at]), place, float(row[value])


def _whole(text: str) -> int | None:
    return int(text) if text else None


def column_names(path: Path) -> list[str]:
    """The names of a table's columns, from its first line."""
    if not path.is_file():
        return []
    with path.open("rb") as file:
        return file.readline(_LONGEST_LINE).decode(errors="replace").rstrip().split(",")


def check_table(data: bytes) -> None:
    """Check that each line of `metrics.csv` has a step and numbers. Raises `Unsound`."""
    if not data.endswith(b"\n"):
        raise Unsound(
            "torn or damaged: no complete line"
            if b"\n" not in data
            else "torn: its last line has no end"
        )
    try:
        header, *rows = _rows(data)
    except (ValueError, csv.Error) as error:
        raise Unsound("torn or damaged: not a table of numbers") from error
    if "step" not in header or len(set(header)) < len(header):
        raise Unsound("torn or damaged: its first line does not name the columns")
    step = header.index("step")
    for number, row in enumerate(rows, start=2):
        try:
            values = [float(value) for value in row if value]
            known = 0 <= int(float(row[step])) <= _LAST_STEP
        except (ValueError, OverflowError, IndexError) as error:
            raise Unsound(f"damaged: line {number} is not a row of numbers") from error
        if not known:
            raise Unsound(f"damaged: line {number} has the step {row[step][:40]}")
        if len(row) != len(header) or not values:
            fields = f"{len(row)} fields instead of {len(header)}"
            raise Unsound(f"damaged: line {number} has {fields}")


def check_probes(data: bytes) -> None:
    """Check that each line of `probes.csv` has quantity, place and step. Raises `Unsound`."""
    try:
        header, *rows = _rows(data)
    except (ValueError, csv.Error) as error:
        raise Unsound("torn or damaged: not a table of numbers") from error
    if absent := [name for name in PROBED if name not in header]:
        raise Unsound(f"torn or damaged: no column '{absent[0]}'")
    numbers = {"step": int, "layer": int, "head": int, "value": float}
    for number, row in enumerate(rows, start=2):
        fields = dict(zip(header, row, strict=False))
        try:
            found = [kind(fields[name]) for name, kind in numbers.items() if fields[name]]
        except (ValueError, KeyError) as error:
            raise Unsound(f"damaged: line {number} is not a row of numbers") from error
        if not fields["step"] or not fields["value"] or len(row) != len(header):
            raise Unsound(f"damaged: line {number} is not complete")
        if any(isinstance(each, int) and not 0 <= each <= _LAST_STEP for each in found):
            raise Unsound(f"damaged: line {number} holds a number that is too large")


def check_text(data: bytes) -> None:
    """Check that a text is UTF-8 and its last line complete. Raises `Unsound`."""
    try:
        data.decode()
    except ValueError as error:
        raise Unsound(f"damaged: {error}") from error
    if data and not data.endswith(b"\n"):
        raise Unsound("torn: its last line has no end")


def _rows(data: bytes) -> Iterator[list[str]]:
    return csv.reader(data.decode().splitlines(), strict=True)


def _check_block(tree: Mapping[str, Any]) -> None:
    for side, stack in tree.items():
        blocks = stack.get("blocks", []) if isinstance(stack, dict) else None
        if not isinstance(blocks, list) or not all(isinstance(each, dict) for each in blocks):
            raise Unsound(f"damaged: {side} is not a stack of blocks")


CHECKS: Mapping[str, Callable[[Path], object]] = {
    METRICS: lambda path: check_table(bytes_of(path)),
    PROBES: lambda path: check_probes(bytes_of(path)),
    HYPOTHESES: lambda path: check_text(bytes_of(path)),
    REFERENCES: lambda path: check_text(bytes_of(path)),
    BLOCK: lambda path: _check_block(read_json(path)),
    ENVIRONMENT: read_json,
}
"""The check of each file that a report reads beside the result. Each raises `Unsound`."""
