"""`Block`, `Encoder` and `Decoder` equal the stacks inside the models of the package."""

import copy
import pickle
import subprocess
import sys
from typing import Any

import pytest
import torch

from lightning_app import Block, Decoder, Encoder, UserError
from lightning_app.api.blocks import wiring
from lightning_app.blocks.masks import causal_mask, padding_mask
from lightning_app.blocks.presets import PRESETS
from lightning_app.blocks.presets.registry import Preset
from lightning_app.blocks.residual import Gain, ResidualSpec
from lightning_app.blocks.spans import SpanMask
from lightning_app.blocks.stack import Stack, StackSpec, around, same_block
from lightning_app.models.stack import BlockStack
from tests.tiny import causal_model, masked_model, randomise, translator

SIZES: dict[str, Any] = {"dim": 10, "heads": 2, "ff_dim": 13}
SPANS = {"longest": 8, "ramp": 2, "penalty": 0.5, "dynamic_bias": 0.0}
PRESENT = torch.tensor([[True] * 7, [True] * 4 + [False] * 3])
# Skips that need the data of a run, branches that need its steps, matrices projected after each.
USUAL = [name for name in PRESETS if name not in ("admin", "prores", "ngpt")]

CHAINED = ("post_ln", "peri_ln", "b2t", "deepnorm", "dual_stream", "realformer", "sas")
CHAINED += ("sas_p_no_norm",)


@pytest.mark.parametrize("preset", USUAL)
def test_an_encoder_and_a_decoder_equal_those_of_a_model(preset: str) -> None:
    model = randomise(translator(preset))
    encoder = Encoder(preset, depth=3, peer_depth=2, **SIZES)
    decoder = Decoder(preset, depth=2, peer_depth=3, cross=True, **SIZES)
    encoder.stack.load_state_dict(model.encoder.state_dict())
    decoder.stack.load_state_dict(model.decoder.state_dict())
    x, y, seen = torch.randn(2, 7, 10), torch.randn(2, 5, 10), padding_mask(PRESENT)
    states = model.encoder(x, seen)
    assert torch.equal(encoder(x, present=PRESENT), states)
    read = model.decoder.remember(states, seen)
    expected = model.decoder(y, causal_mask(5, y.device), read)
    assert torch.equal(decoder(y, memory=states, memory_present=PRESENT), expected)


@pytest.mark.parametrize(
    "axes",
    [
        {},
        {"residual_attention": "sum"},
        {"shaped_attention": {"alpha": 0.5, "beta": 0.5}, "norm": "rms_norm"},
        {"localised_span": {"query_block": 2, "memory": 1}, "qk_norm": "layer_norm"},
        {"share": "all", "step_signal": "learned", "halting": {"epsilon": 0.1}},
    ],
    ids=["plain", "residual", "shaped", "span", "steps"],
)
def test_axes_are_those_of_a_config(axes: dict[str, Any]) -> None:
    config = {"preset": "pre_ln", **axes}
    resolved = wiring(config, {})
    model = randomise(causal_model(resolved, decoder_depth=3, num_heads=1, positions="rope"))
    x = torch.randn(2, 7, 10)
    expected = model.decoder(x, causal_mask(7, x.device))
    for block, given in (("pre_ln", axes), (config, {}), (resolved, {})):
        decoder = Decoder(block, depth=3, positions="rope", **{**SIZES, "heads": 1}, **given)
        assert decoder.stack.spec == model.decoder.spec
        decoder.stack.load_state_dict(model.decoder.state_dict())
        assert torch.equal(decoder(x), expected)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("preset", CHAINED)
def test_a_chain_of_blocks_equals_a_stack(preset: str, causal: bool) -> None:
    stack = randomise(
        causal_model(preset, decoder_depth=3) if causal else masked_model(preset, encoder_depth=3)
    ).get_submodule("decoder" if causal else "encoder")
    assert isinstance(stack, BlockStack)
    x = torch.randn(2, 7, 10)
    mask = causal_mask(7, x.device) if causal else padding_mask(PRESENT)
    y, state = stack.input_norm(x), None
    for layer in (1, 2, 3):
        block = Block(preset, depth=3, layer=layer, **SIZES)
        block.block.load_state_dict(stack.blocks[layer - 1].state_dict())
        given = {"causal": causal, "present": None if causal else PRESENT}
        before = y
        y, state = block.chained(y, state, **given)
        if not block.passes_state:
            assert torch.equal(block(before, **given), y)
            state = None
    total = None if state is None else state.total
    ended = stack.final_norm(y) if total is None else y + stack.final_norm(total)
    torch.testing.assert_close(ended, stack(x, mask), rtol=1e-6, atol=1e-6)


