"""Parts that were built apart, together: positions, spans, shared steps and halting.

Each part has its reference elsewhere. Here a pair of them keeps what holds of every causal stack:
no token depends on a later one, and cached decoding is the whole pass.
"""

from typing import Any
from unittest import mock

import pytest
import torch

from lightning_app.blocks import windows
from lightning_app.blocks.config import BlockConfig
from lightning_app.blocks.spans import AdaptiveSpan
from lightning_app.blocks.steps import HaltingSpec
from lightning_app.blocks.windows import LocalisedSpan
from lightning_app.models.heads import CausalLanguageModel
from lightning_app.testing import check_cached_text
from tests import tiny

pytestmark = pytest.mark.usefixtures("float64")

LOCAL = {"localised_span": LocalisedSpan(query_block=3, memory=2)}
ADAPTIVE = {"adaptive_span": AdaptiveSpan(longest=6, ramp=2.0, start=0.4)}
DYNAMIC = {"adaptive_span": AdaptiveSpan(longest=6, ramp=2.0, dynamic_bias=-0.5)}
HALTING = {"share": "all", "halting": HaltingSpec(), "step_signal": "sinusoidal"}
CAPPED = {"score_cap": 0.6}
SHARED = {"share": "all", "step_signal": "learned"}

PAIRS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "relative and a localised span": ("pre_ln", "relative", LOCAL),
    "relative, a localised span, carried scores": ("realformer", "relative_untied", LOCAL),
    "relative and adaptive spans": ("post_ln", "relative", ADAPTIVE),
    "relative and shared steps": ("pre_ln", "relative", {"share": "all"}),
    "relative, halting": ("post_ln", "relative_untied", {"share": "all", "halting": HaltingSpec()}),
    "a localised span and shared steps": ("realformer", "sinusoidal", {**LOCAL, **SHARED}),
    "a localised span and halting": ("pre_ln", "rope", {**LOCAL, **HALTING}),
    "adaptive spans and shared steps": ("post_ln", "learned", {**ADAPTIVE, **SHARED}),
    "dynamic spans and shared steps": ("post_ln", "learned", {**DYNAMIC, **SHARED}),
    "relative and dynamic spans": ("realformer", "relative", DYNAMIC),
    "shaped, relative, localised": ("sas", "relative", LOCAL),
    "sinks, relative, localised": ("realformer", "relative", {**LOCAL, "sink": "learned"}),
    "sinks, adaptive spans": ("post_ln", "rope", {**ADAPTIVE, "sink": "zero"}),
    "sinks, caps, dynamic spans": ("pre_ln", "learned", {**DYNAMIC, **CAPPED, "sink": "learned"}),
    "caps, localised, halting": ("pre_ln", "rope", {**LOCAL, **HALTING, **CAPPED}),
    "caps, relative": ("qk_norm", "relative", CAPPED),
    "cosines, sinks": ("realformer", "rope", {"scores": "cosine", "sink": "zero"}),
    "cosines, caps, relative": ("post_ln", "relative", {**CAPPED, "scores": "cosine"}),
    "cosines, sums of queries": (
        "pre_ln",
        "learned",
        {"scores": "cosine", "sink": "learned", "residual_attention": "qk_sum"},
    ),
}

every_pair = pytest.mark.parametrize(("preset", "positions", "axes"), PAIRS.values(), ids=PAIRS)


def model(preset: str, positions: str, axes: dict[str, Any]) -> CausalLanguageModel:
    block = BlockConfig(preset=preset, **axes)
    made = tiny.causal_model(block, positions=positions, model_dim=12, decoder_depth=3)
    return tiny.randomise(made).eval()


@pytest.mark.in_turn(5)
@every_pair
def test_cached_decoding_is_the_whole_pass(preset: str, positions: str, axes: Any) -> None:
    check_cached_text(model(preset, positions, axes), tiny.words(3, 11))


@every_pair
def test_every_parameter_learns(preset: str, positions: str, axes: Any) -> None:
    made = model(preset, positions, axes).train()
    loss = made(tiny.words(3, 11)).log_softmax(dim=-1)[..., 5].sum()
    names, parameters = zip(*made.named_parameters(), strict=True)
    gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
    idle = {
        name
        for name, gradient in zip(names, gradients, strict=True)
        if gradient is None or not bool(gradient.any())
    }
    # A key bias adds the same to every score of a query, which a softmax does not see.
    assert {name for name in idle if not name.endswith("self_attention.key.bias")} == set()
    assert all(gradient is None or bool(gradient.isfinite().all()) for gradient in gradients)


@pytest.mark.parametrize("positions", ["relative", "relative_untied", "rope"])
@pytest.mark.parametrize("preset", ["pre_ln", "realformer", "sas"])
def test_folded_blocks_are_the_dense_mask(preset: str, positions: str) -> None:
    made, tokens = model(preset, positions, LOCAL), tiny.words(2, 90)
    folded = made(tokens)
    with mock.patch.object(windows, "_fold", return_value=None):
        dense = made(tokens)
    torch.testing.assert_close(folded, dense, rtol=1e-10, atol=1e-10)
