"""One run: train what a config says, and leave a run folder behind."""

import csv
import hashlib
import json
import math
import os
import platform
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import yaml
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities import rank_zero_only, rank_zero_warn

from lightning_app.ablation.checkpoint import (
    Checkpoint,
    check_checkpoint,
    check_data,
    checkpoint_of_cell,
    copy_whole,
    find_checkpoint,
    with_whole_checkpoints,
)
from lightning_app.ablation.runs import (
    PRUNED,
    REPORTS,
    RESULT,
    STOP,
    is_over,
    read_reports,
    trim_checkpoints,
)
from lightning_app.callbacks.agreement import Agreement
from lightning_app.callbacks.averaging import BeforeAveraging, check_averaging
from lightning_app.callbacks.divergence import DivergenceMonitor
from lightning_app.callbacks.events import Events
from lightning_app.callbacks.interruption import SaveOnInterrupt
from lightning_app.callbacks.origin import Origin
from lightning_app.callbacks.pictures import Pictures
from lightning_app.callbacks.probes import GainLogger
from lightning_app.callbacks.pruning import Pruned, Pruning
from lightning_app.callbacks.throughput import Progress, Throughput
from lightning_app.callbacks.unprofiled import Unprofiled
from lightning_app.config import check
from lightning_app.data.corpus import corpus_of
from lightning_app.data.sources import require_test
from lightning_app.datamodule import TextDataModule
from lightning_app.errors import UserError
from lightning_app.experiment import cell_id, stacks_of
from lightning_app.files import write_whole, writing_in
from lightning_app.identity.record import Record, read_record, write_record
from lightning_app.identity.relevant import without_evaluation_limits
from lightning_app.memory import peak_resident_bytes
from lightning_app.parser import RunCLI, config_parser, data_module, keep_numbers
from lightning_app.provenance import PACKAGES, command_line, plugins, software
from lightning_app.records import SCHEMA


def run_cell(
    run_dir: Path,
    attempt: int,
    *,
    rank: int = 0,
    pruned_by: str | None = None,
    keep: str = "all",
    slot: Mapping[str, Any] | None = None,
    command: Sequence[str] | None = None,
) -> None:
    """Train the config in `run_dir` and leave `result.json`, last; `pruned.json` if told to stop.

    Goes on from the last checkpoint of an attempt that was cut short, to the same weights as a run
    without a break. Runs in a process of its own. Raises whatever made the run crash.

    Args:
        run_dir: The run's folder, with the cell's config.
        attempt: The number of this attempt.
        rank: Which process of the run this is; those after the first write nothing.
        pruned_by: The metric to report at validations, for a pruner to go by; None for no pruner.
        keep: The checkpoints to keep of a run that has ended: all, last, best or none.
        slot: What the run was given, for its result; `devices`, a list, has one for each rank.
        command: The command line that had it run; None for that of this process.
    """
    # Lightning was imported before the processes were told apart.
    rank_zero_only.rank = rank  # pyright: ignore[reportFunctionMemberAccess]
    if not is_over(run_dir, pruned_by is not None):
        tree = yaml.safe_load((run_dir / "config.yaml").read_text(encoding="utf-8"))
        tree["trainer"] |= {"enable_progress_bar": False, "enable_model_summary": False}
        tree["trainer"] |= _devices(tree["trainer"], slot)
        data = data_module(tree["data"])
        checkpoint = checkpoint_of_cell(run_dir, tree["model"], data, rank)
        run = Run(
            tree,
            folder=run_dir,
            attempt=attempt,
            checkpoint=checkpoint,
            data=data,
            pruned_by=pruned_by,
            slot=slot,
            command=command,
            run=False,
        )
        resumed = None if checkpoint is None else str(checkpoint.path)
        run.fit(run.model, run.datamodule, ckpt_path=resumed, weights_only=True)
    if rank == 0:
        trim_checkpoints(run_dir, keep)


def _devices(trainer: Mapping[str, Any], slot: Mapping[str, Any] | None) -> dict[str, Any]:
    """How many devices a cell has, whatever the host has, and how they work together."""
    count = trainer["devices"]
    if slot is not None:
        count = len(slot["devices"])
    elif count == "auto":
        count = 1
    if count in (1, "1"):
        return {"devices": count, "strategy": "auto"}
    strategy = trainer["strategy"]
    return {"devices": count, "strategy": "ddp" if strategy == "auto" else strategy}


