"""The score of every run of each task, without and with warm-up, and the runs that failed."""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lightning_app.analysis.failed_runs import constant_score, failed, median_score
from lightning_app.analysis.figures.drawing import Part, Sketch, identity, warmup_of
from lightning_app.analysis.figures.layout import dots, entropy_line, frozen, title, wrapped
from lightning_app.analysis.figures.links import Links
from lightning_app.analysis.figures.style import INK, MUTED, PAPER, REFERENCE
from lightning_app.analysis.grid_results import CellResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLUMNS, MOST = 4, 12  # panels in a row, and of the figure
HEIGHT, WIDTH = 2.4, 11.5  # inches of a row of panels, and of the figure


def scores_by_task(part: Part) -> list[Sketch]:
    """One panel for each task and value of the other axes; nothing without published scores."""
    import pandas as pd
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    cells = [cell for cell in part.cells if cell.scores and math.isfinite(_score(part, cell))]
    groups = list(dict.fromkeys(cell.group for cell in cells))[:MOST]
    if not groups or part.grid.pruner is not None:
        return []
    drawn = [cell for cell in cells if cell.group in groups]
    warmups = sorted({warmup_of(cell) for cell in drawn})
    columns = min(COLUMNS, len(groups))
    rows = math.ceil(len(groups) / columns)
    figure = Figure(figsize=(WIDTH, HEIGHT * rows + 0.6), layout="constrained")
    every = list(figure.subplots(rows, columns, sharex=True, squeeze=False).flat)
    for unused in every[len(groups) :]:
        unused.remove()
    links = Links(len(drawn))
    variants = part.variants(drawn)
    table: list[dict[str, Any]] = []
    for axes, group in zip(every, groups, strict=False):
        runs = [cell for cell in drawn if cell.group == group]
        table += _panel(axes, runs, part, variants, warmups, links)
    for place, axes in enumerate(every[: len(groups)]):
        axes.tick_params(labelbottom=place + columns >= len(groups))
        names = [wrapped(name) for name in variants]
        axes.set_xticks(range(len(variants)), names, rotation=35, ha="right")
    dot: dict[str, Any] = {"color": MUTED, "linestyle": "none"}
    handles = [
        Line2D([], [], marker="o", markersize=5, label=f"warm-up {warmup:,}", **_look(dot, place))
        for place, warmup in enumerate(warmups)
    ]
    handles += [
        Line2D([], [], marker="X", markersize=7, label="failed", **dot),
        Line2D([], [], color=INK, linewidth=1.6, label="median"),
        Line2D([], [], color=MUTED, linestyle=REFERENCE, label="a constant answer"),
    ]
    figure.legend(handles=handles, loc="outside upper center", ncols=min(6, len(handles)))
    frozen(figure)
    left = len({cell.group for cell in cells}) - len(groups)
    absent = len([cell for cell in part.cells if cell.scores]) - len(cells)
    text = (
        "Every run at its score of the dev set, by variant and warm-up from left to right; higher "
        "is better. Crosses failed: they are no better than a constant answer (dashed where it is "
        "known) or became non-finite; for MRPC and QQP accuracy decides, not F1."
    )
    if absent:
        text += f" Not drawn: {absent} runs without a finite score, which failed too."
    if left:
        text += f" Only the first {len(groups)} of {len(groups) + left} panels are drawn."
    return [
        Sketch(
            figure=figure,
            table=pd.DataFrame(table),
            title="The score of every run",
            text=text,
            limits="Few seeds: the share of failed runs is known only within its Wilson interval.",
            links=links,
            cells=drawn,
        )
    ]


def _panel(
    axes: "Axes",
    runs: Sequence[CellResult],
    part: Part,
    variants: Sequence[str],
    warmups: Sequence[int],
    links: Links,
) -> list[dict[str, Any]]:
    measure = part.grid.measure(runs[0])
    constant = constant_score(runs[0], measure)
    if math.isfinite(constant):
        entropy_line(axes, constant)
    table: list[dict[str, Any]] = []
    step = 0.7 / len(warmups)
    for x, variant in enumerate(variants):
        for place, warmup in enumerate(warmups):
            arm = [c for c in runs if (c.variant, warmup_of(c)) == (variant, warmup)]
            if not arm:
                continue
            centre = x + (place - (len(warmups) - 1) / 2) * step
            _marks(axes, arm, part, centre, 0.5 * step, place, links)
            middle = median_score(arm, measure)
            ends = (centre - 0.4 * step, centre + 0.4 * step)
            axes.plot(ends, (middle, middle), color=INK, linewidth=1.6, zorder=4)
            table += [
                {"mark": "run", "group": c.group, **identity(c), "failed": failed(c)}
                | {"metric": measure.metric, "value": _score(part, c)}
                for c in arm
            ]
            table.append(
                {"mark": "median", "group": arm[0].group, "variant": variant, "warmup": warmup}
                | {"metric": measure.metric, "value": middle}
            )
    axes.grid(axis="y")
    axes.set_xlim(-0.5, len(variants) - 0.5)
    axes.set_ylabel(measure.title)
    title(axes, runs[0].group if runs[0].group != "all" else measure.title)
    return table


def _marks(
    axes: "Axes",
    arm: Sequence[CellResult],
    part: Part,
    centre: float,
    width: float,
    place: int,
    links: Links,
) -> None:
    """The runs of an arm side by side, by seed."""
    colour = part.colours[arm[0].variant]
    marks: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    urls: dict[bool, list[str | None]] = {False: [], True: []}
    for number, cell in enumerate(sorted(arm, key=lambda cell: cell.seed or 0)):
        shift = width * (number / max(1, len(arm) - 1) - 0.5)
        value = _score(part, cell)
        marks[failed(cell)].append((centre + shift, value))
        urls[failed(cell)].append(links.to(cell, f"{value:.4f}"))
    hollow = {"facecolors": PAPER, "edgecolors": colour, "linewidths": 1.2}
    look: Mapping[str, Any] = hollow if place == 0 else {"color": colour}
    dots(axes, marks[False], urls[False], s=24, zorder=3, **look)
    dots(axes, marks[True], urls[True], s=46, zorder=3, marker="X", color=colour)


def _look(dot: Mapping[str, Any], place: int) -> dict[str, Any]:
    """The mark of the first warm-up is hollow."""
    return {**dot, "markerfacecolor": "none"} if place == 0 else dict(dot)


def _score(part: Part, cell: CellResult) -> float:
    value = cell.metrics.get(part.grid.measure(cell).metric)
    return math.nan if value is None else float(value)
