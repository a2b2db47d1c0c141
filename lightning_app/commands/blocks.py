"""`ablate blocks`: the table of presets, and the stacks of a preset or of a config."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lightning_app.commands.options import Parser
from lightning_app.core.errors import UserError
from lightning_app.core.files import write_whole
from lightning_app.grids.display import PlainConsole


def add_blocks(parser: Parser) -> None:
    parser.add("name NAME", "a preset", nargs="?")
    parser.add("--encoder-depth N", "0: decoder only", default=6)
    parser.add("--decoder-depth N", "0: encoder only", default=6)
    text = "show the stacks of a run's config instead of NAME; overrides may follow, as for fit"
    parser.add("--config FILE", text)
    parser.add("--svg FILE", "write the drawing of NAME")
    parser.add("--svg-dir DIR", "write the drawings of all presets and a page with them")
    parser.add("--json", "print the specification of NAME as JSON", dest="as_json")
    parser.set_defaults(call=blocks_command)


def blocks_command(
    name: str | None,
    encoder_depth: int,
    decoder_depth: int,
    *,
    svg: Path | None,
    svg_dir: Path | None,
    as_json: bool,
    config: Path | None,
    overrides: Sequence[str],
) -> int:
    """Print the table of presets, or the details of a preset or a config, or write pictures."""
    if overrides and config is None:
        raise UserError(f"blocks: {overrides[0]}: an override needs --config FILE")
    if config is not None and (name is not None or svg_dir is not None):
        other = "NAME" if svg_dir is None else "--svg-dir"
        raise UserError(f"blocks: --config draws the stacks of that file; leave out {other}")
    if config is None and name is None and (svg is not None or as_json):
        option = "--json" if as_json else "--svg"
        raise UserError(f"blocks: {option} needs NAME, the name of a preset, or --config FILE")
    if name is not None and svg_dir is not None:
        raise UserError("blocks: --svg-dir writes all presets; use --svg FILE for one preset")
    from lightning_app.catalogue.presets import (
        drawings,
        preset_lines,
        preset_table,
        resolve_preset,
        stack_lines,
        write_gallery,
    )
    from lightning_app.catalogue.svg import picture
    from lightning_app.catalogue.text import WIDTH

    console = PlainConsole()
    width = min(WIDTH, console.width)
    depths = (encoder_depth, decoder_depth)
    if svg_dir is not None:
        count = write_gallery(svg_dir, *depths)
        print(f"{svg_dir}: {count} pictures and README.md")
        return 0
    if config is not None:
        name, stacks = _stacks_of(config, overrides)
    elif name is not None:
        stacks = resolve_preset(name, *depths)
    else:
        console.print(preset_table(*depths, wide=console.width >= 150))
        return 0
    if svg is not None:
        write_whole(svg, picture(name, drawings(stacks)))
    if as_json:
        # Keyed by the names of the stacks in a model, as in a run's `block.json`.
        named = {side.partition(" ")[0]: asdict(spec) for side, spec in stacks.items()}
        print(json.dumps(named, indent=1))
    elif svg is None and config is not None:
        print("\n".join([f"{name}, as {config} has it", "", *stack_lines(stacks, width)]))
    elif svg is None:
        print("\n".join(preset_lines(name, *depths, width)))
    return 0


def _stacks_of(config: Path, overrides: Sequence[str]) -> tuple[str, Mapping[Any, Any]]:
    """Return the preset and the stacks of a config with overrides."""
    from lightning_app.config.config import model_config, read_config

    model = model_config(read_config(config, overrides)["model"])
    decoder = "decoder only" if model.architecture.kind == "decoder" else "decoder"
    stacks = model.architecture.stacks(model.block)
    sides = {"encoder": "encoder", "decoder": decoder}
    return model.block.preset, {sides[name]: spec for name, spec in stacks.items()}
