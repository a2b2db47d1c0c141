"""The forms of attention that are timed against each other give the same numbers."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from benchmarks.bench import (
    FORMS,
    AttentionInputs,
    Forward,
    Maps,
    in_form,
    plain,
    residual,
    shaped,
    shaped_literally,
    split,
)
from lightning_app.blocks.masks import causal_mask, full_mask

MAPS = Maps(length=7, tokens=21, heads=2, head_dim=5, depth=3)


def layers_of(maps: Maps) -> list[AttentionInputs]:
    shape = (4, maps.rows, maps.length, maps.heads * maps.head_dim)
    layers = []
    for _ in range(maps.depth):
        query, key, value, upstream = torch.randn(shape)
        layers.append(AttentionInputs(query, key, value, split(upstream, maps)))
    return layers


def naive(layers: list[AttentionInputs], maps: Maps, causal: bool, *, shape: bool, carry: bool):
    """Loops over the equations of the papers, one row at a time."""
    outputs, total = [], 0.0
    for layer in layers:
        q, k, v = (split(part, maps) for part in layer[:3])
        scores = torch.einsum("bhqd,bhkd->bhqk", q, k) / maps.head_dim**0.5
        total = scores + total if carry else scores
        out = torch.zeros_like(v)
        for i in range(maps.length):
            seen = i + 1 if causal else maps.length
            weights = torch.softmax(total[:, :, i, :seen], dim=-1)
            out[:, :, i] = torch.einsum("bhk,bhkd->bhd", weights, v[:, :, :seen])
            if shape:
                out[:, :, i] += v[:, :, i] - v[:, :, :seen].mean(dim=2)
        outputs.append(out)
    return outputs


CASES: list[tuple[str, Forward, bool, bool]] = [
    ("plain", plain, False, False),
    ("shaped", shaped, True, False),
    ("literal", shaped_literally, True, False),
    ("residual", residual, False, True),
    *((form, in_form(form), False, True) for form in FORMS),
]


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("forward", "shape", "carry"), [c[1:] for c in CASES], ids=[c[0] for c in CASES]
)
def test_a_form_is_its_equation(forward: Forward, shape: bool, carry: bool, causal: bool) -> None:
    layers = layers_of(MAPS)
    make: Callable[..., object] = causal_mask if causal else full_mask
    mask = make(MAPS.length, torch.device("cpu"))
    found = forward(layers, MAPS, mask)  # pyright: ignore[reportArgumentType]
    expected: list[Tensor] = naive(layers, MAPS, causal, shape=shape, carry=carry)
    torch.testing.assert_close(found, expected)
