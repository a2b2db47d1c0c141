"""What ``--run RUN`` means: the folder of a run, and one of its checkpoints. Fast to import."""

from collections.abc import Sequence
from pathlib import Path

from lightning_app.config.sources import options_of
from lightning_app.errors import UserError, named, nearest
from lightning_app.plugin_copies import require
from lightning_app.records import Unsound, read_result, read_yaml
from lightning_app.run_folder import NAMED, RunFolder

EXPERIMENTS = Path("experiments")
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
    *("data.root", "data.cache", "data.num_workers"),
    *("data.evaluation_stride", "data.evaluation_streams"),
    "verbose",
)
"""What may follow ``--run``: how a run is evaluated. The rest says which run it is."""

_ASKING = ("help", "print_config")


def find_run(given: str | Path, option: str = "--run") -> RunFolder:
    """Return the run that `given` names: its folder, or GRID/NAME in the folder of experiments.

    Args:
        given: As the user wrote it. An existing folder comes first.
        option: The name of the argument, for messages.

    Raises:
        UserError: if there is no such run.
    """
    path = Path(given)
    short = None
    if len(path.parts) == 2 and not path.is_absolute():
        grid, name = path.parts
        short = EXPERIMENTS / grid / "runs" / name
    for folder in (path, short):
        if folder is not None and _holds_run(folder):
            return RunFolder(folder)
    for folder in (path, EXPERIMENTS / path):
        if runs := _names(folder / "runs"):
            raise UserError(
                f"{option} {given}: is a grid; expected one of its runs, such as "
                f"{folder / 'runs' / runs[0]}"
            )
    if path.is_dir():
        raise UserError(f"{option} {given}: has neither config.yaml nor checkpoints, so is no run")
    if path.exists():
        raise UserError(f"{option} {given}: is a file; expected the folder of a run")
    if short is None:
        hint = nearest(path.name, _names(path.parent))
        raise UserError(
            f"{option} {given}: there is no such folder; a run's folder, or GRID/NAME{hint}"
        )
    grids = nearest(path.parts[0], _names(EXPERIMENTS)) if not short.parent.is_dir() else ""
    hint = nearest(short.name, _names(short.parent)) or grids
    raise UserError(f"{option} {given}: there is no folder {path} and no folder {short}{hint}")


def _names(folder: Path) -> list[str]:
    return sorted(each.name for each in folder.iterdir()) if folder.is_dir() else []


def _holds_run(folder: Path) -> bool:
    run = RunFolder(folder)
    return run.config.is_file() or run.checkpoints.is_dir()


def find_checkpoint_of(run: RunFolder, given: str) -> Path:
    """Return the file of a checkpoint: ``best`` or ``last`` of `run`, or a path.

    Raises:
        UserError: if there is no such file. Another checkpoint never takes its place.
    """
    if given not in NAMED:
        path = Path(given)
        if not path.is_file():
            raise UserError(
                f"--checkpoint {given}: there is no such file; "
                f"{', '.join(NAMED)} or the file of a checkpoint{nearest(given, NAMED)}"
            )
        return path
    path = run.checkpoint(given)
    if path.is_file():
        return path
    kept = [name for name in NAMED if run.checkpoint(name).is_file()]
    instead = f"; the run has --checkpoint {kept[0]}" if kept else ""
    raise UserError(
        f"--checkpoint {given}: {path} is missing; a finished run has it if its grid keeps it "
        f"(checkpoints: all, last or best){instead}"
    )


def check_saved(command: str, run: str | Path, checkpoint: str) -> tuple[RunFolder, Path]:
    """Return the run that `command` reads, and its checkpoint. Raises `UserError`."""
    with named(command):
        folder = find_run(run)
        return folder, find_checkpoint_of(folder, checkpoint)


def evaluation_words(run: str | Path, checkpoint: str, words: Sequence[str]) -> list[str]:
    """Return the arguments with which LightningCLI evaluates a checkpoint of a run.

    The run's loggers are left out: an evaluation is not part of the training that they show.

    Args:
        run: The value of ``--run``.
        checkpoint: The value of ``--checkpoint``.
        words: The further arguments.

    Raises:
        UserError: if there is no such run or checkpoint, or for an argument that is not one of
            `EVALUATION_FLAGS`.
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
    """Return the config of a run after the checks of a grid file: it names no other code.

    The folder may come from somebody else. Raises `UserError`.
    """
    from lightning_app.ablation.grid_classes import check_config

    path = config_of(folder)
    require(folder.path)
    with named(f"--run {folder}"):
        try:
            read_result(folder.result, None)  # an unfinished run has none
            check_config(read_yaml(path))
        except Unsound as error:
            raise UserError(str(error)) from error
    return path


def config_of(folder: RunFolder) -> Path:
    """Return the config of a run. Raises `UserError` if it is missing."""
    if not folder.config.is_file():
        raise UserError(f"--run {folder}: {folder.config} is missing")
    return folder.config


def check_flags(words: Sequence[str]) -> None:
    """Refuse arguments beside ``--run`` that say more than how to evaluate.

    Raises:
        UserError: naming the argument, and what to use instead.
    """
    for name, value in options_of(words):
        if name == "config":
            raise UserError(f"--config {value}: --run names the config already; use one of them")
        if name == "ckpt_path":
            raise UserError(f"--ckpt_path {value}: beside --run the name is --checkpoint")
        if name not in (*EVALUATION_FLAGS, *_ASKING):
            raise UserError(
                f"--{name}: beside --run only flags of evaluation are possible, so that the run "
                f"stays what it was{nearest(_last(name), map(_last, EVALUATION_FLAGS))}"
            )


def _last(name: str) -> str:
    return name.rpartition(".")[2]
