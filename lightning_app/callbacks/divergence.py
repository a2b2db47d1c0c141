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
        self._first_bad = 0
        self._last_finite: float | None = None
        # Losses not looked at yet, with their steps: on the device until then, unread.
        self._unseen: list[tuple[int, Tensor]] = []

    def state_dict(self) -> dict[str, Any]:
        self._read()
        return {"first_bad": self._first_bad, "last_finite": self._last_finite}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._first_bad, self._last_finite = state_dict["first_bad"], state_dict["last_finite"]
        self._unseen = []

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs, batch, batch_idx: int
    ) -> None:
        step = trainer.global_step
        self._unseen.append((step, loss_of(outputs)))
        if is_logged(trainer, step) or step >= trainer.max_steps:
            self._look(trainer)

    def _read(self) -> None:
        """Bring the first bad step and the last finite loss up to date, in one transfer."""
        if not self._unseen:
            return
        steps, losses = zip(*self._unseen, strict=True)
        self._unseen = []
        for step, loss in zip(steps, torch.stack(losses).tolist(), strict=True):
            if math.isfinite(loss):
                self._last_finite = loss
            elif not self._first_bad:
                self._first_bad = step

    def _look(self, trainer: pl.Trainer) -> None:
        self._read()
        # Every rank must stop at the same step.
        first_bad = torch.tensor(self._first_bad, device=trainer.strategy.root_device)
        step = int(trainer.strategy.reduce(first_bad, reduce_op="max"))
        if step and self.divergence is None:
            self.divergence = Divergence(step, "training loss is not finite", self._last_finite)
            trainer.should_stop = True

    def judge(self, nll: float | None, unigram_entropy: float, step: int) -> Divergence | None:
        """Return how the run failed, or None if it trained."""
        if self.divergence is not None:
            return self.divergence
        bar = unigram_entropy - STALL_MARGIN
        if nll is not None and nll < bar:
            return None
        self._read()
        rule = f"final val/nll is not under the unigram entropy less {STALL_MARGIN} ({bar:.4f})"
        if nll is not None and not math.isfinite(nll):
            rule = "final val/nll is not finite"
        return Divergence(step, rule, self._last_finite)
