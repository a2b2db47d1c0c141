"""The cost of a variant: parameters, speed, memory."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lightning_app.analysis.figures.drawing import Part, Sketch, identity
from lightning_app.analysis.figures.layout import cloud, dots, frozen, wrapped
from lightning_app.analysis.figures.links import Links
from lightning_app.analysis.figures.style import INK, MUTED
from lightning_app.analysis.grid_results import CellResult
from lightning_app.analysis.statistics import mean

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SPEED = "train/tokens_per_second"
COUNTS = {1e9: "billions", 1e6: "millions", 1e3: "thousands"}
BYTES = {2.0**30: "GiB", 2.0**20: "MiB", 2.0**10: "KiB"}


@dataclass(frozen=True, kw_only=True)
class Resource:
    """A number of `result.json`: its axis label, its units by size, and how to read it."""

    name: str
    label: str
    units: Mapping[float, str]
    read: Callable[[CellResult], Any]


RESOURCES = (
    Resource(
        name="parameters",
        label="parameters",
        units=COUNTS,
        read=lambda cell: cell.record.get("parameters"),
    ),
    Resource(
        name="tokens_per_second",
        label="tokens per second",
        units=COUNTS,
        read=lambda cell: cell.metrics.get(SPEED),
    ),
    Resource(
        name="peak_memory_bytes",
        label="peak memory",
        units=BYTES,
        read=lambda cell: cell.record.get("peak_memory_bytes"),
    ),
)


def resources(part: Part) -> list[Sketch]:
    """A panel for each resource, a row for each variant, a dot for each run."""
    import pandas as pd
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

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
    dot: dict[str, Any] = {"color": MUTED, "linestyle": "none"}
    handles = [
        Line2D([], [], marker="o", markersize=4, alpha=0.6, label="one run", **dot),
        Line2D([], [], marker="D", markersize=5.5, label="mean of the runs", **dot),
    ]
    figure.legend(handles=handles, loc="outside upper center", ncols=2)
    frozen(figure)
    return [
        Sketch(
            figure=figure,
            table=pd.DataFrame(rows),
            title="Parameters, speed and memory of each variant",
            text=_text(shown),
            limits=_limits(shown, part.cells),
            links=links,
            cells=part.cells,
        )
    ]


def _panel(
    axes: "Axes", resource: Resource, part: Part, variants: Sequence[str], links: Links
) -> list[dict[str, Any]]:
    from matplotlib.ticker import MaxNLocator

    found = {cell.id: value for cell in part.cells if (value := _value(resource, cell)) is not None}
    largest = max(found.values())
    size = next((size for size in resource.units if largest >= size), 1.0)
    unit = resource.units.get(size, "bytes" if resource.units is BYTES else "")
    rows: list[dict[str, Any]] = []
    for y, variant in enumerate(variants):
        runs = [cell for cell in part.cells if cell.variant == variant and cell.id in found]
        values = [found[cell.id] for cell in runs]
        # Runs with equal values have different heights in the row of their variant.
        points = [
            (value / size, y - 0.27 + 0.36 * (turn / max(1, len(runs) - 1)))
            for turn, value in enumerate(values)
        ]
        urls = [links.to(cell, f"{found[cell.id]:,.0f} {_plain_unit(resource)}") for cell in runs]
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


def _plain_unit(resource: Resource) -> str:
    return "bytes" if resource.units is BYTES else resource.label


def _value(resource: Resource, cell: CellResult) -> float | None:
    value = resource.read(cell)
    return None if value is None or not math.isfinite(value) or value <= 0 else float(value)


def _text(shown: Sequence[Resource]) -> str:
    names = {resource.name for resource in shown}
    text = "A dot is a run, a diamond the mean of all runs of a variant, with any warm-up."
    if "parameters" in names:
        text += " Parameters are those of the whole model, embeddings included."
    if "tokens_per_second" in names:
        text += " Speed is over the training steps of a run, without validation."
    if "peak_memory_bytes" in names:
        text += (
            " Peak memory is that of the tensors on the first device; on a CPU, that of the whole "
            "process."
        )
    return f"{text} Every axis begins at zero."


def _limits(shown: Sequence[Resource], cells: Sequence[CellResult]) -> str:
    if any(resource.name == "tokens_per_second" for resource in shown):
        text = "Runs that share a machine slow each other down: speed is noisy, not a benchmark."
    else:
        text = "A variant with fewer parameters need not be faster."
    devices = {str(device) for cell in cells if (device := cell.record.get("device"))}
    if len(devices) > 1:
        text += f" The runs used {len(devices)} kinds of device, whose speeds differ."
    return text
