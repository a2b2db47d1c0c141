"""The losses of the parts of a validation set equal those of its rows, each evaluated alone."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch

from lightning_app.data.tokenizer import PAD
from lightning_app.training.module import PARTS, PartSums
from tests.runs import data, module, trainer


@pytest.mark.parametrize("kind", ["translation", "masked_lm", "causal_lm"])
def test_each_part_sums_its_rows(tmp_path: Path, cache: str, kind: str) -> None:
    """Whatever the batches, the parts hold consecutive rows of the split."""
    pl.seed_everything(1)
    system, source = module(kind, preset="pre_ln"), data(cache, kind)
    fitter = trainer(tmp_path, limit_val_batches=1.0)
    (scores,) = fitter.validate(system, source, verbose=False)
    found, batches = system.validation_parts, len(source.val_dataloader())
    source.config = replace(source.config, tokens_per_batch=100)
    fitter.validate(system, source, verbose=False)
    assert len(source.val_dataloader()) > 2 * batches
    rows: Any = source.val_dataloader().dataset
    losses, counts = np.zeros(PARTS), np.zeros(PARTS)
    for row in range(len(rows)):
        batch = rows[0, np.array([row])]
        with torch.no_grad():
            logits: Any = system(batch).flatten(end_dim=-2).double()
        labels = batch.target[0, 1:] if kind == "translation" else batch.labels.flatten()
        logits, labels = logits[labels != PAD], labels[labels != PAD]
        chosen = logits.log_softmax(dim=-1)[range(len(labels)), labels]
        part = math.floor(row * PARTS / len(rows))
        losses[part] -= float(chosen.sum())
        counts[part] += len(labels)
    for parts in (found, system.validation_parts):
        assert parts["tokens"] == counts[counts > 0].tolist()
        np.testing.assert_allclose(parts["nll"], losses[counts > 0], rtol=1e-5)
        mean = sum(parts["nll"]) / sum(parts["tokens"])
        assert mean == pytest.approx(scores["val/nll"], rel=1e-6)


def test_few_rows_have_a_part_each_and_many_tokens_are_counted() -> None:
    sums = PartSums()
    by_token = torch.tensor([[1.0, 2.0, 4.0, 0.0], [1.0, 1.0, 1.0, 0.0]])
    sums.update(by_token, torch.tensor([0, 2, 2, -1]), size=3)
    assert sums.compute() == {"nll": [1.0, 6.0], "tokens": [1, 2]}
    # Each update adds two tokens of one part: added singly in float32, none of them would count.
    sums = PartSums()
    sums.sums += 2.0**24
    by_token = torch.ones(2, 2 * PARTS)
    for _ in range(3):
        sums.update(by_token, torch.arange(2 * PARTS), size=2 * PARTS)
    assert sums.compute() == {"nll": [2.0**24 + 6] * PARTS, "tokens": [2**24 + 6] * PARTS}
