"""What `ablate blocks` shows: the presets, and the resolved specification of one."""

import dataclasses
from typing import Any

from rich.console import Console
from rich.table import Table

from lightning_app.blocks.axes import BlockConfig
from lightning_app.blocks.presets import PRESETS
from lightning_app.errors import UserError, nearest
from lightning_app.models.heads import ArchitectureConfig


def print_blocks(name: str | None, encoder_depth: int, decoder_depth: int) -> int:
    """Print the table of presets, or each layer of the preset `name`."""
    console = Console(highlight=False)
    if name is None:
        console.print(table())
        return 0
    if name not in PRESETS:
        raise UserError(f"blocks: no preset '{name}'{nearest(name, PRESETS)}")
    if encoder_depth < 1 or decoder_depth < 0:
        raise UserError(
            f"blocks: --encoder-depth {encoder_depth} --decoder-depth {decoder_depth}: at least 1 "
            "block in the encoder, and 0 in the decoder for an encoder alone"
        )
    kind = "encoder_decoder" if decoder_depth else "encoder"
    architecture = ArchitectureConfig(
        kind=kind, encoder_depth=encoder_depth, decoder_depth=max(decoder_depth, 1)
    )
    try:
        stacks = architecture.stacks(BlockConfig(preset=name))
    except ValueError as error:
        raise UserError(f"blocks: {error}") from error
    preset = PRESETS[name]
    console.print(f"{name}: {preset.equation}\n{preset.paper}", markup=False)
    for side, stack in stacks.items():
        console.print(f"\n{side}, {len(stack.blocks)} blocks, final norm: {stack.final_norm}")
        for layer, block in enumerate(stack.blocks, start=1):
            parts = dataclasses.asdict(block)
            if side == "encoder":
                parts = {key: value for key, value in parts.items() if "cross" not in key}
            console.print(f"  layer {layer}", markup=False)
            for line in lines(parts):
                console.print(f"    {line}", markup=False, soft_wrap=True)
    return 0


def table() -> Table:
    """Return the presets with equation, paper, and what each fixes."""
    shown = Table("preset", "equation", "what it fixes", "paper", title="blocks", show_lines=True)
    for preset in PRESETS.values():
        cells = (preset.name, preset.equation, preset.fixes, preset.paper)
        shown.add_row(*(cell.replace("[", r"\[") for cell in cells))
    return shown


def lines(parts: dict[str, Any]) -> list[str]:
    """Return one line a part of a block, gains as ``0.71 learned``."""
    return [f"{name}: {phrase(value)}" for name, value in parts.items()]


def phrase(value: Any) -> str:
    """Return a nested specification as one line of text."""
    if isinstance(value, dict) and value.keys() == {"value", "learned"}:
        return f"{value['value']:.4g}" + (" learned" if value["learned"] else "")
    if isinstance(value, dict):
        return ", ".join(f"{key} {phrase(part)}" for key, part in value.items())
    return f"{value:.4g}" if isinstance(value, float) else str(value)
