"""Packs: cells that differ in rate and warm-up only, trained as one stacked model.

A small step leaves a GPU idle most of the time. The K models of a pack, of one wiring and seed,
have their weights in one tensor, and each step reads one batch for all: `torch.vmap` turns every
operation of the model into one for K models. Nothing is reduced over the pack, and its width is
fixed: places without a cell train copies. A cell's numbers do not depend on its neighbours, nor on
its place, except with MKL, which rounds small float32 products by address unless MKL_CBWR is set.

The products of a pack have other shapes than those of one model, so that its numbers differ from
those by rounding: `model.pack` is part of a run's identity.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from itertools import chain, compress
from pathlib import Path
from typing import Any, NamedTuple, cast, final

import lightning.pytorch as pl
import torch
from jaxtyping import Float
from lightning.pytorch.loggers import Logger
from lightning.pytorch.plugins import TorchCheckpointIO
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from lightning_app.blocks.block import Block
from lightning_app.blocks.linear import followed
from lightning_app.blocks.norm import acts_after_steps
from lightning_app.blocks.spans import AuxiliaryTerms
from lightning_app.core.errors import UserError
from lightning_app.models.optim import build_optimizer, build_schedule, training_of
from lightning_app.models.positions import Embedding
from lightning_app.runs.folder import RunFolder
from lightning_app.runs.parent import is_finite
from lightning_app.runs.store import trim_checkpoints
from lightning_app.tasks.base import Task
from lightning_app.training.callbacks.loggers import Progress, WallClock
from lightning_app.training.checkpoint import Saver, WholeCheckpoints
from lightning_app.training.datamodule import training_steps
from lightning_app.training.module import PARTS, TransformerModule, is_logged, tell_all
from lightning_app.training.run import CutShort, TrainingRun, cell_run


class Columns(NamedTuple):
    """Columns of the weights of a pack that are trained alike: a group of the optimizer."""

    place: slice
    beta_1: float
    beta_2: float
    eps: float
    weight_decay: float


@final
class PackedAdam(torch.optim.Optimizer):
    """Adam, or AdamW if `decoupled`, of the weights (model, parameter) with a rate per model.

    With g the gradient, r the rate of the model and t the step (Kingma & Ba 2015, 1412.6980):
    ``m = b1 m + (1 - b1) g``, ``v = b2 v + (1 - b2) g^2``,
    ``w -= r / (1 - b1^t) m / (sqrt(v / (1 - b2^t)) + eps)``. The weight decay d adds ``d w`` to g,
    or, decoupled, multiplies w by ``1 - r d`` first (Loshchilov & Hutter 2019, 1711.05101).

    Attributes:
        rates: The rates of the next step, (model, group), in float64.
    """

    def __init__(self, weights: nn.Parameter, parts: Sequence[Columns], decoupled: bool) -> None:
        super().__init__([weights], {})
        self.parts = tuple(parts)
        self.decoupled = decoupled
        self.rates = torch.zeros(len(weights), len(parts), dtype=torch.float64)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        (weights,) = self.param_groups[0]["params"]
        state = self.state[weights]
        if not state:
            state["step"] = 0
            state |= {name: torch.zeros_like(weights) for name in ("exp_avg", "exp_avg_sq")}
        state["step"] += 1
        for part, rates in zip(self.parts, self.rates.unbind(dim=1), strict=True):
            self._update(part, rates, weights, state)
        return loss

    def _update(
        self, part: Columns, rates: Tensor, weights: nn.Parameter, state: dict[str, Any]
    ) -> None:
        def here(x: Tensor) -> Tensor:
            return x[:, part.place]

        def column(x: Tensor) -> Tensor:
            return x.to(weights)[:, None]

        assert weights.grad is not None
        w, g, m, v = map(here, (weights, weights.grad, state["exp_avg"], state["exp_avg_sq"]))
        if part.weight_decay and self.decoupled:
            w.mul_(column(1.0 - rates * part.weight_decay))
        elif part.weight_decay:
            g = g.add(w, alpha=part.weight_decay)
        m.lerp_(g, 1.0 - part.beta_1)
        v.mul_(part.beta_2).addcmul_(g, g, value=1.0 - part.beta_2)
        size = column(rates / (1.0 - part.beta_1 ** state["step"]))
        root = math.sqrt(1.0 - part.beta_2 ** state["step"])
        w.sub_(size * (m / (v.sqrt() / root).add_(part.eps)))


class _Summed(nn.Module):
    """The sums of a batch as the call of a module, which `functional_call` gives its weights."""

    def __init__(self, task: Task, model: nn.Module) -> None:
        super().__init__()
        self.task, self.model = task, model

    def forward(self, batch: Any) -> tuple[Tensor, ...]:
        sums = self.task.sums(self.model, batch)
        if torch.is_grad_enabled():
            return sums.loss, sums.nll
        assert sums.correct is not None
        assert sums.by_token is not None
        return sums.nll, sums.correct, sums.tokens, sums.by_token


@final
class PackedModule(TransformerModule):
    """The models of a pack. Values that are logged have one number for each of them.

    Args:
        members: The modules of the cells, with the optimizer and the schedule of each.
        width: The number of models; those without a cell are copies of the first.

    Attributes:
        weights: The trained parameters (model, parameter); `model` has the other values, which are
            the same for all.
        order: The name and the shape of each trained parameter, in the order of the columns.
        found: The last metrics of each member; those of a member that diverged are NaN.
        validated: The step of the last validation.
    """

    def __init__(self, members: Sequence[TransformerModule], width: int) -> None:
        first = members[0]
        parts = first.block, first.architecture, first.objective.config
        super().__init__(*parts, first.optimizer, first.schedule)
        self.members = list(members)
        self.width = width
        self.order: dict[str, torch.Size] = {}
        self._slots: dict[str, str] = {}  # the name in `order` of each place of a parameter
        self.found: list[dict[str, float]] = [{} for _ in members]
        self.validated = -1
        self.stopped: set[int] = set()
        self._summed: list[_Summed] = []  # in a list, since it is no part of this module

    def build(
        self, vocab_size: int, source_vocab: int | None = None, *, doubles: bool = False
    ) -> None:
        super().build(vocab_size, source_vocab, doubles=doubles)
        model = self.model
        assert model is not None
        for part in model.modules():
            own = acts_after_steps(part) and not isinstance(part, Block | Embedding)
            if own or isinstance(part, AuxiliaryTerms):
                raise UserError(
                    f"model.pack: {self.width} with {type(part).__name__}, which acts after steps "
                    "or adds to the loss, as stacked models do not; use 1"
                )
        self.made = [
            build_optimizer(each.optimizer, model, fused=False, **self._grouping)
            for each in self.members
        ]
        names = {parameter: name for name, parameter in model.named_parameters()}
        trained = [p for group in self.made[0].param_groups for p in group["params"]]
        kinds = {(parameter.dtype, parameter.requires_grad) for parameter in trained}
        if len(kinds) > 1:
            raise UserError(
                f"model.pack: {self.width} models, some of whose parameters have another type or "
                "are not trained; use 1"
            )
        self.order = {names[parameter]: parameter.shape for parameter in trained}
        # A module may be registered twice, and a parameter in two modules.
        self.name_of = {
            name: names[parameter]
            for name, parameter in model.named_parameters(remove_duplicate=False)
            if names[parameter] in self.order
        }
        self._slots = {
            f"{path}.{name}".lstrip("."): names[parameter]
            for path, part in model.named_modules()
            for name, parameter in part.named_parameters(recurse=False)
            if names[parameter] in self.order
        }
        self.weights = nn.Parameter(self._flat().expand(self.width, -1).clone())
        self.count = sum(parameter.numel() for parameter in model.parameters())
        model.requires_grad_(False)
        self._summed = [_Summed(self.objective, model)]
        for each in self.members:
            each.model = model

    def _flat(self) -> Float[Tensor, " parameter"]:
        """The trained parameters of `model`."""
        assert self.model is not None
        named = dict(self.model.named_parameters())
        return torch.cat([named[name].detach().flatten() for name in self.order])

    def _columns(self) -> Iterator[Columns]:
        start = 0
        for group in self.made[0].param_groups:
            end = start + sum(parameter.numel() for parameter in group["params"])
            if end > start:
                decay = group["weight_decay"]
                beta_1, beta_2 = group["betas"]
                yield Columns(slice(start, end), beta_1, beta_2, group["eps"], decay)
            start = end

    def configure_optimizers(self) -> Any:
        assert self.model is not None
        total = training_steps(self.trainer)
        pairs = list(zip(self.members, self.made, strict=True))
        self._schedules = [build_schedule(each.schedule, made, total) for each, made in pairs]
        for each, made in pairs:
            each.trained_by = training_of(made, each.schedule, self.model)
        return self.packed_optimizer()

    def _rates(self, place: int) -> list[float]:
        """The rate of each of the optimizer's groups of a member in the next step."""
        schedule = self._schedules[place]
        pairs = zip(schedule.base_lrs, schedule.lr_lambdas, strict=True)
        return [float(rate * factor(self.global_step)) for rate, factor in pairs]

    def schedule_of(self, place: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Return the states of the schedule and of the optimizer's groups of a member alone."""
        rates, done = self._rates(place), self.global_step
        groups = self.made[place].state_dict()["param_groups"]
        state = self._schedules[place].state_dict()
        state |= {"last_epoch": done, "_step_count": done + 1}
        groups = [{**group, "lr": rate} for group, rate in zip(groups, rates, strict=True)]
        return {**state, "_last_lr": rates}, groups

    def packed_optimizer(self) -> PackedAdam:
        """Return the optimizer of the pack, whose rates are 0 until they are set."""
        return PackedAdam(self.weights, list(self._columns()), self.optimizer.kind == "adamw")

    def _pieces(self) -> dict[str, Tensor]:
        """The weights by the names that `_Summed` gives them, views with the models first."""
        parts = self.weights.split([shape.numel() for shape in self.order.values()], dim=1)
        pieces = {
            name: part.view(self.width, *shape)
            for (name, shape), part in zip(self.order.items(), parts, strict=True)
        }
        return {f"model.{slot}": pieces[name] for slot, name in self._slots.items()}

    def sums(self, batch: Any) -> tuple[Tensor, ...]:
        """Return what `_Summed` returns for each model."""
        (summed,) = self._summed

        def of_one(values: dict[str, Tensor]) -> tuple[Tensor, ...]:
            return functional_call(summed, values, (batch,), tie_weights=False)

        with followed(), sdpa_kernel(SDPBackend.MATH):  # fused kernels would run model by model
            return torch.vmap(of_one, randomness="error")(self._pieces())

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        profiled = self.profiled
        super().on_train_batch_start(batch, batch_idx)
        if not profiled:  # the skips that the batch sets are those of `model`
            self.weights.data.copy_(self._flat())
        trained = [bool(group["params"]) for group in self.made[0].param_groups]
        rates = [[*compress(self._rates(place), trained)] for place in range(len(self.members))]
        optimizer: Any = self.trainer.optimizers[0]
        padded = [*rates, *[rates[0]] * (self.width - len(rates))]
        optimizer.rates = torch.tensor(padded, dtype=torch.float64)

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        loss, nll = (total / batch.predicted_tokens for total in self.sums(batch))
        step = self.global_step + 1
        if is_logged(self.trainer, step):
            losses, nlls = torch.stack([loss.detach(), nll]).tolist()
            optimizer: Any = self.trainer.optimizers[0]
            roles = [group.get("role") for group in self.made[0].param_groups if group["params"]]
            warmed = self.schedule.warmup_of
            rates = optimizer.rates[:, roles.index(warmed) if warmed in roles else 0].tolist()
            shown: Any = {"train/loss": losses, "train/nll": nlls, "train/lr": rates}
            if self.schedule.batch_warmup_steps:
                shown["train/batch_tokens"] = [float(batch.predicted_tokens)] * self.width
            tell_all(self.trainer, shown, step)
        # The gradient of the sum with respect to the weights of a model is that of its own loss.
        return {"loss": loss.sum(), "losses": loss.detach(), "nlls": nll}

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        if is_logged(self.trainer, step := self.global_step + 1):
            norms: Any = self._norms().tolist()
            tell_all(self.trainer, {"train/grad_norm": norms}, step)

    def _norms(self) -> Float[Tensor, " model"]:
        assert self.weights.grad is not None
        return self.weights.grad.norm(dim=1)

    def configure_gradient_clipping(
        self,
        optimizer: Any,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip the gradient of each model by its own norm, as `torch.nn.utils` does."""
        if not gradient_clip_val:
            return
        assert self.weights.grad is not None
        if gradient_clip_algorithm == "value":
            self.weights.grad.clamp_(-gradient_clip_val, gradient_clip_val)
        else:
            factors = (gradient_clip_val / (self._norms() + 1e-6)).clamp(max=1.0)
            self.weights.grad.mul_(factors[:, None])

    def _start_evaluation(self, split: str) -> None:
        super()._start_evaluation(split)
        self._totals: list[Tensor] = []
        exact = torch.promote_types(self.weight_type, torch.float32)
        self._by_part = torch.zeros(self.width, 2, PARTS, device=self.device, dtype=exact)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        *totals, by_token = self.sums(batch)
        kept = [totals[0].to(self._by_part), *totals[1:]]
        before = self._totals or [torch.zeros_like(total) for total in kept]
        self._totals = [a + b for a, b in zip(before, kept, strict=True)]
        if not self.trainer.testing:
            size = len(self.trainer.val_dataloaders.dataset)  # pyright: ignore[reportOptionalMemberAccess]
            part = self.objective.rows_of(batch).clamp(min=0) * PARTS // size
            self._by_part.index_add_(2, part, by_token.to(self._by_part))

    test_step = validation_step

    def _log_evaluation(self, stage: str) -> None:
        columns = zip(*(total.tolist() for total in self._totals), strict=True)
        each = [self.metrics_of(stage, *sums) for sums in columns]
        if self.trainer.sanity_checking:
            return
        for place in range(len(self.members)):
            if place not in self.stopped:
                self.found[place] |= each[place]
            elif stage == "val":  # alone, it is validated where it stops
                self.found[place] = dict.fromkeys(each[place], math.nan)
        shown: dict[str, Any] = {name: [of[name] for of in each] for name in each[0]}
        tell_all(self.trainer, shown, self.global_step)

    def on_validation_epoch_end(self) -> None:
        self._log_evaluation("val")
        self.validated = self.global_step
        for place, each in enumerate(self.members):
            if place not in self.stopped:
                nll, tokens = self._by_part[place][:, self._by_part[place, 1] > 0].tolist()
                each.validation_parts = {"nll": nll, "tokens": [int(count) for count in tokens]}


@final
class PackLogger(Logger):
    """Passes metrics to the loggers of each cell; a list has one number for each model."""

    def __init__(self, runs: Sequence[TrainingRun], module: PackedModule) -> None:
        super().__init__()
        self._loggers = [run.trainer.loggers for run in runs]
        self._module = module

    @property
    def name(self) -> str:
        return "pack"

    @property
    def version(self) -> str:
        return ""

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        for place, loggers in enumerate(self._loggers):
            if place in self._module.stopped:
                continue  # alone, its run would have ended
            own = {k: v[place] if isinstance(v, list) else v for k, v in metrics.items()}
            for logger in loggers:
                logger.log_metrics(dict(own), step)

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Do nothing: a pack has only the loggers of every run, which take none."""

    def save(self) -> None:
        for logger in chain.from_iterable(self._loggers):
            logger.save()

    def finalize(self, status: str) -> None:
        for logger in chain.from_iterable(self._loggers):
            logger.finalize(status)


MONITOR, ORIGIN, CLOCK, END = "DivergenceMonitor", "Origin", "WallClock", "End"
"""The names under which a checkpoint of a cell has the states of these callbacks, and where it
ended if it diverged."""


@final
class Members(pl.Callback):
    """What every cell of a pack does for itself: it records its origin, and whether it diverged.

    The pack ends early only if all its cells have diverged.

    Attributes:
        ends: The steps and tokens of the cells that diverged, by their place.
    """

    def __init__(self, runs: Sequence[TrainingRun], module: PackedModule) -> None:
        self._runs = runs
        self._module = module
        self.ends: dict[int, tuple[int, int]] = {}
        self._unseen: list[tuple[int, Tensor, Tensor]] = []

    def state_dict(self) -> dict[str, Any]:
        cells: list[dict[str, Any]] = []
        for place, run in enumerate(self._runs):
            unseen = [(s, float(loss[place]), float(nll[place])) for s, loss, nll in self._unseen]
            monitor = {**run.divergence.state_dict(), "unseen": unseen}
            origin = run.origin.state_dict()
            cells.append({MONITOR: monitor, ORIGIN: origin, END: self.ends.get(place)})
        return {"cells": cells}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        unseen = [states[MONITOR]["unseen"] for states in state_dict["cells"]]
        for rows in zip(*unseen, strict=True):
            steps, losses, nlls = zip(*rows, strict=True)
            copies = self._module.width - len(rows)
            columns = [torch.tensor([*of, *of[:1] * copies]) for of in (losses, nlls)]
            self._unseen.append((steps[0], columns[0], columns[1]))
        for place, (run, states) in enumerate(zip(self._runs, state_dict["cells"], strict=True)):
            run.divergence.load_state_dict({**states[MONITOR], "unseen": []})
            run.origin.load_state_dict(states[ORIGIN])
            if states[END] is not None and run.divergence.has_diverged():
                self.ends[place] = states[END]
                self._module.stopped.add(place)

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        for run in self._runs:
            run.origin.setup(trainer, pl_module, stage)

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        for run in self._runs:
            run.origin.on_fit_start(trainer, pl_module)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs, batch, batch_idx: int
    ) -> None:
        step, found = trainer.global_step, cast(Any, outputs)
        self._unseen.append((step, found["losses"], found["nlls"]))
        if is_logged(trainer, step) or step >= trainer.max_steps:
            self._look(trainer)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._look(trainer)
        saves = trainer.checkpoint_callback is not None
        if saves and self._module.validated != trainer.global_step:
            trainer.save_checkpoint(self._runs[0].folder.checkpoint("last"))

    def _look(self, trainer: pl.Trainer) -> None:
        """Read the new losses in one transfer; stop if no cell has finite ones."""
        if not self._unseen:
            return
        steps, *columns = zip(*self._unseen, strict=True)
        self._unseen = []
        device = trainer.strategy.root_device
        values = [torch.stack([v.to(device, torch.float64) for v in of]) for of in columns]
        losses, nlls = torch.stack(values).tolist()
        for place, run in enumerate(self._runs):
            if run.divergence.divergence is not None:
                continue
            for step, loss, nll in zip(steps, losses, nlls, strict=True):
                run.divergence.see(step, loss[place], nll[place])
            if run.divergence.has_diverged():
                self.ends[place] = trainer.global_step, self._runs[0].throughput.tokens
                self._module.stopped.add(place)
        if len(self.ends) == len(self._runs):
            trainer.should_stop = True


@final
class PackProgress(Progress):
    """Writes the progress of each cell of a pack."""

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs, batch, batch_idx: int
    ) -> None:
        if self._due():
            self._write(trainer, "train", *cast(Any, outputs)["losses"].tolist())


