"""Blocks against PyTorch's own layers, and the specifications that are refused."""

from dataclasses import replace
from typing import Any

import jaxtyping
import pytest
import torch
from torch import Tensor, nn

from lightning_app.blocks.attention import Attention, AttentionSpec, ShapingSpec
from lightning_app.blocks.block import Block, BlockSpec, Call, Carries, CrossAttentionInput, Sizes
from lightning_app.blocks.feed_forward import Activation
from lightning_app.blocks.masks import causal_mask, padding_mask
from lightning_app.blocks.presets import ABSENT, PRESETS
from lightning_app.blocks.residual import Gain, ResidualSpec
from lightning_app.blocks.stack import Stack
from lightning_app.blocks.streams import Stream
from tests import tiny

BATCH, SOURCE, TARGET, MODEL, FF, HEADS = 3, 7, 11, 10, 13, 2
PRESENT = torch.arange(SOURCE) < torch.tensor([7, 4, 1])[:, None]
TORCH_LAYERS = [
    pytest.param(preset, norm_first, activation, id=f"{preset}-{activation}")
    for preset, norm_first in (("post_ln", False), ("pre_ln", True))
    for activation in ("relu", "gelu")
]


def spec_of(preset: str, *, cross: bool = False) -> BlockSpec:
    return PRESETS[preset](Stack(depth=1, peer_depth=1, causal=cross, cross=cross)).blocks[0]


def sizes(activation: Activation = "relu") -> Sizes:
    return Sizes(model_dim=MODEL, ff_dim=FF, num_heads=HEADS, activation=activation)


@torch.no_grad()
def copy_attention(theirs: nn.MultiheadAttention, ours: Attention) -> None:
    parts = (ours.query, ours.key, ours.value)
    theirs.in_proj_weight.copy_(torch.cat([part.weight for part in parts]))  # pyright: ignore
    theirs.in_proj_bias.copy_(torch.cat([part.bias for part in parts]))  # pyright: ignore
    theirs.out_proj.load_state_dict(ours.output.state_dict())


def copy_rest(theirs: nn.Module, ours: Block, norms: list[str]) -> None:
    """Copy the feed-forward and the norms, which PyTorch numbers in the order of sub-layers."""
    theirs.get_submodule("linear1").load_state_dict(ours.feed_forward.inner.state_dict())
    theirs.get_submodule("linear2").load_state_dict(ours.feed_forward.outer.state_dict())
    for number, around in enumerate(norms, start=1):
        (norm,) = (m for m in ours.get_submodule(around).modules() if isinstance(m, nn.LayerNorm))
        theirs.get_submodule(f"norm{number}").load_state_dict(norm.state_dict())


def compare(ours: Tensor, theirs: Tensor, real: Tensor, inputs: list[Tensor]) -> None:
    """Compare outputs at real tokens and the gradients of a random loss over them."""
    torch.testing.assert_close(ours[real], theirs[real], rtol=1e-11, atol=1e-11)
    weight = torch.randn_like(ours) * real[..., None]
    slopes = [torch.autograd.grad((x * weight).sum(), inputs) for x in (ours, theirs)]
    torch.testing.assert_close(*slopes, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("preset", "norm_first", "activation"), TORCH_LAYERS)
@pytest.mark.parametrize("causal", [False, True])
def test_encoder_block_equals_torch_layer(float64, preset, norm_first, activation, causal) -> None:
    ours = tiny.randomise(Block(spec_of(preset), sizes(activation)))
    how: Any = {"norm_first": norm_first, "batch_first": True}
    theirs = nn.TransformerEncoderLayer(MODEL, HEADS, FF, 0.0, activation, **how)
    copy_attention(theirs.self_attn, ours.self_attention)
    copy_rest(theirs, ours, ["around_self", "around_ff"])
    x = torch.randn(BATCH, SOURCE, MODEL, requires_grad=True)
    if causal:
        mask = causal_mask(SOURCE, x.device)
        expected = theirs(x, src_mask=~mask.allowed[0, 0])
        real = torch.ones_like(PRESENT)
    else:
        mask = padding_mask(PRESENT)
        expected = theirs(x, src_key_padding_mask=~PRESENT)
        real = PRESENT
    compare(ours(Stream(x), Carries(), Call(layer=1, mask=mask))[0].x, expected, real, [x])


