"""What was measured inside a run: its `probes.csv`, and the gains among its logged curves."""

import math
from collections.abc import Container
from typing import Any, NamedTuple

from lightning_app.analysis.figures.logs import Curve, read_curves
from lightning_app.analysis.runs import Cell
from lightning_app.tables import PROBED, rows_of

GAINS = ("alpha", "beta", "gamma")
ENDS_OF_GAINS = ("_skip", "_branch", "head_gain", "_change")


class Place(NamedTuple):
    """What a number is about. Layers count from 1; 0 is what enters the first layer.

    `layer` is None for what belongs to a stack or the model, `head` None for all heads.
    """

    quantity: str
    stack: str
    layer: int | None
    head: int | None


def has_probes(cell: Cell) -> bool:
    return cell.sound("probes.csv") is not None


def read_probes(cell: Cell, quantities: Container[str]) -> dict[Place, Curve]:
    """The quantities by place and step, only finite values; of a step probed twice, the last."""
    found: dict[Place, Curve] = {}
    for step, place, value in _rows(cell, quantities):
        if math.isfinite(value):
            found.setdefault(place, {})[step] = value
    return found


def last_probes(cell: Cell, quantities: Container[str]) -> dict[Place, float]:
    """The quantities by place at the last step that was probed."""
    rows = _rows(cell, quantities)
    last = max((step for step, _, _ in rows), default=0)
    return {place: value for step, place, value in rows if step == last and math.isfinite(value)}


def _rows(cell: Cell, quantities: Container[str]) -> list[tuple[int, Place, float]]:
    path = cell.sound("probes.csv")
    if path is None:
        return []
    names, *rows = rows_of(path)
    at, name, *others, value = map(names.index, PROBED)
    found = []
    for row in rows:
        if row[name] in quantities:
            stack, layer, head = (row[other] for other in others)
            place = Place(row[name], stack, _whole(layer), _whole(head))
            found.append((int(row[at]), place, float(row[value])))
    return found


def _whole(text: str) -> int | None:
    return int(text) if text else None


def read_gains(cell: Cell) -> dict[Place, Curve]:
    """The learned gains that `metrics.csv` has as `probe/<quantity>/<stack>/<layer>`."""
    curves = read_curves(cell, lambda tag: _gain(tag) is not None)
    return {place: c for tag, c in curves.items() if c and (place := _gain(tag)) is not None}


def _gain(tag: str) -> Place | None:
    """The place of a learned gain, None for any other tag."""
    match tag.split("/"):
        case ["probe", quantity, stack, layer] if layer.isdecimal():
            if quantity in GAINS or quantity.endswith(ENDS_OF_GAINS):
                return Place(quantity, stack, int(layer), None)
    return None


def where(place: Place) -> dict[str, Any]:
    return {
        "quantity": place.quantity,
        "stack": place.stack,
        "layer": place.layer,
        "head": place.head,
    }
