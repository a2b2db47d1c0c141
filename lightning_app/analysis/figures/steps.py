"""The steps after which tokens halt, while the runs train."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lightning_app.analysis.figures.drawing import Part, Sketch, identity, warmup_of
from lightning_app.analysis.figures.heads import MAPS
from lightning_app.analysis.figures.layers import at_best_rate, which
from lightning_app.analysis.figures.layout import (
    arrange,
    dash,
    log_steps,
    panels,
    thin_lines,
    thinned,
    title,
)
from lightning_app.analysis.figures.links import Links
from lightning_app.analysis.figures.logs import finite_curves, logs
from lightning_app.analysis.figures.style import INK
from lightning_app.analysis.grid_results import CellResult
from lightning_app.analysis.statistics import mean
from lightning_app.tables import Curve

if TYPE_CHECKING:
    from matplotlib.axes import Axes

STEPS, AT_LIMIT = "train/steps/", "train/steps_at_limit/"
RUN_POINTS, MEAN_POINTS = 100, 200  # points of one curve
COLOURS = {each.stack: each.colour for each in MAPS if not each.prefix}
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
    stacks = [name for name in COLOURS if any(name in curves for _, curves in found)]
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
    handles = [Line2D([], [], color=COLOURS[s], linewidth=1.8, label=s) for s in stacks]
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
    colour = COLOURS[stack]
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
