"""The LightningDataModule of every corpus and task, and the effect of a Trainer's limits."""

import os
from collections.abc import Mapping
from copy import copy
from functools import cached_property
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_only

from lightning_app.core.errors import UserError
from lightning_app.data.batching import (
    Batch,
    EpochSampler,
    ResumableLoader,
    SplitRows,
    in_random_order,
    warmed_up,
)
from lightning_app.data.config import DataConfig
from lightning_app.data.prepare import PreparedCorpus, prepare
from lightning_app.data.tokenizer import Tokenizer
from lightning_app.tasks.base import task_class, to_device


def limited(batches: int, limit: float) -> int:
    """Return how many batches Lightning uses: `limit` is their number or a share up to 1.0."""
    return min(batches, limit) if isinstance(limit, int) else int(batches * limit)


def steps_asked(limits: Mapping[str, Any], batches: int) -> int:
    """Return the number of steps from `max_steps` and `max_epochs`, whichever is less.

    -1 if neither limits the run, which then ends only by time. `limits` are those of a section
    `trainer`, also `limit_train_batches`; `batches` are those of an epoch.
    """
    epochs, steps, limit = (limits[name] for name in ("max_epochs", "max_steps", _LIMIT))
    if epochs is None or epochs == -1:
        return steps
    total = limited(batches, 1.0 if limit is None else limit) * epochs
    return total if steps == -1 else min(steps, total)


def training_steps(trainer: pl.Trainer) -> int:
    """Return the number of steps of a run, -1 if only its time is limited.

    `Trainer.estimated_stepping_batches` would make Lightning read the training data before it
    restores their position from a checkpoint, and then not restore it.
    """
    limits = {"max_epochs": trainer.max_epochs, "max_steps": trainer.max_steps}
    if limits["max_epochs"] in (None, -1):
        return trainer.max_steps  # the data need not be read
    batches = len(trainer.datamodule.train_dataloader())  # pyright: ignore[reportAttributeAccessIssue]
    return steps_asked({**limits, _LIMIT: trainer.limit_train_batches}, batches)


_LIMIT = "limit_train_batches"


def check_ranks(trainer: pl.Trainer) -> None:
    """Refuse a Trainer whose rank contradicts the environment.

    Raises:
        UserError: naming the environment variable.
    """
    expected = {"RANK": trainer.global_rank, "WORLD_SIZE": trainer.world_size}
    expected |= {"LOCAL_RANK": trainer.local_rank}
    for name, value in expected.items():
        if name in os.environ and int(os.environ[name]) != value:
            raise UserError(
                f"{name}={os.environ[name]} is set, but trainer.devices, num_nodes and strategy "
                f"make {trainer.world_size} processes, of which this is {trainer.global_rank}: "
                f"unset {name}, or let the launcher start as many"
            )
    if rank_zero_only.rank != trainer.global_rank:  # pyright: ignore[reportFunctionMemberAccess]
        raise UserError(
            "SLURM_PROCID: the launcher has started several processes, but trainer.devices and "
            f"num_nodes make {trainer.world_size}: start one, or set these"
        )


