"""Tell a run that diverged from one that trained: a result, not an error."""

import math
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from lightning_app.steps import is_logged, loss_of

STALL_MARGIN = 0.05
"""Nats under the unigram entropy that a run must reach to count as trained."""


@dataclass(frozen=True)
class Divergence:
    """When a run diverged, by which rule, and its last finite training loss (nats)."""

    step: int
    rule: str
    last_finite_loss: float | None


class DivergenceMonitor(pl.Callback):
    """Stop a run whose training loss is no longer finite; judge a finished one by its `val/nll`.

    A run has failed when its loss is NaN or infinite, or when its final ``val/nll`` is at least
    ``H_uni - 0.05`` with H_uni the unigram entropy of the validation targets: it has learned less
    than the frequencies of the tokens. One bar serves all variants; the loss at initialisation
    does not, because it differs between them. The loss is looked at every `log_every_n_steps`
    steps, so that a GPU is not held up at each; the step recorded is exact.
    """

    def __init__(self) -> None:
        self.divergence: Divergence | None = None
        self._first_bad: Tensor | None = None
        self._last_finite: Tensor | None = None

    def state_dict(self) -> dict[str, Any]:
        kept = {"first_bad": self._first_bad, "last_finite": self._last_finite}
        return {name: None if value is None else value.cpu() for name, value in kept.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._first_bad, self._last_finite = state_dict["first_bad"], state_dict["last_finite"]

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs, batch, batch_idx: int
    ) -> None:
        loss = loss_of(outputs)
        if self._first_bad is None or self._last_finite is None:
            self._first_bad = torch.zeros((), dtype=torch.long)
            self._last_finite = torch.tensor(torch.nan)
        self._first_bad = self._first_bad.to(loss.device)
        self._last_finite = self._last_finite.to(loss)
        finite = loss.isfinite()
        step = trainer.global_step
        self._first_bad = torch.where(~finite & (self._first_bad == 0), step, self._first_bad)
        self._last_finite = torch.where(finite, loss, self._last_finite)
        if is_logged(trainer, step) or step >= trainer.max_steps:
            self._look(trainer)

    def _look(self, trainer: pl.Trainer) -> None:
        assert self._first_bad is not None
        assert self._last_finite is not None
        # Every rank must stop at the same step.
        first_bad = trainer.strategy.reduce(self._first_bad, reduce_op="max")
        step = int(first_bad)
        if step and self.divergence is None:
            last = float(self._last_finite)
            last_finite = last if math.isfinite(last) else None
            self.divergence = Divergence(step, "training loss is not finite", last_finite)
            trainer.should_stop = True

    def judge(self, nll: float | None, unigram_entropy: float, step: int) -> Divergence | None:
        """Return how the run failed, or None if it trained."""
        if self.divergence is not None:
            return self.divergence
        bar = unigram_entropy - STALL_MARGIN
        if nll is not None and nll < bar:
            return None
        last = None if self._last_finite is None else float(self._last_finite)
        rule = f"final val/nll is not under the unigram entropy less {STALL_MARGIN} ({bar:.4f})"
        if nll is not None and not math.isfinite(nll):
            rule = "final val/nll is not finite"
        return Divergence(step, rule, last)
