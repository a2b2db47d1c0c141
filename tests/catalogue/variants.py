"""Stacks to draw: the presets, and stacks that no preset has."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from lightning_app.blocks.attention import ProjectionGains
from lightning_app.blocks.presets import PRESETS
from lightning_app.blocks.residual import Gain
from lightning_app.blocks.stack import Stack, StackSpec, carry_scores
from lightning_app.blocks.steps import HaltingSpec
from lightning_app.catalogue.parts import Drawing, Side, stack_drawing

VECTOR = Gain(value=0.5, learned=True, vector=True, profiled=True)


def stacks(name: str, depth: int = 6) -> dict[Side, StackSpec]:
    decoder = Stack(depth=depth, peer_depth=depth, causal=True, cross=True)
    sides: dict[Side, Stack] = {"encoder": Stack(depth=depth, peer_depth=depth), "decoder": decoder}
    return {side: PRESETS[name](stack) for side, stack in sides.items()}


def with_blocks(spec: StackSpec, **changes: Callable[[Any], Any]) -> StackSpec:
    """Return `spec` with the named fields of every block changed."""
    blocks = tuple(
        replace(block, **{name: change(getattr(block, name)) for name, change in changes.items()})
        for block in spec.blocks
    )
    return replace(spec, blocks=blocks)


def drawn(specs: Mapping[Side, StackSpec]) -> list[Drawing]:
    return [stack_drawing(spec, side) for side, spec in specs.items()]


def unusual() -> dict[str, dict[Side, StackSpec]]:
    """Return stacks with many parts, as made by one or two axes on a preset."""
    gains = ProjectionGains(kept=Gain(learned=True), change=Gain(value=0.2, learned=True))
    return {
        "one block for all layers, with halting": {
            side: replace(spec, share="all", step_signal="learned", halting=HaltingSpec())
            for side, spec in stacks("pre_ln").items()
        },
        "a gain on both skips of b2t, carried sums": {
            side: carry_scores(
                with_blocks(spec, around_ff=lambda around: replace(around, skip=VECTOR)),
                "qk_sum",
                2.0,
            )
            for side, spec in stacks("b2t").items()
        },
        "two streams, carried scores, a gain on a skip": {
            side: carry_scores(
                with_blocks(spec, around_self=lambda around: replace(around, skip=VECTOR)), "mean"
            )
            for side, spec in stacks("dual_stream").items()
        },
        "a parallel block with a gain everywhere": {
            side: carry_scores(
                with_blocks(
                    spec,
                    around_self=lambda around: replace(around, branch=VECTOR),
                    around_ff=lambda around: replace(
                        around, skip=VECTOR, branch=VECTOR, norm_branch="rms_norm"
                    ),
                ),
                "mean",
            )
            for side, spec in stacks("parallel").items()
        },
        "trained projections with gains": {
            side: with_blocks(
                spec,
                self_attention=lambda attention: replace(
                    attention,
                    value="orthogonal_plus",
                    output="orthogonal_plus",
                    value_gains=gains,
                    output_gains=gains,
                    tied=True,
                    head_gain=True,
                    query_key_noise=0.1,
                ),
                ff_norm=lambda _: "layer_norm",
            )
            for side, spec in stacks("sas").items()
        },
        "a gain on every skip and branch": {
            side: with_blocks(
                spec,
                around_self=lambda around: replace(around, skip=VECTOR, branch=VECTOR),
                around_cross=lambda around: replace(around, skip=VECTOR, branch=VECTOR),
                around_ff=lambda around: replace(around, skip=VECTOR, branch=VECTOR),
            )
            for side, spec in stacks("keel").items()
        },
        "layers of three forms": {
            side: replace(
                spec,
                blocks=(
                    *spec.blocks[:2],
                    *stacks("deepnorm")[side].blocks[2:4],
                    *stacks("rezero")[side].blocks[4:],
                ),
            )
            for side, spec in stacks("keel").items()
        },
    }


CASES = {**{name: stacks(name) for name in PRESETS}, **unusual()}
