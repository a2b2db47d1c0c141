"""What all figures share: style, layout, the choice of runs, links, and files.

Files are identical for the same runs. Nothing here touches matplotlib's global state."""

import io
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import quote
from xml.sax.saxutils import escape

from lightning_app.config.tree import label
from lightning_app.core.files import write_whole
from lightning_app.report.facts import say
from lightning_app.report.results import CellResult, GridResults, grouped
from lightning_app.report.statistics import mean
from lightning_app.runs.records import Curve
from lightning_app.scores.task_facts import LOSS

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D


# The first four are Okabe and Ito's (2008); the others maximise the smallest distance between any
# two under every common colour blindness. Each has a contrast of at least 3 : 1 to white and to the
# dark page, which excludes their yellow, sky blue and black.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#9761F2", "#8C5B74", "#B24300")
DASHES: tuple[Any, ...] = ((0, (1, 1.4)), (0, (4, 1.6)), (0, (6, 1.5, 1, 1.5)), (0, (9, 1.5)))
DASHES += ((0, (6, 1.5, 1, 1.5, 1, 1.5)), (0, (6, 1.5, 6, 1.5, 1, 1.5)))
REFERENCE = (0, (5, 2.5))  # the dash of the unigram entropy
INK, MUTED, GRID, PAPER = "#222222", "#707070", "#e6e6e6", "#ffffff"  # replaced on a dark page
STYLE: dict[Any, Any] = {
    "svg.hashsalt": "lightning_app",
    "svg.fonttype": "path",
    "pdf.fonttype": 42,  # journals refuse matplotlib's own default, type 3
    "font.family": ["DejaVu Sans"],
    "font.size": 9.5,
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.labelsize": 9.5,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    "legend.frameon": False,
    "legend.fontsize": 9.0,
}


@contextmanager
def styled() -> Iterator[None]:
    """Draw in the style of the report, and then restore matplotlib's settings."""
    import matplotlib

    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(STYLE)
        yield


FIXED = ("post_ln", "pre_ln", "realformer", "sas")
"""The presets that have the first colours in every report."""


def colours(variants: Iterable[str]) -> dict[str, str]:
    """A colour for each variant, in their order: one of its own for each preset of `FIXED`.

    The others take the first colours that are free in the grid; after seven the colours repeat.
    """
    names = list(variants)
    fixed = {name: COLOURS[FIXED.index(name)] for name in names if name in FIXED}
    free = [colour for colour in COLOURS if colour not in fixed.values()] or [*COLOURS]
    others = [name for name in names if name not in fixed]
    chosen = fixed | {name: free[i % len(free)] for i, name in enumerate(others)}
    return {name: chosen[name] for name in names}


def warmup_colours(warmups: Sequence[int]) -> dict[int, str]:
    """A colour for each warm-up in ascending order: the shortest is red, the longest blue."""
    blue, red, *others = COLOURS
    between = [others[i % len(others)] for i in range(len(warmups) - 2)]
    shown = [red, *between, blue] if len(warmups) > 1 else [blue]
    return dict(zip(warmups, shown, strict=True))


TRAIN, VALID = "train/nll", LOSS


def read_log(cell: CellResult) -> dict[str, Curve]:
    """The finite training and validation losses of a run, each an empty curve if not logged."""
    curves = cell.run.curves((TRAIN, VALID).__contains__)

    def finite(curve: Curve) -> Curve:
        return {step: y for step, y in curve.items() if step > 0 and math.isfinite(y)}

    return {tag: finite(curves.get(tag, {})) for tag in (TRAIN, VALID)}


MOST_PANELS = 40  # panels of one kind of figure: each takes a twentieth of a second to draw


def slices_of(grid: GridResults) -> dict[tuple[str, float | None], list[CellResult]]:
    """The finished cells by group and learning rate; those of one slice share a figure."""
    slices = grouped(grid.finished, lambda cell: (cell.group, cell.lr))
    return dict(sorted(slices.items(), key=lambda item: (item[0][0], item[0][1] or 0.0)))


def drawn_slices(grid: GridResults) -> dict[tuple[str, float | None], list[CellResult]]:
    """The slices with figures: for each group the learning rate at which its runs learn best.

    That is the rate with the smallest mean loss over all finished runs, of those at which most
    variants and warm-ups were run. Of many groups only the first are drawn: at least one, and at
    most `MOST_PANELS` variants in total.
    """
    best: dict[str, tuple[int, float, float | None]] = {}
    slices = slices_of(grid)
    for (group, lr), cells in slices.items():
        arms = len({(cell.variant, cell.warmup) for cell in cells})
        found = -arms, mean([cell.loss for cell in cells]), lr
        if group not in best or found[:2] < best[group][:2]:
            best[group] = found
    drawn, panels = {}, 0
    for group, (*_, lr) in best.items():
        panels += len({cell.variant for cell in slices[group, lr]})
        if drawn and panels > MOST_PANELS:
            break
        drawn[group, lr] = slices[group, lr]
    return drawn


