"""Losses and tokens are counted exactly, in whatever precision a model computes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_app.callbacks.throughput import Throughput
from lightning_app.data.tokenizer import PAD
from lightning_app.objectives.base import LossSums
from tests.runs import data, module, trainer


def predicted(batch: Any) -> int:
    if hasattr(batch, "labels"):
        return len(batch.labels)
    return int((batch.target[:, 1:] != PAD).sum())


@pytest.mark.parametrize("precision", ["32-true", "bf16-true", "bf16-mixed", "64-true"])
@pytest.mark.parametrize("kind", ["translation", "masked_lm"])
def test_sums_do_not_depend_on_the_precision(
    tmp_path: Path, cache: str, kind: str, precision: str
) -> None:
    """With `bf16-true` Lightning turns batches and metrics to bfloat16 as well."""
    trained, throughput = module(kind), Throughput()
    sums = trained.objective.sums
    trained_tokens: list[int] = []
    losses: list[Tensor] = []

    def noted(model: Any, batch: Any) -> LossSums:
        found = sums(model, batch)
        if found.by_token is None:
            trained_tokens.append(predicted(batch))
        else:
            losses.append(found.by_token[0].double())
        return found

    trained.objective.sums = noted  # pyright: ignore[reportAttributeAccessIssue]
    settings: dict[str, Any] = {"limit_val_batches": 1.0, "val_check_interval": 2}
    settings |= {"num_sanity_val_steps": 0, "precision": precision}
    fitter = trainer(tmp_path, max_steps=2, callbacks=[throughput], **settings)
    source = data(cache, kind)
    fitter.fit(trained, datamodule=source)
    total = float(torch.cat(losses).sum())
    counts = sum(predicted(batch) for batch in source.val_dataloader())
    assert float(fitter.callback_metrics["val/nll"]) == pytest.approx(total / counts, rel=1e-6)
    assert sum(trained.validation_parts["nll"]) == pytest.approx(total, rel=1e-6)
    assert sum(trained.validation_parts["tokens"]) == counts
    assert throughput.tokens == sum(trained_tokens)
    assert len(trained_tokens) == 2