@pytest.mark.parametrize(("preset", "norm_first", "activation"), TORCH_LAYERS)
def test_decoder_block_equals_torch_layer(float64, preset, norm_first, activation) -> None:
    ours = tiny.randomise(Block(spec_of(preset, cross=True), sizes(activation), cross=True))
    how: Any = {"norm_first": norm_first, "batch_first": True}
    theirs = nn.TransformerDecoderLayer(MODEL, HEADS, FF, 0.0, activation, **how)
    copy_attention(theirs.self_attn, ours.self_attention)
    assert ours.cross_attention is not None
    copy_attention(theirs.multihead_attn, ours.cross_attention)
    copy_rest(theirs, ours, ["around_self", "around_cross", "around_ff"])
    x = torch.randn(BATCH, TARGET, MODEL, requires_grad=True)
    memory = torch.randn(BATCH, SOURCE, MODEL, requires_grad=True)
    mask = causal_mask(TARGET, x.device)
    keys_values = ours.cross_attention.keys_values(memory, None)
    source = CrossAttentionInput(*keys_values, padding_mask(PRESENT))
    (y, _), _ = ours(Stream(x), Carries(), Call(layer=1, mask=mask, source=source))
    expected = theirs(x, memory, tgt_mask=~mask.allowed[0, 0], memory_key_padding_mask=~PRESENT)
    compare(y, expected, torch.ones(BATCH, TARGET, dtype=torch.bool), [x, memory])


PLAIN = ResidualSpec(norm_input="layer_norm")
SKIPLESS = replace(PLAIN, skip=ABSENT)
SHAPED = AttentionSpec(shaping=ShapingSpec())
LEARNED = Gain(value=0.0, learned=True)  # a skip that is there, although it starts at zero


def block(**changes) -> BlockSpec:
    return BlockSpec(**{"around_self": PLAIN, "around_cross": PLAIN, "around_ff": PLAIN, **changes})


SELF_ALONE = {"layout": "parallel", "around_self": SKIPLESS}
REFUSED = {
    "shaped cross-attention": ({"cross_attention": SHAPED}, "shaped_attention on cross"),
    **{
        f"{name} in cross-attention": ({"cross_attention": spec}, "identity projections on cross")
        for name, spec in {
            "identity values": AttentionSpec(value="identity"),
            "identity plus": AttentionSpec(value="identity_plus"),
            "identity output": AttentionSpec(output="identity"),
        }.items()
    },
    "no skip and no identity part": (
        {"around_self": SKIPLESS, "self_attention": AttentionSpec(shaping=ShapingSpec(alpha=0.0))},
        "attention_skip 0",
    ),
    **{
        f"parallel with {name}": ({**SELF_ALONE, **changes}, said)
        for name, changes, said in (
            ("no skip at all", {"around_ff": SKIPLESS}, "skip 0 without shaped_attention"),
            ("two norms", {"around_ff": replace(PLAIN, norm_input="rms_norm")}, "layout parallel"),
            ("two skips", {"around_self": PLAIN}, "layout parallel"),
            ("the bottom's skip", {"bottom_to_top": True}, "layout parallel with preset b2t"),
        )
    },
    **{
        f"one gain {name}": ({"share_branch_gain": True, **changes}, "share_branch_gain")
        for name, changes in (
            ("where branches differ", {"around_ff": replace(PLAIN, branch=LEARNED)}),
            ("that is not learned", {}),
        )
    },
}


@pytest.mark.parametrize(("changes", "message"), REFUSED.values(), ids=list(REFUSED))
def test_block_without_meaning_is_refused(changes: dict, message: str) -> None:
    block(around_self=replace(PLAIN, skip=LEARNED))
    with pytest.raises(ValueError, match=message):
        block(**changes)


def test_shapes_are_checked_at_every_call() -> None:
    """The import hook of the tests covers a module with shapes, and a method as well."""
    with pytest.raises(jaxtyping.TypeCheckError, match="present"):
        padding_mask(PRESENT[0])
    attention = Attention(AttentionSpec(), MODEL, HEADS, 0.0)
    heads = torch.zeros(BATCH, HEADS, SOURCE, MODEL // HEADS)
    with pytest.raises(jaxtyping.TypeCheckError, match="keys"):
        attention(heads, heads[1:], heads, padding_mask(PRESENT), None)
