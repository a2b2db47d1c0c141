"""Resolve, count and draw the presets, and describe them in a table, in lines and in pictures."""

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from html import escape
from pathlib import Path

from rich import box
from rich.table import Table

from lightning_app.blocks.presets import PRESETS
from lightning_app.blocks.stack import Stack, StackSpec
from lightning_app.catalogue.parts import Drawing, Side, stack_drawing
from lightning_app.catalogue.svg import picture, specification_lines, text_lines, wrapped_lines
from lightning_app.core.errors import UserError, nearest
from lightning_app.core.files import write_whole
from lightning_app.core.registry import OWN
from lightning_app.models.heads import ArchitectureConfig
from lightning_app.models.initialization import count_parameters
from lightning_app.models.stack import BlockStack

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
            f"blocks: --encoder-depth {encoder_depth} --decoder-depth {decoder_depth}: neither may "
            "be negative, and at least one must be greater than 0"
        )
    decoder: Side = "decoder" if encoder_depth else "decoder only"
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
    # Tables of a block count as one row, since embeddings do not count.
    sizes = replace(ArchitectureConfig().sizes(), vocabulary=1)
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
    lines += [*wrapped_lines("The resolved specification, without defaults:", width=width), ""]
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
        cells = (each.replace("|", "\\|") for each in (*cells, preset.paper))
        rows.append(f"| {' | '.join((*cells, f'{shares[name]:.3f}'))} |")
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
    return escape(text, quote=False).replace("*", r"\*")