@final
class PackedCheckpoints(TorchCheckpointIO):
    """Stores a pack as the checkpoints of its cells, each as its run alone would write it."""

    def __init__(self, runs: Sequence[TrainingRun], module: PackedModule) -> None:
        self._runs = runs
        self._module = module
        self._files = WholeCheckpoints()

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None
    ) -> None:
        module = self._module
        weights = module.weights.detach().cpu()
        (states,) = checkpoint["optimizer_states"]
        moments = {k: v.cpu() for k, v in states["state"][0].items() if k != "step"}
        steps = torch.tensor(float(states["state"][0]["step"]))
        sizes = [shape.numel() for shape in module.order.values()]

        def split(values: Tensor) -> list[Tensor]:
            pieces = zip(values.split(sizes), module.order.values(), strict=True)
            return [piece.view(shape).clone() for piece, shape in pieces]

        callbacks = dict(checkpoint["callbacks"])
        cells = callbacks.pop(Members.__name__)["cells"]
        share = {"seconds": callbacks[CLOCK]["seconds"] / len(self._runs)}
        for place, run in enumerate(self._runs):
            own = dict(zip(module.order, split(weights[place]), strict=True))
            assert module.model is not None
            named = module.model.state_dict()
            values = {
                f"model.{k}": own[module.name_of[k]] if k in module.name_of else v.cpu()
                for k, v in named.items()
            }
            split_moments = {name: split(of[place]) for name, of in moments.items()}
            state = {
                number: {"step": steps, **{name: of[number] for name, of in split_moments.items()}}
                for number in range(len(sizes))
            }
            schedule, groups = module.schedule_of(place)
            whole = {
                **checkpoint,
                "state_dict": values,
                "optimizer_states": [{"state": state, "param_groups": groups}],
                "lr_schedulers": [schedule],
                "callbacks": {**callbacks, CLOCK: share, **cells[place]},
                "hyper_parameters": dict(run.model.hparams),
                "finite": is_finite(values),
            }
            run.origin.on_save_checkpoint(run.trainer, module, whole)
            self._files.save_checkpoint(whole, run.folder.checkpoint("last"))

    def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        load, files = super().load_checkpoint, [run.checkpoint_file() for run in self._runs]
        wholes = [load(cast(str, file), *args, **kwargs) for file in files]
        order = self._module.order

        def stacked(rows: list[list[Tensor]]) -> Tensor:
            rows = [*rows, *rows[:1] * (self._module.width - len(rows))]
            return torch.stack([torch.cat([value.flatten() for value in row]) for row in rows])

        values = [whole["state_dict"] for whole in wholes]
        states = [whole["optimizer_states"][0]["state"] for whole in wholes]
        state: dict[str, Any] = {"step": round(float(states[0][0]["step"]))}
        for name in ("exp_avg", "exp_avg_sq"):
            state[name] = stacked([[of[k][name] for k in range(len(order))] for of in states])
        weights = stacked([[of[f"model.{name}"] for name in order] for of in values])
        kept = (MONITOR, ORIGIN, END)
        cells = [{name: whole["callbacks"].pop(name) for name in kept} for whole in wholes]
        seconds = sum(whole["callbacks"][CLOCK]["seconds"] for whole in wholes)
        return {
            **wholes[0],
            "lr_schedulers": [],
            "state_dict": {**values[0], "weights": weights},
            "optimizer_states": [{"state": {0: state}, "param_groups": [{"params": [0]}]}],
            "callbacks": {
                **wholes[0]["callbacks"],
                CLOCK: {"seconds": seconds},
                Members.__name__: {"cells": cells},
            },
        }


