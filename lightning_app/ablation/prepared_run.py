"""A run before its training: config, folder, checkpoint and data, found and checked."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_app.ablation.checkpoint import (
    Checkpoint,
    check_checkpoint,
    check_data,
    find_checkpoint,
)
from lightning_app.ablation.import_allowlist import place_below
from lightning_app.ablation.run_identity import check_folder, with_checkpoint
from lightning_app.callbacks.added_loggers import Labels, label_loggers
from lightning_app.config import check, check_rows
from lightning_app.data.corpus import corpus_of
from lightning_app.data.sources import require_test
from lightning_app.datamodule import TextDataModule
from lightning_app.errors import UserError
from lightning_app.experiment import cell_id, named_by_content, stacks_of
from lightning_app.identity.record import Record
from lightning_app.identity.relevant import leaves, without_evaluation_limits
from lightning_app.parser import (
    RunCLI,
    config_parser,
    data_module,
    keep_numbers,
)
from lightning_app.plugin_copies import require_of
from lightning_app.plugins import check_used, used_by
from lightning_app.precheck import written_values
from lightning_app.provenance import command_line, software
from lightning_app.run_folder import RunFolder
from lightning_app.sections import model_config
from lightning_app.task_facts import TASKS
from lightning_app.trainer_limits import steps_asked


class PreparedRun(RunCLI):
    """LightningCLI that finds and checks what a run needs before its folder is made.

    Args:
        args: Command-line arguments, or a config tree where `run` is False.
        folder: The run folder; None means ``trainer.default_root_dir`` or, without it, a folder
            under ``experiments/fit/runs`` whose name is made from the config.
        attempt: The number of this attempt; None for the next number in the folder.
        checkpoint: The checkpoint from which a run from a config tree continues; a command line
            has ``--ckpt_path`` for it.
        data: The data of a run from a config tree, if they are already open.
        pruned_by: The metric that is reported at validations; None without a pruner.
        slot: The devices and threads that a supervisor gave the run, for the result.
        command: The command line that started the run; None for that of this process.
        again: Whether to train a finished run again, whose result is then replaced.

    Attributes:
        predictions: What `predict` has predicted, one a row in the order of the split; on the first
            rank alone.
    """

    def __init__(
        self,
        args: Any,
        *,
        folder: Path | None = None,
        attempt: int | None = None,
        checkpoint: Checkpoint | None = None,
        data: TextDataModule | None = None,
        pruned_by: str | None = None,
        slot: Mapping[str, Any] | None = None,
        command: Sequence[str] | None = None,
        again: bool = False,
        **kwargs: Any,
    ) -> None:
        self._again = again
        self._software = {**software(), "command": command_line(command)}
        self._given = folder
        self._pruned_by = pruned_by
        self._slot = slot
        self._checkpoint = checkpoint
        self._data = data
        self._attempt = attempt
        self.predictions: list[str] = []
        words = args if isinstance(args, list) else []
        self._written = dict(leaves(args)) if isinstance(args, dict) else written_values(words)
        self._command = args[0] if isinstance(args, list) and args else None
        super().__init__(args, **kwargs)

    def subcommands(self) -> dict[str, set[str]]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the given command alone: to build the parser of each takes a while."""
        known = RunCLI.subcommands()
        return {name: known[name] for name in [self._command] if name in known} or known

    def setup_parser(
        self,
        add_subcommands: bool,
        main_kwargs: dict[str, Any],
        subparser_kwargs: dict[str, Any],
    ) -> None:
        """Without a subcommand use the parser that the fork server has built."""
        if add_subcommands:
            super().setup_parser(add_subcommands, main_kwargs, subparser_kwargs)
        else:
            self.parser = config_parser()

    def before_instantiate_classes(self) -> None:
        """Find all mistakes that can be found before a folder is created."""
        super().before_instantiate_classes()
        keep_numbers(self._written, self.tree)
        check(self.tree, trains=self._trains)
        self.monitored = TASKS[self.tree["model"]["objective"]["kind"]].monitored
        corpus = corpus_of(self.tree["data"])
        stacks = stacks_of(self.tree)
        self.used = used_by(self.tree, stacks)
        check_used(self.used)
        self.record = Record.of(named_by_content(self.tree), stacks, corpus)
        self.id = self.record.id
        root = self.tree["trainer"]["default_root_dir"]
        usual = Path("experiments/fit/runs") / run_name(self.tree)
        path = self._given or (Path(root) if root else usual)
        self.folder = RunFolder(path)
        self.attempt: int = self._attempt or self.folder.last_attempt() + 1
        self.attempt_folder = self.folder.attempt(self.attempt)
        self._find_checkpoint()
        self._open_data()
        if self.subcommand == "fit":  # a cell has its own folder and checkpoint
            there = check_folder(self.folder, self.record, self.tree, self.resumed)
            if self._checkpoint is not None:
                path = self._checkpoint.path
                self.record = with_checkpoint(self.record, there, path, self.folder)
                self.id = self.record.id
            self._refuse_finished()
        if self.subcommand is None:  # a cell
            place_below(self.folder.added, self._get(self.config, "trainer"))
        if self._trains:
            label_loggers(self._get(self.config, "trainer.logger"), self._labels())

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
        return self.subcommand in (None, "fit")

    def _find_checkpoint(self) -> None:
        given = self._get(self.config, "ckpt_path")
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
            self.config[str(self.subcommand)]["ckpt_path"] = str(path)
        elif self._checkpoint is None and not self._trains:
            raise UserError(f"{self.subcommand}: --ckpt_path is needed: a file, 'last' or 'best'")
        self.resumed_step = 0 if self._checkpoint is None else self._checkpoint.step

    def _open_data(self) -> None:
        """Prepare and verify the data, in every rank; refuse a checkpoint of other data."""
        if self._data is None:
            self._data = data_module(self.tree["data"])
            self._data.check_floor()
            if self.subcommand in ("test", "predict"):
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


def run_name(tree: Mapping[str, Any]) -> str:
    """Return the folder name of a run outside a grid: preset, warm-up, seed, short id."""
    model = tree["model"]
    preset = model["block"]["preset"]
    warmup = model["schedule"]["warmup_steps"]
    # Evaluating a part of a split evaluates the run that was trained without that limit.
    identity = cell_id(without_evaluation_limits(tree))
    return f"{preset}-w{warmup}-s{tree['seed_everything']}-{identity[:8]}"
