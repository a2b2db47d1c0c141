"""The command `ablate blocks`."""

import inspect
import json
from collections.abc import Sequence
from dataclasses import asdict
from html import escape
from pathlib import Path

from rich import box
from rich.table import Table

from lightning_app.blocks.presets import PRESETS, Preset
from lightning_app.blocks.stack import StackSpec
from lightning_app.catalogue.parts import Side
from lightning_app.catalogue.presets import (
    BASELINE,
    Stacks,
    caption,
    drawings,
    parameter_ratios,
    resolve_preset,
    stack_parameters,
)
from lightning_app.catalogue.svg import picture
from lightning_app.catalogue.text import WIDTH, specification_lines, text_lines, wrapped_lines
from lightning_app.core.errors import UserError
from lightning_app.core.files import write_whole
from lightning_app.grids.display import PlainConsole

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


def blocks_command(
    name: str | None,
    encoder_depth: int,
    decoder_depth: int,
    *,
    svg: Path | None = None,
    svg_dir: Path | None = None,
    as_json: bool = False,
    config: Path | None = None,
    overrides: Sequence[str] = (),
) -> int:
    """Print the table of presets, or the details of a preset or a config, or write pictures."""
    if config is not None:
        if name is not None or svg_dir is not None:
            other = "NAME" if svg_dir is None else "--svg-dir"
            raise UserError(f"blocks: --config draws the stacks of that file; leave out {other}")
        return config_command(config, overrides, svg=svg, as_json=as_json)
    if name is None and (svg is not None or as_json):
        raise UserError(
            f"blocks: {'--json' if as_json else '--svg'} needs NAME, the name of a preset, or "
            "--config FILE"
        )
    if name is not None and svg_dir is not None:
        raise UserError("blocks: --svg-dir writes all presets; use --svg FILE for one preset")
    if svg_dir is not None:
        write_gallery(svg_dir, encoder_depth, decoder_depth)
    elif name is None:
        console = PlainConsole()
        console.print(preset_table(encoder_depth, decoder_depth, wide=console.width >= 150))
    else:
        stacks = resolve_preset(name, encoder_depth, decoder_depth)
        lines = preset_lines(PRESETS[name], encoder_depth, decoder_depth, _width())
        _show(name, stacks, lines, svg=svg, as_json=as_json)
    return 0


def config_command(
    config: Path, overrides: Sequence[str], *, svg: Path | None, as_json: bool
) -> int:
    """Print the stacks of a config with overrides, or write their picture."""
    from lightning_app.config.config import model_config, read_config

    model = model_config(read_config(config, overrides)["model"])
    decoder: Side = "decoder alone" if model.architecture.kind == "decoder" else "decoder"
    sides: dict[str, Side] = {"encoder": "encoder", "decoder": decoder}
    found = model.architecture.stacks(model.block)
    stacks: dict[Side, StackSpec] = {sides[name]: spec for name, spec in found.items()}
    lines = [f"{model.block.preset}, as {config} has it", "", *stack_lines(stacks, _width())]
    _show(model.block.preset, stacks, lines, svg=svg, as_json=as_json)
    return 0


def _width() -> int:
    return min(WIDTH, PlainConsole().width)


def _show(
    title: str, stacks: Stacks, lines: Sequence[str], *, svg: Path | None, as_json: bool
) -> None:
    """Write the picture of stacks if `svg` names a file, and print them as JSON or in lines."""
    if svg is not None:
        write_whole(svg, picture(title, drawings(stacks)))
    if as_json:
        # By the names of the stacks in a model, as in `block.json` of a run.
        named = {side.partition(" ")[0]: asdict(spec) for side, spec in stacks.items()}
        print(json.dumps(named, indent=1))
    elif svg is None:
        print("\n".join(lines))


def preset_table(encoder_depth: int, decoder_depth: int, *, wide: bool) -> Table:
    """Return the table of presets; if it is not `wide`, their texts share one column."""
    said = ("equation", "what it fixes", "paper")
    columns = said if wide else (", ".join(said),)
    shown = Table("preset", *columns, box=box.SIMPLE, show_lines=True)
    shown.add_column("parameters", justify="right")
    shown.caption = caption(encoder_depth, decoder_depth)
    shares = parameter_ratios(PRESETS, encoder_depth, decoder_depth)
    for name, preset in PRESETS.items():
        fixes = preset.fixes if wide else f"fixes: {preset.fixes}"
        if preset.difference:
            fixes += f"\ndiffers: {preset.difference}"
        cells = [cell.replace("[", r"\[") for cell in (preset.equation, fixes, preset.paper)]
        shown.add_row(name, *(cells if wide else ["\n".join(cells)]), f"{shares[name]:.3f}")
    return shown


def preset_lines(
    preset: Preset, encoder_depth: int, decoder_depth: int, width: int = WIDTH
) -> list[str]:
    """Return the details of a preset in lines of `width`; drawings may have up to 80 columns."""
    stacks = resolve_preset(preset.name, encoder_depth, decoder_depth)
    share = parameter_ratios([preset.name], encoder_depth, decoder_depth)[preset.name]
    said = inspect.getdoc(preset.build) or ""
    lines = [preset.name, ""]
    lines += wrapped_lines(f"equation: {preset.equation}", 0, 10, width)
    lines += wrapped_lines(f"fixes:    {preset.fixes}", 0, 10, width)
    lines += wrapped_lines(f"paper:    {preset.paper}", 0, 10, width)
    if preset.difference:
        lines += wrapped_lines(f"differs:  {preset.difference}", 0, 10, width)
    for paragraph in said.replace("``", "").split("\n\n"):
        lines += ["", *wrapped_lines(" ".join(paragraph.split()), width=width)]
    count = f"{stack_parameters(stacks):,} parameters, {share:.3f} of {BASELINE}'s."
    lines += ["", *wrapped_lines(f"{count} {caption(encoder_depth, decoder_depth)}", width=width)]
    return [*lines, "", *stack_lines(stacks, width)]


def stack_lines(stacks: Stacks, width: int = WIDTH) -> list[str]:
    """Return the drawings of stacks, and their specification."""
    lines = [*text_lines(drawings(stacks), width), ""]
    lines += [
        *wrapped_lines("The resolved specification, without defaults:", width=width),
        "",
    ]
    for depth, line in specification_lines(stacks):
        lines += wrapped_lines(line, 2 * depth, 2 * depth + 4, width)
    return lines


def write_gallery(folder: Path, encoder_depth: int, decoder_depth: int) -> None:
    """Write a picture of every preset, and a page with all pictures."""
    for name in PRESETS:
        stacks = resolve_preset(name, encoder_depth, decoder_depth)
        write_whole(folder / f"{name}.svg", picture(name, drawings(stacks)))
    write_whole(folder / "README.md", gallery_page(encoder_depth, decoder_depth))
    print(f"{folder}: {len(PRESETS)} pictures and README.md")


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
    """Return a text in which Markdown sees no tags and no emphasis."""
    return escape(text, quote=False).replace("*", r"\*")
