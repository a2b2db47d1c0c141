"""Drawings as one SVG document, and as text with the specification of stacks.

In the document the stream runs upwards, as in the figures of the papers. Branches are on it, skips
and a second stream on its right, carried scores and the skip from the bottom on its left.

In text, of plain characters and at most 80 columns, it runs from left to right; the words also fit
narrower terminals. A sub-layer is a piece of it: a main line, lines above it (carried scores, a
second stream) and lines below it (skips).

The resolved specification of stacks groups equal layers and omits defaults.
"""

import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Literal

from lightning_app.blocks.residual import SUM, ResidualSpec
from lightning_app.blocks.stack import StackSpec
from lightning_app.catalogue.parts import (
    NAMES,
    Branch,
    Drawing,
    LayerRun,
    NormPart,
    Part,
    Side,
    SubLayer,
    Sum,
    changed_fields,
    description,
    layer_names,
    phrase,
    runs_of,
    used_fields,
)

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


GAP = 15
"""Length of the line between two elements on the stream."""
LINE = 15
"""Height of a line of text."""
MARGIN = 12
LANE = 17
"""Distance between parallel lines."""
_CARRIED = {"scores": "Z", "qk_sum": "Σq, Σk"}


def picture(name: str, drawings: Sequence[Drawing]) -> str:
    """Return the drawings side by side as one SVG document."""
    sheet = Sheet()
    size = lay_out(sheet, name, drawings)
    title = f"{name}: {' and '.join(drawing.side for drawing in drawings)}"
    return sheet.written(size, title, description(drawings))


def lay_out(sheet: Sheet, name: str, drawings: Sequence[Drawing]) -> Point:
    """Draw the drawings side by side with their name above, and return the total size."""
    x, top = float(MARGIN), 0.0
    for drawing in drawings:
        column = Column(sheet, drawing, x)
        top = max(top, column.draw(MARGIN))
        x += column.width + MARGIN
    size = max(x, text_width(name, "name") + 2 * MARGIN), top + 2.5 * LINE
    sheet.text(size[0] / 2, size[1] - 1.5 * LINE, name, "name")
    return size


def part_lines(part: Part) -> list[str]:
    """Return the lines of text in the box of a norm or a gain."""
    if isinstance(part, NormPart):
        return [part.name]
    return [signs(f"* {part.value}"), *part.notes]


def part_size(part: Part) -> tuple[float, float]:
    first, *notes = part_lines(part)
    width = max([text_width(first), *(text_width(note, "tiny") for note in notes)])
    least = 82.0 if isinstance(part, NormPart) else 40.0
    return max(least, width + 14), 22.0 + 12 * len(notes)


def card_lines(branch: Branch) -> list[tuple[str, str]]:
    """Return the lines of text in a sub-layer, from the top, each with its kind."""
    lines = [(NAMES[branch.kind], "")]
    if branch.kind == "CA":
        lines.append(("to the encoder's output", "tiny"))
    for part in branch.inside:
        lines.append((signs(part.label), "small"))
        lines += [(signs(note), "tiny") for note in part.notes]
    return lines


def card_size(branch: Branch) -> tuple[float, float]:
    lines = card_lines(branch)
    width = max(text_width(text, kind) for text, kind in lines)
    return max(86.0, width + 14), 15.0 + LINE * len(lines)


def carried_name(branch: Branch) -> str:
    """Return the label of the state that an attention carries to the layer above."""
    return _CARRIED.get(branch.carry, branch.carry)


def reach(one: Sum) -> float:
    """Return how far the boxes extend to either side of the stream."""
    parts = [*one.shared, *one.norm]
    parts += [part for branch in one.branches for part in (*branch.before, *branch.after)]
    widest = max((part_size(part)[0] for part in parts), default=0.0)
    joined = sum(branch_width(b) + GAP for b in one.branches) - GAP
    return max(joined, widest, 2 * sum_radius(one)) / 2


def sum_radius(one: Sum) -> float:
    """Return half the width of the symbol that joins skip and branch: a plus or a rule's name."""
    return RADIUS if one.rule == SUM else text_width(one.rule) / 2 + 7


def branch_width(branch: Branch) -> float:
    parts = [part_size(part)[0] for part in (*branch.before, *branch.after)]
    return max([card_size(branch)[0], *parts])


