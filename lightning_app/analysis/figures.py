"""The figures of a report, as SVG files that are the same for the same runs.

Colours tell variants apart, line styles warm-ups. Nothing here touches matplotlib's global state.
"""

import io
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_app.analysis.runs import LOSS, Cell, Grid, curve
from lightning_app.analysis.sensitivity import mean, t_interval
from lightning_app.files import write_whole

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito (2008), told apart with every common colour blindness and in grey.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
DASHES: tuple[Any, ...] = ((0, (1, 1.4)), (0, (4, 1.6)), (0, (6, 1.5, 1, 1.5)), (0, (9, 1.5)))
INK, MUTED = "#222222", "#707070"
STYLE: dict[Any, Any] = {
    "svg.hashsalt": "lightning_app",
    "svg.fonttype": "path",
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
    "grid.color": "#e6e6e6",
    "grid.linewidth": 0.7,
    "legend.frameon": False,
    "legend.fontsize": 9.0,
}
NAMES = {"final": "loss_by_warmup", "train/nll": "training_train", LOSS: "training_valid"}
PANELS = 4  # in one row
POINTS = 300  # of one curve, at most
ALL_POINTS, FEWEST_POINTS = 150_000, 30  # of all single curves of one loss, but of each this many
MOST_PANELS = 240  # of one kind of figure: a panel takes a twentieth of a second to draw


@dataclass(frozen=True)
class Drawing:
    """One figure: the file, what it shows, and the runs in it."""

    path: Path
    kind: str  # a key of NAMES
    group: str
    lr: float | None
    cells: tuple[Cell, ...]


