"""Specifications that are written in Python are checked like the section of a config."""

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import pytest

from lightning_app import Block, Decoder, Encoder, UserError
from lightning_app.blocks.attention import AttentionSpec
from lightning_app.blocks.block import BlockSpec, InitSpec
from lightning_app.blocks.config import BlockConfig
from lightning_app.blocks.presets import PRESETS, Preset
from lightning_app.blocks.residual import Gain, ResidualSpec
from lightning_app.blocks.stack import Stack, StackSpec, around, same_block

PRE = around(ResidualSpec(norm_input="layer_norm"))
PLACE = Stack(depth=3)


@dataclass(frozen=True, kw_only=True)
class MyResidual(ResidualSpec):
    """A specification with a field that nothing reads."""

    factor: float = 2.0


@dataclass(frozen=True, kw_only=True)
class MyConfig(BlockConfig):
    factor: float = 2.0


def made(build: Callable[[Stack], Any]) -> Preset:
    return Preset(name="mine", equation="", paper="", fixes="", build=build)


def forced(spec: Any, **fields: Any) -> Any:
    """Return a copy with other fields, past the checks of types that the tests turn on."""
    changed = copy(spec)
    for name, value in fields.items():
        object.__setattr__(changed, name, value)
    return changed


def all_of(each: Any) -> StackSpec:
    return forced(block(), blocks=(each,) * PLACE.depth)


def block(**changes: Any) -> StackSpec:
    return same_block(PLACE, replace(PRE, **changes), "layer_norm")


def residual(**fields: Any) -> StackSpec:
    each = ResidualSpec(**{"norm_input": "layer_norm", **fields})
    return same_block(PLACE, around(each), "layer_norm")


MINE = MyResidual(norm_input="layer_norm")
ONE: dict[str, Any] = {"dim": 8, "heads": 2, "depth": 1}


def attending(**fields: Any) -> Any:
    return forced(PRE, self_attention=forced(AttentionSpec(), **fields))


def skipping(gain: Gain, **fields: Any) -> Any:
    return forced(PRE, around_ff=forced(PRE.around_ff, skip=forced(gain, **fields)))


WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "a subclass": (lambda: same_block(PLACE, around(MINE), "none"), "MyResidual"),
    "layout": (lambda: all_of(forced(PRE, layout="paralel")), r"blocks\[0\].layout"),
    "norm": (lambda: block(ff_norm="lyer_norm"), "ff_norm"),
    "last norm": (lambda: same_block(PLACE, PRE, "layernorm"), "final_norm"),
    "rule": (lambda: residual(rule="sums"), "residual_rule"),
    "carry": (lambda: all_of(attending(carry="score")), "carry"),
    "value": (lambda: all_of(attending(value="identityplus")), "value"),
    "distribution": (
        lambda: all_of(forced(PRE, init=forced(InitSpec(), distribution="norml"))),
        "init.distribution",
    ),
    "share": (lambda: forced(block(), share="al"), "share"),
    "NaN": (lambda: block(init=InitSpec(ff=float("nan"))), "init ff"),
    "negative": (lambda: block(init=InitSpec(output=-1.0)), "init output"),
    "infinite": (lambda: residual(input_scale=float("inf")), "input_scale"),
    "no embedding": (lambda: replace(block(), embedding_gain=0.0), "embedding_gain"),
    "a text for a number": (lambda: all_of(skipping(Gain(), value="1")), "skip.value"),
    "a number for a gain": (
        lambda: all_of(forced(PRE, around_ff=forced(PRE.around_ff, branch=2.0))),
        "branch: expected Gain",
    ),
    "a number for a switch": (lambda: all_of(forced(PRE, bottom_to_top=1)), "bottom_to_top"),
    "a switch for a number": (lambda: all_of(skipping(Gain(), value=True)), "skip.value"),
    "a list": (lambda: forced(block(), blocks=[PRE] * 3), "blocks: expected a tuple"),
    "too few": (lambda: StackSpec(blocks=(PRE,), final_norm="layer_norm"), "1 blocks"),
    "nothing": (lambda: None, "expected StackSpec, found None"),
    "a block": (lambda: PRE, "expected StackSpec, found BlockSpec"),
    "an error": (lambda: [][1], "IndexError"),
    "an exit": (lambda: exec("raise SystemExit(0)"), "SystemExit"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_preset_is_checked(what: str) -> None:
    build, said = WRONG[what]
    with pytest.raises(ValueError, match=said) as found:
        made(lambda _: build())(PLACE)
    assert f"preset 'mine' ({__file__}, line " in str(found.value)


def test_a_preset_may_build_on_another_and_read_what_changes() -> None:
    gains = iter((0.5, 0.25))
    mine = made(lambda stack: replace(PRESETS["pre_ln"](stack), embedding_gain=next(gains)))
    built = mine(PLACE)
    assert type(built.blocks[0]) is BlockSpec
    assert (built.embedding_gain, mine(PLACE).embedding_gain) == (0.5, 0.25)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: Block(MyConfig(preset="pre_ln"), dim=8, heads=2), "MyConfig"),
        (lambda: Block(forced(BlockConfig(), layout="paralel"), dim=8, heads=2), "layout"),
        (lambda: Encoder(BlockConfig(norm="x"), dim=8, heads=2, depth=1), "norm"),
        (lambda: Encoder(forced(BlockConfig(), share="al"), dim=8, heads=2, depth=1), "share"),
        (lambda: Encoder(**ONE, attention_skip=forced(Gain(), value=True)), "attention_skip.value"),
        (lambda: Encoder(**ONE, ff_branch=forced(Gain(), value="1")), "ff_branch"),
        (lambda: Block(dim=8.0, heads=2), "dim"),  # pyright: ignore[reportArgumentType]
        (lambda: Block(dim=8, heads=True), "heads"),
        (lambda: Block(dim=8, heads=2, activation="rela"), "activation"),
        (lambda: Block(dim=8, heads=2, dropout=float("nan")), "dropout"),
        (lambda: Block(dim=8, heads=2, dropout="0.1"), "dropout"),  # pyright: ignore[reportArgumentType]
        (lambda: Block(dim=8, heads=2, depth=2.0, layer=1), "depth"),  # pyright: ignore[reportArgumentType]
        (lambda: Block(dim=8, heads=2, cross=1, peer_depth=1), "cross"),  # pyright: ignore[reportArgumentType]
        (lambda: Encoder(dim=8, heads=2, depth=1.5), "depth"),  # pyright: ignore[reportArgumentType]
        (lambda: Decoder(dim=8, heads=2, depth=True), "depth"),
        (lambda: Decoder(dim=8, heads=2, depth=1, positions="learnt"), "positions"),
    ],
)
def test_a_call_is_checked(call: Callable[[], object], said: str) -> None:
    with pytest.raises(UserError, match=said) as found:
        call()
    assert "\n" not in str(found.value)
