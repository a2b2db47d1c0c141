"""Halting alone: Graves' weights, the ponder cost and its gradient, without a stack."""

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_app.blocks.spans import auxiliary_terms
from lightning_app.blocks.steps import Halting, HaltingSpec, Pondering

pytestmark = pytest.mark.usefixtures("float64")
DIM = 3


def halting(**spec: Any) -> Halting:
    return Halting(HaltingSpec(**spec), DIM)


def run(module: Halting, states: list[Tensor]) -> Pondering:
    """Halt over given states s_1 .. s_n, as a stack does with those of its steps."""
    found = Pondering.start(states[0])
    for n, state in enumerate(states, start=1):
        found = module(found, state, last=n == len(states))
    module.finish(found, len(states))
    return found


def reading(probabilities: list[list[float]]) -> tuple[Halting, list[Tensor]]:
    """Return a unit, and states of one row of tokens at which it gives `probabilities` by step."""
    module = halting()
    with torch.no_grad():
        module.unit.weight.copy_(torch.tensor([[1.0, 0.0, 0.0]]))
        module.unit.bias.zero_()
    states = []
    for step in probabilities:
        logits = torch.tensor(step).logit().unsqueeze(-1)
        states.append(torch.cat([logits, torch.randn(len(step), 2)], dim=-1).unsqueeze(0))
    return module, states


def weights(probabilities: list[list[float]]) -> tuple[Pondering, Tensor]:
    """Return what halting gives, and the weights p_n: (step, token)."""
    module, states = reading(probabilities)
    states = [state.requires_grad_() for state in states]
    found = run(module, states)
    # The second entry of a state has no part in its probability.
    marks = torch.autograd.grad(found.average[..., 1].sum(), states)
    return found, torch.stack([mark[0, :, 1] for mark in marks])


def test_weights_by_hand() -> None:
    """h = .3 .25 .2 and then .9: R = .25 (family of averages: .3, .25, .2, .25)."""
    found, p = weights([[0.3], [0.25], [0.2], [0.9], [0.9]])
    torch.testing.assert_close(p[:, 0], torch.tensor([0.3, 0.25, 0.2, 0.25, 0.0]))
    assert int(found.steps) == 4
    assert found.remainder.item() == pytest.approx(0.25)


@pytest.mark.parametrize(
    ("h", "steps", "remainder"),
    [(0.995, 1, 1.0), (0.5, 2, 0.5), (0.3301, 3, 0.3398), (0.1, 10, 0.1), (0.01, 12, 0.89)],
)
def test_constant_probabilities(h: float, steps: int, remainder: float) -> None:
    """N = ceil((1 - epsilon) / h), at most twelve steps, at which the rest is given."""
    found, p = weights([[h]] * 12)
    assert int(found.steps) == steps == min(12, math.ceil(0.99 / h))
    assert found.remainder.item() == pytest.approx(remainder)
    assert float(p.sum()) == pytest.approx(1.0)


def test_gradient_of_the_cost() -> None:
    """dP/dh_n = -1 for n < N and 0 from N on, also by differences."""
    probabilities = [[0.3], [0.25], [0.2], [0.9], [0.9]]
    module, states = reading(probabilities)
    module.counted = torch.ones(1, 1, dtype=torch.bool)
    states = [state.requires_grad_() for state in states]

    def cost() -> Tensor:
        run(module, states)
        return module.auxiliary_terms()["ponder"].value

    assert float(cost().detach()) == pytest.approx(4.25)
    slopes = torch.autograd.grad(cost(), states, allow_unused=True, materialize_grads=True)
    expected = (-1.0, -1.0, -1.0, 0.0, 0.0)
    for (h,), state, slope, exact in zip(probabilities, states, slopes, expected, strict=True):
        assert float(slope[0, 0, 0]) / (h * (1 - h)) == pytest.approx(exact)
        with torch.no_grad():
            state[0, 0, 0] += 1e-6
            above = cost().item()
            state[0, 0, 0] -= 2e-6
            below = cost().item()
            state[0, 0, 0] += 1e-6
        assert (above - below) / 2e-6 == pytest.approx(float(slope[0, 0, 0]), abs=1e-8)


def test_the_cost_is_of_the_counted_tokens_per_predicted_token() -> None:
    module = halting(ponder_weight=0.5)
    states = [torch.randn(2, 4, DIM) for _ in range(3)]
    module.counted = torch.tensor([[True, True, False, False], [True, False, False, False]])
    found = run(module, states)
    cost = (found.steps + found.remainder)[module.counted].sum()
    (term,) = auxiliary_terms(module, torch.tensor(7.0)).values()
    assert float(term.detach()) == pytest.approx(0.5 * float(cost.detach()) / 7.0)
    counts = module.step_counts()
    assert int(counts.tokens) == 3
    assert int(counts.steps) == int(found.steps[module.counted].sum())
    assert int(counts.at_limit) == int((found.steps[module.counted] == 3).sum())


def test_a_cost_is_read_once_and_of_counted_tokens_alone() -> None:
    """A second reading would add the cost of an earlier batch; unsaid tokens that of padding.

    Averages of weights copy the model between two steps.
    """
    module = halting()
    states = [torch.randn(1, 2, DIM)] * 2
    run(module, states)
    with pytest.raises(AssertionError):
        module.auxiliary_terms()
    module.counted = torch.ones(1, 2, dtype=torch.bool)
    module.auxiliary_terms()
    copy.deepcopy(module)
    with pytest.raises(AssertionError):
        module.auxiliary_terms()
    run(module.eval(), states)
    with pytest.raises(AssertionError):
        module.auxiliary_terms()


def test_sums_are_in_float32_at_least() -> None:
    """In bfloat16 ten probabilities of 0.1 do not sum to one."""
    module = halting().to(torch.bfloat16)
    with torch.no_grad():
        module.unit.weight.zero_()
        module.unit.bias.fill_(math.log(0.1 / 0.9))
    found = run(module, [torch.randn(1, 2, DIM).to(torch.bfloat16)] * 12)
    assert found.average.dtype == found.given.dtype == torch.float32
    assert found.steps.tolist() == [[10, 10]]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"epsilon": 0.0}, "halting.epsilon 0.0: must be above 0 and less than 1"),
        ({"epsilon": 1.0}, "halting.epsilon 1.0: must be above 0 and less than 1"),
        ({"ponder_weight": -0.1}, "halting.ponder_weight -0.1:.*0"),
        ({"ponder_weight": math.nan}, "halting.ponder_weight nan"),
        ({"bias": math.inf}, "halting.bias inf:"),
    ],
)
def test_impossible_values_are_refused(spec: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        HaltingSpec(**spec)
