"""Checkpoints: which one a command starts from, whether it is of this model, how one is written."""

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import torch
from lightning.pytorch.plugins import CheckpointIO, TorchCheckpointIO

from lightning_app.errors import UserError
from lightning_app.identity.relevant import leaves

NAMED = ("last", "best")


class WholeCheckpoints(TorchCheckpointIO):
    """Writes a checkpoint beside its place and moves it there in one step.

    Lightning writes it in the folder for temporary files. Where that is another file system, as
    with experiments on a shared one, the move is a copy, and a kill in its middle leaves neither
    the old checkpoint nor the new.
    """

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None
    ) -> None:
        with _replacing(Path(path)) as file:
            torch.save(checkpoint, file)


def with_whole_checkpoints(plugins: Any) -> list[Any]:
    """Return a Trainer's plugins with the above, unless they bring another way to write."""
    plugins = list(plugins) if isinstance(plugins, list | tuple) else [plugins]
    plugins = [plugin for plugin in plugins if plugin is not None]
    if not any(isinstance(plugin, CheckpointIO) for plugin in plugins):
        plugins.append(WholeCheckpoints())
    return plugins


def copy_whole(source: Path, target: Path) -> None:
    """Copy a file so that `target` is never half of one."""
    with source.open("rb") as original, _replacing(target) as file:
        shutil.copyfileobj(original, file)


@contextmanager
def _replacing(path: Path) -> Iterator[BinaryIO]:
    """Give a file that takes the place of `path` once it is whole and on the disk."""
    temporary = path.with_name(f".{path.name}.part")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise


def find_checkpoint(given: str, folder: Path) -> Path:
    """Return the file that ``--ckpt_path`` means: a path, or ``last`` or ``best`` of a run folder.

    Raises:
        UserError: if there is no such file.
    """
    path = folder / "checkpoints" / f"{given}.ckpt" if given in NAMED else Path(given)
    if not path.is_file():
        raise UserError(f"--ckpt_path {given}: there is no file {path}")
    return path


def checkpoint_of_cell(folder: Path, model: Mapping[str, Any], rank: int = 0) -> Path | None:
    """Return the checkpoint from which a cell goes on, or None where it starts at step 0.

    One that cannot be read is put aside by the first rank, as the rest of the folder can be made
    again from nothing.
    """
    path = folder / "checkpoints" / "last.ckpt"
    if not path.is_file():
        return None
    try:
        check_checkpoint(path, model)
    except UserError as error:
        if rank == 0:
            print(f"{error}; the cell starts at step 0", flush=True)
            path.replace(path.with_suffix(".damaged"))
        return None
    return path


def check_checkpoint(path: Path, model: Mapping[str, Any]) -> int:
    """Return the step of a checkpoint; refuse one of another model or that cannot be read.

    Raises:
        UserError: naming the file, and the first field that differs.
    """
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        stored = checkpoint["hyper_parameters"]
    except Exception as error:
        # A damaged file fails in many ways; all of them mean the same to who named it.
        raise UserError(f"--ckpt_path {path}: no checkpoint of this program ({error})") from error
    for part in ("block", "architecture"):
        there, here = dict(leaves(stored[part])), dict(leaves(dict(model[part])))
        for key in sorted(there.keys() | here.keys()):
            if there.get(key) != here.get(key):
                raise UserError(
                    f"--ckpt_path {path}: model.{part}.{key} is {there.get(key)} there and "
                    f"{here.get(key)} in the config"
                )
    return checkpoint["global_step"]
