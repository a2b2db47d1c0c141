"""A run before its training: config, folder, checkpoint and data, found and checked."""

import logging
import shutil
import warnings
from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities import rank_zero_only

from lightning_app import strict_yaml
from lightning_app.ablation.checkpoint import (
    Checkpoint,
    check_checkpoint,
    check_data,
    find_checkpoint,
)
from lightning_app.ablation.grid_classes import place_below
from lightning_app.ablation.run_identity import check_folder, with_checkpoint
from lightning_app.atomic_write import write_whole, writing_in
from lightning_app.callbacks.added_loggers import Labels, label_loggers
from lightning_app.config.config import check_rows, data_module, model_config
from lightning_app.data.corpus import corpus_of
from lightning_app.data.sources import require_test
from lightning_app.datamodule import TextDataModule
from lightning_app.errors import UserError
from lightning_app.experiment import cell_id, named_by_content, stacks_of
from lightning_app.identity.record import Record, write_record
from lightning_app.identity.relevant import without_evaluation_limits
from lightning_app.plugin_copies import keep_copies, require_of
from lightning_app.plugins import check_used, used_by
from lightning_app.provenance import command_line, software
from lightning_app.run_folder import RunFolder
from lightning_app.task_facts import TASKS
from lightning_app.trainer_limits import steps_asked

_NEEDLESS = (
    ".*does not have many workers",  # batches come from memory-mapped ids: workers do not help
    ".*smaller than the logging interval",  # we log by optimizer step, across epochs
    "Experiment logs directory .* is not empty",  # it belongs to the same attempt
    "Checkpoint directory .* exists and is not empty",  # it belongs to the same run
    ".*srun. command is available on your system but is not used",  # the supervisor uses it
    ".*recommended to use `self.log.*sync_dist=True",  # metrics are equal on every rank before
    ".*is deprecated, use `isinstance.treespec",  # Lightning's own call of torch
    "You're using the WeightAveraging callback, but loading",  # the averaged weights are evaluated
    # RMSNorm under autocast has a weight of 32 bits, so torch uses its exact, unfused form.
    "Mismatch dtype between input and weight.*Cannot dispatch to fused implementation",
)
"""Warnings of Lightning and torch that do not apply to this program."""


class _Advertisement(logging.Filter):
    """Leave out Lightning's tips, which recommend other products of its makers."""

    def filter(self, record: logging.LogRecord) -> bool:
        return "Tip: " not in record.getMessage()


_NO_TIPS = _Advertisement()


def quiet() -> None:
    """Leave out what Lightning says beside the point, and all but warnings until a run begins."""
    for message in _NEEDLESS:
        warnings.filterwarnings("ignore", message=message)
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(_NO_TIPS)
    set_chatter(logging.WARNING)