class Column:
    """One stack, drawn from the bottom up."""

    def __init__(self, sheet: Sheet, drawing: Drawing, left: float) -> None:
        self.sheet = sheet
        self.drawing = drawing
        self.edge = left
        sums = drawing.sums()
        half = max(46.0, *(reach(one) for one in sums))
        over = [part_size(part)[0] for one in sums for part in one.skip or ()]
        side = max([LANE, *(width / 2 + 8 for width in over)])
        # From the stream to the left: carried scores of each attention, then the bottom's skip.
        carried: dict[SubLayer, float] = {}
        before = half
        for branch in (branch for one in sums for branch in one.branches):
            if branch.carry != "none" and branch.kind not in carried:
                before += max(LANE, text_width(carried_name(branch), "small") + 8)
                carried[branch.kind] = before
        bottom = before + side if any(one.bottom for one in sums) else before
        before = bottom + side if bottom > before else before + MARGIN
        # To the right: skips, then the second stream.
        after = half + side
        total = after + side
        if drawing.dual:
            after = total + 46.0
        elif any(one.skip is not None for one in sums):
            after += side
        else:
            after = half + MARGIN
        notes = [text_width(note, "tiny") for note in self._notes()]
        spare = max(0.0, max(notes, default=0.0) - before - after)
        self.width = before + after + spare
        self.centre = left + before + spare / 2
        self.carried = {kind: self.centre - lane for kind, lane in carried.items()}
        self.bottom = self.centre - bottom
        self.skip = self.centre + half + side
        self.total = self.centre + total
        self.drawn_to = 0.0
        """The height up to which the line of the stream is drawn."""
        self.leaving: dict[SubLayer, tuple[float, float, str]] = {}
        """The start and the name of each carried line in the current frame."""

    def _notes(self) -> list[str]:
        several = len(self.drawing.runs) > 1
        notes = list(self.drawing.notes)
        for run in self.drawing.runs:
            notes += [f"{run.label}, {note}" if several else note for note in run.notes]
        return [line for note in notes for line in signs(note).split("; ")]

    def draw(self, y: float) -> float:
        """Draw the stack from height `y` up, and return its top."""
        sheet, drawing, centre = self.sheet, self.drawing, self.centre
        for note in reversed(self._notes()):
            sheet.text(self.edge + self.width / 2, y, note, "tiny")
            y += LINE - 2
        sheet.text(centre, y, "embedding", "small")
        y += LINE - 4
        self.drawn_to = y
        for part in drawing.entry:
            y = self._part(centre, y + GAP, part)
        if drawing.dual:
            y += GAP
            sheet.dot(centre, y)
        foot = y
        for run in drawing.runs:
            y = self._run(run, y + GAP)
        if drawing.dual:
            y = self._join_total(foot, y)
        else:
            for part in drawing.exit:
                y = self._part(centre, y + GAP, part)
        y += GAP + 6
        sheet.line((centre, self.drawn_to), (centre, y), head=True)
        sheet.text(centre, y + 6, drawing.side, "side")
        return y + LINE

    def _join_total(self, foot: float, y: float) -> float:
        """Draw the second stream from `foot` up, and its sum with the first stream above `y`."""
        sheet, centre = self.sheet, self.centre
        top = y
        for part in self.drawing.exit:
            top = self._part(self.total, top + GAP, part)
        sheet.line((centre, foot), (self.total, foot), (self.total, y + GAP))
        y = top + GAP + RADIUS
        sheet.line((self.total, top), (self.total, y), (centre + RADIUS, y), head=True)
        sheet.plus(centre, y)
        return y + RADIUS

    def _part(self, x: float, y: float, part: Part) -> float:
        width, height = part_size(part)
        kind, radius = ("norm", 4) if isinstance(part, NormPart) else ("gain", 10)
        self.sheet.box(x - width / 2, y, (width, height), kind, radius)
        first, *notes = part_lines(part)
        self.sheet.text(x, y + height - 15, first)
        for place, note in enumerate(notes, start=1):
            self.sheet.text(x, y + height - 15 - 12 * place, note, "tiny")
        return y + height

    def _run(self, run: LayerRun, y: float) -> float:
        """Draw one layer of the run in a frame, and return its top."""
        sheet, foot = self.sheet, y
        y = foot + 4
        self.leaving = {}
        for one in run.sums:
            y = self._sum(one, y, foot, follows=run.last > 1)
        sheet.text(self.centre + 8, y + 8, run.label.replace("-", "–"), "small", left=True)
        top = y + 8 + LINE
        for kind, (card, start, name) in self.leaving.items():
            lane = self.carried[kind]
            sheet.line((card, start), (lane, start), (lane, top + 7), kind="carry", head=True)
            sheet.text(lane + 5, top - 15, name, "small", left=True)
        if self.drawing.dual:
            sheet.text(self.total + 6, top - 15, "r", "small", left=True)
        sheet.box(self.edge, foot, (self.width, top - foot), "frame", 8)
        return top

    def _sum(self, one: Sum, y: float, foot: float, *, follows: bool) -> float:
        """Draw a formula from `y` up, in the frame that starts at `foot`; return its top."""
        sheet, centre = self.sheet, self.centre
        y += GAP - 4
        start = y
        if one.skip is not None:
            sheet.dot(centre, start)
        for part in one.shared:
            y = self._part(centre, y + GAP, part)
        if len(one.branches) == 1:
            y = self._branch(one.branches[0], centre, y, foot, follows=follows)
        else:
            y = self._fork(one.branches, y, foot, follows=follows)
        if self.drawing.dual:
            y += GAP
            sheet.dot(centre, y)
            sheet.line((centre, y), (self.total - RADIUS, y), head=True)
            sheet.plus(self.total, y)
        if one.joins:
            tallest = max((part_size(part)[1] for part in one.skip or ()), default=0.0)
            y = max(y + GAP + RADIUS, start + tallest + GAP)
            rim = sum_radius(one)
            if one.rule == SUM:
                sheet.plus(centre, y)
            else:
                sheet.box(centre - rim, y - RADIUS, (2 * rim, 2 * RADIUS), "sum", RADIUS)
                sheet.text(centre, y - 4, one.rule)
            if one.skip is not None:
                self._over(self.skip, start, (centre + rim, y), one.skip)
            if one.bottom:
                self._over(self.bottom, foot + GAP, (centre - rim, y), one.skip or ())
            y += RADIUS
        for part in one.norm:
            y = self._part(centre, y + GAP, part)
        return y

    def _over(self, x: float, start: float, end: Point, parts: tuple[Part, ...]) -> None:
        """Draw a skip along `x` from the stream at `start` to the rim of the sum at `end`."""
        self.sheet.line((self.centre, start), (x, start), (x, end[1]), end, head=True)
        for part in parts:
            self._part(x, (start + end[1] - part_size(part)[1]) / 2, part)

    def _fork(self, branches: tuple[Branch, ...], y: float, foot: float, *, follows: bool) -> float:
        """Draw branches side by side up to their sum; return the lowest height of that sum."""
        sheet, centre = self.sheet, self.centre
        sheet.line((centre, self.drawn_to), (centre, y + GAP))
        y += GAP
        widths = [branch_width(branch) for branch in branches]
        x = centre - (sum(widths) + GAP * (len(widths) - 1)) / 2
        places, tops = [], []
        for branch, width in zip(branches, widths, strict=True):
            places.append(x + width / 2)
            sheet.line((centre, y), (places[-1], y), (places[-1], y + GAP))
            tops.append(self._branch(branch, places[-1], y, foot, follows=follows))
            x += width + GAP
        meet = max(tops) + GAP
        self.drawn_to = end = meet + GAP + RADIUS
        for place, top in zip(places[:-1], tops[:-1], strict=True):
            sheet.line((place, top), (place, end), (centre - RADIUS, end), head=True)
        last = places[-1]
        corner = (centre, meet), (centre, end - RADIUS)
        sheet.line((last, tops[-1]), (last, meet), *corner, head=True)
        return meet

    def _branch(self, branch: Branch, x: float, y: float, foot: float, *, follows: bool) -> float:
        """Draw a sub-layer with the norms and gains before and after it; return its top."""
        sheet = self.sheet
        for part in branch.before:
            y = self._part(x, y + GAP, part)
        sheet.line((x, y), (x, y + GAP), head=True)
        y += GAP
        width, height = card_size(branch)
        sheet.box(x - width / 2, y, (width, height), branch.kind)
        for place, (text, kind) in enumerate(card_lines(branch)):
            sheet.text(x, y + height - 19 - LINE * place, text, kind)
        if branch.carry != "none":
            card, lane = x - width / 2, self.carried[branch.kind]
            if follows:
                low = y + 0.25 * height
                sheet.line((lane, foot), (lane, low), (card, low), kind="carry", head=True)
            self.leaving[branch.kind] = card, y + 0.75 * height, carried_name(branch)
        y += height
        for part in branch.after:
            sheet.line((x, y), (x, y + GAP))
            y = self._part(x, y + GAP, part)
        return y


