"""Drawings as pixels, for programs that cannot show SVG (TensorBoard)."""

import math
from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path

from matplotlib import get_data_path
from PIL import Image, ImageDraw, ImageFont

from lightning_app.catalogue.drawing import Drawing
from lightning_app.catalogue.stack_layout import lay_out
from lightning_app.catalogue.surface import LINES, QUIET, RADIUS, SHAPES, SIZES, WORDS, Line, Point

SCALE = 2
"""Pixels of the image per unit of length of the layout."""
STROKE = 1.4
ARROW = (8.6, 3.9)
"""Length and half width of the head of an arrow."""
DASHES = (5.0, 2.0)
BOLD = ("name", "side")


def image(name: str, drawings: Sequence[Drawing]) -> Image.Image:
    """Return the drawings side by side in light colours, in the layout of `svg.picture`."""
    raster = Raster()
    return raster.drawn(lay_out(raster, name, drawings))


@cache
def font(size: float, *, bold: bool = False) -> ImageFont.FreeTypeFont:
    """Return a font with mathematical signs, from matplotlib."""
    file = "DejaVuSans-Bold.ttf" if bold else "DejaVuSans.ttf"
    return ImageFont.truetype(Path(get_data_path(), "fonts", "ttf", file), size)


class Raster:
    """A surface of pixels. Frames are below lines, lines below boxes, as on an `svg.Sheet`."""

    def __init__(self) -> None:
        self._frames: list[Callable[[ImageDraw.ImageDraw], None]] = []
        self._lines: list[Callable[[ImageDraw.ImageDraw], None]] = []
        self._shapes: list[Callable[[ImageDraw.ImageDraw], None]] = []
        self._height = 0.0

    def line(self, *points: Point, kind: Line = "stream", head: bool = False) -> None:
        colour = LINES[kind][0]

        def draw(on: ImageDraw.ImageDraw) -> None:
            if kind == "carry":
                on.line(self._places(points), SHAPES["frame"][0], round(5 * SCALE))
                for dash in _dashes(points):
                    on.line(self._places(dash), colour, round(STROKE * SCALE))
            else:
                on.line(self._places(points), colour, round(STROKE * SCALE))
            if head:
                on.polygon(self._places(_head(points[-2], points[-1])), fill=colour)

        self._lines.append(draw)

    def box(self, x: float, y: float, size: Point, kind: str, radius: float = 4) -> None:
        corners = (x, y + size[1]), (x + size[0], y)
        fill, outline = SHAPES[kind][:2]

        def draw(on: ImageDraw.ImageDraw) -> None:
            on.rounded_rectangle(self._places(corners), radius * SCALE, fill, outline, SCALE)

        (self._frames if kind == "frame" else self._shapes).append(draw)

    def text(self, x: float, y: float, text: str, kind: str = "", *, left: bool = False) -> None:
        # DejaVu Sans is wider than the fonts for which the boxes are sized.
        letters = font(0.9 * SIZES[kind] * SCALE, bold=kind in BOLD)
        colour = (QUIET if kind in ("small", "tiny") else WORDS)[0]

        def draw(on: ImageDraw.ImageDraw) -> None:
            on.text(self._places([(x, y)])[0], text, colour, letters, "ls" if left else "ms")

        self._shapes.append(draw)

    def dot(self, x: float, y: float) -> None:
        self._circle(x, y, 2.5, LINES["stream"][0], LINES["stream"][0])

    def plus(self, x: float, y: float) -> None:
        fill, outline = SHAPES["sum"][:2]
        self._circle(x, y, RADIUS, fill, outline)
        for ends in (((x - 4, y), (x + 4, y)), ((x, y - 4), (x, y + 4))):

            def draw(on: ImageDraw.ImageDraw, ends: Sequence[Point] = ends) -> None:
                on.line(self._places(ends), outline, round(STROKE * SCALE))

            self._shapes.append(draw)

    def drawn(self, size: Point) -> Image.Image:
        """Return the picture on a page of `size`."""
        self._height = size[1]
        width, height = (math.ceil(length * SCALE) for length in size)
        picture = Image.new("RGB", (width, height), SHAPES["page"][0])
        on = ImageDraw.Draw(picture)
        for draw in (*self._frames, *self._lines, *self._shapes):
            draw(on)
        return picture

    def _circle(self, x: float, y: float, radius: float, fill: str, outline: str) -> None:
        def draw(on: ImageDraw.ImageDraw) -> None:
            on.circle(self._places([(x, y)])[0], radius * SCALE, fill, outline, SCALE)

        self._shapes.append(draw)

    def _places(self, points: Sequence[Point]) -> list[Point]:
        """Return pixel coordinates, which count from the top."""
        return [(x * SCALE, (self._height - y) * SCALE) for x, y in points]


def _head(before: Point, tip: Point) -> list[Point]:
    """Return the triangle at the `tip` of an arrow that comes from `before`."""
    long, half = ARROW
    length = math.dist(before, tip)
    x, y = (tip[0] - before[0]) / length, (tip[1] - before[1]) / length
    foot = tip[0] - long * x, tip[1] - long * y
    return [tip, (foot[0] - half * y, foot[1] + half * x), (foot[0] + half * y, foot[1] - half * x)]


def _dashes(points: Sequence[Point]) -> list[tuple[Point, Point]]:
    """Return the dashes of a dashed line."""
    pieces = []
    for start, end in pairwise(points):
        length, done = math.dist(start, end), 0.0
        while done < length:
            until = min(done + DASHES[0], length)
            ends = [
                (
                    start[0] + at / length * (end[0] - start[0]),
                    start[1] + at / length * (end[1] - start[1]),
                )
                for at in (done, until)
            ]
            pieces.append((ends[0], ends[1]))
            done += sum(DASHES)
    return pieces
