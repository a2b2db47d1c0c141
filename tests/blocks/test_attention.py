from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_app.blocks.attention import (
    AnchoredProjection,
    Attention,
    AttentionSpec,
    Projection,
    ProjectionGains,
    ShapingSpec,
)
from lightning_app.blocks.masks import Mask, causal_mask, padding_mask
from lightning_app.blocks.residual import Gain

BATCH, LENGTH, HEADS, DIM = 3, 7, 2, 5
MODEL = HEADS * DIM
MASKS = {
    "causal": causal_mask(LENGTH, torch.device("cpu")),
    "padding": padding_mask(torch.arange(LENGTH) < torch.tensor([7, 4, 1])[:, None]),
}
masks = pytest.mark.parametrize("mask", MASKS.values(), ids=list(MASKS))
carries = pytest.mark.parametrize("carry", ["none", "scores", "qk_sum"])


def build(dropout: float = 0.0, **spec: Any) -> Attention:
    return Attention(AttentionSpec(**spec), MODEL, HEADS, dropout)


def run(attention: Attention, u: Tensor, mask: Mask) -> Tensor:
    return attention(*attention.queries_keys_values(u, None), mask, None)[0]


@masks
@pytest.mark.parametrize("value", ["identity", "identity_plus"])
def test_simplified_attention_starts_as_none(float64: None, mask: Mask, value: Projection) -> None:
    attention = build(shaping=ShapingSpec(), value=value, output="identity", query_init="zeros")
    # As initialisation leaves them: no queries, W = 0. Keys and their biases may be anything.
    torch.nn.init.zeros_(attention.query.weight)
    torch.nn.init.zeros_(attention.query.bias)
    if isinstance(attention.value, AnchoredProjection):
        torch.nn.init.zeros_(attention.value.change.weight)
    u = torch.randn(BATCH, LENGTH, MODEL)
    torch.testing.assert_close(run(attention, u, mask), u, rtol=1e-14, atol=1e-14)


def test_a_part_that_is_not_used_has_a_gradient_of_zero() -> None:
    """With deterministic algorithms PyTorch fills memory that nothing was written to by NaN."""
    attention = build()
    torch.use_deterministic_algorithms(True)
    try:
        query, _, values = attention.queries_keys_values(torch.randn(BATCH, LENGTH, MODEL), None)
        (query.sum() + values.sum()).backward()
    finally:
        torch.use_deterministic_algorithms(False)
    for part in (attention.query, attention.value):
        assert part.get_parameter("weight").grad.abs().sum() > 0.0  # pyright: ignore[reportOptionalMemberAccess]
    assert attention.key.weight.grad.abs().sum() == 0.0  # pyright: ignore[reportOptionalMemberAccess]


@carries
def test_attention_dropout_leaves_the_identity_part_alone(carry: str) -> None:
    """beta = gamma = 0 leaves alpha I: nothing is dropped however strong the dropout."""
    only_identity = ShapingSpec(alpha=2.0, beta=0.0, gamma=0.0)
    parts = {"value": "identity", "output": "identity", "carry": carry}
    attention = build(dropout=0.9, shaping=only_identity, **parts).train()
    u = torch.randn(BATCH, LENGTH, MODEL)
    torch.testing.assert_close(run(attention, u, MASKS["causal"]), 2.0 * u)
    # With the softmax part the same dropout is seen.
    attention = build(dropout=0.9, shaping=ShapingSpec(), **parts).train()
    assert not torch.equal(run(attention, u, MASKS["causal"]), run(attention, u, MASKS["causal"]))


def test_noise_is_cut_at_two_deviations_and_acts_in_training_alone() -> None:
    noisy = build(query_key_noise=0.5)
    u = torch.randn(50, LENGTH, MODEL)
    keys = (lambda u, r: noisy.keys_values(u, r)[0], noisy.key)
    for ours, plain in ((noisy.queries, noisy.query), keys):
        clean = plain(u).unflatten(-1, (HEADS, DIM)).transpose(1, 2)
        noise = (ours(u, None) - clean) / 0.5
        assert noise.abs().max() < 2.0 + 1e-4
        # The standard deviation of a standard normal variable that is cut at two.
        assert noise.std().item() == pytest.approx(0.8796, rel=0.03)
        assert noise.mean().abs() < 0.05
        noisy.eval()
        torch.testing.assert_close(ours(u, None), clean)
        noisy.train()
    assert torch.equal(noisy.keys_values(u, None)[1], noisy.keys_values(u, None)[1])


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"score_cap": 0.0}, "score_cap 0.0: .* above 0"),
        ({"score_cap": float("inf")}, "score_cap inf: .* above 0"),
        ({"score_cap": 5.0, "carry": "qk_sum"}, "score_cap 5.0 with residual_attention"),
        ({"score_divisor": 0.0, "carry": "scores"}, "residual_temperature 0"),
        ({"score_divisor": -1.0, "carry": "scores"}, "residual_temperature -1"),
        ({"score_divisor": float("nan"), "carry": "scores"}, "residual_temperature nan"),
        ({"score_divisor": 2.0}, "nothing to divide"),
        ({"query_key_noise": -0.5}, "query_key_noise -0.5"),
        ({"tied": True, "value": "orthogonal", "output": "identity"}, "tied_projections"),
    ],
)
def test_attention_without_meaning_is_refused(spec: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AttentionSpec(**spec)


@pytest.mark.parametrize("changes", [{"vector": True}, {"profiled": True}])
@pytest.mark.parametrize("name", ["kept", "change"])
def test_gains_of_a_projection_are_scalars(name: str, changes: dict[str, bool]) -> None:
    with pytest.raises(ValueError, match="gains of a"):
        ProjectionGains(**{name: Gain(learned=True, **changes)})
