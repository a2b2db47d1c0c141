"""Figures of training: the loss against step and time, and the cost of each variant."""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from lightning_app.report.facts import say
from lightning_app.report.figures.sheet import (
    INK,
    REFERENCE,
    TRAIN,
    VALID,
    Links,
    Part,
    Sketch,
    arrange,
    cloud,
    dash,
    dots,
    entropy_line,
    frozen,
    identity,
    key,
    panels,
    sketch,
    thin_lines,
    thinned,
    title,
    warmup_colours,
    warmup_of,
    wrapped,
)
from lightning_app.report.results import CellResult, as_number
from lightning_app.report.statistics import mean

if TYPE_CHECKING:
    from matplotlib.axes import Axes


MOST_LINKED = 60  # curves of one figure with links: each is a separate node of the SVG
MEAN_POINTS = 300  # points of one curve of means, at most
FEWEST = 4  # validations of a run from which their curve shows more than that of the batches


def during_training(part: Part) -> list[Sketch]:
    """The validation loss against the step, or the training loss if validations are rare.

    One panel per variant: thin lines are runs, heavy lines the means over seeds.
    """
    validations = max((len(log[VALID]) for log in part.logs.values()), default=0)
    name, tag = ("validation", VALID) if validations >= FEWEST else ("training", TRAIN)
    curves = {cell.id: part.logs[cell.id][tag] for cell in part.cells}
    cells = [cell for cell in part.cells if len(curves[cell.id]) > 1]
    if not cells:
        return []
    warmups = sorted({warmup_of(cell) for cell in cells})
    variants = part.variants(cells)
    colours = warmup_colours(warmups)
    links = Links(len(cells), MOST_LINKED)
    figure, axes_of = panels(len(variants), width=2.7, height=2.8)
    rows: list[dict[str, Any]] = []
    for axes, variant in zip(axes_of, variants, strict=True):
        entropy_line(axes, mean([cell.entropy for cell in cells]))
        for warmup in warmups:
            own = [c for c in cells if (c.variant, warmup_of(c)) == (variant, warmup)]
            if not own:
                continue
            lines, urls = [], []
            for cell in own:
                curve = curves[cell.id]
                steps = thinned(list(curve), part.points)
                lines.append([(step, curve[step]) for step in steps])
                urls.append(links.to(cell, f"{curve[steps[-1]]:.4f} at the end"))
                mark = {"mark": "run", **identity(cell)}
                rows += [{**mark, "step": step, tag: curve[step]} for step in steps]
            colour = colours[warmup]
            thin_lines(axes, lines, urls, color=colour, alpha=0.3, linewidth=0.7)
            common = set.intersection(*(set(curves[cell.id]) for cell in own))
            means = {
                step: mean([curves[cell.id][step] for cell in own])
                for step in thinned(sorted(common), MEAN_POINTS)
            }
            look = {"color": colour, "linestyle": dash(warmup, warmups), "linewidth": 1.9}
            axes.plot(list(means), list(means.values()), zorder=3, **look)
            mark = {"mark": "mean", "variant": variant, "warmup": own[0].warmup, "lr": own[0].lr}
            rows += [{**mark, "step": step, tag: value} for step, value in means.items()]
        title(axes, variant)
    axes_of[0].set_xlim(0.0, 1.03 * max(max(curves[cell.id]) for cell in cells))
    handles = [
        key(f"warm-up {w:,}", color=colours[w], linewidth=1.9, linestyle=dash(w, warmups))
        for w in warmups
    ]
    handles.append(key("unigram entropy", linestyle=REFERENCE, linewidth=1))
    arrange(figure, axes_of, "optimizer step", f"{name} loss ({part.grid.unit})", handles)
    return [sketch(name, figure, rows, links, cells, text="curves")]


COUNTS = {1e9: "billions", 1e6: "millions", 1e3: "thousands"}
BYTES = {2.0**30: "GiB", 2.0**20: "MiB", 2.0**10: "KiB"}


class Resource(NamedTuple):
    """A number of `result.json`: its axis label, its units by size, and its field or metric."""

    name: str
    label: str
    units: Mapping[float, str]
    field: str


RESOURCES = (
    Resource("parameters", "parameters", COUNTS, "parameters"),
    Resource("tokens_per_second", "tokens per second", COUNTS, "train/tokens_per_second"),
    Resource("peak_memory_bytes", "peak memory", BYTES, "peak_memory_bytes"),
)


