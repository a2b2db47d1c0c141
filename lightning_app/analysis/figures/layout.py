"""Panels, their layout, and the marks in them, for all figures."""

import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lightning_app.analysis.figures.style import DASHES, MUTED, PAPER, REFERENCE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLUMNS, WIDEST = 4, 11.5  # the maximum of panels in one row, and of their total width in inches
LETTERS = 24  # characters of a title in one line of a panel

Point = tuple[float, float]


def panels(
    count: int, width: float, height: float, *, shared: bool = True
) -> tuple["Figure", list["Axes"]]:
    """A figure of `count` panels; `arrange` sets its margins, or `frozen` if not `shared`.

    Panels that are `shared` have the same axes; the others share only the x axis.
    """
    from matplotlib.figure import Figure

    columns = min(count, COLUMNS, max(1, int(WIDEST / width)))
    rows = math.ceil(count / columns)
    figure = Figure(figsize=(max(4.4, width * columns + 0.7), height * rows))
    grid = figure.subplots(rows, columns, sharex=True, sharey=shared, squeeze=False)
    found = list(grid.flat)
    for unused in found[count:]:
        unused.remove()
    for index, axes in enumerate(found[:count]):
        axes.grid(axis="y")
        axes.tick_params(length=3, labelbottom=index + columns >= count)
    return figure, found[:count]


def arrange(
    figure: "Figure",
    panels: Sequence["Axes"],
    x: str,
    y: str,
    handles: Sequence[Any],
    below: float = 0.0,
) -> None:
    """Label the axes, add the legend, and set the margins; `below` inches are left free.

    Matplotlib's own layout asks every panel for every tick several times, which takes longer than
    all the drawing.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    panels[0].margins(y=0.07)
    width, height = map(float, figure.get_size_inches())
    place_in = panels[0].get_subplotspec()
    assert place_in is not None
    rows, columns = place_in.get_gridspec().get_geometry()
    in_row = min(len(handles), max(1, int(width // 1.75)))
    title = 0.09 + 0.17 * max(1 + axes.get_title().count("\n") for axes in panels)
    top = 0.12 + 0.2 * math.ceil(len(handles) / in_row) + title
    bottom, gap = 0.55 + below, title + 0.1
    panel = height / rows - 0.4
    height = top + rows * panel + (rows - 1) * gap + bottom
    between = 0.2

    def place(left: float) -> None:
        each = (width - left - 0.12 - (columns - 1) * between) / columns
        figure.subplots_adjust(
            left=left / width,
            right=1 - 0.12 / width,
            bottom=bottom / height,
            top=1 - top / height,
            wspace=between / each,
            hspace=gap / panel,
        )

    figure.set_size_inches(width, height)
    place(0.7)  # the numbers on the axis depend on its length
    numbers = panels[0].yaxis.get_tightbbox(FigureCanvasAgg(figure).get_renderer())
    place(0.38 + (0.3 if numbers is None else numbers.width / figure.dpi))
    figure.supxlabel(x, fontsize=9.5, y=(0.08 + below) / height, verticalalignment="bottom")
    middle = (bottom + height - top) / 2 / height
    figure.supylabel(y, fontsize=9.5, x=0.06 / width, y=middle, horizontalalignment="left")
    figure.legend(
        handles=handles,
        loc="upper center",
        bbox_to_anchor=(0.5, 1 - 0.02 / height),
        borderaxespad=0.0,
        ncols=in_row,
        handlelength=2.8,
    )


def title(axes: "Axes", text: str) -> None:
    axes.set_title(wrapped(text), y=1.0)


def wrapped(name: str) -> str:
    """Long names, one a line, broken between their parts so that they fit as a panel's title."""
    if "\n" in name:
        return "\n".join(map(wrapped, name.split("\n")))
    lines = [""]
    for part in re.findall(r"[^+]*\+?", name):
        if len(lines[-1]) + len(part) > LETTERS:
            lines.append("")
        for word in re.findall(r"[^_,={]*[_,={]?", part):
            for piece in (word[i : i + LETTERS] for i in range(0, len(word), LETTERS)):
                if len(lines[-1]) + len(piece) > LETTERS:
                    lines.append("")
                lines[-1] += piece
    return without_formula("\n".join(line for line in lines if line))


def without_formula(text: str) -> str:
    """`text` with escapes, so that matplotlib reads no formula in it."""
    return text.replace("$", r"\$")


def dots(axes: "Axes", points: Sequence[Point], urls: Sequence[str | None], **look: Any) -> None:
    """Marks of one look, each with the address of its run. `s` is the area, in square points."""
    if not points:
        return
    x, y = zip(*points, strict=True)
    drawn = axes.scatter(x, y, **{"edgecolors": PAPER, "linewidths": 0.5, **look})
    if urls[0] is not None:
        drawn.set_urls(list(urls))


def cloud(axes: "Axes", points: Sequence[Point], *, color: str, s: float, alpha: float) -> None:
    """Round marks as one path, for more marks than the page can have nodes."""
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path

    codes = [Path.MOVETO, Path.LINETO] * len(points)  # a line of length 0 shows its round ends
    path = Path([point for point in points for _ in range(2)], codes)
    path.should_simplify = False
    look: dict[str, Any] = {"capstyle": "round", "linewidth": math.sqrt(s), "zorder": 2}
    axes.add_patch(PathPatch(path, edgecolor=color, facecolor="none", alpha=alpha, **look))
    axes.update_datalim(points)


def thin_lines(
    axes: "Axes",
    lines: Sequence[Sequence[Point]],
    urls: Sequence[str | None] = (None,),
    **look: Any,
) -> None:
    """Many lines of one look as one artist: separate artists take a millisecond each to draw."""
    from matplotlib.collections import LineCollection

    if not lines:
        return
    collection = LineCollection(lines, capstyle="projecting", joinstyle="round", zorder=2, **look)
    if urls[0] is not None:
        collection.set_urls(list(urls))
    axes.add_collection(collection, autolim=False)  # which would rescale every panel each time
    axes.update_datalim([point for line in lines for point in line])


def entropy_line(axes: "Axes", entropy: float) -> None:
    axes.axhline(entropy, color=MUTED, linewidth=1.1, linestyle=REFERENCE, zorder=1)


def dash(warmup: int, warmups: Sequence[int]) -> Any:
    """The longest warm-up is solid, the shortest dotted."""
    if warmup == warmups[-1]:
        return "solid"
    return DASHES[warmups.index(warmup) % len(DASHES)]


def log_steps(axes: "Axes", first: float, last: float) -> None:
    """A logarithmic axis of optimizer steps, with plain numbers."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if last < 30 * first else (1,)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda step, _: f"{step:,.0f}"))
    axes.xaxis.set_minor_locator(NullLocator())  # small ticks take most of the time of a panel


def thinned(steps: Sequence[int], most: int) -> list[int]:
    """At most `most` of the steps, even on a log scale, the first and the last kept."""
    if len(steps) <= most:
        return list(steps)
    ratio = (steps[-1] / steps[0]) ** (1 / (most - 1))
    kept, wanted = [], float(steps[0])
    for step in steps:
        if step >= wanted * (1 - 1e-9):
            kept.append(step)
            while wanted <= step:
                wanted *= ratio
    return kept if kept[-1] == steps[-1] else [*kept, steps[-1]]


def frozen(figure: "Figure") -> None:
    """Let matplotlib compute the layout once, and not each time the figure is written."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    FigureCanvasAgg(figure)
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
