"""The choice of runs and the look of layers in all figures of the inside of blocks."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from lightning_app.analysis.figures.drawing import Sketch, warmup_of
from lightning_app.analysis.grid_results import CellResult
from lightning_app.analysis.statistics import mean
from lightning_app.grid_axes import label

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STACKS = ("encoder", "decoder", "model")
MARKERS = ("o", "s", "^", "D", "v", "P")  # of layers, repeated


def at_best_rate(cells: Sequence[CellResult]) -> list[CellResult]:
    """The runs at the rate with the lowest mean final loss, without stalled ones unless all did.

    The figure shows one rate, since otherwise it would mix effects of the rate and the variant.
    """
    losses: dict[float | None, list[float]] = {}
    for cell in cells:
        if math.isfinite(cell.loss):
            losses.setdefault(cell.lr, []).append(cell.loss)
    if not losses:
        return []
    best = min(losses, key=lambda lr: mean(losses[lr]))
    runs = [cell for cell in cells if cell.lr == best]
    return [cell for cell in runs if cell.state == "ok"] or runs


def which(cells: Sequence[CellResult]) -> str:
    """A sentence about the runs that `at_best_rate` has chosen."""
    if all(cell.state == "diverged" for cell in cells):
        return "All of these runs stalled or were non-finite."
    rates = {cell.lr for cell in cells}
    at = "" if None in rates else f" at the learning rate {label(min(r for r in rates if r))}"
    return f"The runs{at} that did not stall, with warm-up {_listed(map(warmup_of, cells))}."


def _listed(warmups: Iterable[int]) -> str:
    return " and ".join(f"{warmup:,}" for warmup in sorted(set(warmups)))


def naming_the_rest(sketches: Sequence[Sketch], rest: Iterable[str]) -> list[Sketch]:
    """The sketches; the last one names the variants whose sketch is missing."""
    names = ", ".join(rest)
    if not names or not sketches:
        return list(sketches)
    text = f"{sketches[-1].text} Not drawn, to keep the report short: {names}."
    return [*sketches[:-1], replace(sketches[-1], text=text)]


def layer_look(layer: int, layers: Sequence[int]) -> dict[str, Any]:
    """Marker and opacity of a layer, readable without colour; deeper layers are more opaque."""
    turn = layers.index(layer)
    depth = turn / max(1, len(layers) - 1)
    return {"marker": MARKERS[turn % len(MARKERS)], "alpha": 0.4 + 0.6 * depth}


def layer_legend(
    figure: "Figure", layers: Sequence[int], colour: str, before: Sequence[Any] = ()
) -> None:
    from matplotlib.lines import Line2D

    handles = [
        Line2D([], [], color=colour, markersize=4, label=f"layer {n}", **layer_look(n, layers))
        for n in layers
    ]
    handles = [*before, *handles]
    columns = max(1, int(figure.get_figwidth() // 1.3))
    figure.legend(handles=handles, loc="outside upper center", ncols=min(columns, len(handles)))