WIDTH = 80
LEAST = 20  # columns; narrower lines would split words
SHORT: dict[str, str] = {"layer_norm": "LN", "rms_norm": "RMS"}
CARRIED: dict[str, str] = {"scores": "Z", "qk_sum": "q,k"}
LEGEND = {
    r"\bLN\b": "LN LayerNorm",
    r"\bRMS\b": "RMS RMSNorm",
    r"\bSA\b": "SA self-attention",
    r"\bCA\b": "CA cross-attention",
    r"\bFF\b": "FF feed-forward",
    r"\* ": "* a gain",
    r"[ (_]n\b": "n the layer",
    r"\bx_0\b": "x_0 the layer's input",
    r"\bdW\b": "dW a trained matrix",
}


@dataclass
class Piece:
    """A part of the stream: lines of text, by their offset below the main line."""

    width: int = 0
    lines: dict[int, str] = field(default_factory=dict)
    taps: list[int] = field(default_factory=list)
    """Columns where a branch joins the second stream."""

    def put(self, line: int, column: int, text: str) -> None:
        old = self.lines.get(line, "").ljust(column + len(text))
        self.lines[line] = old[:column] + text + old[column + len(text) :]
        self.width = max(self.width, column + len(text))

    def labels(self, labels: Sequence[str]) -> None:
        """Append labels to the main line, each with a connection after it."""
        for label in labels:
            self.put(0, self.width, f" {label} --")

    def fill(self, line: int, column: int) -> None:
        """Extend `line` up to `column`."""
        self.lines[line] = self.lines[line].ljust(column, "-")

    def add(self, other: "Piece") -> None:
        """Append `other` on the right."""
        start = self.width
        for line, text in other.lines.items():
            self.put(line, start, text)
        self.taps += [start + tap for tap in other.taps]
        self.width = start + other.width


