"""A run that a command names: its folder, its checkpoints and its records."""

import re
from collections.abc import Mapping, Sequence
from glob import escape
from pathlib import Path
from typing import Any, NamedTuple

from lightning_app.commands.options import EXPERIMENTS
from lightning_app.config.identity import Record, completed, leaves, read_record, relevant, require
from lightning_app.config.sources import options_of
from lightning_app.config.tree import BLOCK, PRESET
from lightning_app.core.errors import UserError, named, nearest
from lightning_app.runs.folder import NAMED, STORE, RunFolder
from lightning_app.runs.records import is_sealed
from lightning_app.runs.run import DamagedRun, Run, RunState, read_progress
from lightning_app.runs.store import stored
from lightning_app.scores.task_facts import task_facts

BEST = "best"
"""The checkpoint that is used without ``--checkpoint``."""

EVALUATION_FLAGS = (
    *("trainer.accelerator", "trainer.devices", "trainer.strategy", "trainer.precision"),
    *("trainer.limit_val_batches", "trainer.limit_test_batches", "trainer.limit_predict_batches"),
    *("trainer.enable_progress_bar", "trainer.inference_mode"),
    *("trainer.deterministic", "trainer.benchmark"),
    *("model.compile", "model.objective.beam", "model.objective.length_penalty"),
    *("model.objective.validation_bleu", "model.block.memory.evaluation_length"),
    "model.architecture.clamp_length",
    *("data.root", "data.tokenizer_file", "data.cache", "data.num_workers"),
    *("data.evaluation_stride", "data.evaluation_streams"),
    "verbose",
)
"""The options allowed after ``--run``: they set how a run is evaluated. Others identify the run."""

_ASKING = ("help", "print_config")


def find_run(text: str | Path, option: str = "--run") -> RunFolder:
    """Return the run that `text` names.

    The text may be its folder, which takes precedence, GRID/NAME, a name in `ablate fit` or any
    grid, an id, or the first digits of one. Raises `UserError` if there is no such run, or several;
    `option` is the name of the argument.
    """
    path = Path(text)
    short = None
    if len(path.parts) == 2 and not path.is_absolute():
        grid, name = path.parts
        short = EXPERIMENTS / grid / "runs" / name
    for folder in (path, short):
        if folder is not None and _holds_run(folder):
            return RunFolder(folder)
    if len(path.parts) == 1 and (named := _by_name(path.name, option)):
        return named
    for folder in (path, EXPERIMENTS / path):
        if runs := _names(folder / "runs"):
            raise UserError(
                f"{option} {text}: is a grid; expected one of its runs, such as "
                f"{folder / 'runs' / runs[0]}"
            )
    if path.is_dir():
        raise UserError(f"{option} {text}: has neither config.yaml nor checkpoints, so is no run")
    if path.exists():
        raise UserError(f"{option} {text}: is a file; expected the folder of a run")
    if short is None:
        hint = nearest(path.name, _names(path.parent))
        raise UserError(
            f"{option} {text}: there is no such folder; a run's folder, GRID/NAME, a name or an id"
            f"{hint}"
        )
    grids = nearest(path.parts[0], _names(EXPERIMENTS)) if not short.parent.is_dir() else ""
    hint = nearest(short.name, _names(short.parent)) or grids
    raise UserError(f"{option} {text}: there is no folder {path} and no folder {short}{hint}")


_DIGITS = re.compile(r"[0-9a-f]{4,16}")


def _by_name(text: str, option: str) -> RunFolder | None:
    """The run with this name, this id or this prefix of its id; None without one."""
    paths = sorted(EXPERIMENTS.glob(f"*/runs/{escape(text)}"), key=lambda p: p.parts[-3] != "fit")
    paths = [path for path in paths if _holds_run(path)]
    if not paths and (EXPERIMENTS / STORE / text).is_dir():
        paths = [stored(EXPERIMENTS, text)]
    elif not paths and _DIGITS.fullmatch(text):
        names = [name for name in _names(EXPERIMENTS / STORE) if name.startswith(text)]
        paths = [stored(EXPERIMENTS, name) for name in names if "@" not in name]
    runs = {path.resolve(): RunFolder(path) for path in reversed(paths)}
    if len(runs) > 1:
        several = ", ".join(map(str, sorted(paths)[:3]))
        raise UserError(f"{option} {text}: names {len(runs)} runs (such as {several})")
    for run in runs.values():
        for grid, name in run.grids().items() if run.path.parent.name == STORE else ():
            return RunFolder(EXPERIMENTS / grid / "runs" / name)  # the name that users know
        return run
    return None


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


def _holds_run(folder: Path) -> bool:
    run = RunFolder(folder)
    return run.config.is_file() or run.checkpoints.is_dir()


def find_checkpoint_of(run: RunFolder, name: str) -> Path:
    """Return the file of a checkpoint: ``best`` or ``last`` of `run`, or a path.

    Raises `UserError` without such a file: another checkpoint never takes its place.
    """
    if name not in NAMED:
        path = Path(name)
        if not path.is_file():
            raise UserError(
                f"--checkpoint {name}: there is no such file; "
                f"{', '.join(NAMED)} or the file of a checkpoint{nearest(name, NAMED)}"
            )
        return path
    path = run.checkpoint(name)
    if path.is_file():
        return path
    kept = [word for word in NAMED if run.checkpoint(word).is_file()]
    instead = f"; the run has --checkpoint {kept[0]}" if kept else ""
    raise UserError(
        f"--checkpoint {name}: {path} is missing; a finished run has it if its grid keeps it "
        f"(checkpoints: all, last or best){instead}"
    )


