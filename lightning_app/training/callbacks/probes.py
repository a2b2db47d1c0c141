"""Measurements inside the blocks while a run trains."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import FSDPStrategy
from torch import Tensor, nn

from lightning_app.blocks.linear import SpectralLinear
from lightning_app.blocks.residual import Shrink
from lightning_app.core.errors import UserError
from lightning_app.core.files import write_whole
from lightning_app.probes.hooks import MODEL, Place, Row, from_csv, to_csv
from lightning_app.probes.probe import (
    Snapshot,
    change_ratios,
    dynamic_spans,
    layers_by_rank,
    learned_gains,
    probe,
    snapshot,
    stacks,
    update_ratios,
)
from lightning_app.probes.steps import (
    Passage,
    Step,
    TrainedPart,
    curvature_rows,
    gradients_of,
    pass_rows,
    passage,
    trained_parts,
)
from lightning_app.training.callbacks.loggers import event_files, example, show_attention
from lightning_app.training.module import is_logged, tell_all

LOGGED = ("token_cosine", "w2_gradient", "output_information")
"""The logged quantities: they show a stall without warm-up within five steps."""
GAINS, HISTOGRAMS = 10, 3
"""The largest number of tags of gains in an event file, as numbers and as histograms."""
BINS = 16
"""Bins of a histogram. TensorFlow's own bins grow by a tenth each, which is too coarse."""


def tag(place: Place) -> str:
    """Return ``probe/<quantity>/<stack>/<layer>/<head>``, without the parts that are None."""
    inner = (str(number) for number in (place.layer, place.head) if number is not None)
    return "/".join(["probe", place.quantity, place.stack, *inner])


def fires(step: int) -> bool:
    """Whether `step` is 1, 2 or 5 times a power of ten."""
    return str(step).rstrip("0") in ("1", "2", "5")


def gains(model: nn.Module) -> dict[Place, Tensor]:
    """Return every learned gain, and the ratios of projections, of every layer."""
    return dict([*learned_gains(model), *change_ratios(model)])


def shown(model: nn.Module, places: Sequence[Place]) -> list[Place]:
    """Return the gains that event files record, `GAINS` at most.

    They cover as many layers of each stack as fit: the last, the first, the middle, the rest. A
    group is taken as a whole, except the first, where the encoder comes first.
    """
    kept: list[Place] = []
    for layers in layers_by_rank(model):
        chosen = [place for at in layers for place in places if (place.stack, place.layer) == at]
        if kept and len(kept) + len(chosen) > GAINS:
            break
        kept += chosen[:GAINS]
    return kept


class GainLogger(pl.Callback):
    """Log each learned gain, averaged over its heads, as ``probe/<quantity>/<stack>/<layer>``.

    Learned spans are in tokens; dynamic ones are means over the tokens of the step's batch. The
    span of each head is ``probe/span/<stack>/<layer>/<head>``.

    Event files record only some layers and no heads. At logged steps among 1, 2, 5, 10,
    20, 50, ... they also record a histogram, over all layers, of each gain with a value per
    head or unit.
    """

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any, **__: Any) -> None:
        step = trainer.global_step
        if not is_logged(trainer, step):
            return
        model = model_of(pl_module)
        reduce = trainer.strategy.reduce
        spans = dynamic_spans(model, lambda sums: reduce(sums, reduce_op="sum"))  # pyright: ignore[reportArgumentType, reportReturnType]
        found = {**gains(model), **dict(spans)}
        if not found:
            return
        means = torch.stack([gain.detach().mean() for gain in found.values()]).tolist()
        values = {tag(place): mean for place, mean in zip(found, means, strict=True)}
        few = {tag(place): values[tag(place)] for place in shown(model, list(found))}
        for place in [place for place in found if place.quantity == "span"]:
            for head, span in enumerate(found[place].detach().flatten().tolist()):
                values[tag(place._replace(head=head))] = span
        tell_all(trainer, values, step, few)
        if fires(step):
            for logger in event_files(trainer):
                for name, drawn in histograms(found).items():
                    logger.experiment.add_histogram(name, drawn.numpy(), step, bins=BINS)


