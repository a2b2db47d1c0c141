"""Figures of learned gains, and of a run that stalled beside its twin that did not."""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lightning_app.report.figures.sheet import (
    INK,
    STACKS,
    Links,
    Part,
    Sketch,
    at_best_rate,
    dash,
    frozen,
    has_probes,
    identity,
    layer_legend,
    layer_look,
    log_steps,
    naming_the_rest,
    panels,
    read_gains,
    read_probes,
    thin_lines,
    thinned,
    warmup_of,
    where,
    which,
)
from lightning_app.report.results import CellResult
from lightning_app.report.statistics import mean
from lightning_app.runs.records import Curve, Place

if TYPE_CHECKING:
    from matplotlib.axes import Axes


RUN_POINTS, MEAN_POINTS = 60, 150  # points of one curve


def gain_figures(part: Part) -> list[Sketch]:
    """Every learned gain by layer over the steps, one figure for each variant."""
    logged = {}
    for variant in part.variants(part.cells):
        runs = at_best_rate([cell for cell in part.cells if cell.variant == variant])
        found = [(cell, curves) for cell in runs if (curves := read_gains(cell))]
        if found:
            logged[variant] = found
    names = list(logged)
    sketches = [_gains(logged[name], part.colours[name]) for name in names[: part.figures]]
    return naming_the_rest(sketches, names[part.figures :])


def _gains(found: Sequence[tuple[CellResult, Mapping[Place, Curve]]], colour: str) -> Sketch:
    """A panel for each quantity and stack; markers show layers, line styles show warm-ups."""
    import pandas as pd
    from matplotlib.lines import Line2D

    cells = [cell for cell, _ in found]
    warmups = sorted({warmup_of(cell) for cell in cells})
    warmups = list(dict.fromkeys((warmups[0], warmups[-1])))
    columns = sorted(
        {(p.quantity, p.stack) for _, curves in found for p in curves},
        key=lambda column: (column[0], STACKS.index(column[1])),
    )
    layers = sorted({p.layer for _, curves in found for p in curves if p.layer is not None})
    steps = [step for _, curves in found for curve in curves.values() for step in curve]
    links = Links(sum(len(curves) for _, curves in found))
    figure, axes_of = panels(len(columns), width=2.6, height=2.1, shared=False)
    figure.set_layout_engine("constrained")
    rows: list[dict[str, Any]] = []
    for axes, (quantity, stack) in zip(axes_of, columns, strict=True):
        for warmup in warmups:
            for layer in layers:
                place = Place(quantity, stack, layer, None)
                own = [
                    (cell, curves[place])
                    for cell, curves in found
                    if warmup_of(cell) == warmup and place in curves
                ]
                look = {"color": colour, "linestyle": dash(warmup, warmups)}
                rows += _gain(axes, place, own, look | layer_look(layer, layers), links)
        axes.set_title(f"{quantity.replace('_', ' ')}, {stack}", fontsize=9.5)
        log_steps(axes, min(steps), max(steps))
    figure.supxlabel("optimizer step (log scale)", fontsize=9.5)
    figure.supylabel("value of the gain, mean over its heads", fontsize=9.5)
    lines = [
        Line2D([], [], color=INK, linestyle=dash(w, warmups), linewidth=1.6, label=f"warm-up {w:,}")
        for w in warmups
    ]
    layer_legend(figure, layers, colour, lines)
    frozen(figure)
    drawn = [cell for cell in cells if warmup_of(cell) in warmups]
    return Sketch(
        figure=figure,
        table=pd.DataFrame(rows),
        title=f"Learned gains of {cells[0].variant} during training",
        text="One panel for each gain and stack, one marker for each layer, counted from 1; deeper "
        "layers are more opaque. Heavy lines are means over the runs, thin lines the runs. "
        f"{which(drawn)} {_gain_words(columns)}",
        limits="A gain is the weight of a part of a block, not the size of that part: a small gain "
        "before a large map may matter more than its value suggests.",
        links=links,
        cells=drawn,
    )


def _gain(
    axes: "Axes",
    place: Place,
    own: Sequence[tuple[CellResult, Curve]],
    look: Mapping[str, Any],
    links: Links,
) -> list[dict[str, Any]]:
    """The runs of one layer and warm-up thin, their mean heavy; their rows of the table."""
    if not own:
        return []
    rows: list[dict[str, Any]] = []
    lines, urls = [], []
    for cell, curve in own:
        kept = thinned(list(curve), RUN_POINTS)
        lines.append([(float(step), curve[step]) for step in kept])
        urls.append(links.to(cell, f"layer {place.layer}, {curve[kept[-1]]:.4f} at the end"))
        mark = {"mark": "run", **identity(cell), **where(place)}
        rows += [{**mark, "step": step, "value": curve[step]} for step in kept]
    thin_lines(axes, lines, urls, color=look["color"], alpha=0.3, linewidth=0.7)
    common = thinned(sorted(set.intersection(*(set(curve) for _, curve in own))), MEAN_POINTS)
    means = {step: mean([curve[step] for _, curve in own]) for step in common}
    every = max(1, len(common) // 5)
    axes.plot(
        common, list(means.values()), linewidth=1.6, markersize=4, markevery=every, zorder=3, **look
    )
    first = own[0][0]
    mark = {"mark": "mean", "variant": first.variant, "warmup": first.warmup, "lr": first.lr}
    rows += [{**mark, **where(place), "step": step, "value": means[step]} for step in common]
    return rows


def _gain_words(columns: Iterable[tuple[str, str]]) -> str:
    names = {quantity for quantity, _ in columns}
    sentences = []
    if names & {"alpha", "beta", "gamma"}:
        sentences.append("alpha I + beta A − gamma C is the shaped map.")
    if any(name.endswith(("_skip", "_branch")) for name in names):
        sentences.append("A skip weighs the stream, a branch weighs the output of a sub-layer.")
    if any(name.endswith("head_gain") for name in names):
        sentences.append("A head gain weighs the output of each head.")
    if any(name.endswith("_change") for name in names):
        sentences.append("A change is |b / a| of a projection a W₀ + b ΔW.")
    return " ".join(sentences)


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
