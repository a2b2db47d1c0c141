"""The drawing operations, and the sizes and colours that all renderers share.

Lengths are pixels; heights count from the bottom.
"""

from typing import Literal, Protocol

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


def signs(text: str) -> str:
    """Return a label with the signs of mathematics."""
    for word, sign in SIGNS.items():
        text = text.replace(word, sign)
    return text


def text_width(text: str, kind: str = "") -> float:
    """Return a width in which `text` fits, whatever the sans-serif font."""
    narrow = sum(letter in " .,:;'()|fijlrtI-₁₋ₙ₀" for letter in text)
    return SIZES[kind] * (0.63 * (len(text) - narrow) + 0.37 * narrow)


class Surface(Protocol):
    """A renderer: `svg.Sheet` and `raster.Raster` have these operations."""

    def line(self, *points: Point, kind: Line = "stream", head: bool = False) -> None: ...

    def box(self, x: float, y: float, size: Point, kind: str, radius: float = 4) -> None: ...

    def text(
        self, x: float, y: float, text: str, kind: str = "", *, left: bool = False
    ) -> None: ...

    def dot(self, x: float, y: float) -> None: ...

    def plus(self, x: float, y: float) -> None: ...
