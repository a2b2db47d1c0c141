"""How many batches and steps the limits of a Trainer allow."""

import lightning.pytorch as pl


def limited(batches: int, limit: float) -> int:
    """Return how many batches Lightning takes: `limit` is their number, or a share up to 1.0."""
    return min(batches, limit) if isinstance(limit, int) else int(batches * limit)


def training_steps(trainer: pl.Trainer) -> int:
    """Return the number of steps of a run, -1 where only its time is limited.

    `Trainer.estimated_stepping_batches` would make Lightning read the training data before it
    restores their place from a checkpoint, and then not restore it.
    """
    epochs, steps = trainer.max_epochs, trainer.max_steps
    if epochs is None or epochs == -1:
        return steps
    batches, limit = len(trainer.datamodule.train_dataloader()), trainer.limit_train_batches  # pyright: ignore[reportAttributeAccessIssue]
    total = limited(batches, 1.0 if limit is None else limit) * epochs
    return total if steps == -1 else min(steps, total)
