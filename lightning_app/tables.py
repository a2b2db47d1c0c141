"""Tables of numbers by step, such as `metrics.csv`: their rows, and whether they are whole."""

import csv
from collections.abc import Iterator
from pathlib import Path

from lightning_app.records import Unsound

PROBED = ("step", "quantity", "stack", "layer", "head", "value")
_LAST_STEP = 2**53  # the last whole number that is a float


def rows_of(path: Path) -> Iterator[list[str]]:
    """The rows of a sound table, the names of its columns first."""
    return _rows(path.read_bytes())


def torn_table(data: bytes) -> int | None:
    """The length of the whole lines of a table that ends in the midst of one, else None."""
    whole = data.rfind(b"\n") + 1
    return whole if 0 < whole < len(data) else None


def check_table(data: bytes) -> None:
    """Check the lines of `metrics.csv`: numbers in named columns, a step in each. `Unsound`."""
    if not data.endswith(b"\n"):
        raise Unsound(
            "torn or damaged: no whole line"
            if b"\n" not in data
            else "torn: its last line has no end"
        )
    try:
        header, *rows = _rows(data)
    except (ValueError, csv.Error) as error:
        raise Unsound("torn or damaged: no table of numbers") from error
    if "step" not in header or len(set(header)) < len(header):
        raise Unsound("torn or damaged: its first line does not name the columns")
    step = header.index("step")
    for number, row in enumerate(rows, start=2):
        try:
            values = [float(value) for value in row if value]
            known = 0 <= int(float(row[step])) <= _LAST_STEP
        except (ValueError, OverflowError, IndexError) as error:
            raise Unsound(f"damaged: line {number} is no row of numbers") from error
        if not known:
            raise Unsound(f"damaged: line {number} has the step {row[step][:40]}")
        if len(row) != len(header) or not values:
            fields = f"{len(row)} fields instead of {len(header)}"
            raise Unsound(f"damaged: line {number} has {fields}")


def check_probes(data: bytes) -> None:
    """Check the lines of `probes.csv`: what is measured where, at which step. `Unsound`."""
    try:
        header, *rows = _rows(data)
    except (ValueError, csv.Error) as error:
        raise Unsound("torn or damaged: no table of numbers") from error
    if absent := [name for name in PROBED if name not in header]:
        raise Unsound(f"torn or damaged: no column '{absent[0]}'")
    numbers = {"step": int, "layer": int, "head": int, "value": float}
    for number, row in enumerate(rows, start=2):
        fields = dict(zip(header, row, strict=False))
        try:
            found = [kind(fields[name]) for name, kind in numbers.items() if fields[name]]
        except (ValueError, KeyError) as error:
            raise Unsound(f"damaged: line {number} is no row of numbers") from error
        if not fields["step"] or not fields["value"] or len(row) != len(header):
            raise Unsound(f"damaged: line {number} is not whole")
        if any(isinstance(each, int) and not 0 <= each <= _LAST_STEP for each in found):
            raise Unsound(f"damaged: line {number} holds a number that is too large")


def check_text(data: bytes) -> None:
    """Check that lines are whole and in UTF-8. `Unsound`."""
    try:
        data.decode()
    except ValueError as error:
        raise Unsound(f"damaged: {error}") from error
    if data and not data.endswith(b"\n"):
        raise Unsound("torn: its last line has no end")


def bytes_of(path: Path) -> bytes:
    """What a file holds. Raises `Unsound` for what is no file."""
    if not path.is_file():
        raise Unsound("is no file")
    return path.read_bytes()


def _rows(data: bytes) -> Iterator[list[str]]:
    return csv.reader(data.decode().splitlines(), strict=True)
