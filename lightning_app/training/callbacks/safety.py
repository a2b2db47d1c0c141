"""Callbacks that protect a run: signals, pruning, provenance, equal ranks, exact averages."""

import json
import math
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_app.blocks.attention import Attention
from lightning_app.blocks.block import BlockSpec
from lightning_app.config.classes import check_callback
from lightning_app.core.errors import UserError
from lightning_app.core.files import write_whole
from lightning_app.models.stack import stacks
from lightning_app.probes.hooks import scores
from lightning_app.runs.parent import RUN
from lightning_app.runs.records import Divergence
from lightning_app.scores.task_facts import Monitored
from lightning_app.training.checkpoint import Checkpoint
from lightning_app.training.hardware import hardware
from lightning_app.training.module import is_logged, loss_of, tell_all

STALL_MARGIN = 0.05
"""Nats below the floor: a run that ends higher has learned nothing from its input."""
CLEAR_FALL = 0.1
"""The least fall (nats) between two quarters of the trace for a loss that still falls."""
PLATEAU = 0.5
"""The largest distance (nats) above the floor of a loss on a stall's plateau."""
TRACE = 200
"""The number of last steps whose training losses are kept."""


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
        self._recent = deque(state_dict["recent"], maxlen=TRACE)
        unseen = state_dict["unseen"]
        self._unseen = [(step, torch.tensor(loss), torch.tensor(nll)) for step, loss, nll in unseen]

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = trainer.global_step
        self._unseen.append((step, loss_of(outputs), outputs["nll"]))
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
        # The mean over ranks is the global loss, and all ranks stop at the same step.
        values = trainer.strategy.reduce(values, reduce_op="mean")
        for step, loss, nll in zip(steps, *values.tolist(), strict=True):  # pyright: ignore[reportAttributeAccessIssue]
            self.see(step, loss, nll)
        if self.has_diverged():
            trainer.should_stop = True

    def see(self, step: int, loss: float, nll: float) -> None:
        """Take note of the losses of a step."""
        self._recent.append(nll)
        if math.isfinite(loss):
            self._last_finite = loss
        elif not self._first_bad:
            self._first_bad = step

    def has_diverged(self) -> bool:
        """Whether a loss that was seen is not finite; `divergence` then says so."""
        if self._first_bad and self.divergence is None:
            rule = f"the training loss is not finite at step {self._first_bad}"
            self.divergence = Divergence(self._first_bad, rule, self._last_finite)
        return self.divergence is not None

    def judge(
        self, loss: float, floor: float, training_floor: Callable[[], float], step: int
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


STOPPING = (
    "\nablate: stopping after this step, or after the validation that is running, with a "
    "checkpoint; Ctrl-C again stops at once, without one\n"
)


class SaveOnInterrupt(pl.Callback):
    """Write a checkpoint to resume from when Ctrl-C or SIGTERM ends the training.

    The handlers only record the signal. Training ends after the current step, which is the same
    on all ranks, whichever of them received it; a running or due validation is finished first.
    The checkpoint is therefore exact: the continued run has the weights of an uninterrupted one.

    Every further Ctrl-C raises `KeyboardInterrupt` at once, without saving, since the step may
    be half done. A process that was started with SIGINT ignored, as a shell script starts its
    background jobs, keeps ignoring it. Before the first step and after the last validation both
    signals have their usual effect.

    Args:
        path: The checkpoint; None to stop without one.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.asked = False  # whether a signal has requested the end of the run
        self._saved = False
        self._interrupts = 0
        self._first_rank = True
        self._before: dict[int, Any] = {}

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        self._first_rank = trainer.is_global_zero
        # With Lightning's own handler of SIGTERM each rank would stop at once; two ranks at
        # different steps would then wait for each other forever.
        self._before[signal.SIGTERM] = signal.signal(signal.SIGTERM, self._note)
        # KeyboardInterrupt at an arbitrary instruction can leave the queue of TensorBoard's thread
        # locked, and the end of the run would then wait for that thread forever. In a `__del__` or
        # another callback of the interpreter it is lost.
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            self._before[signal.SIGINT] = signal.signal(signal.SIGINT, self._note)

    def _note(self, number: int, frame: object) -> None:
        self.asked = True
        if number != signal.SIGINT:
            return
        self._interrupts += 1
        if self._interrupts > 1:
            raise KeyboardInterrupt
        if self._first_rank:
            os.write(2, STOPPING.encode())  # `print` fails in a handler that interrupts `print`

    def _is_asked(self, trainer: pl.Trainer) -> bool:
        """Whether any rank has received a signal; all ranks call this at the same step."""
        return trainer.strategy.reduce_boolean_decision(self.asked, all=False)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs, batch, batch_idx: int
    ) -> None:
        if not self._is_asked(trainer):
            return
        # A validation that is due now would be skipped; its own checkpoint is exact as well.
        self._saved = trainer.enable_validation and _is_validated(trainer, batch_idx)
        if not self._saved:
            raise SIGTERMException

    def on_train_batch_start(self, *_: Any, **__: Any) -> None:
        if self._saved:
            raise SIGTERMException

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._restore()
        # A signal in the last validation has not stopped anything, and the last step has its
        # checkpoint.
        if self._is_asked(trainer):
            self._saved = True
            raise SIGTERMException

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        unsaved = isinstance(exception, SIGTERMException) and not self._saved
        try:
            if unsaved and self.path is not None and trainer.training and trainer.global_step:
                trainer.save_checkpoint(self.path)
        finally:
            self._restore()

    def _restore(self) -> None:
        while self._before:
            signal.signal(*self._before.popitem())


def _is_validated(trainer: pl.Trainer, batch_idx: int) -> bool:
    every, epochs = trainer.val_check_batch, trainer.check_val_every_n_epoch
    if every is None:
        return False
    if epochs is None:
        return (trainer.fit_loop.total_batch_idx + 1) % every == 0
    return (trainer.current_epoch + 1) % epochs == 0 and (batch_idx + 1) % every == 0


def averaging(trainer: pl.Trainer) -> list[WeightAveraging]:
    """Return the callbacks of a Trainer that average weights."""
    callbacks: list[Any] = trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]
    for callback in callbacks:
        check_callback(type(callback).__name__, (kind.__name__ for kind in type(callback).__mro__))
    return [callback for callback in callbacks if isinstance(callback, WeightAveraging)]


def check_averaging(
    trainer: pl.Trainer, blocks: Iterable[BlockSpec], start: Checkpoint | None
) -> None:
    """Refuse averages that would be wrong, before anything is written.

    An average keeps neither the length of rows nor a factor that follows the steps. If the run
    starts from a checkpoint of averages, only the callback that wrote them finds the raw weights in
    it. Raises `UserError`, naming the callback.
    """
    found = averaging(trainer)
    names = " and ".join(type(callback).__name__ for callback in found)
    if len(found) > 1:
        raise UserError(f"trainer.callbacks: {names}: expected at most one average of weights")
    if found and not isinstance(trainer.strategy, SingleDeviceStrategy | DDPStrategy):
        kind = type(trainer.strategy).__name__
        raise UserError(
            f"trainer.callbacks: {names} needs whole models, which {kind} does not have"
        )
    for block in blocks if found else ():
        ramps = block.around_self.branch.ramp, block.around_ff.branch.ramp
        if block.unit_matrices or any(ramps):
            field = "unit_matrices" if block.unit_matrices else "branch_ramp"
            raise UserError(
                f"trainer.callbacks: {names} with model.block.{field} (as in presets ngpt and "
                "prores), which an average over steps does not keep; use one of the two"
            )
    if start is None:
        return
    if start.averaged and not found:
        raise UserError(
            f"--ckpt_path {start.path}: holds averaged weights, and trainer.callbacks has no "
            "WeightAveraging to continue with; give the callback of the run that wrote it"
        )
    if found and not start.averaged:
        raise UserError(
            f"--ckpt_path {start.path}: holds no averaged weights for {names} of "
            "trainer.callbacks to continue with; a run averages from its start or not at all"
        )


class BeforeAveraging(pl.Callback):
    """Act before a callback that averages weights; it comes before all other callbacks.

    It builds the model before they copy it. Initial weights never count as an average: the first
    validation, and the end, must come after the first update. The checkpoint of a last step on
    which no validation falls is written while the model still has its raw weights.

    Args:
        monitor: Records whether the run has diverged; such a run has no final checkpoint.
        last: The final checkpoint.
    """

    def __init__(self, monitor: DivergenceMonitor, last: Path) -> None:
        self._monitor = monitor
        self._last = last

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        module: Any = pl_module
        module.ensure_built()

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking:
            self._check_updated(trainer)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._monitor.divergence is not None or trainer.global_step == 0:
            return
        self._check_updated(trainer)
        validated = int(trainer.callback_metrics.get("step", -1)) == trainer.global_step
        if trainer.checkpoint_callback is not None and not validated:
            trainer.save_checkpoint(self._last)

    def _check_updated(self, trainer: pl.Trainer) -> None:
        for callback in averaging(trainer):
            if callback.state_dict()["latest_update_step"] == 0:
                raise UserError(
                    f"trainer.callbacks: {type(callback).__name__} has averaged nothing by step "
                    f"{trainer.global_step}, where its average is evaluated; let it begin before"
                )


class Pruned(Exception):
    """The run was stopped on request after `step`."""

    def __init__(self, step: int) -> None:
        super().__init__(f"pruned after step {step}")
        self.step = step


class Pruning(pl.Callback):
    """Report a metric at each validation, and end the training when a file exists.

    A line `{"step", "value"}` is appended to `reports` before the checkpoint of that validation is
    written, so every step from which a run can resume has a report; a value that is not
    finite is null. The first rank checks for `stop` before the first batch after a logged step or a
    validation; all ranks then raise `Pruned` together. Nothing else changes: a run that is
    not stopped ends with the same weights as one without reports.

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

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
        step = trainer.global_step
        due = self._validated or (step != self._looked and is_logged(trainer, step))
        if not due:
            return
        self._looked, self._validated = step, False
        stops = trainer.is_global_zero and self.stop.is_file()
        if trainer.strategy.reduce_boolean_decision(stops, all=False):
            raise Pruned(step)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # A validation after the training is not needed for pruning.
        if trainer.state.fn != TrainerFn.FITTING or trainer.sanity_checking:
            return
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
            said = value if math.isfinite(value) else None
            report = {"step": trainer.global_step, "metric": self.metric, "value": said}
            with self.reports.open("a", encoding="utf-8") as file:
                file.write(json.dumps(report) + "\n")


_MAKERS = ("code", "plugins", "libraries", "data", "cpu", "gpus", "matmul")
_MAKERS += ("classes", "plugins_used", "arithmetic", "devices", "threads")


class Origin(pl.Callback):
    """Complete and store the `provenance` of a run, before its first step.

    A resumed run lists the earlier provenances under `resumed_from`, from the checkpoint.

    Args:
        path: The file of this attempt.
        software: The version of the code, libraries and command line.
        resumed: Whether the run continues from a checkpoint.
        run: The run as recorded in each checkpoint: its id, its seed, its parent's id.
    """

    def __init__(
        self, path: Path, software: Mapping[str, Any], resumed: bool, run: Mapping[str, Any]
    ) -> None:
        self._path = path
        self._run = dict(run)
        self.record: dict[str, Any] = dict(software)
        # The checkpoint of a Trainer without this callback has no record.
        self.record["resumed_from"] = [dict.fromkeys(_MAKERS)] if resumed else []

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage == "fit":
            data: Mapping[str, Any] = getattr(trainer, "datamodule", None).description  # pyright: ignore[reportOptionalMemberAccess]
            ids = getattr(trainer, "device_ids", [0])
            self.record["data"] = data["digest"]
            self.record |= hardware(trainer.strategy.root_device, ids)
            self.record["devices"] = trainer.world_size

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        found = [_makers(self.record)]
        for each in (*state_dict["resumed_from"], _makers(state_dict)):
            if each not in found:
                found.append(each)
        self.record["resumed_from"] = found[1:]

    def state_dict(self) -> dict[str, Any]:
        return {**_makers(self.record), "resumed_from": self.record["resumed_from"]}

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        checkpoint[RUN] = self._run

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.is_global_zero:
            write_whole(self._path, json.dumps(self.record, indent=1))


def _makers(record: Mapping[str, Any]) -> dict[str, Any]:
    return {key: record[key] for key in _MAKERS}


class Agreement(pl.Callback):
    """Refuse to train if the config, the starting step or the data differ between ranks.

    Such ranks would average gradients of different models if their shapes happened to match.

    Args:
        identity: The id of the run's config, hexadecimal.
    """

    def __init__(self, identity: str) -> None:
        self.identity = identity

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.world_size == 1:
            return
        data = trainer.datamodule.description["digest"]  # pyright: ignore[reportAttributeAccessIssue]
        # 60 bits, which fit into a signed 64-bit integer.
        identity, digest = (int(text[:15], 16) for text in (self.identity, data))
        mine = torch.tensor([identity, trainer.global_step, digest])
        mine = mine.to(trainer.strategy.root_device)
        everyone = trainer.strategy.all_gather(mine)
        others = (everyone != mine).any(dim=0).tolist()
        for what, differs in zip(("configs", "starting steps", "data"), others, strict=True):
            if differs:
                raise RuntimeError(
                    f"rank {trainer.global_rank}: the ranks' {what} differ; nothing was trained"
                )


class QKClip(pl.Callback):
    """Bound the logits of attention by smaller queries and keys (MuonClip, Kimi K2, 2507.20534).

    S is the largest logit of a head over the cells of a batch that count, on all ranks. After
    the step the head's rows of W_Q and W_K, and its biases, are multiplied by ``sqrt(g)``,
    ``g = min(1, tau / S)``, so that its logits are g times as large. Where heads of queries share
    keys, W_Q is multiplied by g, and the keys stay. Loggers record the largest S of all heads as
    ``train/largest_logit``.

    Args:
        tau: The bound, above 0; 100 in the paper.
    """

    def __init__(self, tau: float = 100.0) -> None:
        if not 0.0 < tau < math.inf:
            raise ValueError(f"tau {tau}: must be a number above 0")
        self.tau = tau
        self._attentions: list[tuple[str, Attention]] = []
        self._handles: list[RemovableHandle] = []
        self._real: Mapping[str, Tensor] = {}
        self._largest = torch.empty(0)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._attentions, self._handles = [], []
        for name, stack in stacks(pl_module.model).items():  # pyright: ignore[reportArgumentType]
            for part in stack.modules():
                if isinstance(part, Attention):
                    hook = partial(self._measure, pl_module, name, len(self._attentions))
                    self._attentions.append((name, part))
                    self._handles.append(part.register_forward_hook(hook, with_kwargs=True))
        if not self._attentions:
            raise UserError(
                "trainer.callbacks: QKClip with a model that has no attention of this package; "
                "leave QKClip out"
            )
        heads = max(part.num_heads for _, part in self._attentions)
        self._largest = torch.empty(len(self._attentions), heads, device=pl_module.device)
        clip = partial(self._clip, trainer)
        self._handles.append(trainer.optimizers[0].register_step_post_hook(clip))

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._real = pl_module.objective.real_tokens(batch)  # pyright: ignore[reportAttributeAccessIssue, reportCallIssue]
        self._largest.fill_(-math.inf)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        for handle in self._handles:
            handle.remove()

    @torch.no_grad()
    def _measure(
        self, system: Any, stack: str, place: int, module: Attention, args: Any, kwargs: Any, _: Any
    ) -> None:
        # Before its first step Admin passes over the batch with other skips.
        if not (module.training and system.profiled):
            return
        mask, logits, _ = scores(module, args, kwargs, None)
        cells = mask.allowed & self._real[stack][:, None, :, None]
        largest = logits.masked_fill(~cells, -math.inf).amax(dim=(0, 2, 3))
        row = self._largest[place, : module.num_heads]
        torch.maximum(row, largest.to(row.dtype), out=row)

    @torch.no_grad()
    def _clip(self, trainer: pl.Trainer, *_: Any) -> None:
        largest = trainer.strategy.reduce(self._largest, reduce_op="max")
        assert isinstance(largest, Tensor)
        factors = torch.where(largest > self.tau, self.tau / largest, 1.0)
        for (_name, part), factor in zip(self._attentions, factors, strict=True):
            shared = part.kv_heads != part.num_heads
            root = factor[: part.num_heads].sqrt()
            _scale(part.query, root * root if shared else root)
            if not shared:
                _scale(part.key, root)
        if is_logged(trainer, step := trainer.global_step + 1):
            tell_all(trainer, {"train/largest_logit": float(largest.max())}, step)


def _scale(linear: nn.Linear, factors: Tensor) -> None:
    for parameter in linear.parameters():
        by_head = parameter.unflatten(0, (len(factors), -1))
        by_head.mul_(factors.to(parameter.dtype).view(-1, *[1] * (by_head.dim() - 1)))
