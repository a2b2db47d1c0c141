"""Callbacks that count and display tokens per second, steps, time and parameters."""

import json
import os
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, final

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelSummary
from lightning.pytorch.profilers import PassThroughProfiler
from torch import Tensor

from lightning_app.training.module import is_logged, loss_of


class Throughput(pl.Callback):
    """Log the tokens and seconds of the run so far, and the speed since the last logged step.

    ``train/tokens``, predicted tokens of all devices, and ``train/seconds``, wall-clock seconds of
    training, are sums over the run and all its attempts. ``train/tokens_per_second`` and
    ``train/data_wait_share`` cover the steps since the last log: the share of their seconds, from 0
    to 1, that passed between the end of a step and the start of the next, waiting for its batch.
    Time spent in validation does not count. `tokens` and `seconds` are the sums; they are
    updated every `log_every_n_steps` steps and at the end.
    """

    def __init__(self) -> None:
        self.tokens = 0
        self.seconds = 0.0
        self._since = 0.0
        # Kept on the device: reading it at each step would make the GPU wait.
        self._counted: Tensor | None = None
        self._elapsed = 0.0
        self._waited = 0.0

    @property
    def rate(self) -> float:
        """Tokens per second over the whole run."""
        return self.tokens / self.seconds if self.seconds else 0.0

    def state_dict(self) -> dict[str, Any]:
        self._take()
        return {"tokens": self.tokens, "seconds": self.seconds}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.tokens, self.seconds = state_dict["tokens"], state_dict["seconds"]

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._since = time.perf_counter()
        self._elapsed = 0.0  # a validation before the first step does not count as training

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._elapsed += time.perf_counter() - self._since

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._since = time.perf_counter()

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch, batch_idx: int
    ) -> None:
        self._waited += time.perf_counter() - self._since

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs, batch, batch_idx: int
    ) -> None:
        now = time.perf_counter()
        self._elapsed += now - self._since
        self._since = now
        counted = batch.predicted_tokens
        self._counted = counted if self._counted is None else self._counted + counted
        if is_logged(trainer, trainer.global_step):
            rate, share = self._take()
            logged = {"train/tokens_per_second": rate, "train/data_wait_share": share}
            logged |= {"train/tokens": self.tokens, "train/seconds": self.seconds}
            for logger in trainer.loggers:
                logger.log_metrics(logged, step=trainer.global_step)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._take()

    def _take(self) -> tuple[float, float]:
        """Add new tokens and seconds to the sums; return the speed and the share of waiting."""
        counted = 0 if self._counted is None else round(float(self._counted))
        elapsed, waited = self._elapsed, self._waited
        self.tokens += counted
        self.seconds += elapsed
        self._counted, self._elapsed, self._waited = None, 0.0, 0.0
        return (counted / elapsed, waited / elapsed) if elapsed > 0 else (0.0, 0.0)


class WallClock(pl.Callback):
    """The seconds of a run over all its attempts, each up to the checkpoint that was continued."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._before = 0.0

    @property
    def seconds(self) -> float:
        return self._before + time.perf_counter() - self._start

    def state_dict(self) -> dict[str, Any]:
        return {"seconds": self.seconds}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._before = state_dict["seconds"]


class Progress(pl.Callback):
    """Write ``progress.json`` about once a second, for programs that watch the run from outside.

    It also changes during validation and test, and thus shows whether a run hangs.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._started = time.monotonic()
        self._first_step = 0
        self._written = 0.0

    def _write(self, trainer: pl.Trainer, stage: str, loss: float | None) -> None:
        if not trainer.is_global_zero:
            return
        now = time.monotonic()
        self._written = now
        step = trainer.global_step
        report = {
            "step": step,
            "max_steps": trainer.max_steps,
            "rate": (step - self._first_step) / max(now - self._started, 1e-9),
            "loss": loss,
            "time": time.time(),
            "stage": stage,
        }
        partial = self.path.with_suffix(".partial")
        partial.write_text(json.dumps(report))
        os.replace(partial, self.path)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._started, self._first_step = time.monotonic(), trainer.global_step
        self._write(trainer, "train", None)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs, batch, batch_idx: int
    ) -> None:
        if self._due():
            self._write(trainer, "train", float(loss_of(outputs)))

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._write(trainer, "validate", None)

    def on_validation_batch_end(self, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
        if self._due():
            self._write(trainer, "validate", None)

    def on_test_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._write(trainer, "test", None)

    def on_test_batch_end(self, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
        if self._due():
            self._write(trainer, "test", None)

    def _due(self) -> bool:
        return time.monotonic() - self._written >= 1.0


class ParameterCount(ModelSummary):
    """Print a run's number of parameters when it starts.

    Lightning's table has a row for each metric, and FLOPs, which are 0 without an example input.
    """

    @staticmethod
    def summarize(
        summary_data: list[tuple[str, list[str]]],
        total_parameters: int,
        trainable_parameters: int,
        *others: Any,
        **named: Any,
    ) -> None:
        kept = total_parameters - trainable_parameters
        fixed = f", {kept:,} of them fixed" if kept else ""
        print(f"model: {total_parameters:,} parameters{fixed}")


_NOTHING = nullcontext()


@final
class Unprofiled(PassThroughProfiler):
    """Do nothing, at lower cost than Lightning's own, whose generators run 70 times per step."""

    def profile(self, action_name: str) -> AbstractContextManager[Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _NOTHING
