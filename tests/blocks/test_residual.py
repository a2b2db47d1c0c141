import math

import pytest
import torch

from lightning_app.blocks.residual import Gain, Residual, ResidualSpec
from tests import reference, tiny

DIM = 7


@pytest.mark.usefixtures("float64")
def test_all_slots_are_the_formula() -> None:
    """``norm_sum(skip * x + branch * norm_branch(f(norm_input(x))))``, f = 3 x."""
    spec = ResidualSpec(
        norm_input="layer_norm",
        norm_branch="rms_norm",
        norm_sum="layer_norm",
        skip=Gain(value=0.7),
        branch=Gain(value=0.3, learned=True),
    )
    residual = tiny.randomise(Residual(spec, DIM, dropout=0.0))
    x = torch.randn(3, 5, DIM)
    p = tiny.numpy_parameters(residual)
    u = reference.layer_norm(x.numpy(), p["norm_input.weight"], p["norm_input.bias"])
    f = reference.rms_norm(3 * u, p["norm_branch.weight"])
    y = 0.7 * x.numpy() + p["branch.gain"] * f
    y = reference.layer_norm(y, p["norm_sum.weight"], p["norm_sum.bias"])
    ours = residual.leave(x, 3 * residual.enter(x))
    torch.testing.assert_close(ours, torch.from_numpy(y), rtol=1e-12, atol=1e-12)


def test_fixed_gain_has_no_parameter_and_learned_gain_one() -> None:
    def names(gain: Gain) -> list[str]:
        residual = Residual(ResidualSpec(skip=gain, branch=gain), DIM, 0.0)
        return [name for name, _ in residual.named_parameters()]

    assert names(Gain(value=0.5)) == []
    assert names(Gain(value=0.5, learned=True)) == ["skip.gain", "branch.gain"]


def test_absent_skip_leaves_the_branch_alone() -> None:
    residual = Residual(ResidualSpec(skip=Gain(value=0.0)), DIM, 0.0)
    branch = torch.randn(3, 5, DIM)
    x = torch.full((3, 5, DIM), math.inf)  # 0 * inf is NaN: the skip must not be computed
    assert torch.equal(residual.leave(x, branch), branch)


def test_learned_skip_from_zero_is_present() -> None:
    gain = Gain(value=0.0, learned=True)
    assert not gain.absent
    residual = Residual(ResidualSpec(skip=gain), DIM, 0.0)
    x, branch = torch.randn(3, 5, DIM), torch.randn(3, 5, DIM)
    y = residual.leave(x, branch)
    assert torch.equal(y, branch)
    y.sum().backward()
    (parameter,) = residual.parameters()
    assert parameter.grad is not None
    torch.testing.assert_close(parameter.grad, x.sum())


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_gain_that_is_no_number_is_refused(value: float) -> None:
    with pytest.raises(ValueError, match="gain value"):
        Gain(value=value)


def test_dropout_acts_on_the_branch_alone() -> None:
    residual = Residual(ResidualSpec(branch=Gain(value=3.0)), DIM, dropout=0.5)
    x, branch = torch.randn(3, 50, DIM), torch.ones(3, 50, DIM)
    kept = residual.leave(x, branch) - x
    # A kept entry is divided by the share kept.
    assert set(kept.round(decimals=3).unique().tolist()) == {0.0, 6.0}
    residual.eval()
    torch.testing.assert_close(residual.leave(x, branch), x + 3.0)


def test_a_norm_in_any_slot_normalizes() -> None:
    assert ResidualSpec(skip=Gain(value=2.0), branch=Gain(value=0.1)).unnormalized
    assert not ResidualSpec(norm_input="rms_norm").unnormalized
    assert not ResidualSpec(norm_branch="rms_norm").unnormalized
    assert not ResidualSpec(norm_sum="layer_norm").unnormalized
