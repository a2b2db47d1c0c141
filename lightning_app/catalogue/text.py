"""Presets as text: the table, and the specification of a single preset.

Drawings use plain characters and at most 80 columns; their words also fit narrower terminals.

The stream runs from left to right. A sub-layer is a piece of it: a main line, lines above it
(carried scores, a second stream) and lines below it (skips).

The resolved specification of stacks groups equal layers and omits defaults.
"""

import inspect
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from html import escape
from pathlib import Path

from rich import box
from rich.table import Table

from lightning_app.blocks.presets import PRESETS
from lightning_app.blocks.residual import SUM, ResidualSpec
from lightning_app.blocks.stack import Stack, StackSpec
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
    stack_drawing,
    used_fields,
)
from lightning_app.catalogue.svg import picture
from lightning_app.core.errors import UserError, nearest
from lightning_app.core.files import write_whole
from lightning_app.core.registry import OWN
from lightning_app.models.heads import ArchitectureConfig
from lightning_app.models.initialization import count_parameters
from lightning_app.models.stack import BlockStack

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


BASELINE = "pre_ln"
Stacks = Mapping[Side, StackSpec]
REGENERATE = "ablate blocks --svg-dir docs/blocks"
LETTERS = (
    "x is the stream, f a sub-layer, N a norm; SA is self-attention, CA cross-attention, FF the",
    "feed-forward, A an attention map. C, its centre, is the softmax of the mask, so that it",
    "respects padding and causality. L is the depth of a stack; l and n count layers from 1.",
    "",
    "The stream of a drawing runs upwards. A gain is pink and shows its initial value; a dashed",
    "orange line is what an attention passes to the layer above. The drawings are made from the",
    "specifications, never from names.",
)


def resolve_preset(name: str, encoder_depth: int, decoder_depth: int) -> Stacks:
    """Return the stacks of preset `name`; a stack of depth 0 is omitted.

    Raises:
        UserError: for an unknown preset or an invalid depth.
    """
    if name not in PRESETS:
        raise UserError(f"blocks: no preset '{name}'{nearest(name, PRESETS)}{OWN}")
    if min(encoder_depth, decoder_depth) < 0 or encoder_depth == decoder_depth == 0:
        raise UserError(
            f"blocks: --encoder-depth {encoder_depth} --decoder-depth {decoder_depth}: at least 1 "
            "block, and 0 in the other stack for an encoder or a decoder alone"
        )
    decoder: Side = "decoder" if encoder_depth else "decoder alone"
    depths: dict[Side, int] = {"encoder": encoder_depth, decoder: decoder_depth}
    try:
        return {
            side: PRESETS[name](
                Stack(
                    depth=depth,
                    peer_depth=sum(depths.values()) - depth,
                    causal=side != "encoder",
                    cross=side == "decoder",
                )
            )
            for side, depth in depths.items()
            if depth
        }
    except ValueError as error:
        raise UserError(f"blocks: {error}") from error


def drawings(stacks: Stacks) -> list[Drawing]:
    return [stack_drawing(spec, side) for side, spec in stacks.items()]


def stack_parameters(stacks: Stacks) -> int:
    """Return the number of parameters of the stacks at the usual sizes, without embeddings."""
    sizes = ArchitectureConfig().sizes()
    return sum(
        count_parameters(partial(BlockStack, spec, sizes, cross=side == "decoder"))
        for side, spec in stacks.items()
    )


def parameter_ratios(
    names: Iterable[str], encoder_depth: int, decoder_depth: int
) -> dict[str, float]:
    """Return the parameters of presets relative to those of `BASELINE`."""
    one = stack_parameters(resolve_preset(BASELINE, encoder_depth, decoder_depth))
    return {
        name: stack_parameters(resolve_preset(name, encoder_depth, decoder_depth)) / one
        for name in names
    }


def caption(encoder_depth: int, decoder_depth: int) -> str:
    """Return a sentence explaining the ratios."""
    usual = ArchitectureConfig()
    depth = "+".join(str(each) for each in (encoder_depth, decoder_depth) if each)
    return (
        f"Parameters: those of the stacks relative to {BASELINE}, without embeddings, "
        f"at depth {depth}, model_dim {usual.model_dim}, ff_dim {usual.ff_dim}, "
        f"{usual.num_heads} heads."
    )


