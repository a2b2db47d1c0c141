"""One run in its folder, for `ablate fit` and for the cells of a grid."""

import hashlib
import logging
import math
import os
import shutil
import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import (
    LambdaCallback,
    ModelCheckpoint,
    ModelSummary,
    ProgressBar,
    TQDMProgressBar,
)
from lightning.pytorch.utilities import rank_zero_only, rank_zero_warn
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_app.config.classes import entries, made_fields
from lightning_app.config.config import check_rows, data_module, model_config, transformer_module
from lightning_app.config.experiment import cell_id, named_by_content, stacks_of
from lightning_app.config.grid import place_below
from lightning_app.config.identity import (
    Record,
    completed,
    keep_copies,
    read_record,
    relevant,
    require_of,
    used_by,
    without_evaluation_limits,
    write_record,
)
from lightning_app.config.parents import NothingToFineTune
from lightning_app.config.rules import schedule_warnings
from lightning_app.core import strict_yaml
from lightning_app.core.errors import UserError, named
from lightning_app.core.files import write_whole, writing_in
from lightning_app.data.sources import corpus_of, require_test
from lightning_app.plugins import KEY, check_used, digests
from lightning_app.runs.folder import STORE, GridFolder, RunFolder
from lightning_app.runs.locks import run_lock
from lightning_app.runs.parent import FIELD, origin_of
from lightning_app.runs.provenance import (
    PACKAGES,
    command_line,
    foreign_classes,
    is_launched,
    software,
)
from lightning_app.runs.records import (
    CUT_SHORT,
    SCHEMA,
    SIGNATURES,
    Divergence,
    Unsound,
    finite_metrics,
    read_yaml,
)
from lightning_app.runs.run import last_report, words_of_short
from lightning_app.runs.store import (
    link_run,
    locate_run,
    place_run,
    put_aside,
    stored,
    trim_checkpoints,
)
from lightning_app.scores.task_facts import TASKS
from lightning_app.training.callbacks.averages import LastAverage
from lightning_app.training.callbacks.loggers import (
    Curves,
    Events,
    Labels,
    ParameterCount,
    Pictures,
    Progress,
    Throughput,
    Unprofiled,
    WallClock,
    close_loggers,
    label_loggers,
)
from lightning_app.training.callbacks.probes import GainLogger
from lightning_app.training.callbacks.safety import (
    Agreement,
    BeforeAveraging,
    DivergenceMonitor,
    Origin,
    Outcome,
    Pruned,
    Pruning,
    SaveOnInterrupt,
    check_averaging,
)
from lightning_app.training.checkpoint import (
    Checkpoint,
    Saver,
    check_checkpoint,
    check_data,
    checkpoint_of_cell,
    checkpoints,
    device_name,
    find_checkpoint,
    join_metrics,
    listed,
    peak_memory_bytes,
    with_whole_checkpoints,
    write_pruned,
    write_result,
)
from lightning_app.training.datamodule import TextDataModule, check_ranks, steps_asked


def check_folder(
    folder: RunFolder, record: Record, tree: Mapping[str, Any], resumed: bool
) -> Record | None:
    """Return the record of the run that a folder holds, None if it is empty.

    Refuse that of another experiment, with another config, block or corpus; one that is `resumed`
    may train more steps. Raises `UserError`, naming the first difference, or the damaged file.
    """
    if not folder.config.exists():
        return None
    found = read_record(folder.path) or _of_config_alone(folder, record)
    there, here = found.apart(), record
    if resumed:
        steps = {"trainer.max_steps": tree["trainer"]["max_steps"]}
        there, here = there.with_config(steps), here.with_config(steps)
    if there.id != here.id:
        raise UserError(
            f"{folder}: holds another run ({there.difference(here)}; its id is {there.id}, the id "
            f"of this run is {here.id}); set trainer.default_root_dir to another folder"
        )
    return found


def _of_config_alone(folder: RunFolder, record: Record) -> Record:
    """The record of a folder with a `config.yaml` and no run, placed there by a user."""
    if folder.result.exists() or folder.last_attempt():
        raise UserError(
            f"{folder.identity}: missing, so that nothing says which run the folder holds; move "
            "the folder away"
        )
    try:
        with named(folder.config):
            return replace(record, config=relevant(completed(read_yaml(folder.config))))
    except (Unsound, LookupError, TypeError, AttributeError) as error:
        reason = str(error) if isinstance(error, Unsound) else "damaged"
        raise UserError(f"{folder.config}: {reason}; move the run's folder away") from error


