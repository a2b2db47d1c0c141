"""Attention maps as one image: a square for each layer and head, the deepest layer on top."""

import textwrap
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

import numpy as np
from matplotlib import colormaps, get_data_path
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

SQUARE, GAP = 72, 6
"""Pixels of a map, and between maps."""
LINE = 18
LAYERS, HEADS = 6, 8
"""The largest number of rows and of columns of squares."""
TITLES = {
    "encoder": "encoder, self-attention",
    "decoder": "decoder, self-attention",
    "cross": "decoder, cross-attention",
}
HIDDEN = (225, 225, 225)
WRITING = (30, 34, 40)


def attention_image(maps: Mapping[str, Tensor], lines: Sequence[str]) -> Image.Image:
    """Return the maps (layer, head, query, key) of each name side by side, `lines` below them.

    A row of a map is a query, a column a key. The colour is the square root of the weight, from 0
    to 1, as many weights are small; masked cells and NaN are grey.
    """
    panels = [_panel(TITLES[name], each.numpy()) for name, each in maps.items()]
    width = sum(panel.width + 2 * GAP for panel in panels) + 2 * GAP
    said = [part for line in lines for part in textwrap.wrap(line, max(40, width // 7))]
    top = max(panel.height for panel in panels) + 2 * GAP
    picture = Image.new("RGB", (width, top + LINE * (len(said) + 1) + 2 * GAP), "white")
    x = 2 * GAP
    for panel in panels:
        picture.paste(panel, (x, GAP))
        x += panel.width + 2 * GAP
    on = ImageDraw.Draw(picture)
    _scale(picture, on, top)
    for place, line in enumerate(said, start=1):
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
    """Return colours, (query, key, 3) uint8."""
    colours = _palette()[(255 * np.sqrt(np.nan_to_num(weights).clip(0, 1))).astype(np.uint8)]
    return np.where(np.isfinite(weights)[..., None], colours, np.array(HIDDEN, np.uint8))


def _scale(picture: Image.Image, on: ImageDraw.ImageDraw, y: int) -> None:
    """Draw the legend of the colours at height `y`."""
    bar = Image.fromarray(np.repeat(_palette()[None, ::2], 10, axis=0))
    start = 2 * GAP + _width("weight 0 ")
    on.text((2 * GAP, y), "weight 0", WRITING, _font(11))
    picture.paste(bar, (start, y + 2))
    text = "1, as its square root; rows are queries, columns keys"
    on.text((start + bar.width + GAP, y), text, WRITING, _font(11))


def _some(count: int, most: int) -> list[int]:
    """Return at most `most` of the numbers below `count`, the first and the last among them."""
    if count <= most:
        return list(range(count))
    return [round(place * (count - 1) / (most - 1)) for place in range(most)]


@cache
def _palette() -> np.ndarray:
    return (255 * colormaps["viridis"](np.arange(256))[:, :3]).astype(np.uint8)


@cache
def _font(size: int) -> ImageFont.FreeTypeFont:
    return ImageFont.truetype(Path(get_data_path(), "fonts", "ttf", "DejaVuSans.ttf"), size)


def _width(text: str, size: int = 11) -> int:
    return round(_font(size).getlength(text)) + 1
