"""Checkpoints: find, check against the run, and write them."""

import csv
import io
import json
import os
import platform
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import CheckpointIO, TorchCheckpointIO
from lightning.pytorch.utilities import rank_zero_only

from lightning_app.config.classes import CLASS_FIELDS
from lightning_app.config.identity import completed, leaves
from lightning_app.core.errors import UserError, named, peak_resident_bytes
from lightning_app.core.files import move, replacing, seal, write_whole
from lightning_app.core.schema import as_written
from lightning_app.runs.folder import NAMED, RunFolder
from lightning_app.runs.parent import RUN, SEALED, OtherRun, data_state, other_run, read_checkpoint
from lightning_app.runs.records import CUT_SHORT, sealed
from lightning_app.runs.run import words_of_short
from lightning_app.scores.task_facts import Monitored
from lightning_app.training.datamodule import TextDataModule

OF_EVALUATION: Mapping[str, frozenset[str]] = {
    "block": frozenset({"memory.evaluation_length"}),
    "architecture": frozenset({"clamp_length"}),
}
"""The fields that training does not read, by part of the model."""


class Checkpoint(NamedTuple):
    """A verified checkpoint; those of other programs have no `data` and no `run`."""

    path: Path
    step: int  # after which it was written
    data: Mapping[str, Any] | None  # the record of the data of its run
    averaged: bool  # whether its weights are averages, stored together with the raw weights
    run: Mapping[str, Any] | None  # `id`, `seed` and `parent` of the run that wrote it


class WholeCheckpoints(TorchCheckpointIO):
    """Writes a sealed checkpoint to a temporary file next to its destination and renames it.

    It records that it is sealed: one changed and saved again by `torch.save` lacks the seal.

    Lightning itself writes to the folder for temporary files. If that is on another file system
    than the experiments, the move is a copy, and a kill during the copy leaves neither the old
    checkpoint nor the new one.
    """

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None
    ) -> None:
        with replacing(Path(path)) as file:
            torch.save({**checkpoint, SEALED: True}, file)
            seal(file)


def listed(value: Any) -> list[Any]:
    """Return the objects in a field of the Trainer; null, true and false name none."""
    if value is None or isinstance(value, bool):
        return []
    return list(value) if isinstance(value, list | tuple) else [value]


def with_whole_checkpoints(given: Any) -> list[Any]:
    """Return a Trainer's plugins with `WholeCheckpoints`, unless they have a `CheckpointIO`."""
    plugins = listed(given)
    if not any(isinstance(plugin, CheckpointIO) for plugin in plugins):
        plugins.append(WholeCheckpoints())
    return plugins


def find_checkpoint(given: str, folder: Path) -> Path:
    """Return the file that ``--ckpt_path`` selects: a path, or a run folder's ``last`` or ``best``.

    Raises:
        UserError: if there is no such file.
    """
    path = RunFolder(folder).checkpoint(given) if given in NAMED else Path(given)
    if not path.is_file():
        raise UserError(f"--ckpt_path {given}: there is no file {path}")
    return path


def checkpoint_of_cell(
    folder: RunFolder, identity: str, model: Mapping[str, Any], data: TextDataModule, rank: int = 0
) -> Checkpoint | None:
    """Return the checkpoint from which the cell with this id continues, None to start at step 0.

    If the checkpoint is damaged or from another run or other data, the first rank renames it, and
    the cell starts over.
    """
    path = folder.checkpoint("last")
    if not path.is_file():
        return None
    ending = ".damaged"
    try:
        checkpoint = check_checkpoint(path, model)
        if checkpoint.run is not None and checkpoint.run["id"] != identity:
            raise OtherRun(other_run(path, checkpoint.run, identity))
        ending = ".other-data"
        check_data(checkpoint, data)
    except UserError as error:
        ending = ".other-run" if isinstance(error, OtherRun) else ending
        if rank == 0:
            aside = move(path, path.with_suffix(ending))
            _say(f"{error}; renamed to {aside.name}, the cell starts at step 0")
        return None
    return checkpoint