MOST = 3000  # marks of one figure with links: each takes three nodes of the page
_OPENING = re.compile(r'<a xlink:href="mark:(\d+)"[^>]*>')


class Links:
    """The links of the marks of one figure. With more than `most` marks, none has a link.

    matplotlib writes the address of a mark but no text. So a mark is written with a number as its
    address, and `into` replaces it by address and text.
    """

    def __init__(self, marks: int, most: int | None = None) -> None:
        self.on = marks <= (MOST if most is None else most)
        self._marks: list[tuple[CellResult | None, str]] = []

    def to(self, cell: CellResult, words: str) -> str | None:
        """The link for the mark of a run, or None."""
        words_of_run = [cell.variant]
        words_of_run += [] if cell.warmup is None else [f"warm-up {cell.warmup:,}"]
        words_of_run += [] if cell.lr is None else [f"lr {label(cell.lr)}"]
        words_of_run += [] if cell.seed is None else [f"seed {cell.seed}"]
        ended = "" if cell.outcome in (None, "trained") else f", {cell.word}"
        return self._add(cell, f"{', '.join(words_of_run)}: {words}{ended}")

    def about(self, words: str) -> str | None:
        """The same for a mark of several runs, which has a text but no link."""
        return self._add(None, words)

    def into(self, svg: str, folder: Path) -> str:
        """The SVG with addresses and texts, to be written into `folder`."""
        return _OPENING.sub(lambda found: self._opening(int(found[1]), folder), svg)

    def _add(self, cell: CellResult | None, words: str) -> str | None:
        if not self.on:
            return None
        self._marks.append((cell, words))
        return f"mark:{len(self._marks) - 1}"

    def _opening(self, number: int, folder: Path) -> str:
        cell, words = self._marks[number]
        title = f"<title>{escape(words)}</title>"
        if cell is None:
            return f"<a>{title}"
        there = os.path.relpath(cell.folder.absolute(), folder.absolute())
        return f'<a xlink:href="{quote(Path(there).as_posix())}/">{title}'


DARK: Mapping[str, str] = {INK: "#e4e7eb", MUTED: "#9aa4b0", GRID: "#272d35", PAPER: "#12151a"}
_PARTS = ("color", "facecolor", "edgecolor", "markerfacecolor", "markeredgecolor")


def darken(figure: "Figure") -> None:
    """Replace ink, grey and paper of every mark; the colours of variants and warm-ups stay."""
    for artist in figure.findobj():
        for part in _PARTS:
            getter = getattr(artist, f"get_{part}", None)
            setter = getattr(artist, f"set_{part}", None)
            if getter is not None and setter is not None:
                _replace(getter(), setter)


def _replace(colour: Any, setter: Any) -> None:
    from matplotlib.colors import is_color_like, to_hex, to_rgba

    if is_color_like(colour):
        if (dark := DARK.get(to_hex(colour))) is not None:
            setter(to_rgba(dark, to_rgba(colour)[3]))
    elif hasattr(colour, "__len__") and len(colour) and not isinstance(colour, str):
        each = [to_rgba(one) for one in colour]
        found = [DARK.get(to_hex(one)) for one in each]
        if any(found):
            pairs = zip(found, each, strict=True)
            setter([to_rgba(dark, old[3]) if dark else old for dark, old in pairs])


_ANCHOR = re.compile(r"</?a\b[^>]*>")
_PATH = re.compile(r' d="[^"]*"')
_DIGITS = re.compile(r"(\.\d\d)\d+")


def save(figure: "Figure", path: Path) -> Path:
    """Write `figure` as SVG without links, identical each time."""
    write_whole(path, _ANCHOR.sub("", svg(figure)))
    return path


def svg(figure: "Figure") -> str:
    """The figure with marks by number; paths are cut to a hundredth of a point, half the bytes."""
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    buffer = io.BytesIO()
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    FigureCanvasSVG(figure).print_svg(buffer, metadata=nothing)
    text = buffer.getvalue().decode()
    return _PATH.sub(lambda path: _DIGITS.sub(r"\1", path[0]), text)


def pdf(figure: "Figure") -> bytes:
    """The figure as PDF, without a date."""
    from matplotlib.backends.backend_pdf import FigureCanvasPdf

    buffer = io.BytesIO()
    nothing = dict.fromkeys(("CreationDate", "Creator", "Producer"))
    FigureCanvasPdf(figure).print_pdf(buffer, metadata=nothing)
    return buffer.getvalue()


Question = Literal["need", "cost", "inside"]
POINTS = 300  # points of one curve, at most


@dataclass(frozen=True, kw_only=True)
class FigureFiles:
    """One figure as files: `path` is the SVG; PDF and CSV (the data drawn) have the same stem.

    `text` explains the marks, `limits` lists invalid conclusions. `group` names the values of the
    other axes, `all` without other axes; `lr` is None if the figure is over several rates. `narrow`
    is an SVG of the same panels, two in a row, for small screens.
    """

    path: Path
    question: Question
    title: str
    text: str
    limits: str
    group: str
    lr: float | None
    cells: tuple[CellResult, ...]
    narrow: Path | None = None


