"""The pictures of a run: its block as SVG, and its attention maps in TensorBoard."""

from itertools import islice
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import FSDPStrategy
from torch import nn

from lightning_app.atomic_write import write_whole
from lightning_app.callbacks.tensorboard_logger import event_files, log_image
from lightning_app.catalogue.draw_stack import stack_drawing
from lightning_app.catalogue.svg import picture
from lightning_app.probes.maps import attention_maps
from lightning_app.probes.pictures import attention_image
from lightning_app.run_folder import DRAWING
from lightning_app.tasks.base import Task

ATTENTION = "attention"
LONG, LOOKED_AT = 12, 20
"""The wanted length of the example in tokens, and the number of batches to search for it."""


class Pictures(pl.Callback):
    """Draw the block as training starts (`block.svg`, to which the Text tab links), and the
    attention maps of an `example` as it ends.

    Nothing is drawn if no event file is written. Training is not affected: the maps are computed in
    evaluation mode, and the state of the RNG is restored.
    """

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.global_step > 0:
            return
        module: Any = pl_module
        for logger in event_files(trainer):
            stacks = module.architecture.stacks(module.block)
            drawings = [stack_drawing(spec, side) for side, spec in stacks.items()]
            write_whole(Path(logger.log_dir) / DRAWING, picture(module.block.preset, drawings))

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # One rank cannot run a model that is sharded over all of them.
        if any(event_files(trainer)) and not isinstance(trainer.strategy, FSDPStrategy):
            show_attention(trainer, pl_module, example(trainer, pl_module))


def example(trainer: pl.Trainer, module: pl.LightningModule) -> Any:
    """Return the longest row of a validation batch, the same at any time, as a batch.

    From the first batch that has a row of `LONG` tokens; else from the batch with the longest row.
    """
    system: Any = module
    task: Task = system.objective

    def length(batch: Any) -> int:
        return task.texts(batch)[0].shape[1]

    with torch.random.fork_rng(devices=[]):
        loader = trainer.datamodule.val_dataloader()  # pyright: ignore[reportAttributeAccessIssue]
        longest = None
        for batch in islice(loader, LOOKED_AT):
            if longest is None or length(batch) > length(longest):
                longest = batch
            if length(longest) >= LONG:
                break
    assert longest is not None
    return task.longest(trainer.strategy.batch_to_device(longest))


def show_attention(trainer: pl.Trainer, module: pl.LightningModule, sentence: Any) -> None:
    """Write the attention maps of one row to the event files, at the present step."""
    system: Any = module
    task: Task = system.objective
    model = system.model
    assert isinstance(model, nn.Module)
    maps = attention_maps(model, task, sentence)
    tokenizer = trainer.datamodule.tokenizer  # pyright: ignore[reportAttributeAccessIssue]
    read = " → ".join(tokenizer.decode(text[0].tolist()) for text in task.texts(sentence))
    step = trainer.global_step
    lines = [f"{system.block.preset}, step {step}: softmax maps, before any shaping", read]
    log_image(trainer, ATTENTION, attention_image(maps, lines), step)