_NEEDLESS = (
    ".*does not have many workers",  # batches come from memory-mapped ids, so workers do not help
    ".*smaller than the logging interval",  # we log by optimizer step, across epochs
    "Experiment logs directory .* is not empty",  # it belongs to the same attempt
    "Checkpoint directory .* exists and is not empty",  # it belongs to the same run
    ".*srun. command is available on your system but is not used",  # the supervisor uses it
    ".*recommended to use `self.log.*sync_dist=True",  # metrics are already equal on every rank
    ".*is deprecated, use `isinstance.treespec",  # Lightning's own call of torch
    "You're using the WeightAveraging callback, but loading",  # the averaged weights are evaluated
    # RMSNorm under autocast has a weight of 32 bits, so torch uses its exact, unfused form.
    "Mismatch dtype between input and weight.*Cannot dispatch to fused implementation",
)
"""Warnings of Lightning and torch that do not apply to this program."""


def _no_tips(record: logging.LogRecord) -> bool:
    """Suppress Lightning's tips, which recommend other products of its makers."""
    return "Tip: " not in record.getMessage()


def quiet() -> None:
    """Suppress irrelevant messages of Lightning, and all but warnings until a run begins."""
    for message in _NEEDLESS:
        warnings.filterwarnings("ignore", message=message)
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(_no_tips)
    set_chatter(logging.WARNING)