def histograms(found: Mapping[Place, Tensor]) -> dict[str, Tensor]:
    """Return the finite values of each vector of gains, over all layers, by tag."""
    parts: dict[str, list[Tensor]] = {}
    for place, gain in found.items():
        if gain.numel() > 1:
            parts.setdefault(f"gains/{place.quantity}", []).append(gain.detach().flatten())
    whole = {name: torch.cat(parts[name]).float().cpu() for name in list(parts)[:HISTOGRAMS]}
    finite = {name: values[values.isfinite()] for name, values in whole.items()}
    return {name: values for name, values in finite.items() if len(values)}


class Probing(pl.Callback):
    """A callback whose rows go to ``probes.csv`` in the run's folder, from the first rank.

    A run that continues from a checkpoint keeps the rows up to its step; a new one starts without.
    """

    def __init__(self, steps: list[int] | None = None) -> None:
        self.steps = steps
        self._batch: Any = None

    def fires(self, step: int) -> bool:
        """Whether to measure at optimizer step `step`, from 1."""
        return fires(step) if self.steps is None else step in self.steps

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        path = table_of(trainer)
        if not trainer.is_global_zero or not path.is_file():
            return
        rows = [row for row in from_csv(path) if row.step <= trainer.global_step]
        if rows:
            write_whole(path, to_csv(rows))
        else:
            path.unlink()

    def record(self, trainer: pl.Trainer, rows: Sequence[Row]) -> None:
        """Add `rows` to the table, to which other callbacks add theirs."""
        path = table_of(trainer)
        earlier = path.read_bytes() if path.is_file() else to_csv([]).encode()
        write_whole(path, earlier + to_csv(rows, headed=False).encode())

    def first_batch(self, trainer: pl.Trainer) -> Any:
        """Return the first validation batch of this rank, on its device."""
        if self._batch is None:
            with torch.random.fork_rng(devices=[]):
                loader = trainer.datamodule.val_dataloader()  # pyright: ignore[reportAttributeAccessIssue]
                self._batch = next(iter(loader))
        assert self._batch is not None
        return trainer.strategy.batch_to_device(self._batch)


class SignalProbe(Probing):
    """Probe the model after steps 1, 2, 5, 10, 20, 50, ... on the first validation batch.

    Everything that `ablate probe` measures goes to ``probes.csv`` in the run's folder, together
    with
    ``update_ratio``, the step's update relative to the weights, per layer. Loggers
    record the token cosine and the W2 gradient of each layer and the information in the
    output; event files record only the last layer and an image of the attention maps, as
    `Pictures` draws it at the end. Training is not affected: the probe restores the RNG, takes
    gradients past ``.grad``, and leaves no hook behind. Only the first rank probes, on its share
    of the batch.

    Args:
        steps: the optimizer steps after which to probe; null for 1, 2, 5 times powers of ten.
    """

    def __init__(self, steps: list[int] | None = None) -> None:
        super().__init__(steps)
        self._before: Snapshot | None = None
        self._sentence: Any = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._before = None
        super().on_train_start(trainer, pl_module)

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, *_: Any, **__: Any) -> None:
        if self.fires(trainer.global_step + 1) and trainer.is_global_zero:
            self._before = snapshot(model_of(pl_module))

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any, **__: Any) -> None:
        if self._before is None:
            return
        model, step = model_of(pl_module), trainer.global_step
        rows = update_ratios(model, self._before, step)
        self._before = None
        rows += probe(model, pl_module.objective, [self.first_batch(trainer)], step)
        self.record(trainer, rows)
        self._log(trainer, model, rows)
        if any(event_files(trainer)):
            if self._sentence is None:
                self._sentence = example(trainer, pl_module)
            show_attention(trainer, pl_module, self._sentence)

    def _log(self, trainer: pl.Trainer, model: nn.Module, rows: Sequence[Row]) -> None:
        values = {
            row.place: row.value
            for row in rows
            if row.quantity in LOGGED and row.head is None and row.layer != 0
        }
        metrics = {tag(place): value for place, value in values.items()}
        name, stack = list(stacks(model).items())[-1]
        last, (cosine, gradient, information) = (name, stack.spec.depth), LOGGED
        ends = Place(cosine, *last), Place(gradient, *last), Place(information, MODEL)
        few = {tag(place): values[place] for place in ends if place in values}
        tell_all(trainer, metrics, rows[0].step, few)


