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
    cloud,
    dash,
    dots,
    finite_curves,
    has_probes,
    identity,
    last_probes,
    log_steps,
    logs,
    panels,
    thin_lines,
    thinned,
    title,
    warmup_of,
    where,
    which,
)
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


PROBED = "At the last step that was probed, on one fixed validation batch."
ENTROPY = Heads(
    quantity="attention_entropy_p50",
    line="attention_entropy",
    free="attention_free_entropy",
    title="Entropy of the attention maps by layer",
    label="entropy of the map (nats)",
    text="How widely the heads attend (He et al. 2021, section 4.1.3): the entropy of the "
    "softmax map. A small mark is the median over the rows of one head of one run, a line the "
    "mean over rows, heads and runs. A grey bar is the entropy of the uniform map, the maximum. "
    f"{PROBED}",
    limits="A head may attend widely and still contribute little: entropy does not measure the "
    "values.",
)
DISTANCE = Heads(
    quantity="attention_distance",
    line="attention_distance",
    title="Distance of the attention maps to the layer below",
    label="Jensen-Shannon divergence (bits)",
    text="How far the map of each head is from that of the same head in the layer below: the "
    "Jensen-Shannon divergence, 0 for equal maps, 1 for maps that share no key (He et al. "
    f"2021). A small mark is a head of one run, a line the mean over heads and runs. {PROBED}",
    limits="Without residual scores a head is not related to the head of the same number below: "
    "the distance is then that of two random heads.",
)


def attention_figures(part: Part, kind: Heads) -> list[Sketch]:
    """A quantity of the attention maps by layer, one panel for each variant."""
    runs = [cell for cell in part.cells if has_probes(cell)]
    return heads_by_layer(part, runs, kind, last_probes)


LOGGED = "probe/span/"
SPANS = Heads(
    quantity="span",
    line="span",
    title="Learned spans of the attention heads by layer",
    label="span (tokens)",
    text="How far back the heads have learned to look (Sukhbaatar et al. 2019): the span z of a "
    "head, at the last logged step. Weights fall from 1 at distance z to 0 at z + R. A span that "
    "depends on the token is the mean over the tokens of that step's batch. A small mark is a head "
    "of one run, a line the mean over heads and runs.",
    limits="A span is the distance that a head may look back, not the distance at which its "
    "weights lie. Spans move slowly: after few steps they show the start more than the data.",
)


def span_figures(part: Part) -> list[Sketch]:
    """The spans of every head, one panel for each variant that learns them."""
    runs = [cell for cell in part.cells if logs(cell, LOGGED)]
    return [_with_numbers(sketch) for sketch in heads_by_layer(part, runs, SPANS, last_spans)]


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


def _with_numbers(sketch: Sketch) -> Sketch:
    """The sketch with a sentence about the spans of all heads."""
    spans = list(sketch.table.loc[sketch.table["mark"] == "head", "value"])
    found = (
        f"The {len(spans):,} spans drawn lie between {min(spans):.1f} and {max(spans):.1f} tokens, "
        f"their median is {median(spans):.1f}."
    )
    return replace(sketch, text=f"{sketch.text} {found}")


STEPS, AT_LIMIT = "train/steps/", "train/steps_at_limit/"
RUN_POINTS, MEAN_POINTS = 100, 200  # points of one curve
STACK_COLOURS = {each.stack: each.colour for each in MAPS if not each.prefix}
Curves = Mapping[str, Curve]


def halting_figures(part: Part) -> list[Sketch]:
    """The mean number of steps of a token, one panel for each variant that halts."""
    import pandas as pd
    from matplotlib.lines import Line2D

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
                    (cell, curves[stack])
                    for cell, curves in found
                    if (cell.variant, warmup_of(cell)) == (variant, warmup) and curves.get(stack)
                ]
                rows += _lines(axes, own, stack, dash(warmup, warmups), links)
        title(axes, variant)
    steps = [step for _, curves in found for curve in curves.values() for step in curve]
    log_steps(axes_of[0], min(steps), max(steps))
    handles = [Line2D([], [], color=STACK_COLOURS[s], linewidth=1.8, label=s) for s in stacks]
    handles += [
        Line2D([], [], color=INK, linestyle=dash(w, warmups), linewidth=1.8, label=f"warm-up {w:,}")
        for w in warmups
    ]
    arrange(figure, axes_of, "optimizer step (log scale)", "steps of a token (mean)", handles)
    return [
        Sketch(
            figure=figure,
            table=pd.DataFrame(rows),
            title="Steps after which tokens halt, during training",
            text="Adaptive computation time (Graves 2016): the mean number of steps of the tokens "
            "of a training batch, one panel for each variant. Thin lines are single runs, heavy "
            f"lines their mean. {_ends(found)} {which(cells)}",
            limits="A mean does not show which tokens take more steps. The number depends on the "
            "weight of the ponder cost as much as on the wiring.",
            links=links,
            cells=cells,
        )
    ]


def _curves(cell: CellResult, start: str) -> Curves:
    """The logged curves with this start of their tag, by stack."""
    curves = finite_curves(cell, lambda tag: tag.startswith(start))
    return {tag.removeprefix(start): curve for tag, curve in curves.items() if curve}


def _lines(
    axes: "Axes",
    own: Sequence[tuple[CellResult, Curve]],
    stack: str,
    style: Any,
    links: Links,
) -> list[dict[str, Any]]:
    """The runs of one stack and warm-up thin, their mean heavy; their rows of the table."""
    if not own:
        return []
    rows: list[dict[str, Any]] = []
    lines, urls = [], []
    for cell, curve in own:
        kept = thinned(list(curve), RUN_POINTS)
        lines.append([(float(step), curve[step]) for step in kept])
        urls.append(links.to(cell, f"{stack}, {curve[kept[-1]]:.2f} steps at the end"))
        mark = {"mark": "run", **identity(cell), "stack": stack}
        rows += [{**mark, "step": step, "value": curve[step]} for step in kept]
    colour = STACK_COLOURS[stack]
    thin_lines(axes, lines, urls, color=colour, linestyle=style, alpha=0.45, linewidth=0.9)
    common = thinned(sorted(set.intersection(*(set(curve) for _, curve in own))), MEAN_POINTS)
    means = {step: mean([curve[step] for _, curve in own]) for step in common}
    axes.plot(common, list(means.values()), color=colour, linestyle=style, linewidth=1.8, zorder=3)
    first = own[0][0]
    mark = {"mark": "mean", "variant": first.variant, "warmup": first.warmup, "lr": first.lr}
    return rows + [{**mark, "stack": stack, "step": s, "value": v} for s, v in means.items()]


def _ends(found: Sequence[tuple[CellResult, Curves]]) -> str:
    """A sentence about the last logged steps of the runs."""
    last = [curve[max(curve)] for _, curves in found for curve in curves.values()]
    text = f"At the last logged step the mean of a run is {min(last):.1f} to {max(last):.1f} steps"
    limits = [_curves(cell, AT_LIMIT) for cell, _ in found]
    shares = [curve[max(curve)] for curves in limits for curve in curves.values()]
    if shares:
        low, high = 100 * min(shares), 100 * max(shares)
        text += f", and {low:.0f} to {high:.0f} % of its tokens take as many as there are"
    return f"{text}."