def set_chatter(level: int) -> None:
    """Set Lightning's log level."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(level)


EXPERIMENTS = Path("experiments")
_SINGLE = GridFolder(EXPERIMENTS / "fit")
"""The folder of links to the runs of `ablate fit`."""


def run_name(tree: Mapping[str, Any], identity: str) -> str:
    """Return the name of a run outside a grid: preset, warm-up, seed, short id."""
    model = tree["model"]
    warmup = model["schedule"]["warmup_steps"]
    return f"{model['block']['preset']}-w{warmup}-s{tree['seed_everything']}-{identity[:8]}"


def evaluated_run(tree: Mapping[str, Any]) -> RunFolder:
    """The run of `ablate fit` in the store that an evaluation with this config belongs to.

    Limits on the evaluation do not affect which run is meant.
    """
    found = RunFolder(stored(EXPERIMENTS, cell_id(tree)))
    whole = cell_id(without_evaluation_limits(tree))
    return found if found.path.exists() else RunFolder(stored(EXPERIMENTS, whole))


class CutShort(UserError):
    """The training ended before the number of steps in its config."""


class TrainingRun:
    """A run with its module, its data and its Trainer, checked before its folder is created.

    Args:
        tree: The complete config.
        command: `fit`, `validate`, `test` or `predict` on the command line; None for a cell.
        ckpt_path: The checkpoint that the command names: a file, ``last`` or ``best``.
        folder: The run folder; None means ``trainer.default_root_dir`` or, without it, the path of
            the run in the store, with a link under ``experiments/fit/runs``.
        attempt: The number of this attempt; None for the next number in the folder.
        checkpoint: The checkpoint from which a cell continues.
        data: The data of a cell, if they are already open.
        pruned_by: The metric to report at validations; None without a pruner.
        slot: The devices and threads that a supervisor assigned to the run, for the result.
        words: The command line that started the run; None for this process's.
        again: Whether to train from step 0 where an earlier attempt left a result or a checkpoint.
            A finished run in the store is kept next to the new one; others are replaced.
        name: The name of the link; None to derive it from the config.

    Attributes:
        predictions: The predictions of `predict`, one per row in the order of the split; only on
            the first rank.
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
        name: str | None = None,
    ) -> None:
        if again and ckpt_path is not None:
            raise UserError(
                f"--again: trains from step 0, but --ckpt_path {ckpt_path} goes on from a "
                "checkpoint; leave one of both out"
            )
        self.held = ExitStack()
        quiet()
        if command == "fit" and tree["model"]["pack"] > 1:
            raise UserError(
                f"model.pack: {tree['model']['pack']}, which is for the cells of a grid (`ablate "
                "run`); use 1"
            )
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
        root = folder or tree["trainer"]["default_root_dir"]
        self._in_store = root is None
        self._name = name
        self.folder = self._stored(self.id) if root is None else RunFolder(Path(root))
        self._continues = ""  # said if it goes on unasked
        self._find_checkpoint(ckpt_path)
        if command == "fit":  # a cell has its own folder and checkpoint
            self._go_on()
            self._refuse_finished()
        self._open_data()
        self.attempt: int = attempt or self.folder.last_attempt() + 1
        if command == "fit" and self._in_store:  # the link is created when the run begins
            self.folder = RunFolder(_SINGLE.link(self._link_name()))
        self.attempt_folder = self.folder.attempt(self.attempt)
        self._section = deepcopy(tree["trainer"])  # for the Trainer; config.yaml keeps the tree
        if command is None:  # a cell
            place_below(self.folder.added, self._section)
        if self._trains:
            label_loggers(self._section["logger"], self._labels())
        self.datamodule = data_module(tree["data"])
        self.model = transformer_module(tree["model"])
        self.trainer = self._make_trainer()
        set_chatter(logging.INFO)
        if self.command is not None:  # the supervisor starts the ranks of a cell
            check_ranks(self.trainer)
        self.datamodule.corpus = self.corpus
        if self._trains:
            self._begin()

    def _stored(self, identity: str) -> RunFolder:
        """A run of `ablate fit` in the store, by its link if there is one."""
        if self.command != "fit":
            return evaluated_run(self.tree)
        link = _SINGLE.link(self._link_name(identity))
        if link.is_symlink() and link.readlink().name != identity:
            other = read_record(link)
            if other is not None and other.apart().id == identity:  # it started from a checkpoint
                return RunFolder(link)
            why = "" if other is None else f": {other.difference(self.record)}"
            raise UserError(
                f"{link}: names another run ({link.readlink().name}{why}); choose another --name"
            )
        return locate_run(_SINGLE, link.name, identity)

    def _link_name(self, identity: str | None = None) -> str:
        return self._name or run_name(self.tree, identity or self.id)

    def _go_on(self) -> None:
        """Determine which run a checkpoint continues: its own, or a new one that starts from it."""
        path = None if self._checkpoint is None else self._checkpoint.path
        if path is not None and self._in_store:
            owner = RunFolder(path.resolve().parent.parent)
            if owner.path != self.folder.path.resolve() and owner.path.parent.name == STORE:
                begun = read_record(owner.path)
                if begun is not None and begun.apart().id == self.id:
                    self.folder = owner  # it started from a checkpoint itself
        there = check_folder(self.folder, self.record, self.tree, self.resumed)
        if path is not None:
            # The checkpoint of another run is part of the id.
            own = path.resolve().parent == self.folder.checkpoints.resolve()
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            self.record = self.record.going_on(there if own else None, digest[:16])
            self.id = self.record.id
            if self._in_store:
                self.folder = self._stored(self.id)
        self._take_up(there if path is None else read_record(self.folder.path))

    def _take_up(self, begun: Record | None) -> None:
        """Go on from the last checkpoint of an earlier attempt of this very run, as a cell does."""
        given, last = self._checkpoint, self.folder.checkpoint("last")
        own = given is not None and given.path.resolve().parent == last.resolve().parent
        if begun is None or self._again or own:
            return
        if given is not None and begun.id != self.id:
            wrong = f"holds a run that began elsewhere than in {given.path}"
            raise UserError(f"{self.folder}: {wrong}; set trainer.default_root_dir to another one")
        if last.is_file() and not self.folder.result.exists():
            over = "; --again starts over" if given is None else ""
            try:
                self._find_checkpoint("last")
            except UserError as error:
                raise UserError(f"{error}{over}") from error
            self._continues = f"goes on from step {self.resumed_step}{over}"
            self.record, self.id = begun, begun.id

    def _refuse_finished(self) -> None:
        """Refuse to train a finished run from step 0, which would delete its result."""
        if not self.folder.result.is_file() or (self.resumed and not self._continues):
            return
        if not self._again:
            if self._in_store:  # it may belong to a grid; from now on also to `fit`
                link_run(_SINGLE, self._link_name(), self.id)
            raise UserError(
                f"{self.folder}: holds the finished run of this config; --again (again=True in "
                "Python) trains it again"
            )

    def _labels(self) -> Labels:
        model = self.tree["model"]
        tags = {"preset": model["block"]["preset"], "task": model["objective"]["kind"]}
        tags |= {"data": self.tree["data"]["name"], "warmup": model["schedule"]["warmup_steps"]}
        tags |= {"seed": self.tree["seed_everything"], "id": self.id}
        texts = {name: str(value) for name, value in tags.items()}
        folder = self.folder
        return Labels(name=folder.name, group=folder.grid, attempt=self.attempt, tags=texts)

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
            # Lightning restores the optimizer from the checkpoint, including its constants.
            trained = ("optimizer",) if self._trains else ()
            parts = ("block", "architecture", *trained)
            self._checkpoint = check_checkpoint(path, model, parts, evaluates=not self._trains)
            most, step = self.tree["trainer"]["max_steps"], self._checkpoint.step
            if self._trains and 0 < most < step:
                raise UserError(
                    f"--ckpt_path {path}: is of step {step}, after which trainer.max_steps {most} "
                    f"trains nothing; it must be at least {step + 1}"
                )
        self.resumed_step = 0 if self._checkpoint is None else self._checkpoint.step

    def _open_data(self) -> None:
        """Prepare and verify the data, on every rank; refuse a checkpoint trained on other data."""
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
            # The number of steps in the epochs is now known.
            steps = steps_asked(trainer, len(self._data.train_dataloader()))
            model_config(self.tree["model"]).schedule.check(steps)

    @rank_zero_only
    def _prepare_folder(self) -> None:
        """Reserve the folder for this run; a run from step 0 deletes earlier curves."""
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

    def _begin(self) -> None:
        """Run the checks that need the Trainer, and reserve the folder."""
        self.model.parent_name = self.record.config.get(FIELD)
        stacks = self.model.architecture.stacks(self.model.block)
        blocks = [block for stack in stacks.values() for block in stack.blocks]
        check_averaging(self.trainer, blocks, self._checkpoint)
        if self.command is not None and self.trainer.is_global_zero:
            if self._in_store:
                self.folder = place_run(_SINGLE, self.folder.name, self.id)
                if self._again and self.folder.result.is_file() and not self.resumed:
                    with run_lock(self.folder):
                        put_aside(EXPERIMENTS, self.id)
            self.held.enter_context(run_lock(self.folder))
            self._refuse_finished()  # it may have finished meanwhile
            if self.folder.last_attempt() >= self.attempt:
                raise UserError(f"{self.folder}: was trained meanwhile; give the command again")
            if self._continues:
                print(f"{self.folder}: {self._continues}", flush=True)
        steps = steps_asked(self.tree["trainer"], len(self.datamodule.train_dataloader()))
        for average in self._averages():
            average.check_steps(steps)
        self._prepare_folder()
        for warning in schedule_warnings(self.tree["model"]["schedule"], steps):
            rank_zero_warn(warning)
        if any(block.keeps_skip_of_identity for block in blocks):
            rank_zero_warn(
                "identity value or output projections combined with an attention skip: He & "
                "Hofmann 2023 (2311.01906, figure 20) found that this trains worse"
            )

    def _make_trainer(self) -> pl.Trainer:
        self.divergence = DivergenceMonitor(self.monitored)
        self.throughput = Throughput()
        self.clock = WallClock()
        self._best: Saver | None = None
        callbacks: list[pl.Callback] = []
        # Classes outside the tables were imported when the config was completed.
        settings = made_fields(self._section, imports=True)
        given = listed(settings["callbacks"])
        if self._trains:
            progress = Progress(self.attempt_folder.progress)
            code: dict[str, Any] = {KEY: digests(), f"{KEY}_used": self.used}
            code["classes"] = foreign_classes(self.tree, apart=digests())
            made = {**self._software, **code, **origin_of(self.tree)}
            named = {"id": self.id, "seed": self.tree["seed_everything"]}
            named["parent"] = made.get("parent", {}).get("id")
            self.origin = Origin(self.attempt_folder.provenance, made, self.resumed, named)
            callbacks += [self.origin, self.divergence, self.throughput, self.clock]
            callbacks += [GainLogger(), progress, Agreement(self.id), Pictures()]
            callbacks.append(LambdaCallback(on_train_start=lambda *_: self._check_plugins()))
            before = BeforeAveraging(self.divergence, self.folder.checkpoint("last"))
            given = [before, *given]
            if self._pruned_by is not None:
                files = (self.attempt_folder.reports, self.attempt_folder.stop)
                callbacks.append(Pruning(self._pruned_by, *files))
            saves = settings["enable_checkpointing"] is not False
            if saves:
                self._best, last = checkpoints(self.folder.path, self.monitored)
                callbacks += [self._best, last]
            self.interrupts = SaveOnInterrupt(self.folder.checkpoint("last") if saves else None)
            callbacks.append(self.interrupts)
            self.added = listed(settings["logger"])
            whole = {**self.tree, "id": self.id}
            to_added = LambdaCallback(
                on_fit_start=lambda *_: [each.log_hyperparams(whole) for each in self.added]
            )
            callbacks.append(to_added)
            if settings["logger"] is not False:
                # Steps after the checkpoint will be logged again.
                purge = self.resumed_step + 1 if self.resumed else None
                curves = Curves(self.attempt_folder.path, name="", version="")
                settings["logger"] = [Events(self.folder.path, purge), curves, *self.added]
            summarised = any(isinstance(each, ModelSummary) for each in given)
            if settings["enable_model_summary"] is not False and not summarised:
                callbacks.append(ParameterCount())
            shown = any(isinstance(each, ProgressBar) for each in given)
            if settings["enable_progress_bar"] is not False and not shown:
                # Lightning's default, Rich's, counts epochs up to -2 if only steps are limited.
                callbacks.append(TQDMProgressBar())
        else:
            # Training callbacks are not needed here, and nothing is saved.
            warnings.filterwarnings("ignore", message="Be aware that when using `ckpt_path`")
            if not any(isinstance(each, ModelCheckpoint) for each in given):
                settings["enable_checkpointing"] = False
            if settings["logger"] is None:
                settings["logger"] = False
        settings["profiler"] = settings["profiler"] or Unprofiled()
        plugins = with_whole_checkpoints(settings["plugins"])
        placed = any(isinstance(plugin, ClusterEnvironment) for plugin in plugins)
        placed = placed or getattr(settings["strategy"], "cluster_environment", None) is not None
        if not placed and not is_launched(os.environ):
            # Where mpi4py is installed, Lightning would otherwise start MPI to ask for its size,
            # and a broken MPI ends the process.
            plugins.append(LightningEnvironment())
        settings["plugins"] = plugins
        # cuDNN builds a plan for every new shape of a batch, which takes longer than a step.
        torch.backends.cuda.enable_cudnn_sdp(False)
        # An evaluation leaves the folder of its run unchanged.
        settings["default_root_dir"] = str(self.folder) if self._trains else None
        settings["callbacks"] = [*given, *callbacks]
        try:
            return pl.Trainer(**settings)
        except (MisconfigurationException, ValueError, ZeroDivisionError) as error:
            raise UserError(f"trainer: {error}") from error

    def fit(self) -> None:
        """Train, decide the outcome, evaluate the test split, and write the files of the run."""
        with self.held:
            self._fit()

    def evaluate(self, *, verbose: bool = True) -> None:
        """Evaluate the checkpoint: the validation split, or the test split for `test`."""
        evaluate = self.trainer.test if self.command == "test" else self.trainer.validate
        evaluate(self.model, verbose=verbose, **self._source())

    def predict(self) -> None:
        """Keep one prediction per row, in the order of the split, on the first rank."""
        self.trainer.predict(self.model, **self._source())
        if self.trainer.is_global_zero:
            self.predictions = [text for _, text in sorted(self.model.predicted.items())]

    def checkpoint_file(self) -> str | None:
        return None if self._checkpoint is None else str(self._checkpoint.path)

    def _source(self) -> dict[str, Any]:
        """What the Trainer reads; our checkpoints hold plain values, foreign ones may hold code."""
        start = self.checkpoint_file()
        return {"datamodule": self.datamodule, "ckpt_path": start, "weights_only": True}

    def _fit(self) -> None:
        trainer, model, datamodule = self.trainer, self.model, self.datamodule
        started = datetime.now(UTC)
        try:
            trainer.fit(model, **self._source())
        except Pruned as pruned:
            self._check_plugins()
            self._leave_pruned(pruned.step, started)
            return
        except SystemExit as ending:
            inside = trainer.global_step > self.resumed_step and not self.interrupts.asked
            if isinstance(ending, SIGTERMException) or not inside:  # but by a user
                raise
            # Lightning does not return a model that could be evaluated.
            raise CutShort(self.shortness(self.asked(datamodule))) from ending
        except NothingToFineTune as why:
            self.origin.setup(trainer, model, "fit")  # another callback may have built the model
            outcome = Outcome("non_finite", str(why), Divergence(0, str(why), None))
            self.leave(self.result(outcome, {}, datamodule, started), datamodule)
            return
        if trainer.global_step == 0:
            limits = ("max_steps", "max_epochs", "max_time", "limit_train_batches")
            values = {name: self.tree["trainer"][name] for name in limits}
            given = ", ".join(f"{k} {v}" for k, v in values.items() if v is not None)
            raise UserError(f"trainer: no step was trained ({given}); a result needs at least 1")
        asked = self.asked(datamodule)
        finite = self.divergence.divergence is None
        short = finite and 0 <= trainer.global_step < asked
        if short and self.command is None:
            raise CutShort(self.shortness(asked))  # not a valid result for a grid
        metrics: dict[str, Any] = dict(trainer.callback_metrics)
        if finite and int(metrics.get("step", -1)) != trainer.global_step:
            metrics |= self._validate_end()
        outcome = self.divergence.judge(
            float(metrics[self.monitored.loss]) if finite else math.nan,
            datamodule.floor,
            datamodule.training_floor,
            trainer.global_step,
        )
        if short:
            outcome = Outcome(CUT_SHORT, f"{self.shortness(asked)}; {outcome.rule}")
        if finite and model.objective.config.evaluate_test:
            metrics |= trainer.test(model, datamodule=datamodule, verbose=False)[0]
        metrics = {k: float(v) for k, v in metrics.items() if k.startswith(("val/", "test/"))}
        metrics["train/tokens_per_second"] = self.throughput.rate
        for average in self._averages() if outcome.name not in ("non_finite", CUT_SHORT) else ():
            metrics |= average.metrics(trainer, model, datamodule)
        self.leave(self.result(outcome, metrics, datamodule, started), datamodule)

    def _averages(self) -> list[LastAverage]:
        callbacks: list[Any] = self.trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]
        return [each for each in callbacks if isinstance(each, LastAverage)]

    def asked(self, datamodule: Any) -> int:
        """The steps that the config asks for, whatever a callback has set; -1 without a limit."""
        return steps_asked(self.tree["trainer"], len(datamodule.train_dataloader()))

    def shortness(self, asked: int) -> str:
        limit, named = self.tree["trainer"]["max_time"], entries(self.tree["trainer"]["callbacks"])
        given = ", ".join(str(each["class_path"]).rpartition(".")[2] for each in named)
        by = "a callback or a module"
        if limit is not None:
            by = f"trainer.max_time {limit} or by a callback"
        short = f"{words_of_short(self.trainer.global_step, asked)} by {by}"
        return f"{short} (trainer.callbacks: {given})" if given else short

    def result(
        self, outcome: Outcome, metrics: Mapping[str, float], datamodule: Any, started: datetime
    ) -> dict[str, Any]:
        """The content of `result.json`."""
        trainer, model, failure = self.trainer, self.model, outcome.divergence
        return {
            "schema": SCHEMA,
            "id": self.id,
            "name": self.folder.name,
            "status": CUT_SHORT if outcome.name == CUT_SHORT else "diverged" if failure else "ok",
            "outcome": outcome.name,
            "outcome_rule": outcome.rule,
            "diverged": None if failure is None else asdict(failure),
            "metrics": finite_metrics(metrics, outcome.name),
            "unigram_entropy": datamodule.floor,
            "validation_parts": None if outcome.name == "non_finite" else model.validation_parts,
            "steps": trainer.global_step,
            "steps_asked": None if (asked := self.asked(datamodule)) < 0 else asked,
            "tokens": self.throughput.tokens,
            "parameters": sum(p.numel() for p in model.parameters()),
            "trained_by": model.trained_by,
            "seconds": self.clock.seconds,
            "device": device_name(trainer),
            "devices": trainer.world_size,
            "peak_memory_bytes": peak_memory_bytes(trainer),
            "slot": self._slot,
            "precision": str(trainer.precision),
            "versions": {name: self._software["libraries"][name] for name in PACKAGES},
            "provenance": self.origin.record,
            "data": datamodule.description,
            **dict.fromkeys(SIGNATURES),
            **model.objective.signatures,
            "attempt": self.attempt,
            "started": started.isoformat(),
            "finished": datetime.now(UTC).isoformat(),
        }

    def _validate_end(self) -> dict[str, float]:
        """Validate after the last step unless that was due; keep the checkpoint if best."""
        source, trainer = self.datamodule, self.trainer
        metrics = dict(trainer.validate(self.model, datamodule=source, verbose=False)[0])
        if self._best is not None and self.trainer.is_global_zero:
            kept, score = self._best.best_model_score, metrics[self.monitored.metric]
            sign = 1 if self.monitored.mode == "min" else -1
            if kept is None or sign * score < sign * float(kept):
                self._best.replace_by(self.folder.checkpoint("last"), score)
        return metrics

    def _check_plugins(self) -> None:
        """Refuse a result from code that its id does not cover; on every rank, if on any."""
        said = ""
        try:
            check_used(self.used)
        except UserError as error:
            said = str(error)
        if not self.trainer.strategy.reduce_boolean_decision(not said, all=True):
            raise UserError(said or "plug-ins: refused on another rank of this run")

    def leave(self, result: dict[str, Any], datamodule: Any) -> None:
        self._check_plugins()
        self._write(result, datamodule)

    @rank_zero_only
    def _write(self, result: dict[str, Any], datamodule: Any) -> None:
        self._join_logs()
        write_result(self.folder, result, self.model, datamodule)
        close_loggers(self.added)

    @rank_zero_only
    def _leave_pruned(self, step: int, started: datetime) -> None:
        pruned = {
            "schema": SCHEMA,
            "id": self.id,
            "name": self.folder.name,
            "grid": self.folder.grid,
            "status": "pruned",
            "step": step,
            "metric": self._pruned_by,
            "value": last_report(self.folder, self._pruned_by or ""),
            "attempt": self.attempt,
            "provenance": self.origin.record,
            "seconds": self.clock.seconds,
            "started": started.isoformat(),
            "finished": datetime.now(UTC).isoformat(),
        }
        self._join_logs()
        write_pruned(self.folder, pruned)
        close_loggers(self.added)

    def _join_logs(self) -> None:
        first = 1 if self.resumed else self.attempt
        attempts = map(self.folder.attempt, range(first, self.attempt + 1))
        write_whole(self.folder.metrics, join_metrics([each.metrics for each in attempts]))


