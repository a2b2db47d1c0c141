"""Fewer heads of keys and values than of queries; the reference is in `test_reference.py`."""

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_app.blocks.config import BlockConfig
from lightning_app.blocks.kernels.choose import attention_form
from lightning_app.blocks.spans import AdaptiveSpan
from lightning_app.blocks.windows import LocalisedSpan
from lightning_app.probes.hooks import ActivationHooks
from tests import tiny
from tests.models.test_heads import check_beams
from tests.models.test_reference_steps import same

HEADS, GROUPS, WIDTH = 4, 2, 16
SIZES: dict[str, Any] = {"num_heads": HEADS, "model_dim": WIDTH, "kv_heads": GROUPS}
BLOCKS: dict[str, BlockConfig] = {
    "plain": BlockConfig(),
    "sum": BlockConfig(residual_attention="sum"),
    "qk_sum": BlockConfig(residual_attention="qk_sum"),
    "qk_norm": BlockConfig(preset="qk_norm", query_key_noise=0.1),
    "softmax": BlockConfig(scores="cosine", score_cap=2.0, sink="learned"),
    "values": BlockConfig(value_carry="learned", output_gate="head"),
    "localised": BlockConfig(localised_span=LocalisedSpan(query_block=3, memory=2)),
    "spans": BlockConfig(adaptive_span=AdaptiveSpan(longest=5, ramp=2.0, start=0.5)),
}
every_block = pytest.mark.parametrize("name", BLOCKS)


def repeated(name: str, value: Tensor) -> Tensor:
    """Return the parameter of the same model with a head of keys and values per query head."""
    if ".key." not in name and ".value." not in name:
        return value
    return value.unflatten(0, (GROUPS, -1)).repeat_interleave(HEADS // GROUPS, dim=0).flatten(0, 1)


def both(build: Any, block: BlockConfig, **changes: Any) -> tuple[Any, Any]:
    """Return a model of grouped queries, and the ordinary one with repeated matrices."""
    grouped = tiny.randomise(build(block, **SIZES, **changes)).eval()
    ordinary = build(block, **(SIZES | changes | {"kv_heads": None})).eval()
    ordinary.load_state_dict({k: repeated(k, v) for k, v in grouped.state_dict().items()})
    return grouped, ordinary


@pytest.mark.in_turn(6)
@every_block
@pytest.mark.parametrize("positions", ["sinusoidal", "rope", "relative"])
def test_it_is_attention_with_repeated_heads(float64: None, name: str, positions: str) -> None:
    if (name, positions) == ("qk_sum", "relative"):
        with pytest.raises(ValueError, match="qk_sum"):
            both(tiny.translator, BLOCKS[name], positions=positions)
        return
    grouped, ordinary = both(tiny.translator, BLOCKS[name], positions=positions)
    source, target = tiny.sentences()
    same(grouped(source, target), ordinary(source, target))
    rows = []
    for model in (grouped, ordinary):
        hooks = ActivationHooks(model)
        with torch.no_grad(), hooks:
            hooks.expect(model.present(source, target))
            model(source, target)
        rows.append(hooks.rows(0))
    assert len(rows[0]) == len(rows[1]) > 0
    for ours, theirs in zip(*rows, strict=True):
        assert ours[:-1] == theirs[:-1]
        assert ours.value == pytest.approx(theirs.value, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("form", ["plain", "stored", "reversible", "blocked"])
def test_every_form_of_a_chain(float64: None, form: Any) -> None:
    """Also the gradients, which a repeated matrix splits among its copies."""
    grouped, ordinary = both(tiny.causal_model, BLOCKS["sum"])
    tokens, weight = tiny.words(2, 9), torch.randn(2, 9, tiny.VOCABULARY)
    with attention_form(form):
        (grouped(tokens) * weight).sum().backward()
    (ordinary(tokens) * weight).sum().backward()
    expected = dict(ordinary.named_parameters())
    for name, parameter in grouped.named_parameters():
        theirs = expected[name].grad
        assert theirs is not None
        if theirs.shape != parameter.shape:
            theirs = theirs.unflatten(0, (GROUPS, HEADS // GROUPS, -1)).sum(dim=1).flatten(0, 1)
        torch.testing.assert_close(parameter.grad, theirs, rtol=1e-9, atol=1e-11)


@pytest.mark.in_turn(4)
@every_block
@pytest.mark.parametrize("positions", ["sinusoidal", "rope"])
@torch.no_grad()
def test_cached_decoding_is_the_whole_pass(float64: None, name: str, positions: str) -> None:
    """The caches hold the heads of keys and values only."""
    model = tiny.randomise(tiny.translator(BLOCKS[name], **SIZES, positions=positions)).eval()
    state = check_beams(model, 12)
    assert state.memory is not None
    for part in (*state.memory.layers, *((c.keys, c.values) for c in state.caches)):
        assert all(x is not None and x.shape[1] == GROUPS for x in part)


def test_matrices_start_by_their_own_fans() -> None:
    wide: dict[str, Any] = {"num_heads": 8, "model_dim": 128, "kv_heads": 2}
    attention: Any = (
        tiny.causal_model("pre_ln", **wide).decoder.blocks[0].get_submodule("self_attention")
    )
    for part in (attention.key, attention.value):
        assert part.weight.shape == (32, 128)
        bound = (6 / (128 + 32)) ** 0.5 * 2**-0.5
        assert 0.98 * bound < float(part.weight.detach().abs().max()) <= bound


@pytest.mark.parametrize("groups", [0, -1, 3, 8])
def test_a_number_that_does_not_divide_is_refused(groups: int) -> None:
    with pytest.raises(ValueError, match=f"kv_heads {groups}: must divide num_heads 4"):
        tiny.architecture(**(SIZES | {"kv_heads": groups})).stacks(BlockConfig())


@pytest.mark.parametrize(
    "block",
    [
        BlockConfig(preset="sas"),
        BlockConfig(preset="v_skipinit"),
        BlockConfig(value_projection="identity_plus"),
    ],
)
def test_values_in_the_width_of_the_stream_are_refused(block: BlockConfig) -> None:
    with pytest.raises(ValueError, match="kv_heads 2 with value_projection"):
        tiny.architecture(**SIZES).stacks(block)
    tiny.architecture(**(SIZES | {"kv_heads": HEADS})).stacks(block)