class TextDataModule(pl.LightningDataModule):
    """Builds batches of token ids from the text of a corpus.

    After `setup` it has `vocab_size`, `tokenizer`, `floor` (the loss of a model that ignores its
    input, in nats per predicted validation token), and `description`, a part of every result.
    Without a Trainer the training batches are those of the schedule of `trained`, if that is set.

    Args:
        class_path: The subclass that the config names; null for this class.
        init_args: The arguments of that subclass that are not listed here.
        fields: The fields of `DataConfig`.
    """

    def __init__(
        self, class_path: str | None = None, init_args: dict[str, Any] | None = None, **fields: Any
    ) -> None:
        super().__init__()
        self.trained: pl.LightningModule | None = None
        self.config = DataConfig(**fields)
        self.tokenizer: Tokenizer
        self.vocab_size: int
        self.source_vocab: int | None
        self.floor: float
        self.description: dict[str, Any]
        self._made_of: tuple[Any, Any] = (None, None)  # the config and the corpus of what is kept
        self._splits: dict[tuple[str, int, int], SplitRows] = {}
        self._batches: dict[tuple[str, int, int], EpochSampler] = {}

    @cached_property
    def corpus(self) -> PreparedCorpus:
        """The corpus, prepared and verified on first use."""
        corpus = prepare(self.config)
        task_class(self.config.task).check(corpus, self.config)
        return corpus

    def prepare_data(self) -> None:
        """Read, tokenise and cache the corpus, unless it is cached; verify it."""
        _ = self.corpus

    def setup(self, stage: str | None = None) -> None:
        """Open the corpus that `prepare_data` has cached."""
        meta = self.corpus.meta
        self.tokenizer = self.corpus.tokenizer
        self.vocab_size, self.source_vocab = meta["vocab_size"], meta.get("source_vocab_size")
        rows = {split: self._rows(split) for split in meta["sizes"]}
        task = task_class(self.config.task)
        self.evaluated = {split: self._evaluated(split) for split in self._limits()}
        self.floor = self._floor(rows["valid"], self.evaluated.get("valid"))
        packing = task.describe(rows)
        for split, part in self.evaluated.items():
            packing += f"; {len(part):,} of {len(rows[split]):,} rows of {split} are evaluated"
        self.description = {
            "name": meta["name"],
            "protocol": meta["protocol"] + packing,
            "sizes": meta["sizes"],
            "vocab_size": meta["vocab_size"],
            "tokenizer_sha256": meta["tokenizer_sha256"],
            "checksum": meta["checksum"],
            "digest": self.corpus.digest,
        }

    def check_floor(self) -> None:
        """Refuse a validation split on which no loss can beat a constant answer.

        Raises:
            UserError: stating what is needed.
        """
        self._floor(self._rows("valid"))

    def _floor(self, rows: SplitRows, evaluated: np.ndarray | None = None) -> float:
        floor = task_class(self.config.task).floor(rows, evaluated)
        if floor <= 0.0:
            raise UserError(
                f"data.name '{self.config.name}': all that is predicted in the validation split is "
                "the same, so a constant answer has the lowest loss; two different labels or "
                "tokens are needed, also in the part that trainer.limit_val_batches leaves"
            )
        return floor

    def training_floor(self) -> float:
        """Count the training targets and return their `floor`."""
        return task_class(self.config.task).floor(self._rows("train"))

    def state_dict(self) -> dict[str, Any]:
        """Return the record of the data that a checkpoint holds."""
        tokenizer = self.corpus.meta["tokenizer_sha256"]
        return {"digest": self.corpus.digest, "tokenizer_sha256": tokenizer}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Refuse to continue with data other than the checkpoint's.

        Raises:
            UserError: naming both digests.
        """
        there, here = state_dict["digest"], self.corpus.digest
        if there != here:
            raise UserError(
                f"is of other data: their digest is {there[:16]}, but that of data.name "
                f"'{self.config.name}' is now {here[:16]}"
            )

    def references(self, split: str) -> list[str]:
        """Return plain target lines of a split, in original case if the corpus has it."""
        return self.corpus.lines(split, "reference")

    def targets(self, split: str) -> list[str]:
        """Return the target lines of a split in the corpus's form, tokenised if `tokenized`."""
        return self.corpus.lines(split, "target")

    @property
    def tokenized(self) -> bool:
        """Whether the corpus separates words and punctuation by spaces."""
        return self.corpus.meta["tokenized"]

    def train_dataloader(self) -> ResumableLoader:
        return self._loader("train")

    def val_dataloader(self) -> ResumableLoader:
        return self._loader("valid")

    def test_dataloader(self) -> ResumableLoader:
        return self._loader("test")

    def predict_dataloader(self) -> ResumableLoader:
        return self._loader("test")

    def transfer_batch_to_device(
        self, batch: Batch, device: torch.device, dataloader_idx: int
    ) -> Any:
        """Move a batch; from pinned memory, the copy to a GPU overlaps with work on the host."""
        return to_device(batch, device, non_blocking=device.type == "cuda")

    def _rows(self, split: str) -> SplitRows:
        """Return a split as batches for this rank; only training depends on the run's seed."""
        seed = self.config.seed if split == "train" else None
        _, rank, count = key = self._part(split)
        if key not in self._splits:
            rows = task_class(self.config.task).rows
            made = rows(self.corpus, split, self.config, seed=seed, rank=rank, world_size=count)
            self._splits[key] = made
        return self._splits[key]

    def _part(self, split: str) -> tuple[str, int, int]:
        if self._made_of[0] is not self.config or self._made_of[1] is not self.corpus:
            self._made_of, self._splits, self._batches = (self.config, self.corpus), {}, {}
        trainer = self.trainer
        return (
            (split, 0, 1) if trainer is None else (split, trainer.global_rank, trainer.world_size)
        )

    def _loader(self, split: str) -> ResumableLoader:
        if split not in self.corpus.meta["sizes"]:
            raise UserError(f"data.splits.{split}: the corpus has no {split} split")
        rows = self._rows(split)
        device = None if self.trainer is None else self.trainer.strategy.root_device
        gpu = device if device is not None and device.type == "cuda" else None
        return ResumableLoader(rows, self._sampler(split), self.config.num_workers, gpu)

    def _sampler(self, split: str) -> EpochSampler:
        key = self._part(split)
        if key not in self._batches:
            self._batches[key] = self._rows(split).sampler(self.config.tokens_per_batch)
        sampler = copy(self._batches[key])  # each loader sets its own epoch
        trained = self.trained if self.trainer is None else self.trainer.lightning_module
        if split == "train" and trained is not None:
            schedule: Any = getattr(trained, "schedule", None)
            if schedule is not None and schedule.batch_warmup_steps:
                limit = 1.0 if self.trainer is None else self.trainer.limit_train_batches
                steps = limited(len(sampler), limit)
                return warmed_up(sampler, schedule.batch_share, steps)
        return in_random_order(sampler) if split in self._limits() else sampler

    def _evaluated(self, split: str) -> np.ndarray:
        batches = [part for _, part in self._sampler(split)]
        count = limited(len(batches), self._limits()[split])
        return np.concatenate(batches[: max(1, count)])  # Lightning refuses a share below one batch

    def _limits(self) -> dict[str, float]:
        """The Trainer's limits on evaluation, for the splits that it evaluates in part.

        A limit of 0 skips the evaluation; the number 1 is one batch, the share 1.0 all.
        """
        if self.trainer is None:
            return {}
        limits = {"valid": self.trainer.limit_val_batches, "test": self.trainer.limit_test_batches}
        return {
            split: limit
            for split, limit in limits.items()
            if split in self.corpus.meta["sizes"]
            and limit
            and (isinstance(limit, int) or limit < 1.0)
        }