def set_chatter(level: int) -> None:
    """Set how much Lightning says."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(level)


class PreparedRun:
    """What a run needs, found and checked before its folder is made.

    Args:
        tree: The complete config.
        command: `fit`, `validate`, `test` or `predict` on the command line; None for a cell.
        ckpt_path: The checkpoint that the command names: a file, ``last`` or ``best``.
        folder: The run folder; None means ``trainer.default_root_dir`` or, without it, a folder
            under ``experiments/fit/runs`` whose name is made from the config.
        attempt: The number of this attempt; None for the next number in the folder.
        checkpoint: The checkpoint from which a cell continues.
        data: The data of a cell, if they are already open.
        pruned_by: The metric that is reported at validations; None without a pruner.
        slot: The devices and threads that a supervisor gave the run, for the result.
        words: The command line that started the run; None for that of this process.
        again: Whether to train a finished run again, whose result is then replaced.

    Attributes:
        predictions: What `predict` has predicted, one a row in the order of the split; on the first
            rank alone.
    """

    def __init__(
        self,
        tree: dict[str, Any],
        *,
        command: str | None = None,
        ckpt_path: str | None = None,
        folder: Path | None = None,
        attempt: int | None = None,
        checkpoint: Checkpoint | None = None,
        data: TextDataModule | None = None,
        pruned_by: str | None = None,
        slot: Mapping[str, Any] | None = None,
        words: Sequence[str] | None = None,
        again: bool = False,
    ) -> None:
        quiet()
        self.tree = tree
        self.command = command
        self._again = again
        self._software = {**software(), "command": command_line(words)}
        self._pruned_by = pruned_by
        self._slot = slot
        self._checkpoint = checkpoint
        self._data = data
        self.predictions: list[str] = []
        pl.seed_everything(tree["seed_everything"], workers=True)
        self.monitored = TASKS[tree["model"]["objective"]["kind"]].monitored
        corpus = corpus_of(tree["data"])
        stacks = stacks_of(tree)
        self.used = used_by(tree, stacks)
        check_used(self.used)
        self.record = Record.of(named_by_content(tree), stacks, corpus)
        self.id = self.record.id
        root = tree["trainer"]["default_root_dir"]
        usual = Path("experiments/fit/runs") / run_name(tree)
        self.folder = RunFolder(folder or (Path(root) if root else usual))
        self.attempt: int = attempt or self.folder.last_attempt() + 1
        self.attempt_folder = self.folder.attempt(self.attempt)
        self._find_checkpoint(ckpt_path)
        self._open_data()
        if command == "fit":  # a cell has its own folder and checkpoint
            there = check_folder(self.folder, self.record, tree, self.resumed)
            if self._checkpoint is not None:
                path = self._checkpoint.path
                self.record = with_checkpoint(self.record, there, path, self.folder)
                self.id = self.record.id
            self._refuse_finished()
        self._section = deepcopy(tree["trainer"])  # of the Trainer; config.yaml keeps the tree
        if command is None:  # a cell
            place_below(self.folder.added, self._section)
        if self._trains:
            label_loggers(self._section["logger"], self._labels())

    def _refuse_finished(self) -> None:
        """Refuse to train a finished run from step 0, which would remove its result."""
        if self.folder.result.is_file() and not self.resumed and not self._again:
            raise UserError(
                f"{self.folder}: holds the finished run of this config; --again (again=True in "
                "Python) trains it again and replaces its result"
            )

    def _labels(self) -> Labels:
        model = self.tree["model"]
        tags = {
            "preset": model["block"]["preset"],
            "task": model["objective"]["kind"],
            "data": self.tree["data"]["name"],
            "warmup": model["schedule"]["warmup_steps"],
            "seed": self.tree["seed_everything"],
            "id": self.id,
        }
        return Labels(
            name=self.folder.name,
            group=self.folder.grid,
            attempt=self.attempt,
            tags={name: str(value) for name, value in tags.items()},
        )

    @property
    def resumed(self) -> bool:
        """Whether the run continues from a checkpoint."""
        return self._checkpoint is not None

    @property
    def _trains(self) -> bool:
        return self.command in (None, "fit")

    def _find_checkpoint(self, given: str | None) -> None:
        if given is not None:
            path = find_checkpoint(given, self.folder.path)
            require_of(path)
            model = self.tree["model"]
            # Lightning restores the optimizer from the checkpoint, with its constants.
            trained = ("optimizer",) if self._trains else ()
            parts = ("block", "architecture", *trained)
            self._checkpoint = check_checkpoint(path, model, parts, evaluates=not self._trains)
            most, step = self.tree["trainer"]["max_steps"], self._checkpoint.step
            if self._trains and 0 < most < step:
                raise UserError(
                    f"--ckpt_path {path}: is of step {step}, after which trainer.max_steps {most} "
                    f"trains nothing; {step + 1} or more is right"
                )
        elif self._checkpoint is None and not self._trains:
            raise UserError(f"{self.command}: --ckpt_path is needed: a file, 'last' or 'best'")
        self.resumed_step = 0 if self._checkpoint is None else self._checkpoint.step

    def _open_data(self) -> None:
        """Prepare and verify the data, in every rank; refuse a checkpoint of other data."""
        if self._data is None:
            self._data = data_module(self.tree["data"])
            self._data.check_floor()
            if self.command in ("test", "predict"):
                require_test(self._data.config)
            if self._checkpoint is not None:
                check_data(self._checkpoint, self._data)
        self.corpus = self._data.corpus
        check_rows(self.tree, self.corpus)
        trainer = self.tree["trainer"]
        if self._trains and (trainer["max_epochs"] or 0) > 0:
            # How many steps the epochs have is known now.
            steps = steps_asked(trainer, len(self._data.train_dataloader()))
            model_config(self.tree["model"]).schedule.check(steps)

    @rank_zero_only
    def _prepare_folder(self) -> None:
        """Reserve the folder for this run; a run from step 0 removes earlier curves."""
        if self.folder.config.exists():
            self.folder.result.unlink(missing_ok=True)
            if not self.resumed:
                for old in self.folder.path.glob("events.out.tfevents.*"):
                    old.unlink()
                for old in self.folder.checkpoints.glob("*.ckpt"):
                    shutil.rmtree(old) if old.is_dir() else old.unlink()
        with writing_in(self.folder.path):
            self.attempt_folder.path.mkdir(parents=True, exist_ok=True)
        keep_copies(self.folder, self.used)
        write_record(self.folder.path, self.record)
        write_whole(self.folder.config, strict_yaml.dump_yaml(self.tree))


def run_name(tree: Mapping[str, Any]) -> str:
    """Return the folder name of a run outside a grid: preset, warm-up, seed, short id."""
    model = tree["model"]
    preset = model["block"]["preset"]
    warmup = model["schedule"]["warmup_steps"]
    # Evaluating a part of a split evaluates the run that was trained without that limit.
    identity = cell_id(without_evaluation_limits(tree))
    return f"{preset}-w{warmup}-s{tree['seed_everything']}-{identity[:8]}"
