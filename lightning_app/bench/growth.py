"""Growth of time and memory with length, depth and width: an encoder's forward and backward."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

from lightning_app.analysis.figures.files import save
from lightning_app.analysis.figures.style import styled
from lightning_app.bench.compare import Comparison, Contender, How, compare
from lightning_app.bench.learners import Setting, masked, preset_work
from lightning_app.bench.tables import MEGA
from lightning_app.blocks.kernels import Form
from lightning_app.probes.figures import legend, looks, panel_grid

Axis = Literal["length", "depth", "width"]
LABELS: dict[Axis, str] = {
    "length": "tokens of a row (T)",
    "depth": "blocks",
    "width": "width",
}
SERIES: dict[str, tuple[str, Form | None]] = {
    "post_ln": ("post_ln", None),
    "sas": ("sas", None),
    "realformer": ("realformer", None),
    "realformer, plain": ("realformer", "plain"),
    "realformer, reversible": ("realformer", "reversible"),
}
"""The series: a preset, and the form of its attention; None lets the policy choose."""


class Point(NamedTuple):
    """All series at one value of one axis."""

    axis: Axis
    value: int
    comparison: Comparison


def measure_growth(
    setting: Setting, values: Mapping[Axis, Sequence[int]], how: How
) -> Iterator[Point]:
    """Measure every series along each axis, the other sizes as in `setting`.

    The number of tokens is constant, so longer rows mean fewer rows; ff grows with the width.
    """
    base = replace(masked(setting), step=False)
    for axis, places in values.items():
        for value in places:
            mine = replace(base, **{axis: value})
            if axis == "width":
                mine = sized(mine)
            contenders = [
                Contender(name, partial(preset_work, mine, preset, form))
                for name, (preset, form) in SERIES.items()
            ]
            title = f"Growth, {LABELS[axis]}: {value}"
            yield Point(axis, value, compare(title, contenders, how))


def sized(setting: Setting) -> Setting:
    """Return `setting` with the feed-forward size and the heads for its width."""
    heads = max(2, setting.width // 64)
    return replace(setting, ff_dim=2 * setting.width, heads=heads)


def draw(points: Sequence[Point], path: Path) -> Path:
    """Write the figure: time above, memory below, one column an axis, both scales logarithmic."""
    from matplotlib.lines import Line2D

    axes_named: list[Axis] = list(dict.fromkeys(point.axis for point in points))
    style = looks(SERIES)
    with styled():
        figure, panels = panel_grid(2, len(axes_named))
        for column, axis in enumerate(axes_named):
            mine = [point for point in points if point.axis == axis]
            for name in SERIES:
                for row, height in enumerate(("seconds", "bytes")):
                    _line(panels[row][column], mine, name, height, style[name])
            panels[1][column].set_xlabel(LABELS[axis])
        panels[0][0].set_ylabel("ms")
        panels[1][0].set_ylabel("MB at once")
        lines = [Line2D([], [], label=name, marker="o", **style[name]) for name in SERIES]
        legend(figure, lines)
        return save(figure, path)


def _line(axes: Any, points: Sequence[Point], name: str, height: str, look: Any) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator

    places, heights = [], []
    for point in points:
        result = next(r for r in point.comparison.results if r.name == name)
        assert result.seconds is not None
        assert result.peak_bytes is not None
        places.append(point.value)
        seconds = height == "seconds"
        heights.append(1e3 * result.seconds.median if seconds else result.peak_bytes / MEGA)
    axes.plot(places, heights, marker="o", markersize=3.0, **look)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    # Axes that span less than one power of ten also need tick labels.
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_xticks(places, [str(place) for place in places])
    axes.minorticks_off()
