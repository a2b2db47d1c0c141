"""Measure the seconds of a cell's training step. Slow to import, since it trains."""

import tempfile
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

from lightning_app.config.classes import entries, made_fields
from lightning_app.config.config import data_module, transformer_module
from lightning_app.training.run import quiet


class _StepTimer(pl.Callback):
    """Wall-clock seconds of each training step after the first; ends the run after `steps`."""

    def __init__(self, steps: int) -> None:
        self.seconds: list[float] = []
        self._steps = steps
        self._last: float | None = None

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
        now = time.perf_counter()
        if self._last is not None:
            self.seconds.append(now - self._last)
        self._last = now
        # max_steps cannot end the run, since the schedule depends on it.
        if trainer.global_step >= self._steps:
            trainer.should_stop = True


def seconds_per_step(config: dict[str, Any], steps: int = 20) -> float:
    """Train `steps` steps and return the median seconds per step, without the first.

    It uses one thread, like a cell on a host with one worker per core.
    """
    torch.set_num_threads(1)
    quiet()
    trainer = dict(config["trainer"])
    trainer |= {
        "limit_val_batches": 0,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    with tempfile.TemporaryDirectory() as folder:
        trainer["default_root_dir"] = str(Path(folder))
        trainer["callbacks"] = [*entries(trainer["callbacks"])]
        made = made_fields(trainer, imports=False)
        clock = _StepTimer(steps)
        pl.seed_everything(config["seed_everything"], workers=True)
        made["callbacks"] += [clock]
        module, data = transformer_module(config["model"]), data_module(config["data"])
        pl.Trainer(**made).fit(module, datamodule=data)
    return sorted(clock.seconds)[len(clock.seconds) // 2]
