"""A run that a pruner may end early: it reports a metric, and stops when a file appears."""

import json
import math
from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.states import TrainerFn

from lightning_app.errors import UserError
from lightning_app.logging_steps import is_logged


class Pruned(Exception):
    """The run was stopped on request after `step`."""

    def __init__(self, step: int) -> None:
        super().__init__(f"pruned after step {step}")
        self.step = step


class Pruning(pl.Callback):
    """Report a metric at each validation, and end the training when a file exists.

    A line `{"step", "value"}` is appended to `reports` before the checkpoint of that validation is
    written, so that every step from which a run can resume has its report; a value that is not
    finite is null. `stop` is looked for before the first batch after a logged step or a validation,
    by the first rank; all ranks then raise `Pruned` together. Nothing else changes: a run that is
    not stopped ends with the same weights as one that does not report.

    Args:
        metric: The reported metric, such as ``val/bleu``.
        reports: The file to append to.
        stop: The file whose existence ends the run.
    """

    def __init__(self, metric: str, reports: Path, stop: Path) -> None:
        self.metric = metric
        self.reports = reports
        self.stop = stop
        self._looked = -1
        self._validated = False

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch, batch_idx: int
    ) -> None:
        step = trainer.global_step
        due = self._validated or (step != self._looked and is_logged(trainer, step))
        if not due:
            return
        self._looked, self._validated = step, False
        stop = torch.tensor(float(trainer.is_global_zero and self.stop.is_file()))
        if trainer.world_size > 1:
            stop = stop.to(trainer.strategy.root_device)
            stop = trainer.strategy.reduce(stop, reduce_op="max")
        if stop:
            raise Pruned(step)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # A validation after the training is not needed for pruning.
        if trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking:
            self._report(trainer)

    def _report(self, trainer: pl.Trainer) -> None:
        self._validated = True
        metrics = trainer.callback_metrics
        if self.metric not in metrics:
            known = ", ".join(sorted(name for name in metrics if name.startswith("val/")))
            raise UserError(
                f"metric.name: validations report no '{self.metric}' ({known}), so the pruner has "
                f"nothing to go by"
            )
        if trainer.is_global_zero:
            value = float(metrics[self.metric])
            report = {"step": trainer.global_step, "value": value if math.isfinite(value) else None}
            with self.reports.open("a", encoding="utf-8") as file:
                file.write(json.dumps(report) + "\n")
