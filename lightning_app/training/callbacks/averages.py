"""The average of the last weights of a run, evaluated beside them."""

from copy import copy
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers.logger import DummyLogger, Logger
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from lightning_app.core.errors import UserError
from lightning_app.scores.task_facts import AVERAGE
from lightning_app.training.datamodule import training_steps


class LastAverage(pl.Callback):
    """Average the last weights of a run (fairseq's ``average_checkpoints.py``).

    With the parameters w_t after optimizer step t of T, it evaluates ``1 / n sum_k w_{T - k m}``,
    k = 0 to n - 1, summed in float32 (in float64 for such weights); buffers are those of the end.
    Vaswani et al. 2017 (1706.03762, section 6.1) average the last 5 or 20 checkpoints. A finite run
    that is not cut short has the average's metrics as ``average/val/nll`` and so on, beside those
    of its last weights, to which its checkpoints, curves and hypotheses belong. A run that goes on
    from a checkpoint without the sum of earlier weights has none, and warns.

    Args:
        every: m, the optimizer steps between two of the averaged weights, 1 or more.
        count: n, the number of weights, 2 or more.

    Raises:
        ValueError: for another number.
        UserError: if the run has too few steps.
    """

    def __init__(self, every: int, count: int = 10) -> None:
        for name, value, least in (("every", every, 1), ("count", count, 2)):
            if value < least:
                raise ValueError(f"{name} {value}: expected {least} or more")
        self.every, self.count = every, count
        self._steps = range(0)
        self._added: list[int] = []
        self._sums: dict[str, Tensor] = {}

    def state_dict(self) -> dict[str, Any]:
        return {"added": [*self._added], "sums": {**self._sums}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._added, self._sums = state_dict["added"], state_dict["sums"]

    def check_steps(self, total: int) -> None:
        """Refuse a run of at most ``(n - 1) m`` steps; `total` is -1 without a limit."""
        if total <= (least := (self.count - 1) * self.every):
            raise UserError(
                f"trainer.callbacks: LastAverage: count {self.count} and every {self.every} need "
                f"a run of more than {least} steps, found {total}"
            )

    def _due(self, trainer: pl.Trainer) -> range:
        total = training_steps(trainer)
        return range(total - (self.count - 1) * self.every, total + 1, self.every)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._steps = self._due(trainer)
        before = [step for step in self._steps if step <= trainer.global_step]
        if self._added != before:  # of a shorter run that goes on, or of other numbers
            self._added, self._sums = [], {}

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any, **__: Any) -> None:
        if (step := trainer.global_step) not in self._steps or step in self._added:
            return
        for name, value in pl_module.named_parameters():
            kind = torch.promote_types(value.dtype, torch.float32)
            self._sums[name] = value.detach().to("cpu", kind) + self._sums.get(name, 0.0)
        self._added.append(step)

    def metrics(self, trainer: pl.Trainer, module: Any, datamodule: Any) -> dict[str, float]:
        """Return the metrics of the average by tag; none, with a warning, without all n weights.

        All else stays as the last weights left it: the module, its task, curves, metrics.
        """
        if self._added != (due := [*self._due(trainer)]):
            rank_zero_warn(
                f"trainer.callbacks: LastAverage: no average: it needs the weights of steps {due}, "
                f"and has those of {self._added}"
            )
            return {}
        last = {name: value.detach().clone() for name, value in module.named_parameters()}
        kept = module.objective, module.validation_parts, trainer.loggers
        before, silent = dict(trainer.callback_metrics), list[Logger]([DummyLogger()])
        module.objective, trainer.loggers = copy(module.objective), silent
        mean = {name: total / self.count for name, total in self._sums.items()}
        module.load_state_dict(mean, strict=False)  # buffers stay
        found = dict(trainer.validate(module, datamodule=datamodule, verbose=False)[0])
        if module.objective.config.evaluate_test:
            found |= trainer.test(module, datamodule=datamodule, verbose=False)[0]
        module.load_state_dict(last, strict=False)
        module.objective, module.validation_parts, trainer.loggers = kept
        trainer.callback_metrics.clear()
        trainer.callback_metrics.update(before)
        return {AVERAGE + k: float(v) for k, v in found.items() if k.startswith(("val/", "test/"))}