def write_figures(grid: Grid, folder: Path) -> list[Drawing]:
    """Write the figures that the finished runs allow, one set for each group and rate.

    Where there are many groups and rates, only the first as `drawn_slices` counts them.
    """
    drawings = []
    slices = drawn_slices(grid)
    colours = _colours(grid)
    most = min(POINTS, max(FEWEST_POINTS, ALL_POINTS // max(1, len(grid.finished))))
    for number, ((group, lr), cells) in enumerate(slices.items(), start=1):
        suffix = f"-{number}" if len(slices) > 1 else ""
        with styled():
            for kind, name in NAMES.items():
                final = kind == "final"
                figure = _final(cells, colours) if final else _training(cells, colours, kind, most)
                if figure is not None:
                    path = folder / f"{name}{suffix}.svg"
                    save(figure, path)
                    drawings.append(Drawing(path, kind, group, lr, tuple(cells)))
    kept = {drawing.path for drawing in drawings}
    for old in (path for name in NAMES.values() for path in folder.glob(f"{name}*.svg")):
        if old not in kept:
            old.unlink()
    return drawings


def slices_of(grid: Grid) -> dict[tuple[str, float | None], list[Cell]]:
    """The finished cells by group and learning rate: what shares a figure."""
    slices: dict[tuple[str, float | None], list[Cell]] = {}
    for cell in grid.finished:
        slices.setdefault((cell.group, cell.lr), []).append(cell)
    return dict(sorted(slices.items(), key=lambda item: (item[0][0], item[0][1] or 0.0)))


def drawn_slices(grid: Grid) -> dict[tuple[str, float | None], list[Cell]]:
    """The first slices, at least one, with no more than `MOST_PANELS` variants in all."""
    drawn, panels = {}, 0
    for key, cells in slices_of(grid).items():
        panels += len({cell.variant for cell in cells})
        if drawn and panels > MOST_PANELS:
            break
        drawn[key] = cells
    return drawn


def _colours(grid: Grid) -> dict[str, str]:
    return {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(grid.variants)}


def _final(cells: Sequence[Cell], colours: Mapping[str, str]) -> "Figure | None":
    """Final loss against warm-up, a panel a variant: seeds as lines, mean with its t interval."""
    from matplotlib.lines import Line2D

    cells = [cell for cell in cells if math.isfinite(cell.loss)]
    if not cells:
        return None
    warmups = sorted({cell.warmup or 0 for cell in cells})
    variants = [name for name in colours if any(cell.variant == name for cell in cells)]
    figure, panels = _panels(len(variants), width=1.5 + 0.4 * len(warmups), height=2.8)
    entropy = mean([cell.entropy for cell in cells])
    place = {warmup: x for x, warmup in enumerate(warmups)}
    for axes, variant in zip(panels, variants, strict=True):
        runs = [cell for cell in cells if cell.variant == variant]
        axes.axhline(entropy, color=MUTED, linewidth=1.1, linestyle=(0, (5, 2.5)), zorder=1)
        _seeds(axes, runs, place, colours[variant])
        _means(axes, runs, place, colours[variant])
        axes.set_title(_wrapped(variant), color=colours[variant], y=1.0)
        axes.set_xticks(range(len(warmups)), [f"{warmup:,}" for warmup in warmups])
        axes.set_xlim(-0.45, len(warmups) - 0.4)
    dot: dict[str, Any] = {"color": MUTED, "linestyle": "none"}
    handles = [
        Line2D([], [], marker="o", markersize=4.5, alpha=0.6, label="one seed", **dot),
        Line2D([], [], marker="X", markersize=7, label="stalled or diverged", **dot),
        Line2D([], [], marker="D", markersize=5.5, label="mean, 95 % t interval", **dot),
        Line2D([], [], color=MUTED, linestyle=(0, (5, 2.5)), label="unigram entropy"),
    ]
    _arrange(figure, panels, "warm-up (updates)", "final validation loss (nats per token)", handles)
    return figure


def _seeds(axes: "Axes", runs: Sequence[Cell], place: Mapping[int, int], colour: str) -> None:
    """The runs of a seed joined by a thin line; a small shift keeps equal values apart."""
    seeds = sorted({cell.seed or 0 for cell in runs})
    shift = {s: -0.22 + 0.22 * (i / max(1, len(seeds) - 1)) for i, s in enumerate(seeds)}
    own: dict[int, list[tuple[float, float]]] = {seed: [] for seed in seeds}
    marks: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    for cell in sorted(runs, key=_warmup):
        seed = cell.seed or 0
        point = (place[_warmup(cell)] + shift[seed], cell.loss)
        own[seed].append(point)
        marks[cell.state == "diverged"].append(point)
    _thin_lines(axes, list(own.values()), color=colour, alpha=0.3, linewidth=0.9)
    for failed, marker, size in ((False, "o", 4.5), (True, "X", 7)):
        axes.plot(
            [x for x, _ in marks[failed]],
            [y for _, y in marks[failed]],
            linestyle="none",
            marker=marker,
            markersize=size,
            markeredgecolor="white",
            markeredgewidth=0.5,
            color=colour,
            alpha=0.95 if failed else 0.6,
            zorder=3,
        )


def _thin_lines(axes: "Axes", lines: Sequence[Sequence[tuple[float, float]]], **look: Any) -> None:
    """Many lines of one look as one artist: each one of its own takes a millisecond to draw."""
    from matplotlib.collections import LineCollection

    collection = LineCollection(lines, capstyle="projecting", joinstyle="round", zorder=2, **look)
    axes.add_collection(collection, autolim=False)  # which would scale every panel anew each time
    axes.update_datalim([point for line in lines for point in line])


def _means(axes: "Axes", runs: Sequence[Cell], place: Mapping[int, int], colour: str) -> None:
    for warmup, x in place.items():
        losses = [cell.loss for cell in runs if (cell.warmup or 0) == warmup]
        if not losses:
            continue
        centre = mean(losses)
        low, high, _ = t_interval(losses)
        if math.isfinite(low):
            axes.errorbar(
                x + 0.18,
                centre,
                yerr=[[centre - low], [high - centre]],
                color=INK,
                capsize=3,
                linewidth=1.2,
                zorder=4,
            )
        axes.plot(
            x + 0.18,
            centre,
            marker="D",
            markersize=5.5,
            color=colour,
            markeredgecolor=INK,
            markeredgewidth=0.8,
            zorder=5,
        )


def _training(
    cells: Sequence[Cell], colours: Mapping[str, str], tag: str, most: int
) -> "Figure | None":
    """Loss against the step, a panel a variant: every seed thin, the mean over seeds heavy.

    A thin line has at most `most` points.
    """
    from matplotlib.lines import Line2D

    curves = [(cell, *_finite(*curve(cell, tag))) for cell in cells]
    curves = [(cell, steps, values) for cell, steps, values in curves if len(steps) > 1]
    if not curves:
        return None
    warmups = sorted({cell.warmup or 0 for cell, _, _ in curves})
    variants = [name for name in colours if any(cell.variant == name for cell, _, _ in curves)]
    entropy = mean([cell.entropy for cell, _, _ in curves])
    first = min(steps[0] for _, steps, _ in curves)
    last = max(steps[-1] for _, steps, _ in curves)
    figure, panels = _panels(len(variants), width=2.7, height=2.8)
    for axes, variant in zip(panels, variants, strict=True):
        axes.axhline(entropy, color=MUTED, linewidth=1.0, linestyle=(0, (5, 2.5)), zorder=1)
        for warmup in warmups:
            own = [
                dict(zip(steps, values, strict=True))
                for cell, steps, values in curves
                if cell.variant == variant and (cell.warmup or 0) == warmup
            ]
            thin = [[(step, p[step]) for step in _thinned(sorted(p), most)] for p in own]
            _thin_lines(axes, thin, color=colours[variant], alpha=0.2, linewidth=0.7)
            common = _thinned(sorted(set.intersection(*map(set, own)))) if own else []
            axes.plot(
                common,
                [mean([points[step] for points in own]) for step in common],
                color=colours[variant],
                linewidth=1.9,
                linestyle=_dash(warmup, warmups),
                zorder=3,
            )
        axes.set_title(_wrapped(variant), color=colours[variant], y=1.0)
        axes.set_xscale("log")
        _plain_steps(axes, cramped=last < 30 * first)
    panels[0].set_xlim(first / 1.08, last * 1.08)
    what = "training" if tag.startswith("train") else "validation"
    loss = f"{what} loss (nats per token)"
    handles = [
        Line2D(
            [], [], color=INK, linewidth=1.9, linestyle=_dash(w, warmups), label=f"warm-up {w:,}"
        )
        for w in warmups
    ]
    handles.append(
        Line2D([], [], color=MUTED, linestyle=(0, (5, 2.5)), linewidth=1, label="unigram entropy")
    )
    _arrange(figure, panels, "optimizer step (log scale)", loss, handles)
    return figure


def _finite(steps: Sequence[int], values: Sequence[float]) -> tuple[list[int], list[float]]:
    kept = [(s, v) for s, v in zip(steps, values, strict=True) if math.isfinite(v) and s > 0]
    return [step for step, _ in kept], [value for _, value in kept]


def _thinned(steps: Sequence[int], most: int = POINTS) -> list[int]:
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


def _dash(warmup: int, warmups: Sequence[int]) -> Any:
    """The longest warm-up is solid, the shortest dotted."""
    if warmup == warmups[-1]:
        return "solid"
    return DASHES[warmups.index(warmup) % len(DASHES)]


def _warmup(cell: Cell) -> int:
    return cell.warmup or 0


def _wrapped(variant: str) -> str:
    """A long name broken where its parts meet, so that no panel cuts its title."""
    lines = [""]
    for part in variant.replace("+", "+\0").split("\0"):
        pieces = [part[i : i + 24] for i in range(0, len(part), 24)]
        for piece in pieces:
            if len(lines[-1]) + len(piece) > 24:
                lines.append("")
            lines[-1] += piece
    return "\n".join(line for line in lines if line).replace("$", r"\$")


def _panels(count: int, width: float, height: float) -> tuple["Figure", list["Axes"]]:
    """A figure of `count` panels that share their axes; `_arrange` gives it margins."""
    from matplotlib.figure import Figure

    columns = min(PANELS, count)
    rows = math.ceil(count / columns)
    figure = Figure(figsize=(max(4.4, width * columns + 0.7), height * rows))
    grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    panels = list(grid.flat)
    for unused in panels[count:]:
        unused.remove()
    for index, axes in enumerate(panels[:count]):
        axes.grid(axis="y")
        axes.tick_params(length=3, labelbottom=index + columns >= count)
    return figure, panels[:count]


def _plain_steps(axes: "Axes", cramped: bool) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if cramped else (1,)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda step, _: f"{step:,.0f}"))
    axes.xaxis.set_minor_formatter(NullFormatter())


