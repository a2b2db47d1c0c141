"""Rates of products, and the count of a workload's products."""

from dataclasses import replace

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from lightning_app.blocks import linear as module
from lightning_app.blocks.linear import linear, mkl_products
from lightning_app.lab.bench.measure import matmul_rates, product_flops, rate_in_force
from lightning_app.lab.bench.peers import Setting, preset_work

CPU = torch.device("cpu")
SETTING = Setting(depth=2, width=64, ff_dim=128, heads=4, vocabulary=100, length=16, tokens=64)


def body_of(setting: Setting) -> tuple[int, int]:
    """The operations of the linear maps and of attention in a forward pass, counted by hand.

    An encoder-decoder of SETTING.depth blocks each; the target is as long as the source.
    """
    width, tokens = setting.width, setting.tokens
    square, feed_forward = width * width, 2 * width * setting.ff_dim
    encoder = tokens * (4 * square + feed_forward)
    decoder = tokens * (6 * square + feed_forward) + tokens * 2 * square
    attention = 3 * 2 * setting.rows * setting.length**2 * width
    return 2 * setting.depth * (encoder + decoder), 2 * setting.depth * attention


def test_the_products_of_a_model_are_counted_as_by_hand() -> None:
    """The output layer grows with the vocabulary, the body does not."""
    small = replace(SETTING, step=False, label_smoothing=0.0)
    counts = [
        product_flops(preset_work(replace(small, vocabulary=words), "post_ln").run)
        for words in (100, 200)
    ]
    linear_maps, attention = body_of(small)
    # Backward, a linear map makes two products more, and attention five, as it repeats the scores.
    # The loss makes one product with a single row, for the sum of the states that are predicted.
    single = 2 * small.tokens * small.width
    assert 2 * counts[0] - counts[1] == 3 * linear_maps + attention * 7 // 2 + single


@pytest.mark.parametrize("mkl", [False, True])
def test_a_linear_map_counts_alike_in_both_libraries(
    mkl: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        pytest.skip("this PyTorch has no oneDNN")
    monkeypatch.setattr(module, "prefers_onednn", lambda: not mkl)
    x, weight = torch.randn(7, 512, 64), torch.randn(96, 64)
    assert product_flops(lambda: linear(x, weight)) == 2 * 7 * 512 * 64 * 96


def test_a_product_that_is_added_in_place_counts() -> None:
    total, a, b = torch.zeros(5, 11), torch.randn(5, 7), torch.randn(7, 11)
    assert product_flops(lambda: total.addmm_(a, b)) == 2 * 5 * 7 * 11


@pytest.mark.parametrize("causal", [False, True])
def test_attention_counts_as_its_two_products(causal: bool) -> None:
    query, key, value = (torch.randn(2, 3, 32, 8) for _ in range(3))

    def attend() -> None:
        torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=causal)

    fast = product_flops(attend)
    with sdpa_kernel(SDPBackend.MATH):
        assert product_flops(attend) == fast == 2 * 2 * 3 * 32 * 32 * (8 + 8)


def test_rates_are_of_the_libraries_in_force() -> None:
    rates = matmul_rates(CPU)
    assert all(rate > 1e6 for rate in rates.values())
    assert rate_in_force(rates, "cpu", bf16=True) == rates["bfloat16"]
    ours = rate_in_force(rates, "cpu", bf16=False)
    with mkl_products():
        theirs = rate_in_force(rates, "cpu", bf16=False)
    assert {ours, theirs, rates["bfloat16"]} == set(rates.values())


def test_no_product_is_computed_by_onednn_in_the_context(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_has_onednn", lambda: True)
    assert module.prefers_onednn()
    with mkl_products():
        assert not module.prefers_onednn()
    assert module.prefers_onednn()