class Run(RunCLI):
    """LightningCLI with a run folder: loggers, checkpoints and callbacks point into it.

    Args:
        args: Command-line arguments, or a config tree where `run` is False.
        folder: The run folder; None takes ``trainer.default_root_dir``, or names one after the
            config under ``experiments/fit/runs``.
        attempt: The number of this attempt; None counts on from those in the folder.
        checkpoint: Where a run from a config tree goes on; the command line says ``--ckpt_path``.
        data: The data of a run from a config tree, where they are open already.
        pruned_by: The metric that is reported at validations; None where nobody prunes the run.
        slot: What a supervisor gave the run, for the result.
        command: The command line that had it run; None for that of this process.
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
        **kwargs: Any,
    ) -> None:
        self._software = {**software(), "command": command_line(command)}
        self._folder = folder
        self._pruned_by = pruned_by
        self._slot = slot
        self._checkpoint = checkpoint
        self._data = data
        self._attempt = attempt
        self._written: dict[str, Any] = args if isinstance(args, dict) else {}
        super().__init__(args, **kwargs)

    def setup_parser(
        self,
        add_subcommands: bool,
        main_kwargs: dict[str, Any],
        subparser_kwargs: dict[str, Any],
    ) -> None:
        """Take the parser of a whole run, which a cell inherits, where there is no command."""
        if add_subcommands:
            super().setup_parser(add_subcommands, main_kwargs, subparser_kwargs)
        else:
            self.parser = config_parser()

    def before_instantiate_classes(self) -> None:
        """Find every mistake that can be found, before a folder is made."""
        self.tree = self.dump()
        keep_numbers(self._written, self.tree)
        check(self.tree)
        self.record = Record.of(self.tree, stacks_of(self.tree), corpus_of(self.tree["data"]))
        self.id = self.record.id
        root = self.tree["trainer"]["default_root_dir"]
        named = Path("experiments/fit/runs") / run_name(self.tree)
        self.folder: Path = self._folder or (Path(root) if root else named)
        taken = [int(p.name) for p in (self.folder / "attempts").glob("*") if p.name.isdigit()]
        self.attempt: int = self._attempt or max(taken, default=0) + 1
        self.attempt_folder = self.folder / "attempts" / str(self.attempt)
        self._find_checkpoint()
        self._open_data()
        if self.subcommand == "fit":  # a cell's folder and checkpoint are its own
            there = self._check_folder()
            self._note_checkpoint(there)

    @property
    def resumed(self) -> bool:
        """Whether the run goes on from a checkpoint."""
        return self._checkpoint is not None

    @property
    def _trains(self) -> bool:
        return self.subcommand in (None, "fit")

    def _find_checkpoint(self) -> None:
        given = self._get(self.config, "ckpt_path")
        if given is not None:
            path = find_checkpoint(given, self.folder)
            self._checkpoint = check_checkpoint(path, self.tree["model"])
            self.config[str(self.subcommand)]["ckpt_path"] = str(path)
        elif self._checkpoint is None and not self._trains:
            raise UserError(f"{self.subcommand}: --ckpt_path is needed: a file, 'last' or 'best'")
        self.resumed_step = 0 if self._checkpoint is None else self._checkpoint.step

    def _check_folder(self) -> Record | None:
        """Refuse the folder of another experiment, be it another config, block or corpus.

        Returns the record of the run that the folder holds, None where it holds none.
        """
        config = self.folder / "config.yaml"
        if not config.exists():
            return None
        found = read_record(self.folder) or self._former_record(config)
        there, here = found.apart(), self.record
        if self.resumed:  # a run may go on to more steps
            steps = {"trainer.max_steps": self.tree["trainer"]["max_steps"]}
            there, here = there.with_config(steps), here.with_config(steps)
        if there.id != here.id:
            raise UserError(
                f"{self.folder}: holds another run ({there.difference(here)}; its id is "
                f"{there.id}, this one's {here.id}); give trainer.default_root_dir another folder"
            )
        return found

    def _note_checkpoint(self, there: Record | None) -> None:
        """Have the id say where a run goes on from the checkpoint of another, or to more steps."""
        if self._checkpoint is None:
            return
        path = self._checkpoint.path
        own = path.resolve().parent == (self.folder / "checkpoints").resolve()
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        self.record = self.record.going_on(there if own else None, digest[:16])
        self.id = self.record.id

    def _former_record(self, config: Path) -> Record:
        """What a run left of which only the config was recorded, with ids of schema 1.

        Its blocks and its corpus are known by what it left at its end, if it came so far.
        """
        tree = yaml.safe_load(config.read_text(encoding="utf-8"))
        blocks, result = self.folder / "block.json", self.folder / RESULT
        stacks = json.loads(blocks.read_text("utf-8")) if blocks.is_file() else stacks_of(self.tree)
        corpus = self.record.corpus
        if result.is_file():
            known = json.loads(result.read_text("utf-8"))["data"]["checksum"]
            now = self.corpus.meta["checksum"]
            corpus = corpus if now == known else f"tokens {known}"
        return Record.of(tree, stacks, corpus)

    def _open_data(self) -> None:
        """Prepare and verify the data, every rank for itself; refuse a checkpoint of others."""
        if self._data is None:
            self._data = data_module(self.tree["data"])
            if self.subcommand in ("test", "predict"):
                require_test(self._data.config)
            if self._checkpoint is not None:
                check_data(self._checkpoint, self._data)
        self.corpus = self._data.corpus

    def after_instantiate_classes(self) -> None:
        super().after_instantiate_classes()
        self.datamodule.corpus = self.corpus
        if self._trains:
            path = None if self._checkpoint is None else self._checkpoint.path
            check_averaging(self.trainer, path)
            self._prepare_folder()
            stacks = self.model.architecture.stacks(self.model.block)
            if any(block.keeps_skip_of_identity for s in stacks.values() for block in s.blocks):
                rank_zero_warn(
                    "identity value or output projections beside an attention skip: He & Hofmann "
                    "2023 (2311.01906, figure 20) found that this trains worse"
                )

    @rank_zero_only
    def _prepare_folder(self) -> None:
        """Make the folder this run's own; a run that starts anew leaves no old curve in it."""
        if (self.folder / "config.yaml").exists():
            (self.folder / RESULT).unlink(missing_ok=True)
            if not self.resumed:
                for old in self.folder.glob("events.out.tfevents.*"):
                    old.unlink()
                for old in (self.folder / "checkpoints").glob("*.ckpt"):
                    shutil.rmtree(old) if old.is_dir() else old.unlink()
        with writing_in(self.folder):
            self.attempt_folder.mkdir(parents=True, exist_ok=True)
        write_record(self.folder, self.record)
        write_whole(self.folder / "config.yaml", yaml.safe_dump(self.tree, sort_keys=False))

    def instantiate_trainer(self, **kwargs: Any) -> pl.Trainer:
        self.divergence = DivergenceMonitor()
        self.throughput = Throughput()
        callbacks: list[pl.Callback] = []
        settings = dict(self._get(self.config_init, "trainer"))
        settings |= {k: v for k, v in self.tree["trainer"].items() if type(v) in (int, float)}
        if self._trains:
            progress = Progress(self.attempt_folder / "progress.json")
            made = {**self._software, "plugins": plugins(self.tree)}
            self.origin = Origin(self.attempt_folder / "provenance.json", made, self.resumed)
            callbacks += [self.origin, self.divergence, self.throughput, GainLogger(), progress]
            callbacks += [Agreement(self.id), Pictures()]
            given = settings["callbacks"] or []
            before = BeforeAveraging(self.divergence, self.folder / "checkpoints" / "last.ckpt")
            settings["callbacks"] = [before, *(given if isinstance(given, list) else [given])]
            if self._pruned_by is not None:
                files = (self.attempt_folder / REPORTS, self.attempt_folder / STOP)
                callbacks.append(Pruning(self._pruned_by, *files))
            if settings["enable_checkpointing"] is not False:
                callbacks += checkpoints(self.folder)
                callbacks.append(SaveOnInterrupt(self.folder / "checkpoints" / "last.ckpt"))
            if settings["logger"] is None:
                # A curve that was drawn beyond the checkpoint is drawn again from there on.
                purge = self.resumed_step + 1 if self.resumed else None
                settings["logger"] = [
                    Events(
                        self.folder, name="", version="", default_hp_metric=False, purge_step=purge
                    ),
                    CSVLogger(self.attempt_folder, name="", version=""),
                ]
        elif settings["logger"] is None:
            settings["logger"] = False
        settings["profiler"] = settings["profiler"] or Unprofiled()
        settings["plugins"] = with_whole_checkpoints(settings["plugins"])
        settings |= {**kwargs, "default_root_dir": str(self.folder)}
        try:
            return self._instantiate_trainer(settings, callbacks)
        except (MisconfigurationException, ValueError, ZeroDivisionError) as error:
            raise UserError(f"trainer: {error}") from error

    def _prepare_subcommand_kwargs(self, subcommand: str) -> dict[str, Any]:
        # Ours hold plain values, and a checkpoint from elsewhere must not run code.
        return {**super()._prepare_subcommand_kwargs(subcommand), "weights_only": True}

    def fit(self, model: Any, datamodule: Any, ckpt_path: str | None = None, **kwargs: Any) -> None:
        """Train, judge, evaluate the test split, and write what the run leaves."""
        trainer = self.trainer
        started = datetime.now(UTC)
        clock = time.perf_counter()
        try:
            trainer.fit(model, datamodule=datamodule, ckpt_path=ckpt_path, **kwargs)
        except Pruned as pruned:
            self._leave_pruned(pruned.step, started, time.perf_counter() - clock)
            return
        if trainer.global_step == 0:
            limits = ("max_steps", "max_epochs", "max_time", "limit_train_batches")
            values = {name: self.tree["trainer"][name] for name in limits}
            given = ", ".join(f"{k} {v}" for k, v in values.items() if v is not None)
            raise UserError(f"trainer: no step was trained ({given}); a result needs at least 1")
        metrics: dict[str, Any] = dict(trainer.callback_metrics)
        finite = self.divergence.divergence is None
        if finite and int(metrics.get("step", -1)) != trainer.global_step:
            metrics |= self._validate_end(model, datamodule)
        outcome = self.divergence.judge(
            float(metrics["val/nll"]) if finite else math.nan,
            datamodule.unigram_entropy,
            datamodule.training_entropy,
            trainer.global_step,
        )
        failure = outcome.divergence
        if finite and model.objective.config.evaluate_test:
            metrics |= trainer.test(model, datamodule=datamodule, verbose=False)[0]
        metrics = {k: float(v) for k, v in metrics.items() if k.startswith(("val/", "test/"))}
        metrics["train/tokens_per_second"] = self.throughput.rate
        result = {
            "schema": SCHEMA,
            "id": self.id,
            "name": self.folder.name,
            "status": "ok" if failure is None else "diverged",
            "outcome": outcome.name,
            "outcome_rule": outcome.rule,
            "diverged": None if failure is None else asdict(failure),
            "metrics": {k: v if math.isfinite(v) else None for k, v in sorted(metrics.items())},
            "unigram_entropy": datamodule.unigram_entropy,
            "steps": trainer.global_step,
            "tokens": self.throughput.tokens,
            "parameters": sum(p.numel() for p in model.parameters()),
            "seconds": time.perf_counter() - clock,
            "device": device_name(trainer),
            "devices": trainer.world_size,
            "peak_memory_bytes": peak_memory_bytes(trainer),
            "slot": self._slot,
            "precision": str(trainer.precision),
            "versions": {name: self._software["libraries"][name] for name in PACKAGES},
            "provenance": self.origin.record,
            "data": datamodule.description,
            "bleu_signature": model.objective.bleu_signature,
            "sacrebleu_signature": model.objective.sacrebleu_signature,
            "attempt": self.attempt,
            "started": started.isoformat(),
            "finished": datetime.now(UTC).isoformat(),
        }
        self._leave(result, model, datamodule)

    def _validate_end(self, model: Any, datamodule: Any) -> dict[str, float]:
        """Evaluate the last step where no validation fell on it, and keep it as others are."""
        saver = self.trainer.checkpoint_callback
        last, best = (self.folder / "checkpoints" / f"{name}.ckpt" for name in ("last", "best"))
        metrics = dict(self.trainer.validate(model, datamodule=datamodule, verbose=False)[0])
        if isinstance(saver, ModelCheckpoint) and self.trainer.is_global_zero:
            score = saver.best_model_score
            if score is None or metrics["val/nll"] < float(score):
                copy_whole(last, best)
        return metrics

    @rank_zero_only
    def _leave(self, result: dict[str, Any], model: Any, datamodule: Any) -> None:
        folder = self.folder
        shutil.copyfile(datamodule.tokenizer.path, folder / "tokenizer.model")
        stacks = model.architecture.stacks(model.block)
        resolved = {side: asdict(spec) for side, spec in stacks.items()}
        write_whole(folder / "block.json", json.dumps(resolved, indent=1))
        environment = {
            "python": platform.python_version(),
            "platform": platform.platform(),
            "cpus": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "device": result["device"],
            "slot": result["slot"],
            "versions": result["versions"],
            "provenance": result["provenance"],
        }
        write_whole(folder / "env.json", json.dumps(environment, indent=1))
        objective = model.objective
        for name, lines in (
            ("hypotheses", objective.hypotheses),
            ("references", objective.targets),
        ):
            if lines:
                write_whole(folder / f"{name}.txt", "".join(f"{line}\n" for line in lines))
        self._join_logs()
        write_whole(folder / RESULT, json.dumps(result, indent=1, allow_nan=False))
        (folder / PRUNED).unlink(missing_ok=True)  # of the time when the grid had a pruner
        scores = ", ".join(f"{k} {v:.4f}" for k, v in result["metrics"].items() if v is not None)
        print(f"{folder}: {result['outcome'].replace('_', ' ')}, {scores}")

    @rank_zero_only
    def _leave_pruned(self, step: int, started: datetime, seconds: float) -> None:
        reports = read_reports(self.folder)
        pruned = {
            "schema": SCHEMA,
            "id": self.id,
            "name": self.folder.name,
            "status": "pruned",
            "step": step,
            "metric": self._pruned_by,
            "value": reports[max(reports)] if reports else None,
            "attempt": self.attempt,
            "provenance": self.origin.record,
            "seconds": seconds,
            "started": started.isoformat(),
            "finished": datetime.now(UTC).isoformat(),
        }
        self._join_logs()
        write_whole(self.folder / PRUNED, json.dumps(pruned, indent=1, allow_nan=False))
        print(f"{self.folder}: pruned after step {step}, {self._pruned_by} {pruned['value']}")

    def _join_logs(self) -> None:
        """Write the curves of the attempts that the run went through."""
        first = 1 if self.resumed else self.attempt
        logs = [self.folder / "attempts" / str(k) for k in range(first, self.attempt + 1)]
        table = join_metrics([log / "metrics.csv" for log in logs])
        write_whole(self.folder / "metrics.csv", table)

    def predict(self, model: Any, datamodule: Any, **kwargs: Any) -> None:
        """Print one prediction a line, in the order of the split."""
        with redirect_stdout(sys.stderr):  # where a progress bar does not stand between them
            batches = self.trainer.predict(model, datamodule=datamodule, **kwargs) or []
        for _, text in sorted(pair for batch in batches for pair in batch):
            print(text)


