import pytest
import torch
from torch import Tensor

from lightning_app.blocks.attention import (
    Attention,
    AttentionSpec,
    IdentityPlus,
    Projection,
    Shaping,
    ShapingSpec,
)
from lightning_app.blocks.kernels import Mask, causal_mask, padding_mask
from tests import tiny

BATCH, LENGTH, HEADS, DIM = 3, 7, 2, 5
MODEL = HEADS * DIM
MASKS = {
    "causal": causal_mask(LENGTH, torch.device("cpu")),
    "padding": padding_mask(torch.arange(LENGTH) < torch.tensor([7, 4, 1])[:, None]),
}
masks = pytest.mark.parametrize("mask", MASKS.values(), ids=list(MASKS))


def build(dropout: float = 0.0, **spec) -> Attention:
    return Attention(AttentionSpec(**spec), MODEL, HEADS, dropout)


def run(attention: Attention, u: Tensor, mask: Mask) -> Tensor:
    return attention(u, *attention.keys_values(u), mask, None)[0]


@masks
@pytest.mark.parametrize("value", ["identity", "identity_plus"])
def test_simplified_attention_starts_as_the_identity(
    float64: None, mask: Mask, value: Projection
) -> None:
    attention = build(shaping=ShapingSpec(), value=value, output="identity", query_init="zeros")
    # As initialisation leaves them: no queries, W = 0. Keys and their biases may be anything.
    torch.nn.init.zeros_(attention.query.weight)
    torch.nn.init.zeros_(attention.query.bias)
    if isinstance(attention.value, IdentityPlus):
        torch.nn.init.zeros_(attention.value.change.weight)
    u = torch.randn(BATCH, LENGTH, MODEL)
    torch.testing.assert_close(run(attention, u, mask), u, rtol=1e-14, atol=1e-14)


@masks
@pytest.mark.parametrize("carry", [False, True])
def test_weights_0_1_0_are_plain_attention(float64: None, mask: Mask, carry: bool) -> None:
    plain = ShapingSpec(alpha=0.0, beta=1.0, gamma=0.0, learned=False)
    shaped = tiny.randomise(build(shaping=plain, carry_scores=carry))
    ordinary = build(carry_scores=carry)
    missing, unexpected = ordinary.load_state_dict(shaped.state_dict(), strict=False)
    assert not missing
    assert unexpected == [f"shaping.{name}" for name in ("alpha", "beta", "gamma")]
    u = torch.randn(BATCH, LENGTH, MODEL)
    torch.testing.assert_close(run(shaped, u, mask), run(ordinary, u, mask), rtol=1e-14, atol=1e-14)


@masks
def test_rows_of_the_shaped_map_sum_to_its_weights(float64: None, mask: Mask) -> None:
    """The sum of a row is what the map makes of a value that is 1 for every key."""
    attention = tiny.randomise(build(shaping=ShapingSpec(), output="identity"))
    assert attention.shaping is not None
    u = torch.randn(BATCH, LENGTH, MODEL)
    keys, values = attention.keys_values(u)
    sums, _ = attention(u, keys, torch.ones_like(values), mask, None)
    alpha, beta, gamma = attention.shaping.parameters()
    weights = alpha + beta - gamma
    expected = weights.expand(HEADS, 1, DIM).flatten().expand_as(sums)
    torch.testing.assert_close(sums, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("per_head", [True, False])
@pytest.mark.parametrize("learned", [True, False])
def test_weights_are_per_head_and_learned_as_asked(per_head: bool, learned: bool) -> None:
    shaping = Shaping(
        ShapingSpec(alpha=0.5, beta=2.0, gamma=3.0, per_head=per_head, learned=learned), HEADS
    )
    state = shaping.state_dict()
    assert {name: value.unique().tolist() for name, value in state.items()} == {
        "alpha": [0.5],
        "beta": [2.0],
        "gamma": [3.0],
    }
    assert {value.shape for value in state.values()} == {(HEADS if per_head else 1, 1, 1)}
    assert [name for name, _ in shaping.named_parameters()] == (list(state) if learned else [])


def test_identity_plus_is_u_times_identity_plus_w(float64: None) -> None:
    module = tiny.randomise(IdentityPlus(MODEL))
    u = torch.randn(BATCH, LENGTH, MODEL)
    matrix = torch.eye(MODEL) + module.change.weight.T
    torch.testing.assert_close(module(u), u @ matrix, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("carry", [False, True])
def test_attention_dropout_leaves_the_identity_part_alone(carry: bool) -> None:
    """beta = gamma = 0 leaves alpha I: nothing is dropped however strong the dropout."""
    only_identity = ShapingSpec(alpha=2.0, beta=0.0, gamma=0.0)
    parts = {"value": "identity", "output": "identity", "carry_scores": carry}
    attention = build(dropout=0.9, shaping=only_identity, **parts).train()
    u = torch.randn(BATCH, LENGTH, MODEL)
    torch.testing.assert_close(run(attention, u, MASKS["causal"]), 2.0 * u)
    # With the softmax part the same dropout is seen.
    attention = build(dropout=0.9, shaping=ShapingSpec(), **parts).train()
    assert not torch.equal(run(attention, u, MASKS["causal"]), run(attention, u, MASKS["causal"]))


@pytest.mark.parametrize("carry", [False, True])
def test_evaluation_is_deterministic(carry: bool) -> None:
    attention = build(dropout=0.5, carry_scores=carry)
    u = torch.randn(BATCH, LENGTH, MODEL)
    assert not torch.equal(run(attention, u, MASKS["causal"]), run(attention, u, MASKS["causal"]))
    attention.eval()
    assert torch.equal(run(attention, u, MASKS["causal"]), run(attention, u, MASKS["causal"]))


def test_scores_are_returned_only_where_they_are_carried() -> None:
    u = torch.randn(BATCH, LENGTH, MODEL)
    for carry in (True, False):
        attention = build(carry_scores=carry)
        _, scores = attention(u, *attention.keys_values(u), MASKS["causal"], None)
        assert (scores is not None) == carry
