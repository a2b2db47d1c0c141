"""Measurements inside the blocks while a run trains."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

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
from lightning_app.training.callbacks.loggers import event_files, example, show_attention, tell
from lightning_app.training.module import is_logged

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

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs, batch, batch_idx: int
    ) -> None:
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
        tell(trainer, values, few, step)
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


class SignalProbe(pl.Callback):
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
        self.steps = steps
        self._before: Snapshot | None = None
        self._batch: Any = None
        self._sentence: Any = None
        self._rows: list[Row] = []

    def fires(self, step: int) -> bool:
        """Whether the model is probed after optimizer step `step`, from 1."""
        return fires(step) if self.steps is None else step in self.steps

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Continue the rows of earlier steps; a new run starts without rows."""
        self._rows, self._before = [], None
        path = table_of(trainer)
        if not trainer.is_global_zero or not path.is_file():
            return
        self._rows = [row for row in from_csv(path) if row.step <= trainer.global_step]
        if not self._rows:
            path.unlink()

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch, batch_idx: int
    ) -> None:
        if self.fires(trainer.global_step + 1) and trainer.is_global_zero:
            self._before = snapshot(model_of(pl_module))

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs, batch, batch_idx: int
    ) -> None:
        if self._before is None:
            return
        model, step = model_of(pl_module), trainer.global_step
        rows = update_ratios(model, self._before, step)
        self._before = None
        first = trainer.strategy.batch_to_device(self._first_batch(trainer))
        rows += probe(model, pl_module.objective, [first], step)  # pyright: ignore[reportArgumentType]
        self._rows += rows
        write_whole(table_of(trainer), to_csv(self._rows))
        self._log(trainer, model, rows)
        if any(event_files(trainer)):
            if self._sentence is None:
                self._sentence = example(trainer, pl_module)
            show_attention(trainer, pl_module, self._sentence)

    def _first_batch(self, trainer: pl.Trainer) -> Any:
        if self._batch is None:
            with torch.random.fork_rng(devices=[]):
                loader = trainer.datamodule.val_dataloader()  # pyright: ignore[reportAttributeAccessIssue]
                self._batch = next(iter(loader))
        assert self._batch is not None
        return self._batch

    def _log(self, trainer: pl.Trainer, model: nn.Module, rows: Sequence[Row]) -> None:
        values = {
            row.place: row.value
            for row in rows
            if row.quantity in LOGGED and row.head is None and row.layer != 0
        }
        metrics = {tag(place): value for place, value in values.items()}
        few = {tag(place): values[place] for place in at_the_end(model) if place in values}
        tell(trainer, metrics, few, rows[0].step)


def at_the_end(model: nn.Module) -> list[Place]:
    """Return the probed values that event files record: only the model's last layer."""
    name, stack = list(stacks(model).items())[-1]
    last = (name, stack.spec.depth)
    cosine, gradient, information = LOGGED
    return [Place(cosine, *last), Place(gradient, *last), Place(information, MODEL)]


def model_of(module: pl.LightningModule) -> nn.Module:
    """Return the plain model of the LightningModule."""
    model = module.model
    assert isinstance(model, nn.Module)
    return model


def table_of(trainer: pl.Trainer) -> Path:
    """Return the path of the rows of a run."""
    return Path(trainer.default_root_dir) / "probes.csv"
