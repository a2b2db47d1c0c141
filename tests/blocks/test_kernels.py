import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_app.blocks.kernels.choose import (
    PlainScores,
    QueryKeySums,
    attend,
    attend_with_carry,
    attend_with_sums,
)
from lightning_app.blocks.masks import Mask, causal_mask, full_mask, padding_mask
from lightning_app.blocks.placed import rotate, rotation
from tests import reference

BATCH, HEADS, QUERIES, KEYS, DIM = 3, 2, 5, 7, 11
CPU = torch.device("cpu")
LENGTHS = torch.tensor([7, 4, 1])


def inputs(queries: int = QUERIES, keys: int = KEYS) -> tuple[Tensor, Tensor, Tensor]:
    return (
        torch.randn(BATCH, HEADS, queries, DIM),
        torch.randn(BATCH, HEADS, keys, DIM),
        torch.randn(BATCH, HEADS, keys, DIM),
    )


def padded(keys: int = KEYS) -> Mask:
    return padding_mask(torch.arange(keys) < LENGTHS[:, None])


def merged(x: Tensor) -> np.ndarray:
    """Return (batch, head, token, dim) as the reference has it, (batch, token, head * dim)."""
    return x.transpose(1, 2).flatten(2).numpy()


def naive(query: Tensor, key: Tensor, value: Tensor, mask: Mask, temperature: float = 1.0):
    """Return the reference's heads, (batch, head, query, dim), and its scores."""
    scores = reference.scaled_scores(merged(query), merged(key), HEADS)
    allowed = mask.allowed.expand(BATCH, 1, query.shape[2], key.shape[2])[:, 0].numpy()
    heads = reference.mix(reference.softmax_map(scores / temperature, allowed), merged(value))
    split = torch.from_numpy(heads).unflatten(-1, (HEADS, DIM)).transpose(1, 2)
    return split, torch.from_numpy(scores)


def seen(z: Tensor, mask: Mask) -> Tensor:
    """Return scores with zeros at unseen keys, whose values have no meaning."""
    return z.masked_fill(~mask.allowed, 0.0)


@pytest.mark.parametrize("kind", ["padding", "causal", "full"])
def test_every_form_equals_the_naive_one(float64: None, kind: str) -> None:
    queries = KEYS if kind == "causal" else QUERIES
    mask = {"padding": padded(), "causal": causal_mask(KEYS, CPU), "full": full_mask(KEYS, CPU)}
    query, key, value = inputs(queries)
    heads, scores = naive(query, key, value, mask[kind])
    carried, z = attend_with_carry(query, key, value, mask[kind], 0.0, None, 1.0)
    summed, _ = attend_with_sums(query, key, value, mask[kind], 0.0, None, 1.0)
    for ours in (attend(query, key, value, mask[kind], 0.0), carried, summed):
        torch.testing.assert_close(ours, heads, rtol=1e-12, atol=1e-12)
    z, scores = seen(z.scores, mask[kind]), seen(scores, mask[kind])
    torch.testing.assert_close(z, scores, rtol=1e-12, atol=1e-12)


def test_masks_allow_what_they_say_and_have_its_softmax_as_centre(float64: None) -> None:
    assert padded().allowed.shape == (BATCH, 1, 1, KEYS)
    assert padded().allowed.sum(-1).flatten().tolist() == LENGTHS.tolist()
    causal = causal_mask(3, CPU).allowed[0, 0].tolist()
    assert causal == [[True, False, False], [True, True, False], [True, True, True]]
    assert full_mask(KEYS, CPU).allowed.flatten().tolist() == [True] * KEYS
    for mask in (padded(), causal_mask(KEYS, CPU)):
        scores = torch.zeros(mask.allowed.shape).masked_fill(~mask.allowed, -torch.inf)
        torch.testing.assert_close(mask.centre, scores.softmax(-1), rtol=1e-15, atol=1e-15)


def test_carry_is_a_sum_that_leaves_the_layer_below_intact(float64: None) -> None:
    below = torch.randn(BATCH, HEADS, QUERIES, KEYS)
    kept = below.clone()
    query, key, value = inputs()
    _, z = attend_with_carry(query, key, value, padded(), 0.0, PlainScores(below), 3.0)
    _, scores = naive(query, key, value, padded())
    torch.testing.assert_close(z.scores, kept + scores, rtol=1e-12, atol=1e-12)
    assert torch.equal(below, kept)


@pytest.mark.parametrize("divisor", [1.0, 2.5])
def test_sums_of_queries_and_keys_are_attention_on_the_sums(float64: None, divisor: float) -> None:
    """``softmax((Q_1 + .. + Q_n) (K_1 + .. + K_n)^T / (c sqrt(d_k)))``."""
    layers = [inputs() for _ in range(3)]
    carry, heads = None, torch.empty(0)
    for query, key, value in layers:
        before = None if carry is None else [part.clone() for part in carry]
        heads, grown = attend_with_sums(query, key, value, padded(), 0.0, carry, divisor)
        if carry is not None and before is not None:
            assert all(torch.equal(a, b) for a, b in zip(carry, before, strict=True))
        carry = grown
    query, key = (sum(layer[i] for layer in layers) for i in (0, 1))
    assert isinstance(query, Tensor)
    assert isinstance(key, Tensor)
    torch.testing.assert_close(carry, QueryKeySums(query, key))
    expected, _ = naive(query, key, layers[-1][2], padded(), temperature=divisor)
    torch.testing.assert_close(heads, expected, rtol=1e-12, atol=1e-12)


def test_sums_are_float32_under_autocast() -> None:
    query, key, value = (x.bfloat16() for x in inputs())
    faint_query, faint_key = query / 300, key / 300
    with torch.autocast("cpu", dtype=torch.bfloat16):
        _, below = attend_with_sums(query, key, value, padded(), 0.0, None, 1.0)
        heads, sums = attend_with_sums(faint_query, faint_key, value, padded(), 0.0, below, 1.0)
    assert {part.dtype for part in (*below, *sums)} == {torch.float32}
    assert heads.dtype == torch.bfloat16
    # A term of a 300th would vanish in the eight bits of a bfloat16 sum.
    exact = QueryKeySums(query.float() + faint_query.float(), key.float() + faint_key.float())
    torch.testing.assert_close(sums, exact, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("start", [0, 3, 1000])
def test_rotation_is_the_equation(float64: None, start: int) -> None:
    """Also from a later position on, as in cached decoding; it keeps the type of what it turns."""
    x = torch.randn(BATCH, HEADS, KEYS, 6)
    ours = rotate(x, rotation(start + torch.arange(KEYS), 6))
    before = torch.zeros(BATCH, HEADS, start, 6)
    expected = reference.rotate(merged(torch.cat([before, x], dim=2)), HEADS)[:, start:]
    expected = torch.from_numpy(expected).unflatten(-1, (HEADS, 6)).transpose(1, 2)
    torch.testing.assert_close(ours, expected, rtol=1e-11, atol=1e-11)
    single = rotation(torch.arange(KEYS), 6)
    assert rotate(x.bfloat16(), single).dtype == torch.bfloat16