def test_a_block_with_cross_attention_equals_a_decoder_of_one() -> None:
    decoder = randomise(Decoder("sas", depth=1, peer_depth=3, cross=True, **SIZES))
    block = Block("sas", depth=1, layer=1, peer_depth=3, cross=True, **SIZES)
    block.block.load_state_dict(decoder.stack.blocks[0].state_dict())
    x, memory = torch.randn(2, 5, 10), torch.randn(2, 7, 10)
    given = {"memory": memory, "memory_present": PRESENT}
    expected = decoder(x, **given)
    torch.testing.assert_close(decoder.stack.final_norm(block(x, causal=True, **given)), expected)
    other = block(x, causal=True, memory=memory)
    assert not torch.equal(block(x, causal=True, **given), other)


def test_padding_and_later_tokens_change_nothing() -> None:
    """Padding on the left, too, where a causal mask alone would let real tokens see it."""
    block = randomise(Block("pre_ln", **SIZES))
    present, x = PRESENT.flip(1), torch.randn(2, 7, 10)
    changed = torch.where(present[..., None], x, torch.randn_like(x))
    assert not torch.equal(x, changed)
    for causal in (False, True):
        found = [block(each, causal=causal, present=present) for each in (x, changed)]
        torch.testing.assert_close(found[0][present], found[1][present])
    later = torch.cat([x[:, :4], torch.randn(2, 3, 10)], dim=1)
    torch.testing.assert_close(block(x, causal=True)[:, :4], block(later, causal=True)[:, :4])
    assert not torch.allclose(block(x)[:, :4], block(later)[:, :4])


def test_a_block_that_depends_on_its_place_says_so() -> None:
    """DeepNorm's alpha of another depth would be a wrong block without an error."""
    with pytest.warns(UserWarning, match="this block is"):
        alone = Block("deepnorm", **SIZES)
    assert alone.block.spec == Block("deepnorm", depth=1, layer=1, **SIZES).block.spec
    deep = Block("deepnorm", depth=12, layer=3, **SIZES)
    assert deep.block.spec.around_self.skip.value == pytest.approx(24**0.25)
    assert "deepnorm, layer 3 of 12" in repr(deep)
    first, second = (Block("sas", depth=2, layer=layer, **SIZES) for layer in (1, 2))
    kinds = [each.block.spec.self_attention.value for each in (first, second)]
    assert kinds == ["identity_plus", "identity"]


def test_a_block_of_an_encoder_is_none_of_a_causal_stack() -> None:
    """A preset may depend on the direction, which a call does not change."""

    def turned(stack: Stack) -> StackSpec:
        branch = Gain(value=0.5 if stack.causal else 2.0)
        return same_block(stack, around(ResidualSpec(norm_sum="layer_norm", branch=branch)), "none")

    PRESETS.add("turned", Preset(name="turned", equation="", paper="", fixes="", build=turned))
    try:
        block, x = Block("turned", **SIZES), torch.randn(2, 7, 10)
        with pytest.raises(UserError, match="has another block"):
            block(x, causal=True)
        assert block(x).shape == x.shape
        assert Decoder("turned", depth=1, **SIZES)(x).shape == x.shape
    finally:
        del PRESETS._parts["turned"]


def test_what_a_layer_passes_on_is_not_lost() -> None:
    x = torch.randn(2, 7, 10)
    for preset in ("realformer", "dual_stream"):
        with pytest.raises(UserError, match=f"{preset}: .* block.chained"):
            Block(preset, **SIZES)(x)
    first, second = (Block("realformer", depth=2, layer=n, **SIZES) for n in (1, 2))
    y, state = first.chained(x)
    with pytest.raises(UserError, match="layer 2 of 2"):
        second.chained(y)
    with pytest.raises(UserError, match="layer 1 of 2"):
        first.chained(y, state)