def text_lines(drawings: Sequence[Drawing], width: int = WIDTH) -> list[str]:
    """Return the lines of the drawings and, last, a legend; words fit `width` columns."""
    lines = []
    for drawing in drawings:
        lines += [f"{drawing.side}:", "", *_stack(drawing)]
        lines += [line for note in drawing.notes for line in wrapped_lines(note, 4, 6, width)]
        lines.append("")
        for run in drawing.runs:
            lines += [f"  {run.label}:", *_run(run, width, dual=drawing.dual), ""]
    shown = "\n".join(lines)
    words = [meaning for sign, meaning in LEGEND.items() if re.search(sign, shown)]
    return [*lines, *wrapped_lines(", ".join(words), width=width)]


def wrapped_lines(text: str, first: int = 0, rest: int = 0, width: int = WIDTH) -> list[str]:
    """Return `text` in lines of at most `width`; the first and the other lines are indented."""
    indents = " " * first, " " * rest
    return textwrap.TextWrapper(max(width, LEAST), *indents, break_on_hyphens=False).wrap(text)


def _label(part: Part) -> str:
    if isinstance(part, NormPart):
        return SHORT.get(part.kind, part.kind)
    notes = f" ({', '.join(part.notes)})" if part.notes else ""
    return f"* {part.value}{notes}"


def _chain(labels: Sequence[str]) -> str:
    """Return ``LN -- SA -- ``, with a connection after every label."""
    return "".join(f"{label} -- " for label in labels)


def _stack(drawing: Drawing) -> list[str]:
    """Return the whole stack on one line, or on two if it has a second stream."""
    runs = _chain([f"[{run.label}]" for run in drawing.runs])
    after = _chain([_label(part) for part in drawing.exit])
    start = f"  embedding -- {_chain([_label(part) for part in drawing.entry])}"
    if not drawing.dual:
        return wrapped_lines(f"{start}{runs}{after}".removesuffix(" -- ") + " --> output", 0, 6)
    start = start.removesuffix(" ") + "+-- "
    column = len(start) - 4
    second = f"'-- r, the sum of all branches -- {after}".removesuffix(" ")
    first = runs.removesuffix(" ").ljust(len(second) - 4, "-")
    return [f"{start}{first}(+)--> output", " " * column + second.ljust(len(first) + 5, "-") + "'"]


