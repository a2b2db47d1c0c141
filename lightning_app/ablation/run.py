"""One run in its folder, for `ablate fit` and for the cells of a grid."""

import logging
import math
import warnings
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import ModelCheckpoint, ModelSummary
from lightning.pytorch.utilities import rank_zero_only, rank_zero_warn
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_app.ablation.checkpoint import checkpoints, copy_whole, with_whole_checkpoints
from lightning_app.ablation.prepared_run import PreparedRun, set_chatter
from lightning_app.ablation.reports import last_report
from lightning_app.ablation.run_output import (
    device_name,
    join_metrics,
    peak_memory_bytes,
    write_pruned,
    write_result,
)
from lightning_app.ablation.supervision.locks import run_lock
from lightning_app.atomic_write import write_whole
from lightning_app.bounds import long_warmup
from lightning_app.callbacks.added_loggers import Hyperparameters, added_loggers, close_loggers
from lightning_app.callbacks.averaging import BeforeAveraging, check_averaging
from lightning_app.callbacks.csv_logger import Curves
from lightning_app.callbacks.divergence import DivergenceMonitor, Outcome
from lightning_app.callbacks.image_logger import Pictures
from lightning_app.callbacks.null_profiler import Unprofiled
from lightning_app.callbacks.origin import Origin
from lightning_app.callbacks.parameter_count import ParameterCount
from lightning_app.callbacks.probes import GainLogger
from lightning_app.callbacks.pruning import Pruned, Pruning
from lightning_app.callbacks.rank_consistency import Agreement
from lightning_app.callbacks.save_on_signal import SaveOnInterrupt
from lightning_app.callbacks.tensorboard_logger import Events
from lightning_app.callbacks.throughput import Progress, Throughput, WallClock
from lightning_app.config.classes import made_fields
from lightning_app.config.config import data_module, transformer_module
from lightning_app.errors import UserError
from lightning_app.parent import FIELD, origin_of
from lightning_app.parent_weights import NothingToFineTune
from lightning_app.plugin_imports import window
from lightning_app.plugins import KEY, check_used, digests
from lightning_app.provenance import PACKAGES, foreign_classes
from lightning_app.records import CUT_SHORT, SCHEMA, SIGNATURES
from lightning_app.run_state import words_of_short
from lightning_app.trainer_limits import check_limits, check_ranks, steps_asked


class CutShort(UserError):
    """The training ended before the steps that its config asks for."""


def _status(outcome: Outcome) -> str:
    if outcome.name == CUT_SHORT:
        return CUT_SHORT
    return "ok" if outcome.divergence is None else "diverged"