def preset_table(encoder_depth: int, decoder_depth: int, *, wide: bool) -> Table:
    """Return the table of presets; unless `wide`, their texts share one column."""
    headings = ("equation", "what it fixes", "paper")
    columns = headings if wide else (", ".join(headings),)
    shown = Table("preset", *columns, box=box.SIMPLE, show_lines=True)
    shown.add_column("parameters", justify="right")
    shown.caption = caption(encoder_depth, decoder_depth)
    shares = parameter_ratios(PRESETS, encoder_depth, decoder_depth)
    for name, preset in PRESETS.items():
        fixes = preset.fixes if wide else f"fixes: {preset.fixes}"
        if preset.difference:
            fixes += f"\ndiffers: {preset.difference}"
        cells = (preset.equation, fixes, preset.paper)
        shown.add_row(name, *(cells if wide else ["\n".join(cells)]), f"{shares[name]:.3f}")
    return shown


def preset_lines(name: str, encoder_depth: int, decoder_depth: int, width: int) -> list[str]:
    """Return the details of a preset in lines of `width`; drawings may have up to 80 columns."""
    stacks = resolve_preset(name, encoder_depth, decoder_depth)
    preset = PRESETS[name]
    share = parameter_ratios([name], encoder_depth, decoder_depth)[name]
    description = inspect.getdoc(preset.build) or ""
    lines = [name, ""]
    lines += wrapped_lines(f"equation: {preset.equation}", 0, 10, width)
    lines += wrapped_lines(f"fixes:    {preset.fixes}", 0, 10, width)
    lines += wrapped_lines(f"paper:    {preset.paper}", 0, 10, width)
    if preset.difference:
        lines += wrapped_lines(f"differs:  {preset.difference}", 0, 10, width)
    for paragraph in description.replace("``", "").split("\n\n"):
        lines += ["", *wrapped_lines(" ".join(paragraph.split()), width=width)]
    count = f"{stack_parameters(stacks):,} parameters, {share:.3f} of {BASELINE}'s."
    lines += ["", *wrapped_lines(f"{count} {caption(encoder_depth, decoder_depth)}", width=width)]
    return [*lines, "", *stack_lines(stacks, width)]


def stack_lines(stacks: Stacks, width: int) -> list[str]:
    """Return the drawings of stacks, and their specification."""
    lines = [*text_lines(drawings(stacks), width), ""]
    lines += [
        *wrapped_lines("The resolved specification, without defaults:", width=width),
        "",
    ]
    for depth, line in specification_lines(stacks):
        lines += wrapped_lines(line, 2 * depth, 2 * depth + 4, width)
    return lines


def write_gallery(folder: Path, encoder_depth: int, decoder_depth: int) -> int:
    """Write a picture of every preset and a page with all of them; return their number."""
    for name in PRESETS:
        stacks = resolve_preset(name, encoder_depth, decoder_depth)
        write_whole(folder / f"{name}.svg", picture(name, drawings(stacks)))
    write_whole(folder / "README.md", gallery_page(encoder_depth, decoder_depth))
    return len(PRESETS)


def table_rows(encoder_depth: int, decoder_depth: int) -> list[str]:
    """Return the table of presets in Markdown."""
    shares = parameter_ratios(PRESETS, encoder_depth, decoder_depth)
    rows = ["| preset | equation | paper | parameters |", "|---|---|---|---:|"]
    for name, preset in PRESETS.items():
        cells = (f"[`{name}`]({name}.svg)", _markdown(preset.equation))
        rows.append(f"| {' | '.join((*cells, preset.paper, f'{shares[name]:.3f}'))} |")
    return rows


def gallery_page(encoder_depth: int, decoder_depth: int) -> str:
    """Return the page of the pictures in Markdown."""
    lines = [
        "# The blocks, drawn from their specifications",
        "",
        f"Written by `{REGENERATE}`; do not edit.",
        "",
        *LETTERS,
        "",
        *table_rows(encoder_depth, decoder_depth),
        "",
        caption(encoder_depth, decoder_depth),
    ]
    for name, preset in PRESETS.items():
        stacks = resolve_preset(name, encoder_depth, decoder_depth)
        lines += ["", f"## {name}", "", f"`{preset.equation}`", "", f"{preset.paper}.", ""]
        lines += [f"Fixes: {preset.fixes}.", ""]
        if preset.difference:
            lines += [f"Differs: {_markdown(preset.difference)}.", ""]
        for paragraph in (inspect.getdoc(preset.build) or "").replace("``", "").split("\n\n"):
            lines += [*wrapped_lines(_markdown(" ".join(paragraph.split())), width=100), ""]
        lines += [f"![{name}, encoder and decoder]({name}.svg)", ""]
        lines += ["The resolved specification, without defaults:", "", "```text"]
        lines += [f"{'  ' * depth}{line}" for depth, line in specification_lines(stacks)]
        lines += ["```"]
    return "\n".join([*lines, ""])


def _markdown(text: str) -> str:
    """Return a text in which Markdown finds no tags or emphasis."""
    return escape(text, quote=False).replace("*", r"\*")
