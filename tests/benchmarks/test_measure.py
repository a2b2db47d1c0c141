"""Time, memory, calls, rates and libraries: what is measured is what happened."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks import measure
from benchmarks.measure import (
    Clock,
    LiveMemory,
    Spread,
    count_calls,
    matmul_rates,
    mkl_products,
    onednn_everywhere,
    peak_memory,
    product_flops,
    rate_in_force,
    ratios,
    rounds,
    same_library,
)
from benchmarks.peers import Setting, preset_work
from lightning_app.blocks import linear as linear_maps
from lightning_app.blocks.linear import linear

CPU = torch.device("cpu")
NUMBERS = 1000
SETTING = Setting(depth=2, width=64, ff_dim=128, heads=4, vocabulary=100, length=16, tokens=64)


def test_spread_is_median_and_quartiles_and_ratios_are_those_within_a_round() -> None:
    assert Spread.of([5.0, 1.0, 3.0, 2.0, 4.0]) == (3.0, 2.0, 4.0)
    assert Spread.of([7.0]) == (7.0, 7.0, 7.0)
    # The machine slows down tenfold after the first round; no ratio shows it.
    assert ratios([2.0, 20.0, 30.0], [1.0, 10.0, 15.0]) == (2.0, 2.0, 2.0)


def test_rounds_interleave_and_turn_about() -> None:
    ran: list[str] = []
    runs: list[Callable[[], object]] = [lambda: ran.append("a"), lambda: ran.append("b")]
    seconds = rounds(runs, 3, Clock(CPU), warm=1)
    assert "".join(ran) == "ab" + "ba" + "ab" + "ba"
    assert [len(taken) for taken in seconds] == [3, 3]


def test_calls_leave_views_out_and_follow_the_backward_pass() -> None:
    x = torch.randn(3, 4, requires_grad=True)

    def run() -> None:
        x.grad = None
        x.t().exp().sum().backward()

    calls = {str(func): n for func, n in count_calls(run).calls.items()}
    assert calls["aten.t.default"] == 2  # forward and backward
    # exp, sum; the ones from which gradients start; the product with exp
    assert count_calls(run).total == 4


def test_live_memory_sees_what_is_held_at_once_each_storage_once() -> None:
    """Also what autograd keeps."""

    def chain() -> None:
        x = torch.zeros(NUMBERS)
        for _ in range(10):
            x = x + 1.0

    def hoard() -> None:
        kept = [torch.zeros(NUMBERS)]
        for _ in range(10):
            kept.append(kept[-1] + 1.0)

    one = 4 * NUMBERS
    assert peak_memory(chain, CPU) == 2 * one
    assert peak_memory(hoard, CPU) == 11 * one
    x = torch.zeros(NUMBERS)
    with LiveMemory() as memory:
        view = x.view(10, -1).t()
        x.add_(1.0)
        assert memory.live == 0
        made = view.contiguous()
        part = made[1:]
        assert memory.live == 4 * NUMBERS
        del made
        assert memory.live == 4 * NUMBERS
        del part
        assert memory.live == 0
    assert memory.peak == 4 * NUMBERS
    x.requires_grad_()
    with LiveMemory() as memory:
        y = x.exp().exp().exp()
        assert memory.live == 3 * 4 * NUMBERS  # what autograd keeps
        y.sum().backward()
        del y
        assert memory.live == 4 * NUMBERS  # the gradient alone, and it is x's


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
def test_a_linear_map_counts_alike_in_both_libraries(mkl: bool, monkeypatch) -> None:
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        pytest.skip("this PyTorch has no oneDNN")
    monkeypatch.setattr(linear_maps, "prefers_onednn", lambda: not mkl)
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


@pytest.mark.parametrize("model", ["linear", "gpt2"])
def test_maps_of_peers_take_our_choice(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All blocks of GPT-2 use transposed maps: without them it would be another library."""
    seen = []

    def ours(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        seen.append(tuple(weight.shape))
        result = x @ weight.t()
        return result if bias is None else result + bias

    if model == "linear":
        peer, inputs, shapes = nn.Linear(4, 3), (torch.randn(5, 4), torch.randn(2, 4)), [(3, 4)]
        run: Callable[[Tensor], Tensor] = peer
    else:
        transformers = pytest.importorskip("transformers")
        sizes = {"vocab_size": 11, "n_positions": 8, "n_embd": 6, "n_layer": 1, "n_head": 2}
        gpt2 = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).eval()
        inputs, run = (torch.arange(8)[None],), lambda tokens: gpt2(input_ids=tokens).logits
        shapes = [(18, 6), (6, 6), (24, 6), (6, 24), (11, 6)]
    expected = [run(each) for each in inputs]
    monkeypatch.setattr(measure, "linear", ours)
    taken = (lambda x, weight: x.shape[0] > 2) if model == "linear" else (lambda x, weight: True)
    monkeypatch.setattr(measure, "takes_onednn", taken)
    with onednn_everywhere():
        torch.testing.assert_close([run(each) for each in inputs], expected)
    assert seen == shapes
    run(inputs[0])
    assert seen == shapes


def test_each_library_is_in_force_in_its_context() -> None:
    contexts = same_library()
    assert bool(contexts) == linear_maps.prefers_onednn()
    for name, context in contexts.items():
        with context():
            assert linear_maps.prefers_onednn() == (name == "oneDNN")
