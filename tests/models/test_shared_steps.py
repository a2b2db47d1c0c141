"""Models whose layers share one block: what is shared, what halts, and what neither changes."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_app.blocks.config import BlockConfig
from lightning_app.blocks.kernels.choose import Form, attention_form
from lightning_app.blocks.masks import causal_mask
from lightning_app.blocks.presets import PRESETS
from lightning_app.blocks.residual import Gain
from lightning_app.blocks.spans import AdaptiveSpan, auxiliary_terms
from lightning_app.blocks.stack import Stack
from lightning_app.blocks.steps import HaltingSpec
from lightning_app.models.heads import CausalLanguageModel, EncoderDecoder
from lightning_app.models.stack import BlockStack, count_tokens_of, stacks
from lightning_app.testing import check_cached_text
from tests import tiny
from tests.models.test_reference_steps import same

pytestmark = pytest.mark.usefixtures("float64")

DEPTHS = {"encoder_depth": 4, "decoder_depth": 5}
UNEQUAL = {"admin", "mix_ln", "layer_norm_scaling", "sas_p_no_norm"}
UNEQUAL |= {
    *("siamese_norm", "hyper_connections", "mhc", "attention_residuals", "denseformer"),
    *("resformer", "prores", "differential", "speedrun"),
}
"""Presets with layers that one block cannot serve, whatever the axes."""
SHARED = [preset for preset in PRESETS if preset not in UNEQUAL]
MANY = HaltingSpec(bias=-0.8)


def shared(preset: str, **axes: Any) -> BlockConfig:
    if preset in ("sas", "sas_p"):
        axes["first_value_projection"] = "identity"
    return BlockConfig(preset=preset, share="all", **axes)


every_preset = pytest.mark.parametrize("preset", SHARED)
MAIN = ("post_ln", "pre_ln", "realformer", "sas")
every_kind = pytest.mark.parametrize("build", [tiny.translator, tiny.masked_model])


def halting(preset: str, **axes: Any) -> BlockConfig:
    """A shared block with halting, and with signals where the stream is one."""
    return shared(preset, step_signal="learned", halting=MANY, **axes)


def translator(block: BlockConfig, **changes: Any) -> EncoderDecoder:
    return tiny.randomise(tiny.translator(block, **{**DEPTHS, **changes})).eval()


def causal(block: BlockConfig, **changes: Any) -> CausalLanguageModel:
    return tiny.randomise(tiny.causal_model(block, **{**DEPTHS, **changes})).eval()


def layer_by_layer(model: nn.Module, depths: dict[str, int]) -> dict[str, Tensor]:
    """Return the state of an untied model each of whose blocks is a copy of the shared one."""
    state = {}
    for name, value in model.state_dict().items():
        stack, _, rest = name.partition(".blocks.0.")
        if not rest:
            state[name] = value
            continue
        for layer in range(depths[f"{stack}_depth"]):
            state[f"{stack}.blocks.{layer}.{rest}"] = value
    return state


@pytest.mark.parametrize(
    ("preset", "carry"),
    [*((preset, None) for preset in SHARED), *((p, c) for p in MAIN for c in ("mean", "qk_sum"))],
)
def test_shared_steps_are_layers_with_copied_weights(preset: str, carry: Any) -> None:
    """Forward, and the gradient of the shared block is the sum of those of its copies."""
    block = shared(preset, residual_attention=carry)
    model = translator(block)
    untied = translator(replace(block, share="none"))
    untied.load_state_dict(layer_by_layer(model, DEPTHS))
    source, target = tiny.sentences()
    real = target != tiny.PAD
    weight = torch.randn(int(real.sum()), tiny.VOCABULARY)
    ours, theirs = model(source, target)[real], untied(source, target)[real]
    same(ours, theirs)
    (ours * weight).sum().backward()
    (theirs * weight).sum().backward()
    summed: dict[str, Tensor] = {}
    for name, parameter in untied.named_parameters():
        stack, _, rest = name.partition(".blocks.")
        shared_name = f"{stack}.blocks.0.{rest.partition('.')[2]}" if rest else name
        assert parameter.grad is not None
        summed[shared_name] = summed.get(shared_name, 0.0) + parameter.grad
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, summed.pop(name), rtol=1e-9, atol=1e-9)
    assert not summed


@every_preset
def test_a_shared_stack_has_the_parameters_of_one_block(preset: str) -> None:
    def count(depth: int, **axes: Any) -> int:
        model = tiny.causal_model(BlockConfig(preset=preset, **axes), decoder_depth=depth)
        return sum(p.numel() for p in model.decoder.parameters())

    first = {"first_value_projection": "identity"} if preset in ("sas", "sas_p") else {}
    one = count(1, **first)
    assert count(6, share="all", **first) == one
    if preset == "dual_stream":
        return
    dim = tiny.SIZES["model_dim"]
    assert count(6, share="all", step_signal="sinusoidal", **first) == one
    assert count(6, share="all", step_signal="learned", **first) == one + 6 * dim
    assert count(6, share="all", halting=HaltingSpec(), **first) == one + dim + 1


def test_learned_positions_move_to_the_steps_and_a_norm_of_the_embedding_needs_them() -> None:
    sizes = {"positions": "learned", "max_positions": 19}
    plain = tiny.translator(shared("pre_ln"), **sizes)
    signalled = tiny.translator(shared("pre_ln", step_signal="sinusoidal"), **sizes)
    names = [name for name, _ in signalled.named_parameters() if "position_table" in name]
    assert names == [f"{stack}.signals.position_table.weight" for stack in ("encoder", "decoder")]
    assert plain.embedding.position_table is not None
    assert signalled.embedding.position_table is None
    block = shared("post_ln", step_signal="sinusoidal")
    with pytest.raises(ValueError, match="embedding_norm layer_norm with step_signal sinusoidal"):
        tiny.architecture(kind="encoder", embedding_norm="layer_norm").stacks(block)


@every_preset
@every_kind
def test_every_parameter_takes_part(preset: str, build: Callable[..., nn.Module]) -> None:
    """Distributed training stops at a parameter that no loss reaches; also if all halt at once."""
    for bias in (-0.8, 20.0):
        spec = None if preset == "dual_stream" else HaltingSpec(bias=bias)
        signal = "none" if spec is None else "learned"
        model = tiny.randomise(build(shared(preset, halting=spec, step_signal=signal), **DEPTHS))
        inputs = tiny.sentences()
        if build is tiny.masked_model:
            inputs = tiny.words(3, 7), torch.arange(5)
        (model(*inputs) * torch.randn(tiny.VOCABULARY)).sum().backward()
        assert [name for name, p in model.named_parameters() if p.grad is None] == []


ONE_STREAM = [preset for preset in SHARED if preset != "dual_stream"]


@pytest.mark.parametrize(
    ("preset", "positions"),
    [
        *((preset, "sinusoidal") for preset in ONE_STREAM),
        *((preset, positions) for preset in MAIN for positions in ("learned", "rope")),
    ],
)
def test_cached_decoding_equals_full_decoding(preset: str, positions: str) -> None:
    """Keys and values of every step of a token, also after it has halted."""
    check_cached_text(causal(halting(preset), positions=positions, model_dim=12), tiny.words(3, 7))


@pytest.mark.parametrize("form", ["plain", "stored", "reversible", "blocked"])
@pytest.mark.parametrize("carry", ["sum", "mean"])
def test_every_form_of_carried_scores_serves_shared_steps(form: Form, carry: Any) -> None:
    """The number of steps is fixed, so the reversible form undoes them in their order."""
    model = causal(halting("post_ln", residual_attention=carry)).train()
    tokens, weight = tiny.words(3, 7), torch.randn(3, 7, tiny.VOCABULARY)
    count_tokens_of(model, {"decoder": torch.ones_like(tokens, dtype=torch.bool)})
    found = []
    for chosen in ("plain", form):
        with attention_form(chosen):
            logits = model(tokens)
            loss = (logits * weight).sum() + auxiliary_terms(model, torch.tensor(21.0))["ponder"]
            parameters = list(model.parameters())
            found.append([logits, *torch.autograd.grad(loss, parameters, allow_unused=True)])
    for ours, theirs in zip(*found, strict=True):
        if ours is not None:
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


def test_the_start_of_the_halting_unit() -> None:
    model = tiny.translator(shared("pre_ln", halting=HaltingSpec(bias=-2.5)))
    for stack in stacks(model).values():
        assert stack.halting is not None
        assert stack.halting.unit.bias.tolist() == [-2.5]
        assert bool(stack.halting.unit.weight.any())
    plain, signalled = (
        tiny.causal_model(shared("pre_ln", step_signal=signal)) for signal in ("none", "learned")
    )
    assert plain.decoder.signals is None
    assert signalled.decoder.signals is not None
    assert 0.01 < signalled.get_parameter("decoder.signals.step_table.weight").std().item() < 0.03


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ({"preset": "mix_ln"}, "layers 1 and 2.*around_self.norm_input"),
        ({"preset": "sas"}, "layers 1 and 2.*self_attention.value, identity_plus and"),
        ({"preset": "pre_ln", "last_output_projection": "identity"}, "layers 1 and 4"),
        ({"ff_skip": Gain(learned=True, profiled=True)}, "share all:"),
        (
            {"halting": HaltingSpec(), "adaptive_span": AdaptiveSpan(longest=9, ramp=2.0)},
            "halting with adaptive_span",
        ),
        ({"preset": "dual_stream", "halting": HaltingSpec()}, "halting with preset dual_stream"),
        ({"preset": "dual_stream", "step_signal": "learned"}, "step_signal with preset dual_st"),
    ],
)
def test_what_has_no_meaning_is_refused(axes: dict[str, Any], message: str) -> None:
    block = BlockConfig(**{"preset": "post_ln", "share": "all", **axes})
    with pytest.raises(ValueError, match=message) as error:
        tiny.architecture(encoder_depth=4).stacks(block)
    assert "\n" not in str(error.value)


def test_equal_layers_may_be_shared_whatever_the_preset_is_called() -> None:
    """One layer has nothing to differ from, and axes make the layers of SAS equal."""
    for preset in ("mix_ln", "admin", "sas"):
        assert BlockConfig(preset=preset, share="all").resolve(Stack(depth=1)).share == "all"
    spec = BlockConfig(preset="sas", share="all", first_value_projection="identity")
    assert len(set(spec.resolve(Stack(depth=5)).blocks)) == 1


def test_a_shared_encoder_serves_alone() -> None:
    """A stack outside of a model, with its signals on top of positions that it does not have."""
    spec = shared("pre_ln", step_signal="sinusoidal").resolve(Stack(depth=3))
    stack = BlockStack(spec, tiny.architecture().sizes())
    x = torch.randn(2, 5, tiny.SIZES["model_dim"])
    assert stack(x, causal_mask(5, x.device)).shape == x.shape