def check_saved(command: str, run: str | Path, checkpoint: str) -> tuple[RunFolder, Path]:
    """Return the run that `command` reads, and its checkpoint. Raises `UserError`."""
    with named(command):
        folder = find_run(run)
        return folder, find_checkpoint_of(folder, checkpoint)


def evaluation_words(run: str | Path, checkpoint: str, words: Sequence[str]) -> list[str]:
    """Return the arguments with which commands such as `test` evaluate a checkpoint of a run.

    `words` are additional arguments. The run's loggers are left out: an evaluation is not part of
    the training that they show. Raises `UserError` if there is no such run or checkpoint, or for an
    argument that is not one of `EVALUATION_FLAGS`.
    """
    folder = find_run(run)
    check_flags(words)
    path = find_checkpoint_of(folder, checkpoint)
    config = checked_config_of(folder)
    return [*("--config", str(config), "--ckpt_path", str(path), "--trainer.logger=false"), *words]


def probed_configs(runs: Sequence[str], checkpoint: str, words: Sequence[str]) -> list[Path]:
    """Return the configs of the runs to probe, after the checks of `evaluation_words`."""
    check_flags(words)
    folders = [find_run(run) for run in runs]
    for folder in folders:
        find_checkpoint_of(folder, checkpoint)
    return [checked_config_of(folder) for folder in folders]


def checked_config_of(folder: RunFolder) -> Path:
    """Return the config of a run after the checks of a grid file: it names no outside code.

    The folder may come from someone else. Raises `UserError`.
    """
    from lightning_app.config.grid import check_config

    path = folder.config
    if not path.is_file():
        raise UserError(f"--run {folder}: {path} is missing")
    require(folder.path)
    with named(f"--run {folder}"):
        run = Run(folder)
        try:
            _ = run.result  # an unfinished run has none
        except DamagedRun as error:
            raise UserError(str(error)) from error
        check_config(run.config)
    return path


def check_flags(words: Sequence[str]) -> None:
    """Refuse arguments besides ``--run`` that change more than evaluation. Raises `UserError`."""
    for name, value in options_of(words):
        if name == "config":
            raise UserError(f"--config {value}: --run names the config already; use one of them")
        if name == "ckpt_path":
            raise UserError(f"--ckpt_path {value}: with --run the option is --checkpoint")
        if name not in (*EVALUATION_FLAGS, *_ASKING):
            raise UserError(
                f"--{name}: with --run only evaluation flags are possible, so that the run "
                f"stays what it was{nearest(_last(name), map(_last, EVALUATION_FLAGS))}"
            )


def _last(name: str) -> str:
    return name.rpartition(".")[2]


_OF_RESULT = (
    *("outcome_rule", "diverged", "steps", "steps_asked", "tokens", "parameters", "seconds"),
    *("device", "devices", "precision", "peak_memory_bytes", "started", "finished"),
)
_MADE = ("device", "devices", "precision")


class Recorded(NamedTuple):
    """A run as its folder describes it.

    `config` has the fields added by later versions at their defaults; `record` holds the values
    that `id` is computed from.
    """

    folder: RunFolder
    config: Mapping[str, Any]
    id: str
    record: Record
    state: RunState

    @property
    def outcome(self) -> Mapping[str, Any]:
        """The content of `result.json` or `pruned.json`; empty for a run that has not ended."""
        state = self.state
        return state.result or state.pruned or state.short or {}

    @property
    def made(self) -> dict[str, Any]:
        """The provenance of the result, by dotted name, without the command line."""
        provenance = dict(self.outcome.get("provenance") or {})
        provenance.pop("command", None)
        return {name: self.outcome.get(name) for name in _MADE} | dict(leaves(provenance))


def read_run(text: str) -> Recorded:
    """Read the folder of a run, as `find_run` finds it. Raises `UserError`, also for damage."""
    folder = find_run(text, "RUN")
    try:
        written = Run(folder).config
        with named(folder.config):
            config = completed(written)
        record, identity = read_record(folder.path), Run(folder).id
        if record is None or identity is None:
            raise UserError(f"{folder}: {folder.identity.name} is missing")
        relevant(config)  # fails for what is no config
        state = Run(folder, identity).state
    except DamagedRun as error:
        raise UserError(f"{error.path}: {error}") from error
    except (LookupError, TypeError, AttributeError) as error:
        raise UserError(f"{folder.config}: damaged: not the config of a run") from error
    return Recorded(folder, config, identity, record, state)


def described_run(run: Recorded) -> dict[str, Any]:
    """Return a run's identity, its end and its provenance, by name."""
    model, data = run.config["model"], run.config["data"]
    kind = model["objective"]["kind"]
    result = run.outcome
    progress = read_progress(run.folder, run.state.attempts) if not result else None
    return {
        "folder": str(run.folder),
        "name": run.folder.name,
        "grid": run.folder.grid,
        "grids": run.folder.grids(),
        "id": run.id,
        "task": kind,
        "task_title": task_facts(kind).title,
        "preset": model["block"]["preset"],
        "block": {
            key.removeprefix(BLOCK): value
            for key, value in relevant(run.config).items()
            if key.startswith(BLOCK) and key != PRESET
        },
        "data": {"name": data["name"], **(result.get("data") or {})},
        "seed": run.config["seed_everything"],
        "max_steps": run.config["trainer"]["max_steps"],
        "state": "cut short" if run.state.short else run.state.word,
        "error": run.state.error,
        "step": progress.get("step") if progress else result.get("steps", result.get("step")),
        **{name: result.get(name) for name in _OF_RESULT},
        "attempts": run.state.attempts,
        "sealed": is_sealed(result) if result else None,
        "checkpoints": [name for name in NAMED if run.folder.checkpoint(name).is_file()],
        "metrics": dict(result.get("metrics") or {}),
        "provenance": dict(result.get("provenance") or {}),
    }
