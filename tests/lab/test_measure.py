"""Time, memory and calls: what is measured is what happened."""

from collections.abc import Callable

import pytest
import torch

from lightning_app.lab.bench.measure import (
    Clock,
    LiveMemory,
    Spread,
    Work,
    count_calls,
    peak_memory,
    ratios,
    resident,
    rounds,
)

CPU = torch.device("cpu")
NUMBERS = 1000


def test_spread_is_median_and_quartiles() -> None:
    assert Spread.of([5.0, 1.0, 3.0, 2.0, 4.0]) == (3.0, 2.0, 4.0)
    assert Spread.of([7.0]) == (7.0, 7.0, 7.0)


def test_ratios_are_those_within_a_round() -> None:
    """The machine slows down tenfold after the first round; no ratio shows it."""
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


def test_live_memory_sees_what_is_held_at_once() -> None:
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


def test_live_memory_counts_a_storage_once_and_lets_go() -> None:
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


def test_live_memory_follows_what_autograd_keeps() -> None:
    x = torch.zeros(NUMBERS, requires_grad=True)
    with LiveMemory() as memory:
        y = x.exp().exp().exp()
        assert memory.live == 3 * 4 * NUMBERS
        y.sum().backward()
        del y
        # The gradient alone, and it is x's.
        assert memory.live == 4 * NUMBERS


def hold(megabytes: int) -> Work:
    """Work that touches `megabytes` at once; another process builds it."""
    return Work(lambda: torch.ones(megabytes << 18).sum())


def test_resident_memory_is_that_of_another_process() -> None:
    from functools import partial

    few, many = (resident(partial(hold, size), threads=1) for size in (8, 136))
    assert many - few == pytest.approx(128 << 20, rel=0.1)
