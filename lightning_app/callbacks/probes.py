"""What can be watched inside the blocks while a run trains."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from lightning_app.data.batching import MaskedBatch, TranslationBatch
from lightning_app.files import write_whole
from lightning_app.probes.gains import change_ratios, learned_gains, shown_layers, stacks
from lightning_app.probes.probe import probe, snapshot, update_ratios
from lightning_app.probes.table import Place, Row, from_csv, to_csv
from lightning_app.steps import is_logged

LOGGED = ("token_cosine", "w2_gradient", "output_information")
"""What loggers are told of: where a stall without warm-up shows within five steps."""


def tag(place: Place) -> str:
    """Return ``probe/<quantity>/<stack>/<layer>``, without the layer where there is none."""
    layer = "" if place.layer is None else f"/{place.layer}"
    return f"probe/{place.quantity}/{place.stack}{layer}"


def shown(model: nn.Module) -> set[tuple[str, int | None]]:
    """Return the (stack, layer) that loggers are told of."""
    depths = {name: len(stack.blocks) for name, stack in stacks(model).items()}
    return {(name, layer) for name, depth in depths.items() for layer in shown_layers(depth)}


def logged_gains(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield (tag, tensor) of every learned gain, and of the ratios of projections, where shown."""
    layers = shown(model)
    for place, value in [*learned_gains(model), *change_ratios(model)]:
        if (place.stack, place.layer) in layers:
            yield tag(place), value


class GainLogger(pl.Callback):
    """Log ``probe/<quantity>/<stack>/<layer>``: each learned gain, averaged over its heads."""

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs, batch, batch_idx: int
    ) -> None:
        step = trainer.global_step
        if not is_logged(trainer, step):
            return
        model = pl_module.model
        assert isinstance(model, nn.Module)
        values = {name: gain.detach().mean() for name, gain in logged_gains(model)}
        if not values:
            return
        logged = dict(zip(values, torch.stack(list(values.values())).tolist(), strict=True))
        for logger in trainer.loggers:
            logger.log_metrics(logged, step=step)


class SignalProbe(pl.Callback):
    """Probe the model after steps 1, 2, 5, 10, 20, 50, ... on the first validation batch.

    Everything that `ablate probe` measures goes to ``probes.csv`` in the run's folder, and with
    it ``update_ratio``, the size of that step's update against the weights of each layer. Loggers
    are told of the token cosine and the W2 gradient of a few layers and of the information in the
    output. Training is not touched: the probe has the RNG to itself, takes gradients past
    ``.grad``, and leaves no hook behind. The first rank alone probes, on its share of the batch.

    Args:
        steps: optimizer steps to probe after; null for 1, 2, 5 and their tenfolds.
    """

    def __init__(self, steps: list[int] | None = None) -> None:
        self.steps = steps
        self._before: dict[str, Tensor] | None = None
        self._batch: TranslationBatch | MaskedBatch | None = None
        self._rows: list[Row] = []
        self._last = 0

    def fires(self, step: int) -> bool:
        """Whether the model is probed after optimizer step `step`, from 1."""
        if self.steps is not None:
            return step in self.steps
        return str(step).rstrip("0") in ("1", "2", "5")

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Go on with the rows of the steps that were trained before; a new run starts anew."""
        self._rows, self._before, self._last = [], None, trainer.global_step
        path = table_of(trainer)
        if not trainer.is_global_zero or not path.is_file():
            return
        self._rows = [row for row in from_csv(path) if row.step <= trainer.global_step]
        if not self._rows:
            path.unlink()

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch, batch_idx: int
    ) -> None:
        # With accumulated gradients a step has several batches; the first is before the update.
        if self._before is None and self.fires(trainer.global_step + 1) and trainer.is_global_zero:
            self._before = snapshot(model_of(pl_module))

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs, batch, batch_idx: int
    ) -> None:
        step = trainer.global_step
        if step == self._last or self._before is None:
            return
        model, self._last = model_of(pl_module), step
        rows = update_ratios(model, self._before, step)
        self._before = None
        first = trainer.strategy.batch_to_device(self._first_batch(trainer))
        rows += probe(model, pl_module.objective, [first], step)  # pyright: ignore[reportArgumentType]
        self._rows += rows
        write_whole(table_of(trainer), to_csv(self._rows))
        self._log(trainer, model, rows)

    def _first_batch(self, trainer: pl.Trainer) -> TranslationBatch | MaskedBatch:
        if self._batch is None:
            with torch.random.fork_rng(devices=[]):
                loader = trainer.datamodule.val_dataloader()  # pyright: ignore[reportAttributeAccessIssue]
                self._batch = next(iter(loader))
        assert self._batch is not None
        return self._batch

    def _log(self, trainer: pl.Trainer, model: nn.Module, rows: Sequence[Row]) -> None:
        layers = shown(model) | {("model", None)}
        logged = {
            tag(row.place): row.value
            for row in rows
            if row.quantity in LOGGED and row.head is None and (row.stack, row.layer) in layers
        }
        for logger in trainer.loggers:
            logger.log_metrics(logged, step=rows[0].step)


def model_of(module: pl.LightningModule) -> nn.Module:
    """Return the plain model of the one module."""
    model = module.model
    assert isinstance(model, nn.Module)
    return model


def table_of(trainer: pl.Trainer) -> Path:
    """Return where the rows of a run lie."""
    return Path(trainer.default_root_dir) / "probes.csv"
