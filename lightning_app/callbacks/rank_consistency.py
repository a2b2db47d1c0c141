"""Check that all ranks of a run train the same experiment."""

import lightning.pytorch as pl
import torch


class Agreement(pl.Callback):
    """Refuse to train if the config, the starting step or the data differ between ranks.

    Such ranks would average gradients of different models if the shapes happen to be equal.

    Args:
        identity: The id of the run's config, hexadecimal.
    """

    def __init__(self, identity: str) -> None:
        self.identity = identity

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.world_size == 1:
            return
        data = trainer.datamodule.description["digest"]  # pyright: ignore[reportAttributeAccessIssue]
        # 60 bits, which fit into a signed number of 64 bits.
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
