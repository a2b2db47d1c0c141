"""The elements of an SVG document, with the sizes and colours of a drawing.

Lengths are pixels; heights count from the bottom, so `Sheet` negates them. The colours follow the
reader's light or dark setting. No font is loaded: `text_width` is enough for all common fonts.
"""

from dataclasses import dataclass, field
from html import escape
from typing import Literal

Point = tuple[float, float]
Line = Literal["stream", "carry"]

RADIUS = 8
"""Radius of the circle of a sum."""
SIZES = {"": 12.0, "name": 14.0, "side": 12.0, "small": 11.0, "tiny": 10.0}
"""Sizes of text, by kind."""
# Fill and outline in light mode, then in dark mode.
SHAPES = {
    "page": ("#ffffff", "#d1d9e0", "#12161c", "#323a45"),
    "frame": ("#f5f7f9", "#d1d9e0", "#1a2029", "#3a4350"),
    "norm": ("#fff1c9", "#a87b00", "#41350f", "#c9a227"),
    "gain": ("#fde5f1", "#b83280", "#45182f", "#e37fb2"),
    "SA": ("#e0ebff", "#3267c8", "#172c52", "#79a6ff"),
    "CA": ("#ebe5ff", "#6d4bc3", "#2b2152", "#a98fff"),
    "FF": ("#dff3e3", "#2b7a41", "#14361f", "#62c07e"),
    "sum": ("#ffffff", "#4b5563", "#12161c", "#a9b4c2"),
}
LINES = {"stream": ("#4b5563", "#a9b4c2"), "carry": ("#c2410c", "#fb923c")}
WORDS = ("#1b2027", "#e8edf3")
QUIET = ("#4b5563", "#a9b4c2")
SIGNS = {
    "alpha": "α",
    "beta": "β",
    "gamma": "γ",
    "1/sqrt(n)": "1/√n",
    "sqrt(d_k)": "√d",
    "_(n-1)": "ₙ₋₁",
    "Z_n": "Zₙ",
    "S_n": "Sₙ",
    "W_0": "W₀",
    "^T": "ᵀ",
    "dW": "ΔW",
    "sum ": "Σ",
    "* ": "× ",
    " - ": " − ",
}
_FIXED = (
    "text{font-family:Helvetica,Arial,sans-serif;text-anchor:middle}.left{text-anchor:start}"
    ".name,.side{font-weight:bold}path{fill:none;stroke-width:1.4}.carry{stroke-dasharray:5 2}"
    ".halo{stroke-width:5}"
)


def signs(text: str) -> str:
    """Return a label with the signs of mathematics."""
    for word, sign in SIGNS.items():
        text = text.replace(word, sign)
    return text


def text_width(text: str, kind: str = "") -> float:
    """Return a width in which `text` fits, whatever the sans-serif font."""
    narrow = sum(letter in " .,:;'()|fijlrtI-₁₋ₙ₀" for letter in text)
    return SIZES[kind] * (0.63 * (len(text) - narrow) + 0.37 * narrow)


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
