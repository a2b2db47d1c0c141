"""The command `ablate blocks`."""

import inspect
import json
from dataclasses import asdict
from html import escape
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from lightning_app.atomic_write import write_whole
from lightning_app.blocks.presets import PRESETS, Preset
from lightning_app.catalogue.presets import (
    BASELINE,
    caption,
    drawings,
    parameter_ratios,
    resolve_preset,
    stack_parameters,
)
from lightning_app.catalogue.specification import specification_lines
from lightning_app.catalogue.svg import picture
from lightning_app.catalogue.text import WIDTH, text_lines, wrapped_lines
from lightning_app.errors import UserError

REGENERATE = "ablate blocks --svg-dir docs/blocks"


def blocks_command(
    name: str | None,
    encoder_depth: int,
    decoder_depth: int,
    *,
    svg: Path | None = None,
    svg_dir: Path | None = None,
    as_json: bool = False,
) -> int:
    """Print the table of presets or the details of one preset, or write pictures."""
    if name is None and (svg is not None or as_json):
        raise UserError(
            f"blocks: {'--json' if as_json else '--svg'} needs NAME, the name of a preset"
        )
    if name is not None and svg_dir is not None:
        raise UserError("blocks: --svg-dir writes all presets; use --svg FILE for one preset")
    if svg_dir is not None:
        write_gallery(svg_dir, encoder_depth, decoder_depth)
    elif name is None:
        console = Console(highlight=False)
        console.print(preset_table(encoder_depth, decoder_depth, wide=console.width >= 150))
    else:
        width = min(WIDTH, Console().width)
        stacks = resolve_preset(name, encoder_depth, decoder_depth)
        if svg is not None:
            write_whole(svg, picture(name, drawings(stacks)))
        if as_json:
            # By the names of the stacks in a model, as in `block.json` of a run.
            named = {side.partition(" ")[0]: asdict(spec) for side, spec in stacks.items()}
            print(json.dumps(named, indent=1))
        elif svg is None:
            print("\n".join(preset_lines(PRESETS[name], encoder_depth, decoder_depth, width)))
    return 0


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
    lines += ["", *text_lines(drawings(stacks), width), ""]
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


def table_rows(encoder_depth: int, decoder_depth: int, folder: str = "") -> list[str]:
    """Return the table of presets in Markdown; their pictures are in `folder`."""
    shares = parameter_ratios(PRESETS, encoder_depth, decoder_depth)
    rows = ["| preset | equation | paper | parameters |", "|---|---|---|---:|"]
    for name, preset in PRESETS.items():
        cells = (f"[`{name}`]({folder}{name}.svg)", escape(preset.equation, quote=False))
        cells = (*cells, preset.paper, f"{shares[name]:.3f}")
        rows.append(f"| {' | '.join(cells)} |".replace("*", r"\*"))
    return rows


def gallery_page(encoder_depth: int, decoder_depth: int) -> str:
    """Return the page of the pictures in Markdown."""
    lines = [
        "# The blocks, drawn from their specifications",
        "",
        f"Written by `{REGENERATE}`; do not edit.",
        "",
        "The stream runs upwards. N of the equations is a norm, f a sub-layer; pink is a gain with",
        "its start, dashed orange what an attention hands to the layer above.",
        "",
        *table_rows(encoder_depth, decoder_depth),
        "",
        caption(encoder_depth, decoder_depth),
    ]
    for name, preset in PRESETS.items():
        equation = escape(preset.equation)
        lines += ["", f"## {name}", "", f"Fixes: {preset.fixes}.", ""]
        if preset.difference:
            lines += [f"Differs: {preset.difference}.", ""]
        lines += [f'<img src="{name}.svg" alt="{name}: {equation}">']
    return "\n".join([*lines, ""])