class Run(PreparedRun):
    """A run with its module, its data and its Trainer, whose files all lie in its folder.

    It takes the arguments of `PreparedRun`.
    """

    def __init__(self, tree: dict[str, Any], **how: Any) -> None:
        self._held = ExitStack()
        super().__init__(tree, **how)
        self.datamodule = data_module(tree["data"])
        self.model = transformer_module(tree["model"])
        self.trainer = self._make_trainer()
        set_chatter(logging.INFO)
        if self.command is not None:  # the supervisor starts the ranks of a cell
            check_ranks(self.trainer)
        self.datamodule.corpus = self.corpus
        if self._trains:
            self._begin()

    def _begin(self) -> None:
        """Check what needs the Trainer, and take the folder."""
        self.model.parent_name = self.record.config.get(FIELD)
        path, averaged = None, False
        if self._checkpoint is not None:
            path, averaged = self._checkpoint.path, self._checkpoint.averaged
        check_averaging(self.trainer, path, averaged)
        if self.command is not None and self.trainer.is_global_zero:
            self._held.enter_context(run_lock(self.folder))
            self._refuse_finished()  # it may have finished since
        self._prepare_folder()
        steps = steps_asked(self.tree["trainer"], len(self.datamodule.train_dataloader()))
        if warning := long_warmup(self.model.schedule.warmup_steps, steps):
            rank_zero_warn(warning)
        stacks = self.model.architecture.stacks(self.model.block)
        if any(block.keeps_skip_of_identity for s in stacks.values() for block in s.blocks):
            rank_zero_warn(
                "identity value or output projections combined with an attention skip: He & "
                "Hofmann 2023 (2311.01906, figure 20) found that this trains worse"
            )

    def _make_trainer(self) -> pl.Trainer:
        self.divergence = DivergenceMonitor(self.monitored)
        self.throughput = Throughput()
        self.clock = WallClock()
        self._best: ModelCheckpoint | None = None
        callbacks: list[pl.Callback] = []
        # Classes in no table were imported when the config was completed.
        settings = made_fields(self._section, imports=True)
        given = settings["callbacks"] or []
        given = given if isinstance(given, list) else [given]
        if self._trains:
            progress = Progress(self.attempt_folder.progress)
            code: dict[str, Any] = {KEY: digests(), f"{KEY}_used": self.used}
            code["classes"] = foreign_classes(self.tree, apart=digests())
            made = {**self._software, **code, **origin_of(self.tree)}
            named = {"id": self.id, "seed": self.tree["seed_everything"]}
            named["parent"] = made.get("parent", {}).get("id")
            self.origin = Origin(self.attempt_folder.provenance, made, self.resumed, named)
            callbacks += [self.origin, self.divergence, self.throughput, self.clock]
            callbacks += [GainLogger(), progress]
            callbacks += [Agreement(self.id), Pictures()]
            before = BeforeAveraging(self.divergence, self.folder.checkpoint("last"))
            given = [before, *given]
            if self._pruned_by is not None:
                files = (self.attempt_folder.reports, self.attempt_folder.stop)
                callbacks.append(Pruning(self._pruned_by, *files))
            saves = settings["enable_checkpointing"] is not False
            if saves:
                self._best, last = checkpoints(self.folder.path, self.monitored)
                callbacks += [self._best, last]
            self._interrupts = SaveOnInterrupt(self.folder.checkpoint("last") if saves else None)
            callbacks.append(self._interrupts)
            self._added = added_loggers(settings["logger"])
            callbacks.append(Hyperparameters(self._added, {**self.tree, "id": self.id}))
            if settings["logger"] is not False:
                # The steps after the checkpoint are logged again.
                purge = self.resumed_step + 1 if self.resumed else None
                settings["logger"] = [
                    Events(self.folder.path, purge),
                    Curves(self.attempt_folder.path, name="", version=""),
                    *self._added,
                ]
            summarised = any(isinstance(each, ModelSummary) for each in given)
            if settings["enable_model_summary"] is not False and not summarised:
                callbacks.append(ParameterCount())
        else:
            # The callbacks of training are not needed here, and nothing is saved.
            warnings.filterwarnings("ignore", message="Be aware that when using `ckpt_path`")
            if not any(isinstance(each, ModelCheckpoint) for each in given):
                settings["enable_checkpointing"] = False
            if settings["logger"] is None:
                settings["logger"] = False
        settings["profiler"] = settings["profiler"] or Unprofiled()
        settings["plugins"] = with_whole_checkpoints(settings["plugins"])
        # An evaluation leaves the folder of its run as it is.
        settings["default_root_dir"] = str(self.folder) if self._trains else None
        settings["callbacks"] = [*given, *callbacks]
        try:
            return pl.Trainer(**settings)
        except (MisconfigurationException, ValueError, ZeroDivisionError) as error:
            raise UserError(f"trainer: {error}") from error

    def fit(self) -> None:
        """Train, decide the outcome, evaluate the test split, and write the files of the run."""
        corpus = filter(None, (self.tree["data"][name] for name in ("root", "cache")))
        with self._held, window("run", [self.folder.path, self.corpus.folder, *corpus]):
            self._fit(self.model, self.datamodule)

    def evaluate(self, *, verbose: bool = True) -> None:
        """Evaluate the checkpoint: the validation split, or the test split for `test`."""
        evaluate = self.trainer.test if self.command == "test" else self.trainer.validate
        evaluate(
            self.model,
            datamodule=self.datamodule,
            ckpt_path=self._checkpoint_file(),
            verbose=verbose,
            weights_only=True,
        )

    def predict(self) -> None:
        """Keep one prediction for each row, in the order of the split, on the first rank."""
        self.trainer.predict(
            self.model,
            datamodule=self.datamodule,
            ckpt_path=self._checkpoint_file(),
            weights_only=True,
        )
        if self.trainer.is_global_zero:
            self.predictions = [text for _, text in sorted(self.model.predicted.items())]

    def _checkpoint_file(self) -> str | None:
        return None if self._checkpoint is None else str(self._checkpoint.path)

    def _fit(self, model: Any, datamodule: Any) -> None:
        trainer = self.trainer
        started = datetime.now(UTC)
        try:
            # Our checkpoints hold plain values, and a foreign checkpoint must not run code.
            trainer.fit(
                model,
                datamodule=datamodule,
                ckpt_path=self._checkpoint_file(),
                weights_only=True,
            )
        except Pruned as pruned:
            self._check_plugins()
            self._leave_pruned(pruned.step, started)
            return
        except SystemExit as ending:
            if isinstance(ending, SIGTERMException) or not self._was_ended_from_inside():
                raise
            # Lightning gives no model back that could be evaluated.
            raise CutShort(self._shortness(self._asked(datamodule))) from ending
        except NothingToFineTune as why:
            self.origin.setup(trainer, model, "fit")  # another callback may have built the model
            outcome = self.divergence.never_began(str(why))
            self._leave(self._result(outcome, {}, model, datamodule, started), model, datamodule)
            return
        if trainer.global_step == 0:
            limits = ("max_steps", "max_epochs", "max_time", "limit_train_batches")
            values = {name: self.tree["trainer"][name] for name in limits}
            given = ", ".join(f"{k} {v}" for k, v in values.items() if v is not None)
            raise UserError(f"trainer: no step was trained ({given}); a result needs at least 1")
        asked = self._asked(datamodule)
        finite = self.divergence.divergence is None
        short = finite and 0 <= trainer.global_step < asked
        if short and self.command is None:
            raise CutShort(self._shortness(asked))  # no result of a grid
        if trainer.global_step >= self._most(asked):
            raise UserError(
                f"trainer: {trainer.global_step} steps were trained, but the config asks for "
                f"{asked}{self._callbacks()}"
            )
        metrics: dict[str, Any] = dict(trainer.callback_metrics)
        if finite and int(metrics.get("step", -1)) != trainer.global_step:
            metrics |= self._validate_end(model, datamodule)
        outcome = self.divergence.judge(
            float(metrics[self.monitored.loss]) if finite else math.nan,
            datamodule.floor,
            datamodule.training_floor,
            trainer.global_step,
        )
        if short:
            why = f"{self._shortness(asked)}; {outcome.rule}"
            outcome = Outcome(CUT_SHORT, why)
        if finite and model.objective.config.evaluate_test:
            metrics |= trainer.test(model, datamodule=datamodule, verbose=False)[0]
        check_limits(trainer, self.tree["trainer"], self._callbacks())
        metrics = {k: float(v) for k, v in metrics.items() if k.startswith(("val/", "test/"))}
        metrics["train/tokens_per_second"] = self.throughput.rate
        self._leave(self._result(outcome, metrics, model, datamodule, started), model, datamodule)

    def _asked(self, datamodule: Any) -> int:
        """The steps that the config asks for, whatever a callback has set since; -1 without end."""
        return steps_asked(self.tree["trainer"], len(datamodule.train_dataloader()))

    def _most(self, asked: int) -> float:
        """The number of steps from which a run did too many.

        A module that steps several optimizers itself may exceed `max_steps` by some of them; one
        that continues a checkpoint of a longer run trains nothing.
        """
        limited = asked == self.tree["trainer"]["max_steps"] > self.resumed_step
        return asked + len(self.trainer.optimizers) if limited else math.inf

    def _was_ended_from_inside(self) -> bool:
        """Whether a callback or a module, not a user, has ended the process in its training."""
        steps = self.trainer.global_step
        return steps > self.resumed_step and not self._interrupts.asked

    def _shortness(self, asked: int) -> str:
        short = words_of_short(self.trainer.global_step, asked)
        limit = self.tree["trainer"]["max_time"]
        if limit is not None:
            return f"{short} by trainer.max_time {limit} or by a callback{self._callbacks()}"
        return f"{short} by a callback or a module{self._callbacks()}"

    def _callbacks(self) -> str:
        """The callbacks of the config, for messages."""
        given = [str(each["class_path"]).rpartition(".")[2] for each in self._given_callbacks()]
        return f" (trainer.callbacks: {', '.join(given)})" if given else ""

    def _given_callbacks(self) -> list[Any]:
        given = self.tree["trainer"]["callbacks"] or []
        return given if isinstance(given, list) else [given]

    def _result(
        self,
        outcome: Outcome,
        metrics: Mapping[str, float],
        model: Any,
        datamodule: Any,
        started: datetime,
    ) -> dict[str, Any]:
        """The content of `result.json`."""
        trainer, failure = self.trainer, outcome.divergence
        return {
            "schema": SCHEMA,
            "id": self.id,
            "name": self.folder.name,
            "status": _status(outcome),
            "outcome": outcome.name,
            "outcome_rule": outcome.rule,
            "diverged": None if failure is None else asdict(failure),
            "metrics": {k: v if math.isfinite(v) else None for k, v in sorted(metrics.items())},
            "unigram_entropy": datamodule.floor,
            "validation_parts": None if outcome.name == "non_finite" else model.validation_parts,
            "steps": trainer.global_step,
            "steps_asked": None if (asked := self._asked(datamodule)) < 0 else asked,
            "tokens": self.throughput.tokens,
            "parameters": sum(p.numel() for p in model.parameters()),
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

    def _validate_end(self, model: Any, datamodule: Any) -> dict[str, float]:
        """Validate after the last step if no validation was due, and keep it if it is the best."""
        last, best = map(self.folder.checkpoint, ("last", "best"))
        metrics = dict(self.trainer.validate(model, datamodule=datamodule, verbose=False)[0])
        if self._best is not None and self.trainer.is_global_zero:
            score, sign = self._best.best_model_score, 1 if self.monitored.mode == "min" else -1
            if score is None or sign * metrics[self.monitored.metric] < sign * float(score):
                copy_whole(last, best)
        return metrics

    def _check_plugins(self) -> None:
        """Refuse a result of code that its id does not name; on every rank, if on one."""
        said = ""
        try:
            check_used(self.used)
        except UserError as error:
            said = str(error)
        if not self.trainer.strategy.reduce_boolean_decision(not said, all=True):
            raise UserError(said or "plug-ins: refused on another rank of this run")

    def _leave(self, result: dict[str, Any], model: Any, datamodule: Any) -> None:
        self._check_plugins()
        self._write(result, model, datamodule)

    @rank_zero_only
    def _write(self, result: dict[str, Any], model: Any, datamodule: Any) -> None:
        self._join_logs()
        write_result(self.folder, result, model, datamodule)
        close_loggers(self._added)

    @rank_zero_only
    def _leave_pruned(self, step: int, started: datetime) -> None:
        pruned = {
            "schema": SCHEMA,
            "id": self.id,
            "name": self.folder.name,
            "status": "pruned",
            "step": step,
            "metric": self._pruned_by,
            "value": last_report(self.folder),
            "attempt": self.attempt,
            "provenance": self.origin.record,
            "seconds": self.clock.seconds,
            "started": started.isoformat(),
            "finished": datetime.now(UTC).isoformat(),
        }
        self._join_logs()
        write_pruned(self.folder, pruned)
        close_loggers(self._added)

    def _join_logs(self) -> None:
        """Write the curves of all attempts of the run."""
        first = 1 if self.resumed else self.attempt
        attempts = map(self.folder.attempt, range(first, self.attempt + 1))
        write_whole(self.folder.metrics, join_metrics([each.metrics for each in attempts]))
