"""Attention over few keys in bfloat16: against float64, and its use under autocast."""

import pytest
import torch
from torch import Tensor

from lightning_app.blocks.kernels import stored
from lightning_app.blocks.kernels.choose import attend, attention_form
from lightning_app.blocks.kernels.stored import FEW_KEYS, Bf16Attention
from lightning_app.blocks.masks import Mask, causal_mask, full_mask, padding_mask

CPU = torch.device("cpu")
BATCH, HEADS, DIM, WIDTH = 3, 2, 16, 24
PRESENT = torch.tensor([[1] * 19, [1] * 11 + [0] * 8, [0] * 19], dtype=torch.bool)
MASKS = {
    "full": full_mask(19, CPU),
    "causal": causal_mask(19, CPU),
    "padding": padding_mask(PRESENT),
    "causal and padding": Mask(19, CPU, seen=PRESENT[:, None, None, :], causal=True),
}


def leaves(queries: int = 19, keys: int = 19, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    torch.manual_seed(5)
    sizes = ((queries, DIM), (keys, DIM), (keys, WIDTH))
    made = (torch.randn(BATCH, tokens, HEADS, dim).bfloat16() for tokens, dim in sizes)
    return [x.to(dtype).transpose(1, 2).requires_grad_() for x in made]


def results(output: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    """Return the output and the gradients, in float64."""
    torch.manual_seed(6)
    above = torch.randn(output.shape).to(output.dtype)
    return [x.detach().double() for x in (output, *torch.autograd.grad(output, inputs, above))]


def literal(inputs: list[Tensor], mask: Mask, kept: Tensor | float = 1.0) -> list[Tensor]:
    """Return the results of the equation in float64; a query that sees nothing gives zero."""
    query, key, value = exact = [x.detach().double().requires_grad_() for x in inputs]
    scores = query @ key.transpose(-2, -1) * DIM**-0.5
    weights = scores.masked_fill(~mask.allowed, -torch.inf).softmax(dim=-1).nan_to_num()
    above = (weights * kept) @ value
    torch.manual_seed(6)
    grads = torch.autograd.grad(above, exact, torch.randn(above.shape).bfloat16().double())
    return [above.detach(), *(grad.nan_to_num() for grad in grads)]


def check(found: list[Tensor], exact: list[Tensor], relative: float = 0.006) -> None:
    for ours, truth in zip(found, exact, strict=True):
        assert torch.isfinite(ours).all()
        assert (ours - truth).norm() <= relative * truth.norm()


@pytest.mark.parametrize(("kind", "queries"), [*((kind, 19) for kind in MASKS), ("padding", 7)])
def test_it_is_the_equation(kind: str, queries: int) -> None:
    inputs = leaves(queries)
    output = Bf16Attention.apply(*inputs, MASKS[kind], 0.0)
    check(results(output, inputs), literal(inputs, MASKS[kind]))


def test_dropout_drops_the_same_entries_in_both_passes() -> None:
    inputs = leaves()
    torch.manual_seed(1)
    output = Bf16Attention.apply(*inputs, MASKS["causal"], 0.25)
    torch.manual_seed(1)
    kept = torch.empty(BATCH * HEADS, 19, 19, dtype=torch.bfloat16).bernoulli_(0.75)
    kept = kept.double().unflatten(0, (BATCH, HEADS)) / 0.75
    check(results(output, inputs), literal(inputs, MASKS["causal"], kept))


def test_errors_are_of_the_size_of_those_of_sdpa() -> None:
    inputs, mask = leaves(), MASKS["causal"]
    query, key, value = inputs
    exact = literal(inputs, mask)
    with attention_form("plain"):
        sdpa = results(attend(query, key, value, mask, 0.0), inputs)
    ours = results(attend(query, key, value, mask, 0.0), inputs)
    for our, their, truth in zip(ours, sdpa, exact, strict=True):
        assert (our - truth).norm() <= 2.5 * (their - truth).norm()


@pytest.mark.parametrize(
    ("used", "dtype", "autocast", "keys", "grad"),
    [
        (True, torch.bfloat16, False, 19, True),
        (True, torch.float32, True, FEW_KEYS, True),
        (False, torch.float32, False, 19, True),
        (False, torch.float64, False, 19, True),
        (False, torch.bfloat16, False, FEW_KEYS + 1, True),
        (False, torch.float32, True, 19, False),
    ],
)
def test_when_it_is_used(used, dtype, autocast, keys, grad, monkeypatch) -> None:
    calls = []
    real = Bf16Attention.apply
    monkeypatch.setattr(stored.Bf16Attention, "apply", lambda *x: calls.append(x) or real(*x))
    query, key, value = leaves(keys=keys, dtype=dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast), torch.set_grad_enabled(grad):
        heads = attend(query, key, value, full_mask(keys, CPU), 0.0)
    assert heads.dtype == (torch.bfloat16 if autocast else dtype)
    assert bool(calls) == used


def test_a_second_derivative_is_refused() -> None:
    query, key, value = leaves()
    heads = attend(query, key, value, full_mask(19, CPU), 0.0)
    with pytest.raises(RuntimeError, match="bfloat16"):
        torch.autograd.grad(heads.sum(), query, create_graph=True)