def check_checkpoint(
    path: Path,
    model: Mapping[str, Any],
    parts: Sequence[str] = ("block", "architecture"),
    *,
    evaluates: bool = False,
) -> Checkpoint:
    """Verify that a checkpoint is undamaged and that the `parts` of its config match the model's.

    With `evaluates` the fields of `OF_EVALUATION` may differ.

    Raises:
        UserError: naming the file, and the first field that differs.
    """
    try:
        checkpoint = read_checkpoint(path)
    except UserError as error:
        raise type(error)(f"--ckpt_path {error}") from error
    stored = checkpoint["hyper_parameters"]
    for field in CLASS_FIELDS:
        if stored.get(field) != model.get(field):
            raise UserError(
                f"--ckpt_path {path}: model.{field} is {as_written(stored.get(field))} there "
                f"and {as_written(model.get(field))} in the config"
            )
    for part in parts:
        # A tuple is a list in the config, and an earlier version lacks later fields.
        known = completed({"model": {part: json.loads(json.dumps(stored[part]))}})["model"][part]
        there, here = dict(leaves(known)), dict(leaves(dict(model[part])))
        free = OF_EVALUATION.get(part, frozenset()) if evaluates else set()
        for key in sorted((there.keys() | here.keys()) - free):
            if there.get(key) != here.get(key):
                raise UserError(
                    f"--ckpt_path {path}: model.{part}.{key} is {there.get(key)} there and "
                    f"{here.get(key)} in the config"
                )
    return Checkpoint(
        path,
        checkpoint["global_step"],
        data_state(checkpoint),
        "averaging_state" in checkpoint,
        checkpoint.get(RUN),
    )


def check_data(checkpoint: Checkpoint, data: TextDataModule) -> None:
    """Refuse a checkpoint trained on other data.

    Raises:
        UserError: naming the file and both digests.
    """
    with named(f"--ckpt_path {checkpoint.path}"):
        if checkpoint.data is None:
            raise UserError("does not record its data, as those of this program do")
        data.load_state_dict(checkpoint.data)


@rank_zero_only
def _say(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


class Saver(ModelCheckpoint):
    """Keeps one file; a run that goes on compares with the score of the file in its folder.

    Lightning drops the score where the folder has another name, and keeps it without the file.
    """

    _reached = 0

    @property
    def path(self) -> Path:
        return Path(str(self.dirpath), f"{self.filename}.ckpt")

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        self._reached = checkpoint["global_step"]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self.path.is_dir():  # of a sharded strategy, which keeps no score in it
            super().load_state_dict(state_dict)
        if self.monitor is None or not self.path.is_file():
            return
        try:
            kept = read_checkpoint(self.path)
        except UserError as error:
            return _say(f"{error}; the next validation replaces it")
        score = kept["callbacks"].get(self.state_key, {}).get("best_model_score")
        if score is not None and kept["global_step"] <= self._reached:
            self.best_model_score = self.kth_value = score
            self.best_model_path = self.kth_best_model_path = str(self.path)
            self.best_k_models = {str(self.path): score}

    def replace_by(self, last: Path, score: float) -> None:
        """Keep a checkpoint that was validated only after the training."""
        checkpoint = torch.load(last, weights_only=True, mmap=True)
        checkpoint["callbacks"][self.state_key]["best_model_score"] = torch.tensor(score)
        WholeCheckpoints().save_checkpoint(checkpoint, self.path)


def checkpoints(folder: Path, monitored: Monitored) -> tuple[Saver, Saver]:
    """Keep ``checkpoints/best.ckpt``, by the monitored metric, and ``checkpoints/last.ckpt``.

    Each has its own callback: with `save_last`, Lightning writes the last one only if it is also
    the best. The best comes first, since the last checkpoint contains its score.
    """
    where = {"dirpath": folder / "checkpoints", "enable_version_counter": False}
    best = Saver(filename="best", monitor=monitored.metric, mode=monitored.mode, **where)
    return best, Saver(filename="last", **where)


def write_result(folder: RunFolder, result: Mapping[str, Any], model: Any, data: Any) -> None:
    """Write the files of a finished run beside its metrics, `result.json` last; print its scores.

    `model` is the LightningModule after its evaluation, `data` the LightningDataModule.
    """
    shutil.copyfile(data.corpus.tokenizer_file, folder.tokenizer)
    stacks = model.architecture.stacks(model.block)
    resolved = {side: asdict(spec) for side, spec in stacks.items()}
    write_whole(folder.block, json.dumps(resolved, indent=1))
    environment = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        **{name: result[name] for name in ("device", "slot", "versions", "provenance")},
    }
    write_whole(folder.environment, json.dumps(environment, indent=1))
    for path, lines in (
        (folder.hypotheses, model.objective.hypotheses),
        (folder.references, model.objective.targets),
    ):
        if lines:
            write_whole(path, "".join(f"{line}\n" for line in lines))
    write_whole(folder.result, json.dumps(sealed(result, folder.path), indent=1))
    folder.pruned.unlink(missing_ok=True)  # from an earlier grid with a pruner
    scores = ", ".join(f"{k} {v:.4f}" for k, v in result["metrics"].items() if v is not None)
    ended = result["outcome"].replace("_", " ")
    if result["outcome"] == CUT_SHORT:
        ended = words_of_short(result["steps"], result["steps_asked"])
    print(f"{folder}: {ended}, {scores}")


