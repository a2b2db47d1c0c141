"""Presets as text: the table, and the specification of a single preset.

Drawings use plain characters and at most 80 columns; their words also fit narrower terminals.

The stream runs from left to right. A sub-layer is a piece of it: a main line, lines above it
(carried scores, a second stream) and lines below it (skips).

The resolved specification of stacks groups equal layers and omits defaults.
"""

import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from lightning_app.blocks.residual import SUM, ResidualSpec
from lightning_app.blocks.stack import StackSpec
from lightning_app.catalogue.parts import (
    Branch,
    Drawing,
    LayerRun,
    NormPart,
    Part,
    Side,
    Sum,
    changed_fields,
    layer_names,
    phrase,
    runs_of,
    used_fields,
)

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
        lines += [line for note in drawing.notes for line in wrapped_lines(note, 4, 6, width)] + [
            ""
        ]
        for run in drawing.runs:
            lines += [f"  {run.label}:", *_run(run, width, dual=drawing.dual), ""]
    shown = "\n".join(lines)
    words = [meaning for sign, meaning in LEGEND.items() if re.search(sign, shown)]
    return [*lines, *wrapped_lines(", ".join(words), width=width)]


def wrapped_lines(text: str, first: int = 0, rest: int = 0, width: int = WIDTH) -> list[str]:
    """Return `text` in lines of at most `width`; the first and the other lines are indented."""
    return textwrap.wrap(
        text,
        max(width, LEAST),
        initial_indent=" " * first,
        subsequent_indent=" " * rest,
        break_on_hyphens=False,
    )


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
    return [
        f"{start}{first}(+)--> output",
        " " * column + second.ljust(len(first) + 5, "-") + "'",
    ]


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
    """Draw the second stream above `row`; every branch joins it."""
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
