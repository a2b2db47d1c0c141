"""Stream rules: which of them start as Pre-LN, what they refuse, and rules of one's own."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_app.blocks.masks import padding_mask
from lightning_app.blocks.norm import NORMS
from lightning_app.blocks.presets import PRESETS
from lightning_app.blocks.stack import Stack, StackSpec
from lightning_app.blocks.streams import (
    STREAM_RULES,
    Projected,
    Stream,
    StreamPlace,
    StreamRule,
    doubly_stochastic,
)
from lightning_app.core.errors import UserError
from tests import tiny

Build = Callable[..., Any]
AS_PRE_LN: dict[str, dict[str, Any]] = {
    "hyper_static": {"preset": "hyper_connections", "stream": "hyper_static"},
    "hyper_dynamic": {"preset": "hyper_connections"},
    "hyper_manifold": {"preset": "mhc"},
    "attention": {"preset": "attention_residuals"},
    "average": {"preset": "denseformer"},
    "gpas": {"preset": "gpas"},
}
# mHC divides each sum plus 1e-6, so that its mixing shrinks the states by as much.
CLOSE = dict.fromkeys(AS_PRE_LN, 1e-10) | {"hyper_manifold": 2e-4}
MODELS: dict[str, Build] = {"translator": tiny.translator, "causal_model": tiny.causal_model}


def logits(model: Any) -> Tensor:
    torch.manual_seed(5)
    source, target = tiny.sentences()
    return model(source, target) if hasattr(model, "encoder") else model(target)


def loss(model: Any) -> Tensor:
    found = logits(model).flatten(0, -2)
    return nn.functional.cross_entropy(found, tiny.words(len(found)))


def without_epsilon(model: nn.Module) -> None:
    """A norm cancels a factor of its input exactly only without epsilon."""
    for module in model.modules():
        if isinstance(module, NORMS):
            module.eps = 0.0


def paired(build: Build, config: dict[str, Any]) -> tuple[nn.Module, nn.Module, set[str]]:
    """`pre_ln` with random matrices, the same with a stream at its start, and what that adds."""
    base = tiny.randomise(build("pre_ln"))
    model = build(tiny.BlockConfig(**config))
    added = model.state_dict().keys() - base.state_dict().keys()
    assert not base.state_dict().keys() - model.state_dict().keys()
    model.load_state_dict(base.state_dict(), strict=False)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, Projected):
                module.phi.zero_()  # mHC is Pre-LN only where phi contributes nothing
    for each in (base, model):
        without_epsilon(each)
        each.eval()
    return base, model, added


@pytest.mark.in_turn(3)
@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("build", MODELS)
@pytest.mark.parametrize("rule", AS_PRE_LN)
def test_it_starts_as_pre_ln(rule: str, build: str) -> None:
    """Equal logits, and equal gradients of every parameter that the two share."""
    base, model, added = paired(MODELS[build], AS_PRE_LN[rule])
    assert added
    close = CLOSE[rule]
    torch.testing.assert_close(logits(model), logits(base), rtol=close, atol=close)
    for each in (base, model):
        loss(each).backward()
    theirs = dict(base.named_parameters())
    for name, parameter in model.named_parameters():
        if name not in added:
            gradient = theirs[name].grad
            torch.testing.assert_close(parameter.grad, gradient, rtol=1e-8 + close, atol=close)


def test_each_sub_layer_reads_a_state_of_its_own_at_the_start() -> None:
    """``A_m = e_(k mod n)``, k the sub-layer from 0, as in the authors' code."""
    decoder = tiny.translator("hyper_connections").decoder
    reads = [part for name, part in decoder.named_parameters() if name.endswith("static.read")]
    expected = torch.eye(4).repeat(2, 1)
    assert len(reads) == 3 * tiny.SIZES["decoder_depth"]
    blocks = range(tiny.SIZES["decoder_depth"])
    order = [f"{b}.{a}" for b in blocks for a in ("self", "cross", "ff")]
    parts = dict(decoder.named_parameters())
    for k, place in enumerate(order):
        layer, around = place.split(".")
        found = parts[f"blocks.{layer}.around_{around}.stream.static.read"]
        torch.testing.assert_close(found, expected[k])


@pytest.mark.parametrize("preset", ["hyper_connections", "mhc"])
def test_the_states_come_apart(preset: str) -> None:
    """If no parameter told the states apart, symmetry would keep them equal forever."""
    torch.manual_seed(1)
    model = tiny.causal_model(preset)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(10):
        optimizer.zero_grad()
        loss(model).backward()
        optimizer.step()
    seen: list[Stream] = []
    model.decoder.blocks[-1].register_forward_hook(lambda *call: seen.append(call[2][0]))
    logits(model)
    states = seen[-1].parts[0].detach()
    assert states.shape[2] == 4
    assert float((states - states.mean(dim=2, keepdim=True)).abs().max()) > 1e-3


