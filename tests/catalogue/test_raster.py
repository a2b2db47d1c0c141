"""Drawings as pixels: the same things in the same places as in the SVG."""

import re

import numpy as np
import pytest
from PIL import ImageColor

from lightning_app.blocks.presets import PRESETS
from lightning_app.catalogue.presets import drawings, resolve_preset
from lightning_app.catalogue.raster import SCALE, image
from lightning_app.catalogue.surface import LINES, SHAPES
from lightning_app.catalogue.svg import picture


@pytest.mark.parametrize("preset", PRESETS)
def test_every_shape_of_the_svg_is_there(preset: str) -> None:
    stacks = drawings(resolve_preset(preset, 3, 2))
    svg, drawn = picture(preset, stacks), image(preset, stacks)
    size = re.search(r'<svg [^>]* width="([\d.]+)" height="([\d.]+)"', svg)
    assert size is not None
    assert drawn.size == pytest.approx([SCALE * float(length) for length in size.groups()], abs=1)
    body = svg.partition("</defs>")[2]
    fills = {kind: SHAPES[kind][0] for kind in SHAPES if f'class="{kind}"' in body}
    fills |= {kind: LINES[kind][0] for kind in LINES if f'class="{kind}"' in body}
    colours = {tuple(pixel) for pixel in np.asarray(drawn).reshape(-1, 3)}
    assert fills
    assert {kind for kind, fill in fills.items() if ImageColor.getrgb(fill) not in colours} == set()


def test_a_box_lies_where_the_svg_has_it() -> None:
    """The middle of the left edge's inside, read off in both."""
    stacks = drawings(resolve_preset("sas", 3, 3))
    svg, pixels = picture("sas", stacks), np.asarray(image("sas", stacks))
    height = float(re.findall(r'height="([\d.]+)"', svg)[0])
    for kind in ("norm", "gain", "SA", "CA", "FF"):
        found = re.findall(
            rf'<rect class="{kind}" x="([-\d.]+)" y="([-\d.]+)" width="[\d.]+" height="([\d.]+)"',
            svg,
        )
        assert found
        for x, y, tall in found:
            row = SCALE * (height + float(y) + float(tall) / 2)
            pixel = pixels[round(row), round(SCALE * (float(x) + 3))]
            assert tuple(pixel) == ImageColor.getrgb(SHAPES[kind][0])
