"""Drawings as one SVG document.

Its colours follow the reader's light or dark setting. No font is loaded: boxes are wide enough for
all common fonts. SVG counts heights from the top, so `Sheet` negates them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

from lightning_app.catalogue.drawing import Drawing
from lightning_app.catalogue.sentences import description
from lightning_app.catalogue.stack_layout import lay_out
from lightning_app.catalogue.surface import LINES, QUIET, RADIUS, SHAPES, SIZES, WORDS, Line, Point

_FIXED = (
    "text{font-family:Helvetica,Arial,sans-serif;text-anchor:middle}.left{text-anchor:start}"
    ".name,.side{font-weight:bold}path{fill:none;stroke-width:1.4}.carry{stroke-dasharray:5 2}"
    ".halo{stroke-width:5}"
)


def picture(name: str, drawings: Sequence[Drawing]) -> str:
    """Return the drawings side by side as one SVG document."""
    sheet = Sheet()
    size = lay_out(sheet, name, drawings)
    title = f"{name}: {' and '.join(drawing.side for drawing in drawings)}"
    return sheet.written(size, title, description(drawings))


@dataclass
class Sheet:
    """The elements drawn so far. Lines are below boxes, and frames below everything."""

    frames: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    shapes: list[str] = field(default_factory=list)

    def line(self, *points: Point, kind: Line = "stream", head: bool = False) -> None:
        path = "M" + "L".join(f"{x:g} {-y:g}" for x, y in points)
        marker = f' marker-end="url(#{kind})"' if head else ""
        if kind == "carry":
            self.lines.append(f'<path class="halo" d="{path}"/>')
        self.lines.append(f'<path class="{kind}" d="{path}"{marker}/>')

    def box(self, x: float, y: float, size: Point, kind: str, radius: float = 4) -> None:
        """Draw a box whose lower left corner is at `x` and `y`."""
        width, height = size
        (self.frames if kind == "frame" else self.shapes).append(
            f'<rect class="{kind}" x="{x:g}" y="{-y - height:g}" width="{width:g}" '
            f'height="{height:g}" rx="{radius:g}"/>'
        )

    def text(self, x: float, y: float, text: str, kind: str = "", *, left: bool = False) -> None:
        names = " ".join([kind] * bool(kind) + ["left"] * left)
        shown = f' class="{names}"' if names else ""
        text = escape(text, quote=False)
        self.shapes.append(f'<text{shown} x="{x:g}" y="{-y:g}">{text}</text>')

    def dot(self, x: float, y: float) -> None:
        self.shapes.append(f'<circle class="dot" cx="{x:g}" cy="{-y:g}" r="2.5"/>')

    def plus(self, x: float, y: float) -> None:
        cross = f"M{x - 4:g} {-y:g}h8M{x:g} {-y - 4:g}v8"
        self.shapes.append(f'<circle class="sum" cx="{x:g}" cy="{-y:g}" r="{RADIUS}"/>')
        self.shapes.append(f'<path class="stream" d="{cross}"/>')

    def written(self, size: Point, title: str, description: str) -> str:
        """Return the document: the elements on a page of `size`."""
        width, height = size
        heads = "".join(
            f'<marker id="{kind}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
            f'markerHeight="7" orient="auto"><path class="{kind}head" d="M0 .8L7 4L0 7.2z"/>'
            "</marker>"
            for kind in LINES
        )
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{height:g}" '
                f'viewBox="0 {-height:g} {width:g} {height:g}" role="img" '
                'aria-labelledby="title desc">',
                f'<title id="title">{escape(title)}</title>',
                f'<desc id="desc">{escape(description)}</desc>',
                f"<style>{_style()}</style>",
                f"<defs>{heads}</defs>",
                f'<rect class="page" x="0.5" y="{0.5 - height:g}" width="{width - 1:g}" '
                f'height="{height - 1:g}" rx="6"/>',
                *self.frames,
                *self.lines,
                *self.shapes,
                "</svg>\n",
            ]
        )


def _style() -> str:
    sizes = "".join(
        f"{f'.{kind}' if kind else 'text'}{{font-size:{size:g}px}}" for kind, size in SIZES.items()
    )
    light, dark = (_colours(mode) for mode in (0, 1))
    return f"{_FIXED}{sizes}{light}@media(prefers-color-scheme:dark){{{dark}}}"


def _colours(mode: int) -> str:
    rules = [
        f".{kind}{{fill:{colours[2 * mode]};stroke:{colours[2 * mode + 1]}}}"
        for kind, colours in SHAPES.items()
    ]
    for kind, colours in LINES.items():
        rules.append(f".{kind}{{stroke:{colours[mode]}}}.{kind}head{{fill:{colours[mode]}}}")
    rules += [
        f".halo{{stroke:{SHAPES['frame'][2 * mode]}}}.dot{{fill:{LINES['stream'][mode]}}}",
        f"text{{fill:{WORDS[mode]}}}.small,.tiny{{fill:{QUIET[mode]}}}",
    ]
    return "".join(rules)
