"""The resolved specification of stacks in words: layers of one form together, defaults left out."""

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields
from typing import Any

from lightning_app.blocks.block import BlockSpec
from lightning_app.blocks.residual import ResidualSpec
from lightning_app.blocks.stack import StackSpec
from lightning_app.catalogue.folding import Side, layer_names, phrase, read, runs_of


def specification_lines(stacks: Mapping[Side, StackSpec]) -> list[tuple[int, str]]:
    """Return lines with their depth: a stack, its layers, a field of their blocks."""
    lines = []
    for side, spec in stacks.items():
        whole = [
            f"{field.name} {phrase([getattr(spec, field.name)], field.default, range(1))}"
            for field in fields(spec)
            if field.name != "blocks" and getattr(spec, field.name) != field.default
        ]
        lines.append((0, f"{side}: {', '.join(whole) or 'nothing around the layers'}"))
        for layers, blocks in runs_of(spec.blocks, side):
            lines.append((1, layer_names(layers[0], layers[-1])))
            lines += [(2, line) for line in _block(blocks, layers, side)]
    return lines


def _block(blocks: Sequence[BlockSpec], layers: range, side: Side) -> list[str]:
    lines = []
    for name in read(side):
        default = _default(name)
        parts = [getattr(block, name) for block in blocks]
        if any(part != default for part in parts):
            lines.append(f"{name}: {phrase(parts, default, layers, outer=True)}")
    return lines or ["as by default"]


def _default(name: str) -> Any:
    """Return what a field of a block is if nothing is said of it."""
    default = {field.name: field.default for field in fields(BlockSpec)}[name]
    return ResidualSpec() if default is MISSING else default
