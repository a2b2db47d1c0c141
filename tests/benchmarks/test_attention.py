"""The forms of attention that are timed against each other give the same numbers.

The package's own forms are compared with the papers in `tests/blocks`.
"""

import pytest
import torch

from benchmarks.bench import (
    FORMS,
    AttentionInputs,
    Forward,
    Maps,
    in_form,
    residual,
    residual_literally,
    shaped,
    shaped_literally,
    split,
)
from lightning_app.blocks.masks import causal_mask, full_mask

MAPS = Maps(length=7, tokens=21, heads=2, head_dim=5, depth=3)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("form", "literal"),
    [
        (shaped, shaped_literally),
        (residual, residual_literally),
        *((in_form(form), residual_literally) for form in FORMS),
    ],
)
def test_a_form_is_the_literal_one(form: Forward, literal: Forward, causal: bool) -> None:
    shape = (4, MAPS.rows, MAPS.length, MAPS.heads * MAPS.head_dim)
    layers = []
    for _ in range(MAPS.depth):
        query, key, value, upstream = torch.randn(shape)
        layers.append(AttentionInputs(query, key, value, split(upstream, MAPS)))
    mask = (causal_mask if causal else full_mask)(MAPS.length, torch.device("cpu"))
    expected = literal(layers, MAPS, mask)
    torch.testing.assert_close(form(layers, MAPS, mask), expected)
