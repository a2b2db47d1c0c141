"""Stacks to draw: the presets, and stacks that no preset has."""

from collections.abc import Mapping
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


def with_blocks(spec: StackSpec, **changes: Any) -> StackSpec:
    """Return `spec` with fields of every block changed; a dict changes fields of a part."""

    def changed(part: Any, change: Any) -> Any:
        return replace(part, **change) if isinstance(change, dict) else change

    blocks = (
        replace(b, **{name: changed(getattr(b, name), change) for name, change in changes.items()})
        for b in spec.blocks
    )
    return replace(spec, blocks=tuple(blocks))


def drawn(specs: Mapping[Side, StackSpec]) -> list[Drawing]:
    return [stack_drawing(spec, side) for side, spec in specs.items()]


def unusual() -> dict[str, dict[Side, StackSpec]]:
    """Return stacks with many parts, as made by one or two axes on a preset."""
    gains = ProjectionGains(kept=Gain(learned=True), change=Gain(value=0.2, learned=True))
    parts = {"value": "orthogonal_plus", "value_gains": gains, "tied": True, "head_gain": True}
    parts |= {"output": "orthogonal_plus", "output_gains": gains, "query_key_noise": 0.1}
    trained = {"self_attention": parts, "ff_norm": "layer_norm"}
    skip, both = {"skip": VECTOR}, {"skip": VECTOR, "branch": VECTOR}
    parallel = {"around_self": {"branch": VECTOR}, "around_ff": {**both, "norm_branch": "rms_norm"}}
    everywhere = dict.fromkeys(("around_self", "around_cross", "around_ff"), both)
    rows: list[Any] = [
        ("a gain on both skips of b2t, carried sums", "b2t", {"around_ff": skip}, ["qk_sum", 2.0]),
        ("two streams, a gain on a skip", "dual_stream", {"around_self": skip}, ["mean"]),
        ("a parallel block with a gain everywhere", "parallel", parallel, ["mean"]),
        ("trained projections with gains", "sas", trained, []),
        ("a gain on every skip and branch", "keel", everywhere, []),
    ]
    found: dict[str, Any] = {}
    for title, preset, changes, carry in rows:
        specs = {side: with_blocks(spec, **changes) for side, spec in stacks(preset).items()}
        found[title] = {s: carry_scores(x, *carry) if carry else x for s, x in specs.items()}
    halting = {"share": "all", "step_signal": "learned", "halting": HaltingSpec()}
    found["one block for all layers, with halting"] = {
        side: replace(spec, **halting) for side, spec in stacks("pre_ln").items()
    }
    thirds = [stacks(name) for name in ("keel", "deepnorm", "rezero")]
    found["layers of three forms"] = {
        side: replace(
            spec,
            blocks=tuple(b for n in range(3) for b in thirds[n][side].blocks[2 * n : 2 * n + 2]),
        )
        for side, spec in thirds[0].items()
    }
    return found


CASES = {**{name: stacks(name) for name in PRESETS}, **unusual()}
