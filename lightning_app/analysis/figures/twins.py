"""Inside a run that stalled, and inside its twin that did not."""

from collections.abc import Iterable, Mapping
from typing import Any

from lightning_app.analysis.figures.drawing import Part, Sketch, identity, warmup_of
from lightning_app.analysis.figures.layers import STACKS, layer_legend, layer_look, naming_the_rest
from lightning_app.analysis.figures.layout import frozen, log_steps
from lightning_app.analysis.figures.links import Links
from lightning_app.analysis.figures.probes import has_probes, read_probes, where
from lightning_app.analysis.figures.style import INK
from lightning_app.analysis.grid_results import CellResult
from lightning_app.tables import Curve, Place

SIGNALS = {
    "token_cosine": "cosine of two tokens",
    "w2_gradient": "gradient of $W_2$ (norm)",
    "output_information": "output information (nats)",
}
"""Quantities inside the model that show a stall: each with the label of its axis."""


def twins(part: Part) -> list[Sketch]:
    """A run that stalled beside its twin that did not, one pair for each variant."""
    pairs = [pair for name in part.variants(part.cells) if (pair := _pair(part, name))]
    drawn, rest = pairs[: part.figures], pairs[part.figures :]
    found = [_twins(pair, part.colours[pair[0].variant]) for pair in drawn]
    sketches = [sketch for sketch in found if sketch is not None]
    return naming_the_rest(sketches, [stalled.variant for stalled, _ in rest])


def _pair(part: Part, variant: str) -> tuple[CellResult, CellResult] | None:
    """The first stalled run, by rate and seed, that has a twin; the longest warm-up is its twin."""
    runs = [cell for cell in part.cells if cell.variant == variant and has_probes(cell)]
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
    import pandas as pd
    from matplotlib.figure import Figure

    found = [read_probes(cell, SIGNALS) for cell in pair]
    columns = [
        (quantity, stack)
        for quantity in SIGNALS
        for stack in STACKS
        if any((p.quantity, p.stack) == (quantity, stack) for places in found for p in places)
    ]
    if not columns:
        return None
    layers = sorted({p.layer for places in found for p in places if p.layer is not None})
    steps = [step for places in found for curve in places.values() for step in curve]
    links = Links(sum(map(len, found)))
    figure = Figure(figsize=(2.35 * len(columns) + 0.5, 4.6), layout="constrained")
    grid = figure.subplots(2, len(columns), sharex=True, sharey="col", squeeze=False)
    rows: list[dict[str, Any]] = []
    for cell, places, row in zip(pair, found, grid, strict=True):
        for (quantity, stack), axes in zip(columns, row, strict=True):
            for place, curve in sorted(_of(places, quantity, stack), key=lambda i: i[0].layer or 0):
                look = (
                    layer_look(place.layer, layers) if place.layer is not None else {"marker": "o"}
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
                rows += [
                    {"mark": "run", **identity(cell), **where(place), "step": step, "value": value}
                    for step, value in curve.items()
                ]
            axes.grid(axis="y")
            axes.tick_params(length=3)
            log_steps(axes, min(steps), max(steps))
        row[0].set_ylabel(_ending(cell), color=INK)
    for (quantity, stack), axes in zip(columns, grid[0], strict=True):
        axes.set_title(SIGNALS[quantity] + ("" if stack == "model" else f"\n{stack}"), fontsize=9.5)
        values = [
            v for places in found for _, c in _of(places, quantity, stack) for v in c.values()
        ]
        if quantity == "w2_gradient" and min(values) > 0:
            axes.set_yscale("log")
    figure.supxlabel("optimizer step (log scale)", fontsize=9.5)
    layer_legend(figure, layers, colour)
    frozen(figure)
    stalled, other = pair
    end = (stalled.record.get("diverged") or {}).get("step")
    when = "" if end is None else f" (found at step {end:,})"
    return Sketch(
        figure=figure,
        table=pd.DataFrame(rows),
        title=f"Inside a run of {stalled.variant} that ended {stalled.word}, and its twin that "
        "did not",
        text=f"Above: warm-up {warmup_of(stalled):,}, which ended {stalled.word}{when}; below: "
        f"warm-up {warmup_of(other):,}, which did not; otherwise equal, seed {stalled.seed}. "
        f"{_meanings(columns)} Layers count from 1, deeper layers are more opaque; 0 is the input "
        "of the first layer. Measured on one fixed validation batch after the marked steps.",
        limits=f"Two runs, chosen because one ended {stalled.word}: they show an example, not how "
        "often it happens or what causes it.",
        links=links,
        cells=pair,
    )


def _meanings(columns: Iterable[tuple[str, str]]) -> str:
    meaning = {
        "token_cosine": "Cosine: mean over the pairs of tokens of a sentence; at 1 all tokens have "
        "the same direction.",
        "w2_gradient": "Gradient: Frobenius norm of the loss's gradient by the second matrix of "
        "the feed-forward.",
        "output_information": "Output information: mean divergence of the predictions from their "
        "average; at 0 the model predicts the same at every position.",
    }
    return " ".join(meaning[quantity] for quantity in dict.fromkeys(name for name, _ in columns))


def _ending(cell: CellResult) -> str:
    state = cell.word if cell.state == "diverged" else "did not stall"
    return f"warm-up {warmup_of(cell):,}\n{state}"


def _named(place: Place) -> str:
    return place.stack if place.layer is None else f"{place.stack}, layer {place.layer}"


def _of(places: Mapping[Place, Curve], quantity: str, stack: str) -> list[tuple[Place, Curve]]:
    return [(p, c) for p, c in places.items() if (p.quantity, p.stack) == (quantity, stack)]