def checkpoints(folder: Path) -> list[ModelCheckpoint]:
    """Keep ``checkpoints/best.ckpt``, by val/nll, and ``checkpoints/last.ckpt``.

    One callback each: with `save_last`, Lightning writes the last only where it is the best. The
    best comes first, as the last holds its score.
    """
    where = {"dirpath": folder / "checkpoints", "enable_version_counter": False}
    best = ModelCheckpoint(
        filename="best", monitor="val/nll", auto_insert_metric_name=False, **where
    )
    return [best, ModelCheckpoint(filename="last", **where)]


def run_name(tree: Mapping[str, Any]) -> str:
    """Return the folder name of a run outside a grid: preset, warm-up, seed, short id."""
    model = tree["model"]
    preset = model["block"]["preset"]
    warmup = model["schedule"]["warmup_steps"]
    # A command that evaluates a part of a split means the run that was trained without that limit.
    identity = cell_id(without_evaluation_limits(tree))
    return f"{preset}-w{warmup}-s{tree['seed_everything']}-{identity[:8]}"


def device_name(trainer: pl.Trainer) -> str:
    """Say what the run ran on, and on how many of it."""
    device = trainer.strategy.root_device
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        name = f"{device.type} ({platform.machine()}, {torch.get_num_threads()} threads)"
    return f"{trainer.world_size} x {name}" if trainer.world_size > 1 else name


