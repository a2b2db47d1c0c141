"""The token sums against their definition, written out."""

import math

import pytest
import torch

from lightning_app.models.loss import ObjectiveConfig, token_sums


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.5])
def test_sums_follow_the_definition(smoothing: float) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(7, 11, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, 11, (7,), generator=generator)
    counted = torch.tensor([1, 1, 0, 1, 1, 0, 1], dtype=torch.bool)
    with torch.no_grad():
        sums = token_sums(logits, labels, counted, smoothing)

    loss = nll = correct = 0.0
    for row, label, weight in zip(logits.tolist(), labels.tolist(), counted.tolist(), strict=True):
        if not weight:
            continue
        total = sum(math.exp(value) for value in row)
        log_p = [math.log(math.exp(value) / total) for value in row]
        nll -= log_p[label]
        loss -= (1 - smoothing) * log_p[label] + smoothing * sum(log_p) / len(log_p)
        correct += max(range(11), key=row.__getitem__) == label
    assert sums.loss.item() == pytest.approx(loss, rel=1e-12)
    assert sums.nll.item() == pytest.approx(nll, rel=1e-12)
    assert sums.correct is not None
    assert sums.correct.item() == correct
    assert sums.tokens.item() == 5


def test_half_precision_logits_are_summed_in_float32() -> None:
    logits = torch.randn(4, 50).bfloat16()
    labels = torch.tensor([0, 1, 2, 3])
    half = token_sums(logits, labels, torch.ones(4, dtype=torch.bool), 0.1)
    full = token_sums(logits.float(), labels, torch.ones(4, dtype=torch.bool), 0.1)
    assert half.loss.dtype == torch.float32
    torch.testing.assert_close(half.loss, full.loss)


@pytest.mark.parametrize(
    ("field", "value"), [("label_smoothing", 1.0), ("beam", 0), ("validation_bleu", -1)]
)
def test_values_without_meaning_are_refused(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=field):
        ObjectiveConfig(**{field: value})  # pyright: ignore[reportArgumentType]
