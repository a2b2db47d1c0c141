"""How a run ended: trained, not yet learned, stalled, or with a loss that is no number."""

import math
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_app.models.optim import OptimizerConfig
from lightning_app.scores.task_facts import Monitored
from lightning_app.training.callbacks.safety import Divergence, DivergenceMonitor, Outcome
from tests.runs import data, module, trainer


@pytest.mark.parametrize("every", [1, 4])
def test_a_loss_that_is_not_finite_ends_the_run(tmp_path: Path, cache: str, every: int) -> None:
    monitor = DivergenceMonitor(Monitored())
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
    judged = monitor.judge(math.nan, 5.0, lambda: 5.0, fitter.global_step)
    assert judged.name == "non_finite"
    assert judged.rule == "the training loss is not finite at step 2"
    assert judged.divergence == found


def judged(nll: float, losses: list[float], training: float = 5.2) -> Outcome:
    """The outcome of 200 steps, with an entropy of 5 on the validation targets."""
    monitor = DivergenceMonitor(Monitored())
    monitor.load_state_dict({"first_bad": 0, "last_finite": 3.0, "recent": losses, "unseen": []})
    return monitor.judge(nll, 5.0, lambda: training, 200)


def flat(level: float, steps: int = 200) -> list[float]:
    """A plateau with the noise of batches, 0.1 nats to both sides."""
    return [level + 0.1 * (-1) ** step for step in range(steps)]


def line(first: float, last: float, steps: int) -> list[float]:
    return [first + (last - first) * step / (steps - 1) for step in range(steps)]


FELL = [*line(8.0, 5.2, 60), *flat(5.2, 140)]  # to the plateau in 60 steps, and no further


@pytest.mark.parametrize(
    ("nll", "losses", "outcome"),
    [
        (4.94, flat(5.2), "trained"),
        (4.94, [], "trained"),
        (4.951, flat(5.2), "stalled"),
        (5.0, FELL, "stalled"),
        (5.0, FELL[:120], "stalled"),
        (5.0, flat(5.16), "stalled"),
        (6.0, line(5.65, 5.35, 200), "stalled"),  # 0.075 a quarter
        (6.0, line(6.0, 9.0, 200), "stalled"),
        (8.3, flat(8.3, 12), "stalled"),
        (6.9, flat(6.9), "stalled"),
        (6.0, [7.0], "stalled"),
        (6.0, [], "stalled"),
        (5.0, flat(5.14), "not_yet_learned"),
        (6.0, flat(3.0), "not_yet_learned"),  # the validation split is another text
        (7.0, line(8.0, 7.0, 2), "not_yet_learned"),
        (7.0, line(8.0, 7.0, 5), "not_yet_learned"),
        (7.0, line(8.0, 7.0, 40), "not_yet_learned"),
        (7.0, [*line(8.3, 7.5, 9), 7.6, 7.5, 7.4], "not_yet_learned"),
        (6.0, line(5.8, 5.3, 200), "not_yet_learned"),
        (7.0, FELL[:50], "not_yet_learned"),
        (math.nan, flat(2.0), "non_finite"),
        (math.inf, flat(2.0), "non_finite"),
    ],
)
def test_how_a_run_ended(nll: float, losses: list[float], outcome: str) -> None:
    found = judged(nll, losses)
    assert found.name == outcome
    failed = outcome in ("stalled", "non_finite")
    assert found.divergence == (Divergence(200, found.rule, 3.0) if failed else None)


def test_a_checkpoint_has_the_trace_of_the_last_steps() -> None:
    monitor = DivergenceMonitor(Monitored())
    state = {"first_bad": 0, "last_finite": 3.0, "recent": flat(3.0, 500), "unseen": []}
    monitor.load_state_dict(state)
    assert len(monitor.state_dict()["recent"]) == 200


class Seen(pl.Callback):
    """The unsmoothed loss of each step, from all logits."""

    def __init__(self) -> None:
        self.nll: list[float] = []

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch, batch_idx: int
    ) -> None:
        with torch.no_grad():
            log_probs = pl_module(batch).flatten(0, 1).log_softmax(dim=-1)
        labels = batch.target[:, 1:].flatten()
        self.nll.append(float(torch.nn.functional.nll_loss(log_probs, labels, ignore_index=0)))


def test_the_trace_is_of_each_step_and_goes_into_the_checkpoint(tmp_path: Path, cache: str) -> None:
    monitor, seen = DivergenceMonitor(Monitored()), Seen()
    path = tmp_path / "last.ckpt"
    saver = ModelCheckpoint(dirpath=tmp_path, filename="last", every_n_train_steps=3)
    callbacks = [monitor, seen, saver]
    settings: dict[str, Any] = {"log_every_n_steps": 4, "enable_checkpointing": True}
    trainer(tmp_path, max_steps=5, callbacks=callbacks, **settings).fit(
        module(preset="pre_ln"), datamodule=data(cache)
    )
    assert monitor.state_dict()["recent"] == pytest.approx(seen.nll)
    assert len(seen.nll) == 5
    rest = DivergenceMonitor(Monitored())
    rest.load_state_dict(torch.load(path, weights_only=True)["callbacks"]["DivergenceMonitor"])
    assert rest.state_dict()["recent"] == [monitor.state_dict()["recent"][0]]
    assert [step for step, *_ in rest.state_dict()["unseen"]] == [2, 3]


def test_a_model_that_gives_nan_has_diverged(tmp_path: Path, cache: str) -> None:
    """The one step is finite, the model after it is not: its validation must not read 0."""
    monitor = DivergenceMonitor(Monitored())
    broken = module(preset="post_ln")
    broken.optimizer = OptimizerConfig(kind="sgd", lr=1e30)
    fitter = trainer(tmp_path, max_steps=1, callbacks=[monitor], limit_val_batches=2)
    fitter.fit(broken, datamodule=data(cache))
    nll = fitter.validate(broken, datamodule=data(cache), verbose=False)[0]["val/nll"]
    assert not math.isfinite(nll)
    found = monitor.judge(nll, 5.0, lambda: 5.0, fitter.global_step)
    assert found.name == "non_finite"
    assert found.rule == "the final val/nll is not finite"
