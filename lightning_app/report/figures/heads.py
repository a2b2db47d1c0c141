"""Figures of attention heads: entropies, distances, learned spans, and steps of halting tokens."""

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING, Any

from lightning_app.report.figures.sheet import (
    COLOURS,
    INK,
    MUTED,
    Links,
    Part,
    Sketch,
    arrange,
    at_best_rate,
    by_step,
    cloud,
    dash,
    dots,
    finite_curves,
    has_probes,
    identity,
    key,
    last_probes,
    log_steps,
    logs,
    panels,
    runs_and_mean,
    sketch,
    title,
    warmup_of,
    where,
    which,
)
from lightning_app.report.messages import say
from lightning_app.report.results import CellResult
from lightning_app.report.statistics import mean
from lightning_app.runs.records import Curve, Place

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
    name: str  # of the texts of its figure
    label: str


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
    drawn = _sketch(part, [(cell, read(cell, wanted)) for cell in chosen], kind)
    return [] if drawn is None else [drawn]


def _sketch(
    part: Part, found: Sequence[tuple[CellResult, Mapping[Place, float]]], kind: Heads
) -> Sketch | None:
    """A panel for each variant: a dot for each head of a run, lines through the means of layers."""
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
        key(m.name, color=m.colour, marker=m.marker, markersize=4.5, linestyle="-") for m in maps
    ]
    if kind.free:
        handles.append(key("uniform map", marker="_", markersize=9))
    arrange(figure, axes_of, "layer", kind.label, handles)
    made = sketch(kind.name, figure, rows, links, cells, which=which(cells))
    return replace(made, text=made.text + say("figures.all.most_runs", runs=MOST_RUNS))


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


ENTROPY = Heads(
    quantity="attention_entropy_p50",
    line="attention_entropy",
    free="attention_free_entropy",
    name="attention_entropy",
    label="entropy of the map (nats)",
)
DISTANCE = Heads(
    quantity="attention_distance",
    line="attention_distance",
    name="attention_distance",
    label="Jensen-Shannon divergence (bits)",
)


def attention_figures(part: Part, kind: Heads) -> list[Sketch]:
    """A quantity of the attention maps by layer, one panel for each variant."""
    runs = [cell for cell in part.cells if has_probes(cell)]
    return heads_by_layer(part, runs, kind, last_probes)


LOGGED = "probe/span/"
SPANS = Heads(quantity="span", line="span", name="spans", label="span (tokens)")


def span_figures(part: Part) -> list[Sketch]:
    """The spans of every head, one panel for each variant that learns them."""
    runs = [cell for cell in part.cells if logs(cell, LOGGED)]
    return [_with_numbers(each) for each in heads_by_layer(part, runs, SPANS, last_spans)]


def last_spans(cell: CellResult, quantities: Container[str]) -> dict[Place, float]:
    """The spans that `metrics.csv` has as `probe/span/<stack>/<layer>/<head>`, at its last step.

    Without a head, the mean over the heads of a layer.
    """
    curves = finite_curves(cell, lambda tag: tag.startswith(LOGGED))
    last = max((step for curve in curves.values() for step in curve), default=0)
    return {_place(tag): curve[last] for tag, curve in curves.items() if last in curve}


def _place(tag: str) -> Place:
    _, quantity, stack, layer, *head = tag.split("/")
    return Place(quantity, stack, int(layer), int(head[0]) if head else None)


def _with_numbers(drawn: Sketch) -> Sketch:
    """The sketch with a sentence about the spans of all heads."""
    spans = list(drawn.table.loc[drawn.table["mark"] == "head", "value"])
    values = {"low": min(spans), "high": max(spans), "middle": median(spans)}
    text = say("figures.spans.drawn", count=len(spans), **values)
    return replace(drawn, text=drawn.text + text)


STEPS, AT_LIMIT = "train/steps/", "train/steps_at_limit/"
POINTS = 100, 200  # of the curve of a run, and of a mean, at most
STACK_COLOURS = {each.stack: each.colour for each in MAPS if not each.prefix}
Curves = Mapping[str, Curve]


def halting_figures(part: Part) -> list[Sketch]:
    """The mean number of steps of a token, one panel for each variant that halts."""
    runs = at_best_rate([cell for cell in part.cells if logs(cell, STEPS)])
    found = [(cell, curves) for cell in runs if (curves := _curves(cell, STEPS))]
    if not found:
        return []
    cells = [cell for cell, _ in found]
    warmups = sorted({warmup_of(cell) for cell in cells})
    variants = part.variants(cells)
    stacks = [name for name in STACK_COLOURS if any(name in curves for _, curves in found)]
    links = Links(sum(len(curves) for _, curves in found))
    figure, axes_of = panels(len(variants), width=2.7, height=2.8)
    rows: list[dict[str, Any]] = []
    for axes, variant in zip(axes_of, variants, strict=True):
        for warmup in warmups:
            for stack in stacks:
                own = [
                    (cell, by_step(curves[stack]))
                    for cell, curves in found
                    if (cell.variant, warmup_of(cell)) == (variant, warmup) and curves.get(stack)
                ]
                look = {"color": STACK_COLOURS[stack], "linestyle": dash(warmup, warmups)}
                rows += runs_and_mean(
                    axes,
                    own,
                    links,
                    f"{stack}, {{:.2f}} steps at the end",
                    POINTS,
                    look | {"alpha": 0.45, "linewidth": 0.9},
                    lambda _, look=look: look | {"linewidth": 1.8},
                    who={"stack": stack},
                )
        title(axes, variant)
    steps = [step for _, curves in found for curve in curves.values() for step in curve]
    log_steps(axes_of[0], min(steps), max(steps))
    handles = [key(s, color=STACK_COLOURS[s], linewidth=1.8) for s in stacks]
    handles += [
        key(f"warm-up {w:,}", color=INK, linestyle=dash(w, warmups), linewidth=1.8) for w in warmups
    ]
    arrange(figure, axes_of, "optimizer step (log scale)", "steps of a token (mean)", handles)
    words = {"ends": _ends(found), "which": which(cells)}
    return [sketch("halting", figure, rows, links, cells, **words)]


def _curves(cell: CellResult, start: str) -> Curves:
    """The logged curves with this start of their tag, by stack."""
    curves = finite_curves(cell, lambda tag: tag.startswith(start))
    return {tag.removeprefix(start): curve for tag, curve in curves.items() if curve}


def _ends(found: Sequence[tuple[CellResult, Curves]]) -> str:
    """A sentence about the last logged steps of the runs."""
    last = [curve[max(curve)] for _, curves in found for curve in curves.values()]
    limits = [_curves(cell, AT_LIMIT) for cell, _ in found]
    shares = [100 * curve[max(curve)] for curves in limits for curve in curves.values()]
    text = ""
    if shares:
        text = say("figures.halting.at_limit", low=min(shares), high=max(shares))
    return say("figures.halting.ends", low=min(last), high=max(last), limits=text)