class UpdateProbe(Probing):
    """Measure what optimizer steps do, to tell explanations of warm-up apart.

    Three groups of quantities, each at its own steps: those of `steps.Step` need only the
    parameters, their gradients and the optimizer's state; those of `steps.pass_rows` two passes
    of the first validation batch; those of `steps.curvature_rows` about 10 passes and the products
    with the Hessian of `ablate probe --sharpness`, on the batch of the step. They go to
    ``probes.csv`` in the run's folder; loggers record those of the model and of its stacks.

    It works with any optimizer: a quantity whose state is missing has no row. Training is not
    affected. Only the first rank measures: gradients are those after the all-reduce, passes are
    over its share of a batch.

    Args:
        steps: the optimizer steps of the first group; null for 1, 2, 5 times powers of ten.
        pass_steps: the steps of the second group; null for none.
        curvature_steps: the steps of the third group; null for none.
    """

    def __init__(
        self,
        steps: list[int] | None = None,
        pass_steps: list[int] | None = None,
        curvature_steps: list[int] | None = None,
    ) -> None:
        super().__init__(steps)
        self.pass_steps = pass_steps or []
        self.curvature_steps = curvature_steps or []
        groups = {"steps": steps, "pass_steps": pass_steps, "curvature_steps": curvature_steps}
        for name, given in groups.items():
            wrong = [step for step in given or [] if isinstance(step, bool) or step < 1]
            if wrong:
                raise ValueError(f"{name} {wrong[0]}: steps count from 1")
        self._parts: list[TrainedPart] = []
        self._made: Step | None = None
        self._pass: Passage | None = None
        self._gradients: list[Tensor] | None = None  # of the step before one of `steps`, by part
        self._of_step = 0

    def state_dict(self) -> dict[str, Any]:
        """The gradients that the next step will be compared with, so that it can be resumed."""
        return {"gradients": self._gradients, "step": self._of_step} if self._gradients else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._gradients, self._of_step = state_dict["gradients"], state_dict["step"]

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if isinstance(trainer.strategy, FSDPStrategy):
            raise UserError(
                "trainer.callbacks: UpdateProbe with strategy fsdp, where no rank has whole "
                "matrices; use ddp, or leave UpdateProbe out"
            )
        model = model_of(pl_module)
        for kind, name in ((Shrink, "residual_rule gpas"), (SpectralLinear, "sigma_reparam")):
            if self.curvature_steps and any(isinstance(part, kind) for part in model.modules()):
                raise UserError(
                    f"trainer.callbacks: UpdateProbe with curvature_steps and {name}: it stops "
                    "gradients, so there is no Hessian of what it trains; leave one of both out"
                )
        self._made = self._pass = None
        self._parts = trained_parts(model, trainer.optimizers[0])
        super().on_train_start(trainer, pl_module)

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        if not trainer.is_global_zero:
            return
        model, step = model_of(pl_module), trainer.global_step + 1
        measured = self.fires(step) or step in self.pass_steps or step in self.curvature_steps
        next_fires = self.fires(step + 1)
        gradients = gradients_of(self._parts) if measured or next_fires else None
        if measured and gradients is not None:
            earlier = self._gradients if self._of_step == step - 1 else None
            if earlier is not None:  # those of a checkpoint may lie elsewhere
                pairs = zip(earlier, gradients, strict=True)
                earlier = [old.to(new.device) for old, new in pairs]
            self._made = Step(self._parts, optimizer, gradients, earlier)
        if step in self.pass_steps:
            self._pass = passage(model, pl_module.objective, self.first_batch(trainer))  # pyright: ignore[reportArgumentType]
        self._gradients, self._of_step = (gradients if next_fires else None), step

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs, batch, batch_idx: int
    ) -> None:
        if self._made is None:
            return
        made, before, self._made, self._pass = self._made, self._pass, None, None
        model, step = model_of(pl_module), trainer.global_step
        task: Any = pl_module.objective
        made.finish()
        rows = made.rows(step) if self.fires(step) else []
        if before is not None:
            after = passage(model, task, self.first_batch(trainer))
            rows += pass_rows(model, before, after, made.length, step)
        if step in self.curvature_steps:
            rows += curvature_rows(model, task, batch, made, step)
        self.record(trainer, rows)
        values = {row.place: row.value for row in rows if row.layer is None}
        tell_all(trainer, {tag(place): value for place, value in values.items()}, step)


def model_of(module: pl.LightningModule) -> nn.Module:
    """Return the plain model of the LightningModule."""
    model = module.model
    assert isinstance(model, nn.Module)
    return model


def table_of(trainer: pl.Trainer) -> Path:
    """Return the path of the rows of a run."""
    return Path(trainer.default_root_dir) / "probes.csv"