def test_penalties_of_a_stack_are_offered_and_its_spans_stay_in_their_range() -> None:
    encoder = Encoder("pre_ln", depth=2, adaptive_span=SPANS, **SIZES)
    encoder(torch.randn(2, 7, 10), present=PRESENT)
    (loss,) = encoder.auxiliary_losses(tokens=11).values()
    loss.backward()
    assert loss > 0
    # At the start a span is half of 8, and 11 of the 14 tokens are real.
    assert float(loss.detach()) == pytest.approx(2 * 0.5 * 4, rel=1e-5)
    assert not Encoder("pre_ln", depth=2, **SIZES).auxiliary_losses(tokens=11)

    # `fit` clamps spans after each step; here nobody else does, and the penalty would fall on.
    span = {"longest": 16, "ramp": 4.0, "penalty": 1.0}
    encoder = Encoder("pre_ln", depth=1, dim=8, heads=2, adaptive_span=span)
    optimizer = torch.optim.SGD(encoder.parameters(), lr=1.0)
    for _ in range(5):
        loss = encoder(torch.randn(2, 10, 8)).pow(2).mean()
        (loss + sum(encoder.auxiliary_losses(20).values())).backward()
        optimizer.step()
        optimizer.zero_grad()
    other = copy.deepcopy(encoder)
    assert pickle.loads(pickle.dumps(encoder)).dim == 8
    encoder(torch.randn(2, 10, 8))
    assert all(term.item() >= 0.0 for term in encoder.auxiliary_losses(20).values())
    spans = [part for part in other.modules() if isinstance(part, SpanMask)]
    assert min(span.fraction.min().item() for span in spans) < 0.0  # a copy has its own
    other(torch.randn(2, 10, 8))
    assert min(span.fraction.min().item() for span in spans) >= 0.0


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: Block("pre_lm", **SIZES), "did you mean 'pre_ln'"),
        (lambda: Block("pre_ln", nrom="rms_norm", **SIZES), "'nrom';.*'norm'"),
        (lambda: Block("pre_ln", norm="rms", **SIZES), "norm:.*'rms_norm'"),
        (lambda: Block({"preset": "pre_ln", "norm": 3}, **SIZES), "block.norm:.*null, found 3"),
        (lambda: Block("pre_ln", share_branch_gain=1, **SIZES), "share_branch_gain: "),
        (lambda: Block("pre_ln", attention_skip={"value": 0.0}, **SIZES), "attention_skip 0"),
        (lambda: Block("pre_ln", dim=10, heads=3), "heads 3:.*10"),
        (lambda: Block("pre_ln", dim=10, heads=2, dropout=1.0), "dropout 1.0: must be at least 0"),
        (lambda: Block("pre_ln", depth=3, **SIZES), "needs both"),
        (lambda: Block("pre_ln", depth=3, layer=4, **SIZES), "layer 4: expected 1 to 3"),
        (lambda: Block("pre_ln", cross=True, **SIZES), "peer_depth 0: expected the depth"),
        (lambda: Block("admin", **SIZES), "profiled skips"),
        (lambda: Block("prores", **SIZES), "branch_ramp"),
        (lambda: Encoder("admin", depth=2, **SIZES), "profiled skips"),
        (lambda: Encoder("ngpt", depth=2, **SIZES), "unit_matrices"),
        (lambda: Block("pre_ln", share="all", **SIZES), "belongs to a"),
        (lambda: Block("pre_ln", adaptive_span=SPANS, **SIZES), "adaptive_span:"),
        (lambda: Decoder("pre_ln", depth=2, memory={"length": 4}, **SIZES), "memory: belongs to"),
        (lambda: Encoder("pre_ln", depth=0, **SIZES), "depth 0: must be at least 1"),
        (lambda: Encoder("pre_ln", depth=1, positions="learned", **SIZES), "are added to"),
        (lambda: Encoder("pre_ln", depth=1, positions="ropes", **SIZES), "did you mean 'rope'"),
        (lambda: Decoder("pre_ln", depth=1, peer_depth=2, **SIZES), "reads no stack"),
        (lambda: Block("post_ln", preset="sas", **SIZES), "preset: is the first argument"),
        (lambda: Encoder("pre_ln", depth=1, max_positions=5, **SIZES), "max_positions 5: "),
        (lambda: Encoder("pre_ln", depth=2, dim=33, heads=3, differential=True), "differential"),
    ],
)
def test_a_mistake_is_one_line(call: Any, said: str) -> None:
    with pytest.raises(UserError, match=said) as found:
        call()
    assert "\n" not in str(found.value)


def test_wrong_inputs_are_refused() -> None:
    block, x = Block("pre_ln", **SIZES), torch.randn(2, 7, 10)
    with pytest.raises(UserError, match=r"x:.*\(.*, 10\)"):
        block(x[0])
    for present in (PRESENT.float(), PRESENT[:, 1:], PRESENT[0]):
        with pytest.raises(UserError, match=r"present:.*\(2, 7\)"):
            block(x, present=present)
    with pytest.raises(UserError, match="there is no"):
        block(x, memory=x)
    crossed = Block("pre_ln", cross=True, peer_depth=1, **SIZES)
    with pytest.raises(UserError, match="memory: missing"):
        crossed(x)
    with pytest.raises(UserError, match=r"memory:.*2"):
        crossed(x, memory=x[:1])


def test_blocks_need_no_lightning() -> None:
    code = """
import sys
import lightning_app
assert "torch" not in sys.modules
from lightning_app import Block, Decoder, Encoder
import torch
y = Block("sas", dim=32, heads=4, depth=6, layer=1)(torch.randn(2, 5, 32), causal=True)
assert y.shape == (2, 5, 32)
Decoder("realformer", depth=2, dim=32, heads=4)(y).sum().backward()
here = [name for name in ("lightning", "jsonargparse", "optuna", "pandas") if name in sys.modules]
assert not here, here
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)
