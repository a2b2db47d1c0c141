"""A rerun under perturbed rounding: other last bits, the same draws, an id of its own."""

import pytest
import torch

from lightning_app.module import perturb_rounding


def plain() -> torch.nn.Module:
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(40, 50), torch.nn.LayerNorm(50))


def values(draw: int) -> list[torch.Tensor]:
    model = plain()
    perturb_rounding(model, draw)
    return [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize("draw", [1, 2])
def test_each_value_moves_by_one_unit_of_rounding_at_most(draw: int) -> None:
    moved = 0
    for before, after in zip(plain().parameters(), values(draw), strict=True):
        eps = torch.finfo(before.dtype).eps
        assert ((after - before).abs() <= before.abs() * eps * 1.5).all()
        moved += int((after != before).sum())
    assert 1000 < moved < 2000  # of 2,150 values; two thirds are drawn, zeros stay


def test_a_draw_gives_the_same_bits_each_time_and_another_draw_others() -> None:
    assert all(torch.equal(a, b) for a, b in zip(values(1), values(1), strict=True))
    assert any(not torch.equal(a, b) for a, b in zip(values(1), values(2), strict=True))


def test_other_draws_are_the_same_as_without_it() -> None:
    plain()
    expected = torch.rand(3)
    values(1)
    assert torch.equal(torch.rand(3), expected)
