"""The resolved specification of stacks as text: equal layers are grouped, defaults omitted."""

from collections.abc import Mapping

from lightning_app.blocks.residual import ResidualSpec
from lightning_app.blocks.stack import StackSpec
from lightning_app.catalogue.folding import (
    Side,
    changed_fields,
    layer_names,
    phrase,
    runs_of,
    used_fields,
)


def specification_lines(stacks: Mapping[Side, StackSpec]) -> list[tuple[int, str]]:
    """Return lines with their depth: a stack, its layers, a field of their blocks."""
    lines = []
    for side, spec in stacks.items():
        around = ", ".join(changed_fields([spec], range(1), known=("blocks",)))
        lines.append((0, f"{side}: {around or 'nothing around the layers'}"))
        for layers, blocks in runs_of(spec.blocks, side):
            lines.append((1, layer_names(layers[0], layers[-1])))
            shown = []
            for field in used_fields(blocks[0], side):
                parts = [getattr(block, field.name) for block in blocks]
                plain = isinstance(parts[0], ResidualSpec)  # a block has no default for it
                default = ResidualSpec() if plain else field.default
                if any(part != default for part in parts):
                    words = phrase(parts, default, layers, outer=True)
                    shown.append((2, f"{field.name}: {words}"))
            lines += shown or [(2, "defaults")]
    return lines