def resources(part: Part) -> list[Sketch]:
    """One panel per resource, one row per variant, one dot per run."""
    from matplotlib.figure import Figure

    shown = [r for r in RESOURCES if any(_value(r, cell) is not None for cell in part.cells)]
    if not shown:
        return []
    variants = part.variants(part.cells)
    links = Links(len(part.cells) * len(shown))
    lines = [wrapped(name).count("\n") + 1 for name in variants]
    size = (2.9 * len(shown) + 1.6, 1.1 + 0.17 * sum(lines) + 0.17 * len(variants))
    figure = Figure(figsize=size)
    figure.set_layout_engine("constrained", wspace=0.05)  # between the last and the first number
    grid = figure.subplots(1, len(shown), sharey=True, squeeze=False)[0]
    rows: list[dict[str, Any]] = []
    for resource, axes in zip(shown, grid, strict=True):
        rows += _panel(axes, resource, part, variants, links)
    grid[0].set_yticks(range(len(variants)), [wrapped(name) for name in variants])
    grid[0].set_ylim(len(variants) - 0.4, -0.6)
    handles = [
        key("one run", marker="o", markersize=4, alpha=0.6),
        key("mean of the runs", marker="D", markersize=5.5),
    ]
    frozen(figure, handles, 2)
    names = [resource.name for resource in shown]
    speed = "shared" if "tokens_per_second" in names else "no_speed"
    devices = len({str(device) for cell in part.cells if (device := cell.record.get("device"))})
    words = {
        "shown": "".join(say(f"figures.resources.{name}") for name in names),
        "speed": say(f"figures.resources.{speed}"),
        "devices": say("figures.resources.devices", devices=devices) if devices > 1 else "",
    }
    return [sketch("resources", figure, rows, links, part.cells, **words)]


def _panel(
    axes: "Axes", resource: Resource, part: Part, variants: Sequence[str], links: Links
) -> list[dict[str, Any]]:
    from matplotlib.ticker import MaxNLocator

    by_cell = {
        cell.id: value for cell in part.cells if (value := _value(resource, cell)) is not None
    }
    largest = max(by_cell.values())
    size = next((size for size in resource.units if largest >= size), 1.0)
    unit = resource.units.get(size, "bytes" if resource.units is BYTES else "")
    plain_unit = "bytes" if resource.units is BYTES else resource.label
    rows: list[dict[str, Any]] = []
    for y, variant in enumerate(variants):
        runs = [cell for cell in part.cells if cell.variant == variant and cell.id in by_cell]
        values = [by_cell[cell.id] for cell in runs]
        # Runs with equal values have different heights in the row of their variant.
        points = [
            (value / size, y - 0.27 + 0.36 * (turn / max(1, len(runs) - 1)))
            for turn, value in enumerate(values)
        ]
        urls = [links.to(cell, f"{by_cell[cell.id]:,.0f} {plain_unit}") for cell in runs]
        colour = part.colours[variant]
        look: dict[str, Any] = {"color": colour, "s": 16, "alpha": 0.6}
        if links.on:
            dots(axes, points, urls, zorder=3, **look)
        elif points:
            cloud(axes, points, **look)
        rows += [
            {"mark": "run", "quantity": resource.name, **identity(cell), "n": 1, "value": value}
            for cell, value in zip(runs, values, strict=True)
        ]
        if runs:
            centre = mean(values)
            diamond: dict[str, Any] = {"color": colour, "edgecolors": INK, "marker": "D", "s": 30}
            dots(axes, [(centre / size, y + 0.27)], [None], zorder=5, **diamond)
            mark = {"mark": "mean", "quantity": resource.name, "variant": variant}
            rows.append({**mark, "n": len(runs), "value": centre})
    axes.set_xlabel(f"{resource.label} ({unit})" if unit else resource.label)
    axes.set_xlim(0.0, 1.06 * largest / size)
    axes.xaxis.set_major_locator(MaxNLocator(4))
    axes.grid(axis="x")
    axes.tick_params(length=3)
    axes.tick_params(axis="y", length=0)
    return rows


def _value(resource: Resource, cell: CellResult) -> float | None:
    value = as_number(cell.metrics.get(resource.field, cell.record.get(resource.field)))
    return value if math.isfinite(value) and value > 0 else None
