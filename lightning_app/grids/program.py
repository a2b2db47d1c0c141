"""The functions that a grid calls to run cells. Slow to import, so only children import it."""

import tempfile
import time
from statistics import median_high
from typing import Any

import lightning.pytorch as pl
import torch
import torch.utils.tensorboard
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.loggers import CSVLogger

from lightning_app.config.classes import entries, made_fields
from lightning_app.config.config import check_rows, data_module, resolve, transformer_module
from lightning_app.config.experiment import Identity, identity_of
from lightning_app.data.prepare import find
from lightning_app.data.prepare import prepare as prepare_corpus
from lightning_app.data.sources import resolved_data
from lightning_app.grids.workers import Job
from lightning_app.runs.provenance import software
from lightning_app.scores.task_facts import TASKS
from lightning_app.tasks.base import task_class
from lightning_app.training import packs
from lightning_app.training import run as trainer
from lightning_app.training.hardware import here, join_process_group
from lightning_app.training.run import quiet

__all__ = ["count_devices", "here", "identify", "prepare", "resolve", "run_cell"]

for name in TASKS:
    task_class(name)  # imported now, since every cell needs one
software()  # read now: the cells run this code, even if files are edited later


def prepare(config: dict[str, Any]) -> bool:
    """Prepare the corpus of a resolved data config on disk; return whether it was missing."""
    data = resolved_data(config)
    before = find(data)
    prepare_corpus(data)
    return before is None


def identify(config: dict[str, Any]) -> Identity:
    """Return the identity of the config of a run; refuse one that does not fit its corpus."""
    check_rows(config)
    return identity_of(config)


def count_devices() -> int:
    """The number of accelerators on this host."""
    return torch.cuda.device_count()


def run_cell(job: Job, rank: int, *others: Job) -> None:
    """Train a cell as one of its ranks, from the config in its folder; `others` are of its pack."""
    if job.tree.get("model", {}).get("pack", 1) > 1:
        cells = [(each.folder.path, each.attempt) for each in (job, *others)]
        packs.run_pack(cells, keep=job.keep, slot=job.slot.record(), command=job.command)
        return
    if job.slot.devices > 1:
        accelerator = job.tree.get("trainer", {}).get("accelerator", "auto")
        join_process_group(rank, job.slot.devices, job.record.meeting, accelerator)
    trainer.run_cell(
        job.folder.path,
        job.attempt,
        rank=rank,
        pruned_by=job.metric,
        keep=job.keep,
        slot=job.slot.record(),
        command=job.command,
    )


class _StepTimer(pl.Callback):
    """Wall-clock seconds of each training step; ends the run after `steps`."""

    def __init__(self, steps: int) -> None:
        self.seconds: list[float] = []
        self._steps = steps
        self._last = 0.0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._last = time.perf_counter()

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
        now = time.perf_counter()
        self.seconds.append(now - self._last)
        self._last = now
        # max_steps cannot end the run, since the schedule depends on it.
        if trainer.global_step >= self._steps:
            trainer.should_stop = True


def seconds_per_step(config: dict[str, Any], steps: int = 20) -> float:
    """Train `steps` steps and return the median seconds per step, without the first of several.

    It uses one thread, like a cell on a host with one worker per core.
    """
    torch.set_num_threads(1)
    quiet()
    off = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    trainer = {**config["trainer"], **dict.fromkeys(off, False), "limit_val_batches": 0}
    with tempfile.TemporaryDirectory() as folder:
        trainer["default_root_dir"] = folder
        trainer["callbacks"] = [*entries(trainer["callbacks"])]
        made = made_fields(trainer, imports=False)
        clock = _StepTimer(steps)
        pl.seed_everything(config["seed_everything"], workers=True)
        made["callbacks"] += [clock]
        # Callbacks of the config may need a logger, or be checkpoints.
        saves = any(isinstance(each, Checkpoint) for each in made["callbacks"])
        made |= {"logger": CSVLogger(folder), "enable_checkpointing": saves}
        module, data = transformer_module(config["model"]), data_module(config["data"])
        pl.Trainer(**made).fit(module, datamodule=data)
    return median_high(clock.seconds[1:] or clock.seconds)  # the first step also prepares
