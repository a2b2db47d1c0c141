"""The figures of `ablate probe`, one curve per variant, and attention maps as images.

Nothing here touches matplotlib's global state, and the same rows give the same files.
"""

import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib import colormaps, get_data_path
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from lightning_app.blocks.presets import PRESETS
from lightning_app.probes.hooks import QUANTILES, Probed
from lightning_app.report.figures.sheet import (
    COLOURS,
    DASHES,
    INK,
    MUTED,
    key,
    save,
    styled,
    without_formula,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


COLUMNS = {
    "encoder": ("encoder", ""),
    "decoder": ("decoder", ""),
    "decoder, cross-attention": ("decoder", "cross_"),
}
"""The columns of a figure: stack, and the prefix of the names of its quantities."""
ENTROPY_CUTS = (1.5, 4.5)
"""Entropies (nats) at which RealFormer's figure changes colour (2012.11747, section 4.1.3)."""
DISTANCE_CUTS = (0.25, 0.75)
"""The same for its figure of Jensen-Shannon divergences, in bits."""
SPREAD = 30.0  # ratio of the largest to the smallest value of a panel with a logarithmic axis
SHAPING = ("alpha", "beta", "gamma")


@dataclass(frozen=True)
class Lines:
    """A figure whose panels are quantities (rows) by `COLUMNS`."""

    name: str
    quantities: dict[str, str]
    """The label of the axis by quantity."""
    cuts: tuple[float, ...] = ()
    log: bool = False


LINES = (
    Lines(
        "gradient_norm",
        {
            "w1_expected_gradient": "$W_1$, expected gradient",
            "w2_expected_gradient": "$W_2$, expected gradient",
            "w2_position_gradient": "$W_2$, one position",
        },
        log=True,
    ),
    Lines("hidden_norm", {"sum_norm": "squared norm / d\nbefore the last norm"}),
    Lines("token_cosine", {"token_cosine": "cosine of two tokens", "token_rank": "effective rank"}),
    Lines(
        "attention_distance",
        {
            "attention_distance": "JSD to layer below (bits)\nsame head",
            "attention_matched": "JSD to layer below (bits)\nheads matched",
        },
        cuts=DISTANCE_CUTS,
    ),
    Lines("score_ratio", {"score_ratio": "own scores / running sum"}),
    Lines("logits", {"largest_logit": "largest logit", "peaked_rows": "share of rows\nover 0.99"}),
)


def write_probe_figures(probed: Sequence[Probed], folder: Path) -> list[Path]:
    """Write every figure that has rows; return the paths."""
    with styled():
        drawn = {each.name: line_figure(each, probed) for each in (*LINES, gains_of(probed))}
        drawn["attention_entropy"] = entropy_figure(probed)
        for name in drawn:
            (folder / f"{name}.svg").unlink(missing_ok=True)
        return [save(figure, folder / f"{name}.svg") for name, figure in drawn.items() if figure]


def undrawn_curves(probed: Sequence[Probed]) -> list[str]:
    """List the measured curves that `write_figures` could not draw, with reasons.

    Quantities that a variant lacks, such as learned gains, are not listed.
    """
    notes = []
    for lines in (*LINES, gains_of(probed)):
        figure = f"{lines.name}.svg"
        if line_figure(lines, probed) is None:
            figure += " is not written"
        for variant in probed:
            reasons: dict[str, list[str]] = {}
            for quantity in lines.quantities:
                names = {prefix + quantity for _, prefix in COLUMNS.values()}
                values = [row.value for row in variant.rows if row.quantity in names]
                if values and not any(drawable(value, lines) for value in values):
                    zero = any(value == 0.0 for value in values)
                    why = "0 in every layer, which has no logarithm" if zero else "no finite value"
                    reasons.setdefault(why, []).append(quantity)
            for why, quantities in reasons.items():
                notes.append(f"{figure}: no {', '.join(quantities)} of {variant.name}: {why}")
    return notes


def drawable(value: float, lines: Lines) -> bool:
    """Whether `value` can be drawn on the axis: a gradient of exactly zero cannot."""
    return math.isfinite(value) and (value > 0.0 or not lines.log)


def gains_of(probed: Sequence[Probed]) -> Lines:
    """Return the figure of the learned gains."""
    ends = ("_skip", "_branch", "head_gain", "_change")
    measured = {row.quantity for variant in probed for row in variant.rows}
    gains = sorted(
        quantity
        for quantity in measured
        if (quantity in SHAPING or quantity.endswith(ends))
        # cross_head_gain appears in the cross-attention column, under head_gain
        and not (quantity.startswith("cross_") and quantity.removeprefix("cross_") in measured)
    )
    return Lines("gains", {quantity: quantity.replace("_", " ") for quantity in gains})


def line_figure(lines: Lines, probed: Sequence[Probed]) -> "Figure | None":
    """Draw quantities by stacks, one curve per variant; None if no variant has any of them."""
    from matplotlib.ticker import MaxNLocator

    def curve(variant: Probed, quantity: str, stack: str) -> tuple[list[int], list[float]]:
        by_layer = variant.values(quantity, stack)
        kept = [(n, v) for n, v in sorted(by_layer.items()) if drawable(v, lines)]
        return [layer for layer, _ in kept], [value for _, value in kept]

    panels = {
        (quantity, column): [curve(variant, f"{prefix}{quantity}", stack) for variant in probed]
        for quantity in lines.quantities
        for column, (stack, prefix) in COLUMNS.items()
    }
    filled = {place for place, curves in panels.items() if any(x for x, _ in curves)}
    quantities = [q for q in lines.quantities if any((q, c) in filled for c in COLUMNS)]
    columns = [c for c in COLUMNS if any((q, c) in filled for q in quantities)]
    if not quantities:
        return None
    figure, grid = panel_grid(len(quantities), len(columns))
    styles = looks(variant.name for variant in probed)
    for quantity, row in zip(quantities, grid, strict=True):
        values = [v for column in columns for _, ys in panels[quantity, column] for v in ys]
        spread = min(values) > 0.0 and max(values) > SPREAD * min(values)
        for column, axes in zip(columns, row, strict=True):
            for variant, (x, y) in zip(probed, panels[quantity, column], strict=True):
                axes.plot(x, y, marker="o", markersize=3.5, linewidth=1.6, **styles[variant.name])
            for cut in lines.cuts:
                axes.axhline(cut, color=MUTED, linewidth=0.8, linestyle=(0, (5, 2.5)), zorder=1)
            if lines.log or spread:
                axes.set_yscale("log")
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
            if row is grid[0]:
                axes.set_title(column)
        row[0].set_ylabel(lines.quantities[quantity])
    figure.supxlabel("layer", fontsize=9.5)
    dots: dict[str, Any] = {"marker": "o", "markersize": 3.5, "linewidth": 1.6}
    handles = [key(without_formula(name), **dots, **style) for name, style in styles.items()]
    legend(figure, handles)
    return figure


def entropy_figure(probed: Sequence[Probed]) -> "Figure | None":
    """Draw a box per head and layer, coloured by its median.

    As in RealFormer's figure: a box spans the quartiles over rows, its whiskers 5 % to 95 %. The
    dotted line is the entropy of the uniform map over the visible keys, which is the maximum.
    """
    from matplotlib.patches import Patch

    shown = {
        title: (stack, prefix)
        for title, (stack, prefix) in COLUMNS.items()
        if any(v.values(f"{prefix}attention_entropy", stack) for v in probed)
    }
    if not shown:
        return None
    figure, grid = panel_grid(len(probed), len(shown))
    for variant, row in zip(probed, grid, strict=True):
        for (title, (stack, prefix)), axes in zip(shown.items(), row, strict=True):
            entropy_panel(axes, variant, stack, prefix)
            if row is grid[0]:
                axes.set_title(title)
        row[0].set_ylabel(without_formula(variant.name))
    figure.supxlabel("layer, a box for each head", fontsize=9.5)
    figure.supylabel("entropy of the attention map (nats)", fontsize=9.5)
    low, high = ENTROPY_CUTS
    labels = [f"median under {low}", "between", f"median over {high}"]
    handles = [Patch(color=c, label=text) for c, text in zip(BANDS, labels, strict=True)]
    legend(figure, handles)
    return figure


BANDS = (COLOURS[0], COLOURS[6], COLOURS[1])


def band(median: float) -> str:
    """Return the colour of a head: sparse, middling or broad."""
    return BANDS[sum(median > cut for cut in ENTROPY_CUTS)]


def entropy_panel(axes: "Axes", variant: Probed, stack: str, prefix: str) -> None:
    """Draw the heads of one stack."""
    quantity = f"{prefix}attention_entropy"
    median_of = f"{quantity}_p50", stack
    rows = [row for row in variant.rows if (row.quantity, row.stack) == median_of]
    heads = sorted({row.head for row in rows if row.head is not None})
    width = 0.8 / max(1, len(heads))
    layers: set[int] = set()
    for place, head in enumerate(heads):
        points = {name: variant.values(f"{quantity}_{name}", stack, head) for name in QUANTILES}
        for layer, median in points["p50"].items():
            box = [points[name][layer] for name in QUANTILES]
            if not all(map(math.isfinite, box)):
                continue
            layers.add(layer)
            x = layer - 0.4 + (place + 0.5) * width
            colour = band(median)
            axes.plot([x, x], [box[0], box[4]], color=colour, linewidth=0.8, zorder=2)
            axes.bar(x, box[3] - box[1], 0.8 * width, box[1], color=colour, alpha=0.55, zorder=3)
            axes.plot([x - 0.4 * width, x + 0.4 * width], [median] * 2, color=colour, linewidth=1.6)
    look: dict[str, Any] = {"color": INK, "linestyle": DASHES[0], "zorder": 1}
    for layer, most in variant.values(f"{prefix}attention_free_entropy", stack).items():
        if math.isfinite(most):
            axes.plot([layer - 0.45, layer + 0.45], [most] * 2, **look)
    for cut in ENTROPY_CUTS:
        axes.axhline(cut, color=MUTED, linewidth=0.8, linestyle=(0, (5, 2.5)), zorder=1)
    axes.set_xticks(sorted(layers))
    axes.set_ylim(bottom=0.0)


def looks(names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Return colour and dash by name; a preset has the same in every figure.

    Other names take, in order, those not used by a preset among `names`.
    """
    names = list(dict.fromkeys(names))
    places = {name: place for place, name in enumerate(PRESETS) if name in names}
    free = (place for place in count() if place not in places.values())
    return {name: curve_style(places[name] if name in places else next(free)) for name in names}


def curve_style(index: int) -> dict[str, Any]:
    """Return colour and dash number `index`: the first 35 all differ."""
    dashes = ("solid", *DASHES)
    turn = index // len(COLOURS) % len(dashes)
    return {"color": COLOURS[index % len(COLOURS)], "linestyle": dashes[turn]}


def panel_grid(rows: int, columns: int) -> tuple["Figure", list[list["Axes"]]]:
    """Return a figure of panels, with one value axis per row."""
    from matplotlib.figure import Figure

    size = (max(4.6, 3.3 * columns + 0.9), 2.3 * rows + 0.9)
    figure = Figure(figsize=size, layout="constrained")
    grid = figure.subplots(rows, columns, sharex="col", sharey="row", squeeze=False)
    for axes in grid.flat:
        axes.grid(axis="y")
        axes.tick_params(length=3)
    return figure, [list(row) for row in grid]


def legend(figure: "Figure", handles: Sequence[Any]) -> None:
    """Add one legend above all panels."""
    columns = min(len(handles), max(1, int(figure.get_figwidth() // 1.7)))
    figure.legend(handles=handles, loc="outside upper center", ncols=columns, handlelength=2.4)


SQUARE, GAP = 72, 6
"""Pixels per map and between maps."""
LINE = 18
LAYERS, HEADS = 6, 8
"""The largest number of rows and columns of squares."""
TITLES = {
    "encoder": "encoder, self-attention",
    "decoder": "decoder, self-attention",
    "cross": "decoder, cross-attention",
}
HIDDEN = (225, 225, 225)
WRITING = (30, 34, 40)


def attention_image(maps: Mapping[str, Tensor], lines: Sequence[str]) -> Image.Image:
    """Return the maps (layer, head, query, key) of each name side by side, `lines` below them.

    Rows of a map are queries, columns are keys. The colour is the square root of the weight, from 0
    to 1, since many weights are small; masked cells and NaN are grey.
    """
    panels = [_panel(TITLES[name], each.numpy()) for name, each in maps.items()]
    width = sum(panel.width + 2 * GAP for panel in panels) + 2 * GAP
    wrapped = [part for line in lines for part in textwrap.wrap(line, max(40, width // 7))]
    top = max(panel.height for panel in panels) + 2 * GAP
    picture = Image.new("RGB", (width, top + LINE * (len(wrapped) + 1) + 2 * GAP), "white")
    x = 2 * GAP
    for panel in panels:
        picture.paste(panel, (x, GAP))
        x += panel.width + 2 * GAP
    on = ImageDraw.Draw(picture)
    _scale(picture, on, top)
    for place, line in enumerate(wrapped, start=1):
        on.text((2 * GAP, top + LINE * place), line, WRITING, _font(12))
    return picture


def _panel(title: str, maps: np.ndarray) -> Image.Image:
    layers = _some(maps.shape[0], LAYERS)
    heads = range(min(maps.shape[1], HEADS))
    step = SQUARE + GAP
    left = _width(f"layer {maps.shape[0]}") + GAP
    width = max(left + step * len(heads), _width(title, 13))
    panel = Image.new("RGB", (width, 2 * LINE + step * len(layers)), "white")
    on = ImageDraw.Draw(panel)
    on.text((left, 0), title, WRITING, _font(13))
    for column, head in enumerate(heads):
        on.text((left + step * column, LINE), f"head {head + 1}", WRITING, _font(11))
    for row, layer in enumerate(reversed(layers)):
        y = 2 * LINE + step * row
        on.text((0, y + SQUARE // 2), f"layer {layer + 1}", WRITING, _font(11), "lm")
        for column, head in enumerate(heads):
            pixels = Image.fromarray(_coloured(maps[layer, head]))
            large = max(maps.shape[2:]) > SQUARE
            how = Image.Resampling.BOX if large else Image.Resampling.NEAREST
            panel.paste(pixels.resize((SQUARE, SQUARE), how), (left + step * column, y))
    return panel


def _coloured(weights: np.ndarray) -> np.ndarray:
    colours = _palette()[(255 * np.sqrt(np.nan_to_num(weights).clip(0, 1))).astype(np.uint8)]
    return np.where(np.isfinite(weights)[..., None], colours, np.array(HIDDEN, np.uint8))


def _scale(picture: Image.Image, on: ImageDraw.ImageDraw, y: int) -> None:
    bar = Image.fromarray(np.repeat(_palette()[None, ::2], 10, axis=0))
    start = 2 * GAP + _width("weight 0 ")
    on.text((2 * GAP, y), "weight 0", WRITING, _font(11))
    picture.paste(bar, (start, y + 2))
    text = "1, as its square root; rows are queries, columns keys"
    on.text((start + bar.width + GAP, y), text, WRITING, _font(11))


def _some(count: int, most: int) -> list[int]:
    """Return at most `most` of the numbers below `count`, including the first and the last."""
    if count <= most:
        return list(range(count))
    return [round(place * (count - 1) / (most - 1)) for place in range(most)]


@cache
def _palette() -> np.ndarray:
    return (255 * colormaps["viridis"](np.arange(256))[:, :3]).astype(np.uint8)


@cache
def _font(size: int) -> ImageFont.FreeTypeFont:
    return ImageFont.truetype(f"{get_data_path()}/fonts/ttf/DejaVuSans.ttf", size)


def _width(text: str, size: int = 11) -> int:
    return round(_font(size).getlength(text)) + 1
