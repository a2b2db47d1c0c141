"""The final loss against the learning rate, a line for each warm-up."""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lightning_app.analysis.figures.drawing import Part, Sketch, identity, warmup_of
from lightning_app.analysis.figures.layout import (
    arrange,
    dots,
    entropy_line,
    panels,
    title,
)
from lightning_app.analysis.figures.links import Links
from lightning_app.analysis.figures.style import MUTED, REFERENCE, warmup_colours
from lightning_app.analysis.grid_results import CellResult
from lightning_app.analysis.pairing import Arm, arms
from lightning_app.analysis.rate_scores import need_at_best_rates, octaves
from lightning_app.analysis.score import Score
from lightning_app.analysis.statistics import mean
from lightning_app.grid_axes import label

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TICKS = 4  # rates with a number at the axis, at most
LINKED = 400  # runs of one figure with a mark of their own; more are too small to point at


def loss_by_rate(part: Part) -> list[Sketch]:
    """Final loss against the learning rate, one panel for each variant and group."""
    import pandas as pd
    from matplotlib.lines import Line2D

    groups = dict.fromkeys(cell.group for cell in part.cells)
    every = [arm for arm in arms(part.grid) if arm.cells]
    found = [arm for group in groups for arm in every if arm.group == group]
    rates = sorted({lr for arm in found for _, lr, _ in arm.cells})
    if len(rates) < 2:
        return []
    cells = [cell for arm in found for cell in arm.cells.values()]
    warmups = sorted({warmup_of(cell) for cell in cells})
    colours = warmup_colours(warmups)
    links = Links(len(cells), LINKED)
    figure, axes_of = panels(len(found), width=2.7, height=2.5)
    rows: list[dict[str, Any]] = []
    for axes, arm in zip(axes_of, found, strict=True):
        entropy_line(axes, mean([cell.entropy for cell in arm.cells.values()]))
        for warmup in warmups:
            rows += _line(axes, arm, warmup, colours[warmup], links)
        title(axes, arm.variant if len(groups) == 1 else f"{arm.variant}\n{arm.group}")
        needed = [score for score in _needs(part, arm) if score]
        axes.text(0.03, 0.03, "\n".join(needed), transform=axes.transAxes, fontsize=8.0)
    axes = axes_of[0]
    axes.set_xscale("log", base=2)
    shown = rates[:: math.ceil(len(rates) / TICKS)]
    axes.set_xticks(shown, [label(lr) for lr in shown])
    axes.set_xticks([], minor=True)
    axes.set_xlim(rates[0] / 1.25, rates[-1] * 1.25)
    low, high = axes.get_ylim()
    axes.set_ylim(low - 0.2 * (high - low), high)  # room for the need
    dot: dict[str, Any] = {"color": MUTED, "linestyle": "none"}
    handles = [
        Line2D([], [], color=colours[w], marker="o", markersize=4, label=f"warm-up {w:,}")
        for w in warmups
    ]
    handles += [
        Line2D([], [], marker="X", markersize=6, label="stalled or non-finite", **dot),
        Line2D([], [], color=MUTED, linestyle=REFERENCE, label="unigram entropy"),
    ]
    arrange(figure, axes_of, "learning rate", "final loss (nats per token)", handles)
    return [
        Sketch(
            figure=figure,
            table=pd.DataFrame(rows),
            title="Final loss against the learning rate",
            text="Dots are runs, lines their means over seeds. N: the loss that warm-up saves if "
            "each arm has its own best rate, chosen on other seeds. O: by how many octaves it "
            "raises the largest usable rate; an octave is a factor of 2. In brackets: t intervals.",
            limits="Rates between and beyond those tried are not known.",
            links=links,
            cells=cells,
        )
    ]


def _line(axes: "Axes", arm: Arm, warmup: int, colour: str, links: Links) -> list[dict[str, Any]]:
    """The runs at one warm-up and the line of their means; their rows of the table."""
    runs: dict[float, list[CellResult]] = {}
    for key in sorted(arm.cells, key=lambda key: key[1:]):
        if key[0] == warmup:
            runs.setdefault(key[1], []).append(arm.cells[key])
    for failed, marker, size in ((False, "o", 12), (True, "X", 34)):
        marked = [(lr, cell) for lr, of in runs.items() for cell in of if cell.failed == failed]
        urls = [links.to(cell, f"{cell.loss:.4f}") for _, cell in marked]
        points = [(lr, cell.loss) for lr, cell in marked]
        dots(axes, points, urls, color=colour, marker=marker, s=size, alpha=0.55, zorder=3)
    means = {lr: mean([cell.loss for cell in of]) for lr, of in runs.items()}
    axes.plot(list(means), list(means.values()), color=colour, linewidth=1.8, zorder=4)
    rows = [
        {"mark": "run", "group": arm.group, **identity(cell), "n": 1, "value": cell.loss}
        for of in runs.values()
        for cell in of
    ]
    who = {"mark": "mean", "group": arm.group, "variant": arm.variant, "warmup": warmup}
    return rows + [{**who, "lr": lr, "n": len(runs[lr]), "value": y} for lr, y in means.items()]


def _needs(part: Part, arm: Arm) -> list[str]:
    """N and O of a variant with their intervals, where they are defined."""
    reference = part.grid.reference_warmup
    if part.grid.pruner is not None:
        return []  # the runs that it ended would be missing
    return [
        _estimate("N", need_at_best_rates(arm, reference), 2),
        _estimate("O", octaves(arm, reference), 1),
    ]


def _estimate(symbol: str, score: Score, digits: int) -> str:
    if math.isnan(score.estimate):
        return ""
    sign = _BOUNDS[score.bound]
    ends = ""
    if math.isfinite(score.low):
        ends = f" [{score.low:.{digits}f}, {score.high:.{digits}f}]"
    return f"{symbol} {sign}{score.estimate:.{digits}f}{ends}".replace("-", "−")


_BOUNDS: Mapping[str, str] = {"": "= ", ">=": "≥ ", "<=": "≤ ", "?": "≈ "}