def peak_memory_bytes(trainer: pl.Trainer) -> int:
    """What the first rank used at most: tensors on its GPU, on a CPU its whole process."""
    device = trainer.strategy.root_device
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return peak_resident_bytes()


def join_metrics(logs: list[Path]) -> str:
    """Return one CSV table, a row per step, of the logs of successive attempts.

    Where a later attempt logged a step again, its values stand.
    """
    rows: dict[int, dict[str, str]] = {}
    columns: dict[str, None] = {"epoch": None, "step": None}
    for log in logs:
        if not log.exists():
            continue
        with log.open(newline="", encoding="utf-8") as file:
            seen: dict[int, dict[str, str]] = {}
            for row in csv.DictReader(file):
                step = int(float(row["step"]))
                given = {key: value for key, value in row.items() if value}
                seen.setdefault(step, {}).update(given)
                columns |= dict.fromkeys(given)
        if not seen:
            continue
        first = min(seen)
        # An attempt that was cut short after its last step is only evaluated again.
        seen[first] = rows.get(first, {}) | seen[first]
        rows = {step: row for step, row in rows.items() if step < first} | seen
    lines = [",".join(columns)]
    lines += [",".join(rows[step].get(c, "") for c in columns) for step in sorted(rows)]
    return "\n".join(lines) + "\n"