def _arrange(
    figure: "Figure", panels: Sequence["Axes"], x: str, y: str, handles: Sequence[Any]
) -> None:
    """Label the axes, add the legend, and give everything its room, in inches.

    Matplotlib's own layout asks every panel for every tick several times, which takes longer than
    all the drawing.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    panels[0].margins(y=0.07)
    width, height = map(float, figure.get_size_inches())
    columns = min(PANELS, len(panels))
    rows = math.ceil(len(panels) / columns)
    in_row = min(len(handles), max(1, int(width // 1.75)))
    title = 0.09 + 0.17 * max(1 + axes.get_title().count("\n") for axes in panels)
    top = 0.12 + 0.2 * math.ceil(len(handles) / in_row) + title
    bottom, gap = 0.55, title + 0.1
    numbers = panels[0].yaxis.get_tightbbox(FigureCanvasAgg(figure).get_renderer())
    left = 0.38 + (0.3 if numbers is None else numbers.width / figure.dpi)
    panel = height / rows - 0.4
    height = top + rows * panel + (rows - 1) * gap + bottom
    figure.set_size_inches(width, height)
    between = 0.2
    each = (width - left - 0.12 - (columns - 1) * between) / columns
    figure.subplots_adjust(
        left=left / width,
        right=1 - 0.12 / width,
        bottom=bottom / height,
        top=1 - top / height,
        wspace=between / each,
        hspace=gap / panel,
    )
    figure.supxlabel(x, fontsize=9.5, y=0.08 / height, verticalalignment="bottom")
    figure.supylabel(y, fontsize=9.5, x=0.06 / width, horizontalalignment="left")
    figure.legend(
        handles=handles,
        loc="upper center",
        bbox_to_anchor=(0.5, 1 - 0.02 / height),
        borderaxespad=0.0,
        ncols=in_row,
        handlelength=2.8,
    )


@contextmanager
def styled() -> Iterator[None]:
    """Draw in the look of the report, and leave matplotlib's settings as they were."""
    import matplotlib

    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(STYLE)
        yield


def save(figure: "Figure", path: Path) -> Path:
    """Write `figure` as SVG without anything that changes from one writing to the next."""
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    buffer = io.BytesIO()
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    FigureCanvasSVG(figure).print_svg(buffer, metadata=nothing)
    write_whole(path, buffer.getvalue())
    return path
