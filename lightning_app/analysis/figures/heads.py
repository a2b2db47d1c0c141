"""A quantity of every attention head by layer: a dot for each head, a line through the means."""

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lightning_app.analysis.figures.drawing import Part, Sketch, identity, warmup_of
from lightning_app.analysis.figures.layers import at_best_rate, which
from lightning_app.analysis.figures.layout import arrange, cloud, dots, panels, title
from lightning_app.analysis.figures.links import Links
from lightning_app.analysis.figures.probes import where
from lightning_app.analysis.figures.style import COLOURS, MUTED
from lightning_app.analysis.grid_results import CellResult
from lightning_app.analysis.statistics import mean
from lightning_app.tables import Place

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_RUNS = 5  # runs of one variant whose heads are drawn


@dataclass(frozen=True, kw_only=True)
class Map:
    """A kind of attention map: its stack, and the prefix of the names of its quantities."""

    name: str
    stack: str
    prefix: str
    colour: str
    marker: str


MAPS = (
    Map(name="encoder", stack="encoder", prefix="", colour=COLOURS[0], marker="o"),
    Map(name="decoder", stack="decoder", prefix="", colour=COLOURS[1], marker="s"),
    Map(name="decoder, cross", stack="decoder", prefix="cross_", colour=COLOURS[2], marker="^"),
)


@dataclass(frozen=True, kw_only=True)
class Heads:
    """A quantity of every head, and the texts of its figure."""

    quantity: str  # of a head
    line: str  # of all heads
    free: str = ""
    title: str
    label: str
    text: str
    limits: str


Read = Callable[[CellResult, Container[str]], Mapping[Place, float]]
"""Returns the named quantities of a run, at the last step that has them."""


def heads_by_layer(part: Part, runs: Sequence[CellResult], kind: Heads, read: Read) -> list[Sketch]:
    """A quantity of heads by layer, a panel for each variant; of the `runs` of one warm-up."""
    runs = at_best_rate(runs)
    if not runs:
        return []
    reference = part.grid.reference_warmup
    warmups = {warmup_of(cell) for cell in runs}
    warmup = reference if reference in warmups else max(warmups)
    chosen: list[CellResult] = []
    for variant in part.variants(runs):
        own = [cell for cell in runs if cell.variant == variant and warmup_of(cell) == warmup]
        own.sort(key=lambda cell: cell.seed or 0)
        chosen += own[:MOST_RUNS]
    names = {kind.quantity, kind.line, kind.free} - {""}
    wanted = names | {f"cross_{name}" for name in names}
    sketch = _sketch(part, [(cell, read(cell, wanted)) for cell in chosen], kind)
    return [] if sketch is None else [sketch]


def _sketch(
    part: Part, found: Sequence[tuple[CellResult, Mapping[Place, float]]], kind: Heads
) -> Sketch | None:
    """A panel for each variant: a dot for each head of a run, lines through the means of layers."""
    import pandas as pd
    from matplotlib.lines import Line2D

    found = [(cell, places) for cell, places in found if any(_heads(places, kind, m) for m in MAPS)]
    if not found:
        return None
    cells = [cell for cell, _ in found]
    variants = part.variants(cells)
    maps = [m for m in MAPS if any(_heads(places, kind, m) for _, places in found)]
    links = Links(sum(len(_heads(places, kind, m)) for _, places in found for m in maps))
    figure, axes_of = panels(len(variants), width=2.7, height=2.8)
    rows: list[dict[str, Any]] = []
    layers: set[int] = set()
    for axes, variant in zip(axes_of, variants, strict=True):
        own = [(cell, places) for cell, places in found if cell.variant == variant]
        for turn, each in enumerate(maps):
            shift = 0.2 * (turn - (len(maps) - 1) / 2)
            rows += _map_heads(axes, own, kind, each, shift, links)
        layers |= {row["layer"] for row in rows}
        title(axes, variant)
    ticks = sorted(layers)[:: 1 + len(layers) // 13]
    axes_of[0].set_xticks(ticks, [str(layer) for layer in ticks])
    axes_of[0].set_xlim(min(layers) - 0.5, max(layers) + 0.5)
    handles = [
        Line2D([], [], color=m.colour, marker=m.marker, markersize=4.5, label=m.name) for m in maps
    ]
    if kind.free:
        most = {"color": MUTED, "marker": "_", "markersize": 9, "linestyle": "none"}
        handles.append(Line2D([], [], label="uniform map", **most))
    arrange(figure, axes_of, "layer", kind.label, handles)
    return Sketch(
        figure=figure,
        table=pd.DataFrame(rows),
        title=kind.title,
        text=f"{kind.text} {which(cells)} At most {MOST_RUNS} runs a variant, by seed.",
        limits=kind.limits,
        links=links,
        cells=cells,
    )


def _map_heads(
    axes: "Axes",
    own: Sequence[tuple[CellResult, Mapping[Place, float]]],
    kind: Heads,
    shown: Map,
    shift: float,
    links: Links,
) -> list[dict[str, Any]]:
    """The heads of one kind of attention map of one variant; their rows of the table."""
    rows: list[dict[str, Any]] = []
    points: list[tuple[float, float]] = []
    urls: list[str | None] = []
    for cell, places in own:
        for place, value in _heads(places, kind, shown).items():
            assert place.layer is not None
            points.append((place.layer + shift, value))
            words = f"{shown.name}, layer {place.layer}, head {place.head}: {value:.3f}"
            urls.append(links.to(cell, words))
            rows.append({"mark": "head", **identity(cell), **where(place), "value": value})
    small: dict[str, Any] = {"color": shown.colour, "s": 10, "alpha": 0.45}
    if links.on:
        dots(axes, points, urls, marker=shown.marker, zorder=2, **small)
    elif points:
        cloud(axes, points, **small)
    first = own[0][0]
    who = {"variant": first.variant, "warmup": first.warmup, "lr": first.lr}
    look: dict[str, Any] = {"color": shown.colour, "marker": shown.marker, "markersize": 4.5}
    bar: dict[str, Any] = {"color": MUTED, "marker": "_", "markersize": 9, "linestyle": "none"}
    for mark, quantity, drawn in (("mean", kind.line, look), ("uniform", kind.free, bar)):
        means = _by_layer(own, f"{shown.prefix}{quantity}", shown.stack)
        axes.plot(
            [n + shift for n in means], list(means.values()), linewidth=1.6, zorder=3, **drawn
        )
        for layer, value in means.items():
            place = Place(f"{shown.prefix}{quantity}", shown.stack, layer, None)
            rows.append({"mark": mark, **who, **where(place), "value": value})
    return rows


def _by_layer(
    own: Sequence[tuple[CellResult, Mapping[Place, float]]], quantity: str, stack: str
) -> dict[int, float]:
    """The mean over the runs of a quantity of all heads of a layer."""
    found: dict[int, list[float]] = {}
    for _, places in own:
        for place, value in places.items():
            if place[:2] == (quantity, stack) and place.layer is not None and place.head is None:
                found.setdefault(place.layer, []).append(value)
    return {layer: mean(found[layer]) for layer in sorted(found)}


def _heads(places: Mapping[Place, float], kind: Heads, shown: Map) -> dict[Place, float]:
    quantity = f"{shown.prefix}{kind.quantity}"
    return {
        place: value
        for place, value in places.items()
        if (place.quantity, place.stack) == (quantity, shown.stack) and place.head is not None
    }
