"""The learned gains of the blocks while the runs train."""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lightning_app.analysis.figures.drawing import Part, Sketch, identity, warmup_of
from lightning_app.analysis.figures.layers import (
    STACKS,
    at_best_rate,
    layer_legend,
    layer_look,
    naming_the_rest,
    which,
)
from lightning_app.analysis.figures.layout import (
    dash,
    frozen,
    log_steps,
    panels,
    thin_lines,
    thinned,
)
from lightning_app.analysis.figures.links import Links
from lightning_app.analysis.figures.probes import read_gains, where
from lightning_app.analysis.figures.style import INK
from lightning_app.analysis.grid_results import CellResult
from lightning_app.analysis.statistics import mean
from lightning_app.tables import Curve, Place

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