def test_mixing_matrices_are_doubly_stochastic() -> None:
    mixing = doubly_stochastic(torch.randn(50, 4, 4, dtype=torch.float64))
    assert float(mixing.min()) > 0.0
    assert float((mixing.sum(dim=-2) - 1.0).abs().max()) < 2e-6
    assert float((mixing.sum(dim=-1) - 1.0).abs().max()) < 1e-3


@pytest.mark.parametrize(
    "preset", ["hyper_connections", "mhc", "attention_residuals", "gated_attention", "resformer"]
)
def test_what_it_shares_with_pre_ln_starts_equal(preset: str) -> None:
    """Runs of one seed pair over variants: drawn numbers of a stream come after all others."""
    values = []
    for name in ("pre_ln", preset):
        torch.manual_seed(3)
        values.append(tiny.translator(name).state_dict())
    for name, value in values[0].items():
        assert torch.equal(values[1][name], value), name


@pytest.mark.parametrize(
    ("axes", "words"),
    [
        ({"preset": "pre_ln", "stream": "hyper_dynamic", "streams": 1}, "streams 1: .* at least 2"),
        ({"preset": "pre_ln", "streams": 4}, "streams 4: expected 1 with stream plain"),
        ({"preset": "post_ln", "stream": "attention"}, "norm_placement post"),
        ({"preset": "pre_ln", "stream": "atention"}, "did you mean 'attention'"),
    ],
)
def test_what_has_no_meaning_is_refused_in_one_line(axes: dict[str, Any], words: str) -> None:
    with pytest.raises((ValueError, UserError), match=words) as error:
        tiny.BlockConfig(**axes).resolve(Stack(depth=3))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("rule", ["average", "hyper_static", "hyper_dynamic", "hyper_manifold"])
def test_autocast_leaves_the_states_as_they_are(rule: str) -> None:
    """Beside branches of zero the stream stays the embedding, in float32 as in Pre-LN."""
    model = tiny.encoder(tiny.BlockConfig(preset="zero_output", stream=rule))
    x, mask = torch.randn(2, 5, 10), padding_mask(torch.ones(2, 5, dtype=torch.bool))
    states: list[Stream] = []
    last = [block for _, block in model.layers][-1]
    last.register_forward_hook(lambda *call: states.append(call[2][0]))
    with torch.no_grad():
        model(x, mask)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            model(x, mask)
    plain, rounded = states
    for own, theirs in zip((rounded.x, *rounded.parts), (plain.x, *plain.parts), strict=True):
        assert own.dtype == torch.float32
        torch.testing.assert_close(own, theirs, rtol=0.0, atol=1e-6)


def test_without_a_skip_an_average_works_under_autocast() -> None:
    """A layer's output may then be in bfloat16, beside an embedding in float32."""
    model = tiny.encoder(tiny.BlockConfig(preset="sas", stream="average"))
    mask = padding_mask(torch.ones(2, 5, dtype=torch.bool))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert bool(model(torch.randn(2, 5, 10), mask).isfinite().all())


def test_a_stack_has_one_rule_which_decides_on_the_number_of_states() -> None:
    with pytest.raises(ValueError, match="stream average with dual_stream true"):
        replace(PRESETS["dual_stream"](Stack(depth=2)), stream="average")
    assert tiny.BlockConfig(stream="hyper_static").resolve(Stack(depth=2)).streams == 4
    assert tiny.BlockConfig(preset="mhc", stream="plain").resolve(Stack(depth=2)).streams == 1
    assert tiny.BlockConfig(preset="mhc", streams=2).resolve(Stack(depth=2)).streams == 2


@pytest.mark.parametrize("cross", [False, True])
def test_each_sub_layer_and_the_end_have_a_place(cross: bool) -> None:
    places: list[StreamPlace] = []

    class Watched(StreamRule):
        def __init__(self, place: StreamPlace) -> None:
            super().__init__(place)
            places.append(place)

    each = 3 if cross else 2
    block = PRESETS["pre_ln"](Stack(depth=2)).blocks[0]
    STREAM_RULES.add("watched", Watched)
    try:
        spec = StackSpec(blocks=(block,) * 2, final_norm="rms_norm", stream="watched")
        list(spec.stream_rules(8, cross=cross))
    finally:
        del STREAM_RULES._parts["watched"]  # pyright: ignore[reportPrivateUsage]
    numbers = range(1, 2 * each + 2)
    assert [place.number for place in places] == [*numbers]
    assert [place.layer for place in places] == [(n - 1) // each + 1 for n in numbers]
    assert [place.ends_layer for place in places] == [n % each == 0 for n in numbers]
    assert [place.ends_stack for place in places] == [n > 2 * each for n in numbers]
    assert {place.norm for place in places} == {"rms_norm"}