def run_cell(run_dir: Path, attempt: int, *, keep: str = "all", **how: Any) -> None:
    """Train the config in `run_dir` and write `result.json`, or `pruned.json` if it was pruned.

    It continues from the last checkpoint of an interrupted attempt, to the same weights as an
    uninterrupted run. It runs in a separate process and raises the error of a run that crashes. Of
    a finished run it keeps the checkpoints `keep`: all, last, best or none.
    """
    folder, rank, pruned_by = RunFolder(run_dir), how.get("rank", 0), how.get("pruned_by")
    # Lightning was imported in the fork server, before this process had a rank.
    rank_zero_only.rank = rank  # pyright: ignore[reportFunctionMemberAccess]
    if not folder.is_over(None if pruned_by is None else folder.grid or "", pruned_by):
        cell_run(run_dir, attempt, **how).fit()
    if rank == 0:
        trim_checkpoints(folder, keep)


def cell_run(
    run_dir: Path,
    attempt: int,
    *,
    rank: int = 0,
    pruned_by: str | None = None,
    slot: Mapping[str, Any] | None = None,
    command: Sequence[str] | None = None,
) -> TrainingRun:
    """Return the run that `run_cell` trains, as `TrainingRun` describes.

    Its folder has the cell's config. Only rank 0 writes files. `slot["devices"]` has one for each
    rank.
    """
    folder = RunFolder(run_dir)
    tree = strict_yaml.load_yaml(folder.config.read_text(encoding="utf-8"))
    tree["trainer"] |= {"enable_progress_bar": False, "enable_model_summary": False}
    tree["trainer"] |= _devices(tree["trainer"], slot)
    data = data_module(tree["data"])
    return TrainingRun(
        tree,
        folder=run_dir,
        attempt=attempt,
        checkpoint=checkpoint_of_cell(folder, cell_id(tree), tree["model"], data, rank),
        data=data,
        pruned_by=pruned_by,
        slot=slot,
        words=command,
    )


def _devices(trainer: Mapping[str, Any], slot: Mapping[str, Any] | None) -> dict[str, Any]:
    """The Trainer's arguments for the devices of a cell, and for its strategy."""
    count = trainer["devices"]
    if slot is not None:
        count = len(slot["devices"])
    elif count == "auto":
        count = 1
    if count in (1, "1"):
        return {"devices": count, "strategy": "auto"}
    strategy = trainer["strategy"]
    return {"devices": count, "strategy": "ddp" if strategy == "auto" else strategy}
