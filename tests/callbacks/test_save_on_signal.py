"""SIGTERM ends a run so that it can continue exactly: in an epoch, at its end, in a validation."""

import os
import signal
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from lightning_app.ablation.run import checkpoints
from lightning_app.callbacks.save_on_signal import SaveOnInterrupt
from lightning_app.module import TransformerModule
from lightning_app.task_facts import Monitored
from tests.runs import data, module, trainer

STEPS, EPOCH = 12, 4


class Terminate(pl.Callback):
    """The signal itself, in the middle of a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_before_optimizer_step(self, trainer, pl_module, optimizer) -> None:
        if trainer.global_step + 1 == self.step:
            os.kill(os.getpid(), signal.SIGTERM)


def fit(folder: Path, cache: str, *, stop: int | None = None, **settings: Any) -> TransformerModule:
    """Train in `folder`, from the checkpoint that lies there if there is one."""
    last = folder / "checkpoints" / "last.ckpt"
    callbacks: list[pl.Callback] = [] if stop is None else [Terminate(stop)]
    callbacks += [*checkpoints(folder, Monitored()), SaveOnInterrupt(last)]
    trained = module(dropout=0.3)
    pl.seed_everything(3, verbose=False)
    fitter = trainer(
        folder,
        max_steps=STEPS,
        limit_train_batches=EPOCH,
        limit_val_batches=2,
        check_val_every_n_epoch=None,
        enable_checkpointing=True,
        callbacks=callbacks,
        **settings,
    )
    fitter.fit(
        trained,
        datamodule=data(cache),
        ckpt_path=last if last.exists() else None,
        weights_only=True,
    )
    return trained


@pytest.mark.filterwarnings("ignore:Checkpoint directory")
@pytest.mark.parametrize("interval", [1, 3, 100])
@pytest.mark.parametrize("stop", [2, 3, EPOCH, EPOCH + 1, 2 * EPOCH])
def test_a_terminated_run_goes_on_to_the_same_weights(
    tmp_path: Path, cache: str, interval: int, stop: int
) -> None:
    whole = fit(tmp_path / "whole", cache, val_check_interval=interval)
    broken = tmp_path / "broken"
    with pytest.raises(SystemExit):
        fit(broken, cache, stop=stop, val_check_interval=interval)
    kept = torch.load(broken / "checkpoints" / "last.ckpt", weights_only=True)
    assert kept["global_step"] == stop
    rest = fit(broken, cache, val_check_interval=interval)
    for (name, a), b in zip(whole.state_dict().items(), rest.state_dict().values(), strict=True):
        assert torch.equal(a, b), name
