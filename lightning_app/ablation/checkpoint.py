"""The checkpoint that a command starts from: where it lies, and whether it is of this model."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from lightning_app.config import leaves
from lightning_app.errors import UserError

NAMED = ("last", "best")


def find_checkpoint(given: str, folder: Path) -> Path:
    """Return the file that ``--ckpt_path`` means: a path, or ``last`` or ``best`` of a run folder.

    Raises:
        UserError: if there is no such file.
    """
    path = folder / "checkpoints" / f"{given}.ckpt" if given in NAMED else Path(given)
    if not path.is_file():
        raise UserError(f"--ckpt_path {given}: there is no file {path}")
    return path


def checkpoint_of_cell(folder: Path, model: Mapping[str, Any]) -> Path | None:
    """Return the checkpoint from which a cell goes on, or None where it starts at step 0.

    One that cannot be read is put aside, as the rest of the folder can be made again from nothing.
    """
    path = folder / "checkpoints" / "last.ckpt"
    if not path.is_file():
        return None
    try:
        check_checkpoint(path, model)
    except UserError as error:
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
