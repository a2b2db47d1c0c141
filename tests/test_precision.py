"""Losses and tokens are counted exactly, in whatever precision a model computes."""

import csv
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor

from lightning_app.data.tokenizer import PAD
from lightning_app.models.loss import Evaluated, LossSums
from lightning_app.training.callbacks.loggers import Throughput
from lightning_app.training.module import TokenCount
from tests.runs import data, module, trainer


def predicted(batch: Any) -> int:
    return int(((batch.labels if hasattr(batch, "labels") else batch.target[:, 1:]) != PAD).sum())


@pytest.mark.in_turn(3)
@pytest.mark.parametrize("precision", ["32-true", "bf16-true", "bf16-mixed", "64-true"])
@pytest.mark.parametrize("kind", ["translation", "masked_lm", "causal_lm"])
def test_sums_do_not_depend_on_it(tmp_path: Path, cache: str, kind: str, precision: str) -> None:
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


@pytest.mark.parametrize("precision", ["32-true", "bf16-true", "bf16-mixed"])
def test_tokens_are_counted_beyond_those_that_float32_can_count(
    tmp_path: Path, cache: str, monkeypatch: pytest.MonkeyPatch, precision: Any
) -> None:
    """As if each batch had that many tokens more, all of them predicted right."""
    more, batches, found = 2**24 + 1, 5, []
    evaluated, source = module("causal_lm"), data(cache, "causal_lm")
    sums = evaluated.objective.sums

    def many(model: Any, batch: Any) -> LossSums:
        each = sums(model, batch)
        assert each.correct is not None
        found.append([int(each.correct), int(each.tokens)])
        return each._replace(correct=each.correct + more, tokens=each.tokens + more)

    counted: list[Evaluated] = []

    def scores(stage: str, datamodule: Any, of: Evaluated) -> dict[str, float]:
        counted.append(of)
        return {}

    monkeypatch.setattr(evaluated.objective, "sums", many)
    monkeypatch.setattr(evaluated.objective, "scores", scores)
    fitter = trainer(tmp_path, limit_val_batches=batches, precision=precision)
    (logged,) = fitter.validate(evaluated, source, verbose=False)
    correct, tokens = (sum(each) + batches * more for each in zip(*found, strict=True))
    assert float(torch.tensor(tokens, dtype=torch.float32)) != tokens
    assert [of.tokens for of in counted] == [tokens]
    assert logged["val/accuracy"] == pytest.approx(correct / tokens, rel=1e-6)


def test_a_count_is_exact_and_begins_again_at_zero() -> None:
    count = TokenCount().to(torch.bfloat16)
    for number in (2**24, 1, 1, 1, 2**40):
        count.update(torch.tensor(number))
    assert count.compute().item() == 2**24 + 3 + 2**40
    count.reset()
    count.update(torch.tensor(5))
    assert count.compute().item() == 5


def norm_of(module: pl.LightningModule) -> list[float]:
    found = [p.grad.double().square().sum() for p in module.parameters() if p.grad is not None]
    return [float(torch.stack(found).sum().sqrt())] if found else []


class Norms(pl.Callback):
    """The norms of the gradients before and after they are clipped."""

    def __init__(self) -> None:
        self.seen: list[float] = []
        self.used: list[float] = []

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.seen += norm_of(pl_module)

    def on_before_zero_grad(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.used += norm_of(pl_module)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
def test_the_logged_norm_is_exact_and_gradients_are_clipped(
    tmp_path: Path, cache: str, precision: str
) -> None:
    norms, logger = Norms(), CSVLogger(tmp_path, name="", version="")
    settings: dict[str, Any] = {"precision": precision, "logger": logger, "log_every_n_steps": 1}
    fitter = trainer(tmp_path, max_steps=3, callbacks=[norms], gradient_clip_val=1e-3, **settings)
    fitter.fit(module(), datamodule=data(cache))
    with (tmp_path / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    logged = [float(row["train/grad_norm"]) for row in rows if row.get("train/grad_norm")]
    assert logged == pytest.approx(norms.seen, rel=1e-5)
    assert norms.used
    assert norms.used == pytest.approx([1e-3] * len(norms.used), rel=1e-2)
