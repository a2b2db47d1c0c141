"""Divergence: a loss that is no number, and a run that learned nothing."""

import math
from pathlib import Path

import pytest

from lightning_app.callbacks.divergence import DivergenceMonitor
from lightning_app.optim import OptimizerConfig
from tests.runs import data, module, trainer


@pytest.mark.parametrize("every", [1, 4])
def test_a_loss_that_is_not_finite_ends_the_run(tmp_path: Path, cache: str, every: int) -> None:
    monitor = DivergenceMonitor()
    exploding = module(preset="pre_ln")
    exploding.optimizer = OptimizerConfig(kind="sgd", lr=1e30)
    fitter = trainer(tmp_path, max_steps=40, callbacks=[monitor], log_every_n_steps=every)
    fitter.fit(exploding, datamodule=data(cache))
    found = monitor.divergence
    assert found is not None
    assert "not finite" in found.rule
    # The step at which it happened, not the one at which it was noticed.
    assert found.step == 2
    assert fitter.global_step == (2 if every == 1 else 4)
    assert found.last_finite_loss is not None
    assert math.isfinite(found.last_finite_loss)
    assert monitor.judge(None, 5.0, fitter.global_step) == found


@pytest.mark.parametrize(
    ("nll", "fails"), [(4.94, False), (4.951, True), (6.0, True), (math.nan, True), (None, True)]
)
def test_a_run_that_learned_less_than_the_frequencies_has_failed(nll, fails: bool) -> None:
    judged = DivergenceMonitor().judge(nll, unigram_entropy=5.0, step=200)
    assert (judged is not None) == fails
    if judged is not None:
        assert judged.step == 200
        finite = nll is None or math.isfinite(nll)
        assert ("unigram entropy" if finite else "is not finite") in judged.rule


def test_a_run_that_learns_is_left_alone(tmp_path: Path, cache: str) -> None:
    monitor = DivergenceMonitor()
    fitter = trainer(tmp_path, max_steps=5, callbacks=[monitor], log_every_n_steps=2)
    fitter.fit(module(preset="pre_ln"), datamodule=data(cache))
    assert monitor.divergence is None
    assert fitter.global_step == 5


def test_a_model_that_gives_nan_has_diverged(tmp_path: Path, cache: str) -> None:
    """The one step is finite, the model after it is not: its validation must not read 0."""
    monitor = DivergenceMonitor()
    broken = module(preset="post_ln")
    broken.optimizer = OptimizerConfig(kind="sgd", lr=1e30)
    fitter = trainer(tmp_path, max_steps=1, callbacks=[monitor], limit_val_batches=2)
    fitter.fit(broken, datamodule=data(cache))
    nll = fitter.validate(broken, datamodule=data(cache), verbose=False)[0]["val/nll"]
    assert not math.isfinite(nll)
    found = monitor.judge(nll, 5.0, fitter.global_step)
    assert found is not None
    assert found.rule == "final val/nll is not finite"