def _run(run: LayerRun, width: int, *, dual: bool) -> list[str]:
    bottom = any(one.bottom for one in run.sums)
    pieces = [_sum(one, dual=dual) for one in run.sums]
    rows, row = [], Piece()
    row.put(0, 0, "x_0 --" if bottom else "x --")
    for piece in pieces:
        if row.width + piece.width > WIDTH - 9:
            rows.append(row)
            row = Piece()
            row.put(0, 0, "    --")
        row.add(piece)
    row.put(0, row.width, "> x'")
    lines = []
    for one in [*rows, row]:
        if dual:
            _second_stream(one)
        lines += [f"    {one.lines[line]}".rstrip() for line in sorted(one.lines)]
    for branch in (branch for one in run.sums for branch in one.branches):
        for part in branch.inside:
            notes = f" ({'; '.join(part.notes)})" if part.notes else ""
            lines += wrapped_lines(f"{branch.kind}: {part.label}{notes}", 4, 8, width)
    return lines + [line for note in run.notes for line in wrapped_lines(note, 4, 6, width)]


def _second_stream(row: Piece) -> None:
    top = min(row.lines) - 1
    row.put(top, 0, "r " + "-" * (row.width - 6) + "--> r'")
    for tap in row.taps:
        row.put(top, tap - 1, "(+)")
        for line in range(top + 1, 0):
            row.put(line, tap, "|")


def _branch(branch: Branch, *, dual: bool = False) -> Piece:
    """Return `` LN -- SA -- * 0.1 --``, with the carried scores above it."""
    piece = Piece()
    piece.labels([_label(part) for part in branch.before])
    if branch.carry == "none":
        piece.labels([branch.kind])
    else:
        name = CARRIED.get(branch.carry, branch.carry)
        over = f"{name} -.  .-> {name}"
        main = f"{'-' * over.index('.')} {branch.kind} ".ljust(len(over) + 2, "-")
        piece.put(-1, piece.width, over)
        piece.put(0, piece.width - len(over), main)
    piece.labels([_label(part) for part in branch.after])
    if dual:
        piece.taps.append(piece.width)
        piece.put(0, piece.width, "+--")
    return piece


def _sum(one: Sum, *, dual: bool) -> Piece:
    """Return a residual formula: fork, branches, skip, sum and norm."""
    piece = Piece()
    if one.skip is not None:
        piece.put(0, 0, "+--")
    piece.labels([_label(part) for part in one.shared])
    fork, lowest = piece.width, 0
    first, *others = one.branches
    if others:
        piece.put(0, fork, "+--")
    piece.add(_branch(first, dual=dual))
    for branch in others:
        lowest += 1
        piece.put(lowest, fork, f"'--{_branch(branch).lines[0]}")
    if one.joins:
        piece.fill(0, piece.width)
        sign = "+" if one.rule == SUM else one.rule
        over = [_label(part) for part in one.skip or ()]
        least = len(f"'-- {' -- '.join(over)} -- ") if over else 0
        foot = max(piece.width, least) + 1
        piece.put(0, piece.width, "-" * (foot - 1 - piece.width) + f"({sign})--")
        for line in range(1, lowest + 1):
            piece.fill(line, foot)
            piece.put(line, foot, "'" if line == lowest and one.skip is None else "|")
        if one.skip is not None:
            for line in range(1, lowest + 1):
                piece.put(line, 0, "|")
            lowest += 1
            middle = f" {' -- '.join(over)} " if over else ""
            piece.put(lowest, 0, "'" + middle.center(foot - 1, "-") + ("|" if one.bottom else "'"))
            if one.bottom:
                middle = f"x_0 --{middle}" if over else "x_0 "
                piece.put(lowest + 1, 0, middle.ljust(foot, "-") + "'")
    piece.labels([_label(part) for part in one.norm])
    return piece


def specification_lines(stacks: Mapping[Side, StackSpec]) -> list[tuple[int, str]]:
    """Return lines with their depth: a stack, its layers, a field of their blocks."""
    lines = []
    for side, spec in stacks.items():
        around = ", ".join(changed_fields([spec], range(1), handled=("blocks",)))
        lines.append((0, f"{side}: {around or 'nothing around the layers'}"))
        for layers, blocks in runs_of(spec.blocks, side):
            lines.append((1, layer_names(layers[0], layers[-1])))
            shown = []
            for used in used_fields(blocks[0], side):
                parts = [getattr(block, used.name) for block in blocks]
                plain = isinstance(parts[0], ResidualSpec)  # blocks have no default for it
                default = ResidualSpec() if plain else used.default
                if any(part != default for part in parts):
                    words = phrase(parts, default, layers, outer=True)
                    shown.append((2, f"{used.name}: {words}"))
            lines += shown or [(2, "defaults")]
    return lines
