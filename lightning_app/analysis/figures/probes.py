"""The measurements inside a run: its `probes.csv`, and the gains among its logged curves."""

import math
from collections.abc import Container
from typing import Any

from lightning_app.analysis.figures.logs import finite_curves
from lightning_app.analysis.grid_results import CellResult
from lightning_app.run_folder import PROBES
from lightning_app.tables import Curve, Place, probed_values

GAINS = ("alpha", "beta", "gamma")
ENDS_OF_GAINS = ("_skip", "_branch", "head_gain", "_change")


def has_probes(cell: CellResult) -> bool:
    return cell.sound(PROBES) is not None


def read_probes(cell: CellResult, quantities: Container[str]) -> dict[Place, Curve]:
    """The finite values of each quantity by place and step; the last value of a step counts."""
    found: dict[Place, Curve] = {}
    for step, place, value in _rows(cell, quantities):
        if math.isfinite(value):
            found.setdefault(place, {})[step] = value
    return found


def last_probes(cell: CellResult, quantities: Container[str]) -> dict[Place, float]:
    """The quantities by place at the last step that was probed."""
    rows = _rows(cell, quantities)
    last = max((step for step, _, _ in rows), default=0)
    return {place: value for step, place, value in rows if step == last and math.isfinite(value)}


def _rows(cell: CellResult, quantities: Container[str]) -> list[tuple[int, Place, float]]:
    path = cell.sound(PROBES)
    rows = [] if path is None else probed_values(path)
    return [row for row in rows if row[1].quantity in quantities]


def read_gains(cell: CellResult) -> dict[Place, Curve]:
    """The learned gains that `metrics.csv` has as `probe/<quantity>/<stack>/<layer>`."""
    curves = finite_curves(cell, lambda tag: _gain(tag) is not None)
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