def fit_pack(runs: Sequence[TrainingRun]) -> None:
    """Train the cells of `runs` as one pack, and write the files of each run.

    They are at most as many as the pack is wide, differ in rate and warm-up only, and go on from
    the same step. Pictures and learned gains are not logged; seconds and memory of a result are its
    share of those of the pack.
    """
    first, started = runs[0], datetime.now(UTC)
    pl.seed_everything(first.tree["seed_everything"], workers=True)  # another pack may have drawn
    module = PackedModule([run.model for run in runs], first.tree["model"]["pack"])
    trainer, members, clock = first.trainer, Members(runs, module), WallClock()
    logger = PackLogger(runs, module)
    progress = PackProgress(*(run.attempt_folder.progress for run in runs))
    callbacks: list[Any] = trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]
    savers = [c for c in callbacks if isinstance(c, Saver) and c.monitor is None]
    kept = [first.throughput, members, clock, progress, first.interrupts, *savers]
    trainer.callbacks = kept  # pyright: ignore[reportAttributeAccessIssue]
    trainer.loggers = [logger]
    trainer.strategy.checkpoint_io = PackedCheckpoints(runs, module)
    data = first.datamodule
    with ExitStack() as held:
        for run in runs:
            held.enter_context(run.held)
        start = first.checkpoint_file()
        trainer.fit(module, datamodule=data, ckpt_path=start, weights_only=True)
        asked, going = first.asked(data), len(members.ends) < len(runs)
        if going and trainer.global_step < asked:
            raise CutShort(first.shortness(asked))
        if going and module.validated != trainer.global_step:
            trainer.validate(module, datamodule=data, verbose=False)
        if going and module.objective.config.evaluate_test:
            trainer.test(module, datamodule=data, verbose=False)
        for place, run in enumerate(runs):
            run.trainer, run.throughput = trainer, first.throughput
            metrics = module.found[place]
            metrics["train/tokens_per_second"] = first.throughput.rate
            loss = metrics.get(run.monitored.loss, math.nan)
            floors = data.floor, data.training_floor
            outcome = run.divergence.judge(loss, *floors, trainer.global_step)
            result = run.result(outcome, metrics, data, started)
            steps, tokens = members.ends.get(place, (result["steps"], result["tokens"]))
            result |= {"steps": steps, "tokens": tokens, "parameters": module.count}
            result |= {"seconds": clock.seconds / len(runs)}
            result |= {"peak_memory_bytes": result["peak_memory_bytes"] // module.width}
            run.leave(result, data)


def run_pack(cells: Sequence[tuple[Path, int]], *, keep: str = "all", **how: Any) -> None:
    """Train the configs in several run folders, each with its attempt, as packs: see `run_cell`.

    Cells that go on from different steps, since a kill came between two of their checkpoints, are
    trained one pack after another. There is no best checkpoint to `keep`.
    """
    runs: dict[int, list[TrainingRun]] = {}
    for folder, attempt in cells:
        if not RunFolder(folder).is_over(None, None):
            run = cell_run(folder, attempt, **how)
            runs.setdefault(run.resumed_step, []).append(run)
    for of_step in runs.values():
        fit_pack(of_step)
    for folder, _ in cells:
        trim_checkpoints(RunFolder(folder), keep)
