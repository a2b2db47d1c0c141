"""One block for every layer of a stack: what its layers must have in common."""

from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

from lightning_app.blocks.block import BlockSpec


def check_shared(blocks: Sequence[BlockSpec]) -> None:
    """Refuse layers that one block cannot serve.

    They may differ in the divisor of their carried scores, which the stack passes to the block with
    each call.

    Raises:
        ValueError: naming the field in which two layers differ.
    """
    first, *others = (_undivided(block) for block in blocks)
    for layer, other in enumerate(others, start=2):
        for name, one, another in _differences(first, other):
            raise ValueError(
                f"share all: layers 1 and {layer} differ in {name}, {one} and {another}, and one "
                "block serves all layers; take a preset or axes with equal layers, or share none"
            )
    residuals = (first.around_self, first.around_cross, first.around_ff)
    if len(blocks) > 1 and any(residual.skip.profiled for residual in residuals):
        raise ValueError(
            "share all: profiled skips (preset admin) have a start for each layer, and one block "
            "serves all layers; take another preset, or share none"
        )


def _undivided(block: BlockSpec) -> BlockSpec:
    return replace(
        block,
        self_attention=replace(block.self_attention, score_divisor=1.0),
        cross_attention=replace(block.cross_attention, score_divisor=1.0),
    )


def _differences(one: Any, another: Any, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield (dotted name, value, other value) of every field in which two parts differ."""
    for field in fields(one):
        mine, theirs = getattr(one, field.name), getattr(another, field.name)
        if is_dataclass(mine) and type(mine) is type(theirs):
            yield from _differences(mine, theirs, f"{prefix}{field.name}.")
        elif mine != theirs:
            yield f"{prefix}{field.name}", mine, theirs
