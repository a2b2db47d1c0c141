"""Resolve, count and draw the presets for `ablate blocks`."""

from collections.abc import Iterable, Mapping
from functools import partial

from lightning_app.blocks.presets import PRESETS
from lightning_app.blocks.stack import Stack, StackSpec
from lightning_app.catalogue.parts import Drawing, Side, stack_drawing
from lightning_app.core.errors import UserError, nearest
from lightning_app.models.heads import ArchitectureConfig
from lightning_app.models.initialization import count_parameters
from lightning_app.models.stack import BlockStack

BASELINE = "pre_ln"
Stacks = Mapping[Side, StackSpec]


def resolve_preset(name: str, encoder_depth: int, decoder_depth: int) -> Stacks:
    """Return the stacks of preset `name`; a stack of depth 0 is omitted.

    Raises:
        UserError: for an unknown preset or an invalid depth.
    """
    if name not in PRESETS:
        raise UserError(f"blocks: no preset '{name}'{nearest(name, PRESETS)}")
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
    """Return a sentence that explains the ratios."""
    usual = ArchitectureConfig()
    depth = "+".join(str(each) for each in (encoder_depth, decoder_depth) if each)
    return (
        f"Parameters: those of the stacks relative to {BASELINE}, without embeddings, "
        f"at depth {depth}, model_dim {usual.model_dim}, ff_dim {usual.ff_dim}, "
        f"{usual.num_heads} heads."
    )
