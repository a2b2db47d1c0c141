"""What can be watched inside the blocks while a run trains."""

from collections.abc import Iterator

import lightning.pytorch as pl
import torch
from torch import nn

from lightning_app.blocks.attention import Shaping
from lightning_app.blocks.residual import LearnedGain
from lightning_app.models.transformer import Decoder, Encoder
from lightning_app.steps import is_logged


def learned_gains(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (``<quantity>/<stack>/<layer>``, parameter) of every learned gain, layers from 1.

    Of stacks deeper than three, the first, middle and last layer stand for the rest: TensorBoard
    slows down with more than some forty tags a run.
    """
    for stack_name, stack in model.named_children():
        if not isinstance(stack, Encoder | Decoder):
            continue
        depth = len(stack.blocks)
        shown = {1, (depth + 1) // 2, depth} if depth > 3 else set(range(1, depth + 1))
        for layer, block in enumerate(stack.blocks, start=1):
            if layer not in shown:
                continue
            for name, part in block.named_modules():
                if isinstance(part, Shaping):
                    for quantity, parameter in part.named_parameters():
                        yield f"{quantity}/{stack_name}/{layer}", parameter
                elif isinstance(part, LearnedGain):
                    # around_self.branch -> attention_branch, as the config calls it
                    place, part_name = name.removeprefix("around_").split(".")
                    quantity = f"{'attention' if place == 'self' else place}_{part_name}"
                    yield f"{quantity}/{stack_name}/{layer}", part.gain


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
        values = {f"probe/{n}": p.detach().mean() for n, p in learned_gains(model)}
        if not values:
            return
        logged = dict(zip(values, torch.stack(list(values.values())).tolist(), strict=True))
        for logger in trainer.loggers:
            logger.log_metrics(logged, step=step)
