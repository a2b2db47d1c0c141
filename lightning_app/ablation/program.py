"""What the grid needs of the rest of the package. Heavy: only the processes of cells import it."""

from typing import Any

import torch
import torch.utils.tensorboard  # the logger would import it in every cell

from lightning_app.ablation import trial
from lightning_app.ablation.supervision.process import Job
from lightning_app.ablation.supervision.ranks import join
from lightning_app.config import cell_id, parse, resolve
from lightning_app.data.prepare import prepare as prepare_corpus
from lightning_app.parser import config_parser
from lightning_app.sections import data_config

__all__ = ["cell_id", "count_devices", "parse", "prepare", "resolve", "run_cell"]

config_parser()  # every cell inherits it from the fork server


def prepare(config: dict[str, Any]) -> None:
    """Have the corpus of a resolved data config ready on disk."""
    prepare_corpus(data_config(config))


def count_devices() -> int:
    """How many accelerators this host offers."""
    return torch.cuda.device_count()


def run_cell(job: Job, rank: int) -> None:
    """Train a cell as one of its ranks, from the config in its folder."""
    if job.slot.devices > 1:
        accelerator = job.tree.get("trainer", {}).get("accelerator", "auto")
        join(rank, job.slot.devices, job.meeting, accelerator)
    trial.run_cell(
        job.folder,
        job.attempt,
        rank=rank,
        pruned_by=job.metric,
        keep=job.keep,
        slot=job.slot.record(),
    )