def write_pruned(folder: RunFolder, pruned: Mapping[str, Any]) -> None:
    """Write `pruned.json`, and print where the run ended."""
    write_whole(folder.pruned, json.dumps(sealed(pruned, folder.path), indent=1))
    ended = f"{pruned['metric']} {pruned['value']}"
    print(f"{folder}: pruned after step {pruned['step']}, {ended}")


def device_name(trainer: pl.Trainer) -> str:
    """The name of the device of a run, and the number of its processes if there are several."""
    device = trainer.strategy.root_device
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        name = f"{device.type} ({platform.machine()}, {torch.get_num_threads()} threads)"
    return f"{trainer.world_size} x {name}" if trainer.world_size > 1 else name


def peak_memory_bytes(trainer: pl.Trainer) -> int:
    """The peak memory of the first rank: tensor memory on a GPU, the whole process on a CPU."""
    device = trainer.strategy.root_device
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return peak_resident_bytes()


def join_metrics(logs: list[Path]) -> str:
    """Join the logs of successive attempts into one CSV table with one row per step.

    If several attempts logged a step, the last one counts. An unterminated last line was cut off
    when the process was killed. Its step follows the checkpoint, so a later attempt logs it again.
    """
    rows: dict[int, dict[str, str]] = {}
    columns: dict[str, None] = {"epoch": None, "step": None}
    for log in logs:
        if not log.exists():
            continue
        data = log.read_bytes()
        whole = data[: data.rfind(b"\n") + 1].decode("utf-8")
        seen: dict[int, dict[str, str]] = {}
        for row in csv.DictReader(whole.splitlines()):
            step = int(float(row["step"]))
            given = {key: value for key, value in row.items() if value}
            seen.setdefault(step, {}).update(given)
            columns |= dict.fromkeys(given)
        if not seen:
            continue
        first = min(seen)
        # After an attempt interrupted at its last step, only the evaluation is repeated.
        seen[first] = rows.get(first, {}) | seen[first]
        rows = {step: row for step, row in rows.items() if step < first} | seen
    text = io.StringIO()
    table = csv.DictWriter(text, [*columns], lineterminator="\n")
    table.writeheader()
    table.writerows(rows[step] for step in sorted(rows))
    return text.getvalue()
