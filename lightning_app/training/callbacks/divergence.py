"""Classify how a run ended: a run that did not train is a result, not an error."""

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from torch import Tensor

from lightning_app.scores.task_facts import Monitored
from lightning_app.training.module import is_logged, loss_of, nll_of

STALL_MARGIN = 0.05
"""Nats below the floor: a run that ends higher has learned nothing from its input."""
CLEAR_FALL = 0.1
"""The least fall (nats) between two quarters of the trace for a loss that still falls."""
PLATEAU = 0.5
"""The largest distance (nats) above the floor of a loss on a stall's plateau."""
TRACE = 200
"""The number of last steps whose training losses are kept."""


@dataclass(frozen=True)
class Divergence:
    """When and by which rule a run diverged, and its last finite training loss (nats)."""

    step: int
    rule: str
    last_finite_loss: float | None


@dataclass(frozen=True)
class Outcome:
    """How a run ended, and the rule that decided it, with its numbers.

    `divergence` is set if the run failed, that is, is non-finite or stalled. A run is `cut_short`
    if it ended before the steps of its config, without being non-finite; `judge` cannot know this.
    """

    name: Literal["trained", "not_yet_learned", "stalled", "non_finite", "cut_short"]
    rule: str
    divergence: Divergence | None = None


class DivergenceMonitor(pl.Callback):
    """Stop a run whose training loss is no longer finite; classify a finished one.

    With l the loss of its task and H the floor of l, the loss of the best model that ignores its
    input (`Task.floor`: unless the task says otherwise, the unigram entropy), a run is

    - non_finite if its training loss or its final l is NaN or infinite;
    - trained if its final l is more than 0.05 below H of the validation targets;
    - not_yet_learned if it is not trained, but ``train/nll`` is more than 0.05 below H of the
      training targets, or still falls: the run is too short, or the two splits differ in
      distribution;
    - stalled otherwise: it has learned only the frequencies.

    Here ``train/nll`` is the mean over the last quarter of the last 200 steps, or of all steps of a
    shorter run. It still falls if it is 0.1 lower than in the quarter before. While it is more than
    0.5 above H, the plateau is not reached, and it is compared with the first quarter instead.
    All variants have the same threshold; the loss at initialisation would differ between them. The
    loss is read every `log_every_n_steps` steps, so that a GPU does not wait at each step; the
    recorded step is exact.

    Args:
        monitored: What the task of the run monitors.
    """

    def __init__(self, monitored: Monitored) -> None:
        self.monitored = monitored
        self.divergence: Divergence | None = None
        self._first_bad = 0
        self._last_finite: float | None = None
        self._recent: deque[float] = deque(maxlen=TRACE)
        # (step, loss, nll) still to be read; they stay on the device until then.
        self._unseen: list[tuple[int, Tensor, Tensor]] = []

    def state_dict(self) -> dict[str, Any]:
        return {
            "first_bad": self._first_bad,
            "last_finite": self._last_finite,
            "recent": list(self._recent),
            "unseen": [(step, float(loss), float(nll)) for step, loss, nll in self._unseen],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._first_bad, self._last_finite = state_dict["first_bad"], state_dict["last_finite"]
        # Checkpoints of version 0.1 lack these two entries.
        self._recent = deque(state_dict.get("recent", []), maxlen=TRACE)
        self._unseen = [
            (step, torch.tensor(loss), torch.tensor(nll))
            for step, loss, nll in state_dict.get("unseen", [])
        ]

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs, batch, batch_idx: int
    ) -> None:
        step = trainer.global_step
        self._unseen.append((step, loss_of(outputs), nll_of(outputs)))
        if is_logged(trainer, step) or step >= trainer.max_steps:
            self._look(trainer)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._look(trainer)

    def _look(self, trainer: pl.Trainer) -> None:
        """Read the new losses in one transfer; stop at a loss that is not finite."""
        if not self._unseen:
            return
        steps, *columns = zip(*self._unseen, strict=True)
        self._unseen = []
        device = trainer.strategy.root_device
        values = torch.stack([torch.stack([v.to(device) for v in of]) for of in columns])
        if trainer.world_size > 1:
            # The mean over ranks is the global loss, and all ranks stop at the same step.
            values = trainer.strategy.reduce(values, reduce_op="mean")
        for step, loss, nll in zip(steps, *values.tolist(), strict=True):  # pyright: ignore[reportAttributeAccessIssue]
            self._recent.append(nll)
            if math.isfinite(loss):
                self._last_finite = loss
            elif not self._first_bad:
                self._first_bad = step
        if self._first_bad and self.divergence is None:
            rule = f"the training loss is not finite at step {self._first_bad}"
            self.divergence = Divergence(self._first_bad, rule, self._last_finite)
            trainer.should_stop = True

    def never_began(self, why: str) -> Outcome:
        """Return the outcome of a run whose initial values would not be finite."""
        return self._failed("non_finite", why, 0)

    def judge(
        self,
        loss: float,
        floor: float,
        training_floor: Callable[[], float],
        step: int,
    ) -> Outcome:
        """Return how the run ended.

        Args:
            loss: The final loss (nats); ignored if the training loss was not finite.
            floor: The floor of the validation targets (nats).
            training_floor: Computes the floor of the training targets; called only if needed.
            step: The last step.
        """
        if self.divergence is not None:
            return Outcome("non_finite", self.divergence.rule, self.divergence)
        name = self.monitored.loss
        if not math.isfinite(loss):
            return self._failed("non_finite", f"the final {name} is not finite", step)
        bar = floor - STALL_MARGIN
        low = loss < bar
        verb = "is below" if low else "is not below"
        rule = f"{name} {loss:.4f} {verb} {bar:.4f}, the {self.monitored.floor} less {STALL_MARGIN}"
        if low:
            return Outcome("trained", rule)
        if not self._recent:
            return self._failed("stalled", f"{rule}, and no training loss is known", step)
        trace, size = list(self._recent), max(1, len(self._recent) // 4)
        last, before, first = trace[-size:], trace[-2 * size : -size], trace[:size]
        level, bottom = fmean(last), training_floor()
        high = level > bottom + PLATEAU
        fall = fmean(first if high else before or first) - level
        fell = f"fell by {fall:.4f} from the {'first such' if high else f'{size} before'}"
        bar = f"{bottom - STALL_MARGIN:.4f}, the same of the training targets"
        rule += f"; train/nll, {level:.4f} over the last {size} steps,"
        if level < bottom - STALL_MARGIN:
            return Outcome("not_yet_learned", f"{rule} is below {bar}")
        if fall >= CLEAR_FALL:
            return Outcome("not_yet_learned", f"{rule} still falls: it {fell}")
        rule += f" is not below {bar}, and {fell}, less than {CLEAR_FALL}"
        return self._failed("stalled", rule, step)

    def _failed(self, name: Literal["stalled", "non_finite"], rule: str, step: int) -> Outcome:
        return Outcome(name, rule, Divergence(step, rule, self._last_finite))
