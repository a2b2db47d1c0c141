"""Figures of a stalled run next to a twin that did not stall."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from lightning_app.report.figures.sheet import (
    INK,
    Links,
    Part,
    Sketch,
    frozen,
    identity,
    log_steps,
    sketch,
    warmup_of,
)
from lightning_app.report.messages import say
from lightning_app.report.results import CellResult
from lightning_app.runs.folder import PROBES
from lightning_app.runs.records import Curve, Place, probed_values

if TYPE_CHECKING:
    from matplotlib.figure import Figure


STACKS = ("encoder", "decoder", "model")
MARKERS = ("o", "s", "^", "D", "v", "P")  # of layers, repeated
SIGNALS = {
    "token_cosine": "cosine of two tokens",
    "w2_gradient": "gradient of $W_2$ (norm)",
    "output_information": "output information (nats)",
}
"""Quantities inside the model that show a stall: each with the label of its axis."""


def twins(part: Part) -> list[Sketch]:
    """A stalled run and a twin that did not stall, one pair per variant."""
    pairs = [pair for name in part.variants(part.cells) if (pair := _pair(part, name))]
    drawn = [_twins(pair, part.colours[pair[0].variant]) for pair in pairs[: part.figures]]
    sketches = [each for each in drawn if each is not None]
    names = ", ".join(stalled.variant for stalled, _ in pairs[part.figures :])
    if names and sketches:
        text = sketches[-1].text + say("figures.probes.not_drawn", names=names)
        sketches[-1] = replace(sketches[-1], text=text)
    return sketches


def _pair(part: Part, variant: str) -> tuple[CellResult, CellResult] | None:
    """The first stalled run, by rate and seed, that has a twin; the longest warm-up is its twin."""
    runs = [cell for cell in part.cells if cell.variant == variant and cell.run.sound(PROBES)]
    runs.sort(key=lambda cell: (cell.lr or 0.0, cell.seed or 0, warmup_of(cell)))
    for stalled in (cell for cell in runs if cell.state == "diverged"):
        others = [
            c for c in runs if c.state == "ok" and (c.lr, c.seed) == (stalled.lr, stalled.seed)
        ]
        if others:
            return stalled, others[-1]
    return None


def _twins(pair: tuple[CellResult, CellResult], colour: str) -> Sketch | None:
    """Two rows of panels, the stalled run above; one column for each quantity and stack."""
    from matplotlib.figure import Figure

    curves = [read_probes(cell) for cell in pair]
    columns = [
        (quantity, stack)
        for quantity in SIGNALS
        for stack in STACKS
        if any((p.quantity, p.stack) == (quantity, stack) for places in curves for p in places)
    ]
    if not columns:
        return None
    layers = sorted({p.layer for places in curves for p in places if p.layer is not None})
    steps = [step for places in curves for curve in places.values() for step in curve]
    links = Links(sum(map(len, curves)))
    figure = Figure(figsize=(2.35 * len(columns) + 0.5, 4.6), layout="constrained")
    grid = figure.subplots(2, len(columns), sharex=True, sharey="col", squeeze=False)
    rows: list[dict[str, Any]] = []
    for cell, places, row in zip(pair, curves, grid, strict=True):
        for (quantity, stack), axes in zip(columns, row, strict=True):
            for place, curve in sorted(_of(places, quantity, stack), key=lambda i: i[0].layer or 0):
                look = (
                    _layer_look(place.layer, layers) if place.layer is not None else {"marker": "o"}
                )
                words = f"{quantity.replace('_', ' ')}, {_named(place)}"
                axes.plot(
                    list(curve),
                    list(curve.values()),
                    color=colour,
                    markersize=4,
                    linewidth=1.4,
                    url=links.to(cell, words),
                    **look,
                )
                mark = {"mark": "run", **identity(cell), **place._asdict()}
                rows += [{**mark, "step": step, "value": value} for step, value in curve.items()]
            axes.grid(axis="y")
            axes.tick_params(length=3)
            log_steps(axes, min(steps), max(steps))
        row[0].set_ylabel(_ending(cell), color=INK)
    for (quantity, stack), axes in zip(columns, grid[0], strict=True):
        axes.set_title(SIGNALS[quantity] + ("" if stack == "model" else f"\n{stack}"), fontsize=9.5)
        values = [
            v for places in curves for _, c in _of(places, quantity, stack) for v in c.values()
        ]
        if quantity == "w2_gradient" and min(values) > 0:
            axes.set_yscale("log")
    figure.supxlabel("optimizer step (log scale)", fontsize=9.5)
    _layer_legend(figure, layers, colour)
    frozen(figure)
    stalled, other = pair
    end = (stalled.record.get("diverged") or {}).get("step")
    when = "" if end is None else f" (found at step {end:,})"
    quantities = dict.fromkeys(name for name, _ in columns)
    words = {"variant": stalled.variant, "word": stalled.word, "when": when, "seed": stalled.seed}
    words |= {"warmup": warmup_of(stalled), "other": warmup_of(other)}
    words["meanings"] = " ".join(say(f"figures.probes.{name}") for name in quantities)
    return sketch("probes", figure, rows, links, pair, **words)


def _ending(cell: CellResult) -> str:
    state = cell.word if cell.state == "diverged" else "did not stall"
    return f"warm-up {warmup_of(cell):,}\n{state}"


def _named(place: Place) -> str:
    return place.stack if place.layer is None else f"{place.stack}, layer {place.layer}"


def _of(places: Mapping[Place, Curve], quantity: str, stack: str) -> list[tuple[Place, Curve]]:
    return [(p, c) for p, c in places.items() if (p.quantity, p.stack) == (quantity, stack)]


def _layer_look(layer: int, layers: Sequence[int]) -> dict[str, Any]:
    """Marker and opacity of a layer, readable without colour; deeper layers are more opaque."""
    turn = layers.index(layer)
    depth = turn / max(1, len(layers) - 1)
    return {"marker": MARKERS[turn % len(MARKERS)], "alpha": 0.4 + 0.6 * depth}


def _layer_legend(figure: "Figure", layers: Sequence[int], colour: str) -> None:
    from matplotlib.lines import Line2D

    handles = [
        Line2D([], [], color=colour, markersize=4, label=f"layer {n}", **_layer_look(n, layers))
        for n in layers
    ]
    columns = max(1, int(figure.get_figwidth() // 1.3))
    figure.legend(handles=handles, loc="outside upper center", ncols=min(columns, len(handles)))


def read_probes(cell: CellResult) -> dict[Place, Curve]:
    """The finite values of `SIGNALS` by place and step; the last value of a step counts."""
    path = cell.run.sound(PROBES)
    curves: dict[Place, Curve] = {}
    for step, place, value in [] if path is None else probed_values(path):
        if place.quantity in SIGNALS and math.isfinite(value):
            curves.setdefault(place, {})[step] = value
    return curves