@dataclass(frozen=True, kw_only=True)
class Part:
    """The finished runs of a grid that a figure shows, and limits for the drawing.

    `group` and `lr` as in `FigureFiles`. `logs` holds the logged curves by id of the cell, none if
    curves are not drawn, `points` is the maximum for a single curve, `figures` the maximum for a
    kind with one for each variant.
    """

    grid: GridResults
    group: str
    lr: float | None
    cells: Sequence[CellResult]
    logs: Mapping[str, Mapping[str, Curve]] = field(default_factory=dict)
    points: int = POINTS
    figures: int = 1

    @cached_property
    def colours(self) -> dict[str, str]:
        """The colour of each variant of the grid."""
        return colours(self.grid.variants)

    def variants(self, cells: Sequence[CellResult]) -> list[str]:
        """The variants of `cells` in the order of the plan."""
        present = {cell.variant for cell in cells}
        return [name for name in self.colours if name in present]


@dataclass(frozen=True, kw_only=True)
class Sketch:
    """A figure before it is written. `table` holds the data, one row per mark."""

    figure: "Figure"
    table: "pd.DataFrame"
    title: str
    text: str
    limits: str
    links: Links
    cells: Sequence[CellResult]


def sketch(
    name: str,
    figure: "Figure",
    rows: Sequence[Mapping[str, Any]],
    links: Links,
    cells: Sequence[CellResult],
    /,
    *,
    text: str | None = None,
    **values: Any,
) -> Sketch:
    """A figure with the texts of this name, of which `text` is another one, and their values."""
    import pandas as pd

    return Sketch(
        figure=figure,
        table=pd.DataFrame(rows),
        title=say(f"figures.{name}.title", **values),
        text=say(f"figures.{text or name}.text", **values),
        limits=say(f"figures.{name}.limits", **values),
        links=links,
        cells=cells,
    )


def key(label: str, **look: Any) -> "Line2D":
    """An entry of a legend; a grey mark without a line, unless its look says otherwise."""
    from matplotlib.lines import Line2D

    marked = {"linestyle": "none"} if "marker" in look and "linestyle" not in look else {}
    return Line2D([], [], **{"color": MUTED, "label": label, **marked, **look})


def warmup_of(cell: CellResult) -> int:
    """The warm-up in updates; 0 for a schedule without warm-up."""
    return cell.warmup or 0


def identity(cell: CellResult) -> dict[str, object]:
    """The columns that identify a run in every table of a figure."""
    own = {name: getattr(cell, name) for name in ("variant", "warmup", "lr", "seed")}
    return own | {"run": cell.name, "status": cell.state, "outcome": cell.outcome}


COLUMNS, WIDEST = 4, 11.5  # the maximum of panels in one row, and of their total width in inches
LETTERS = 24  # characters of a title in one line of a panel

Point = tuple[float, float]


def panels(
    count: int, width: float, height: float, columns: int = COLUMNS
) -> tuple["Figure", list["Axes"]]:
    """A figure of `count` panels with the same axes; `arrange` sets its margins."""
    from matplotlib.figure import Figure

    columns = min(count, columns, max(1, int(WIDEST / width)))
    rows = math.ceil(count / columns)
    figure = Figure(figsize=(max(4.4, width * columns + 0.7), height * rows))
    grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    panes = list(grid.flat)
    for unused in panes[count:]:
        unused.remove()
    for index, axes in enumerate(panes[:count]):
        axes.grid(axis="y")
        axes.tick_params(length=3, labelbottom=index + columns >= count)
    return figure, panes[:count]


def arrange(
    figure: "Figure",
    panels: Sequence["Axes"],
    x: str,
    y: str,
    handles: Sequence[Any],
    below: float = 0.0,
) -> None:
    """Label the axes, add the legend, and set the margins.

    `below` inches are left free at the bottom.

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
    """Long names, one per line, broken between their parts to fit into a panel's title."""
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


def two_kinds(
    axes: "Axes",
    marks: Sequence[tuple[bool, Point, str | None]],
    sound: Mapping[str, Any],
    bad: Mapping[str, Any],
) -> None:
    """Marks with their addresses, each with the look of its kind."""
    for kind, look in ((False, sound), (True, bad)):
        own = [(point, url) for is_bad, point, url in marks if is_bad == kind]
        dots(axes, [point for point, _ in own], [url for _, url in own], **look)


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


def frozen(figure: "Figure", handles: Sequence[Any], columns: int) -> None:
    """Add a legend above all panels, and compute the layout once, not each time it is written."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    columns = max(1, min(columns, len(handles)))
    figure.legend(handles=handles, loc="outside upper center", ncols=columns)
    FigureCanvasAgg(figure)
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
