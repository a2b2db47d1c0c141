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
    Shaping,
    ShapingSpec,
)
from lightning_app.blocks.kernels.choose import PlainScores, QueryKeySums
from lightning_app.blocks.masks import Mask, causal_mask, padding_mask
from lightning_app.blocks.placed import rotation
from lightning_app.blocks.residual import Gain
from tests import reference, tiny

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


@pytest.mark.parametrize("per_head", [True, False])
@pytest.mark.parametrize("learned", [True, False])
@pytest.mark.parametrize("gamma", [3.0, None])
def test_weights_are_learned_per_head(per_head: bool, learned: bool, gamma: float | None) -> None:
    shaping = Shaping(
        ShapingSpec(alpha=0.5, beta=2.0, gamma=gamma, per_head=per_head, learned=learned), HEADS
    )
    expected = {"alpha": [0.5], "beta": [2.0]} | ({} if gamma is None else {"gamma": [gamma]})
    state = shaping.state_dict()
    assert {name: value.unique().tolist() for name, value in state.items()} == expected
    assert {value.shape for value in state.values()} == {(HEADS if per_head else 1, 1, 1)}
    assert [name for name, _ in shaping.named_parameters()] == (list(state) if learned else [])


@pytest.mark.parametrize("orthogonal", [False, True])
@pytest.mark.parametrize("learned", [False, True])
def test_an_anchored_projection_is_right(float64: None, orthogonal: bool, learned: bool) -> None:
    """``u (a W_0 + b dW)``, W_0 the identity or an orthogonal matrix."""
    kept, change = (Gain(value=value, learned=learned) for value in (0.9, 0.3))
    gains = ProjectionGains(kept=kept, change=change)
    module = AnchoredProjection(MODEL, gains, orthogonal=orthogonal)
    initial = torch.eye(MODEL)
    if orthogonal:
        assert module.initial is not None
        initial = torch.nn.init.orthogonal_(module.initial)
    module = tiny.randomise(module)
    state = module.state_dict()
    names = ["change.weight", *(["kept.gain", "departure.gain"] if learned else [])]
    assert [name for name, _ in module.named_parameters()] == names
    assert list(state) == [*(["initial"] if orthogonal else []), *names]
    kept, change = state.get("kept.gain", 0.9), state.get("departure.gain", 0.3)
    u = torch.randn(BATCH, LENGTH, MODEL)
    expected = u @ (kept * initial.T + change * module.change.weight.T)
    torch.testing.assert_close(module(u), expected, rtol=1e-13, atol=1e-13)


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


def test_a_chain_hands_on_what_it_carries(float64: None) -> None:
    """Nothing, Z_n, or the sums of queries and of keys; from a layer above, added to its own."""
    u = torch.randn(BATCH, LENGTH, MODEL)
    for carry in ("none", "scores", "qk_sum"):
        attention = tiny.randomise(build(carry=carry, score_divisor=3.0 - 2.0 * (carry == "none")))
        query, keys, values = attention.queries_keys_values(u, None)
        _, first = attention(query, keys, values, MASKS["causal"], None)
        _, second = attention(query, keys, values, MASKS["causal"], first)
        match carry:
            case "none":
                assert first is None
                assert second is None
            case "scores":
                scores, allowed = query @ keys.mT / DIM**0.5, MASKS["causal"].allowed
                for n, carried in enumerate((first, second), start=1):
                    assert isinstance(carried, PlainScores)
                    ours = carried.scores.masked_fill(~allowed, 0.0)
                    torch.testing.assert_close(ours, n * scores.masked_fill(~allowed, 0.0))
            case _:
                assert isinstance(first, QueryKeySums)
                torch.testing.assert_close(first, QueryKeySums(query, keys))
                torch.testing.assert_close(second, QueryKeySums(2 * query, 2 * keys))


@pytest.mark.parametrize("norm", ["layer_norm", "rms_norm"])
def test_queries_and_keys_are_normalized_per_head_then_rotated(float64: None, norm: Any) -> None:
    attention = tiny.randomise(Attention(AttentionSpec(qk_norm=norm), 12, HEADS, 0.0))
    u = torch.randn(BATCH, LENGTH, 12)
    angles = rotation(torch.arange(LENGTH), 6)
    p = tiny.numpy_parameters(attention)
    found = attention.queries(u, angles), attention.keys_values(u, angles)[0]
    for name, ours in zip(("query", "key"), found, strict=True):
        x = u.numpy() @ p[f"{name}.weight"].T + p[f"{name}.bias"]
        x = x.reshape(BATCH, LENGTH, HEADS, 6)
        gain = p[f"{name}_norm.weight"]
        if norm == "layer_norm":
            x = reference.layer_norm(x, gain, p[f"{name}_norm.bias"])
        else:
            x = reference.rms_norm(x, gain)
        x = reference.rotate(x.reshape(BATCH, LENGTH, 12), HEADS)
        expected = torch.from_numpy(x).unflatten(-1, (HEADS, 6)).transpose(1, 2)
        torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)


def test_noise_is_cut_at_two_deviations_and_acts_in_training_alone() -> None:
    noisy = build(query_key_noise=0.5)
    u = torch.randn(50, LENGTH, MODEL)
    for ours, plain in (
        (noisy.queries, noisy.query),
        (lambda u, r: noisy.keys_values(u, r)[0], noisy.key),
    ):
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
        ({"qk_norm": "layer_norm", "query_init": "zeros"}, "qk_norm"),
        ({"qk_norm": "rms_norm", "scores": "cosine"}, "scores cosine with qk_norm rms_norm"),
        ({"query_init": "zeros", "scores": "cosine"}, "scores cosine with queries"),
        ({"score_cap": 0.0}, "score_cap 0.0: .* above 0"),
        ({"score_cap": float("inf")}, "score_cap inf: .* above 0"),
        ({"score_cap": 5.0, "carry": "scores"}, "score_cap 5.0 with residual_attention"),
        ({"score_cap": 5.0, "carry": "qk_sum"}, "score_cap 5.0 with residual_attention"),
        ({"score_cap": 5.0, "shaping": ShapingSpec(gamma=None)}, "score_cap 5.0 with shaped"),
        ({"sink": "zero", "shaping": ShapingSpec(gamma=None)}, "sink zero with shaped"),
        ({"score_divisor": 0.0, "carry": "scores"}, "residual_temperature 0"),
        ({"score_divisor": -1.0, "carry": "scores"}, "residual_temperature -1"),
        ({"score_divisor": float("nan"), "carry": "scores"}, "residual_temperature nan"),
        ({"score_divisor": 2.0}, "nothing to divide"),
        ({"query_key_noise": -0.5}, "query_key_noise -0.5"),
        ({"tied": True}, "tied_projections"),
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
