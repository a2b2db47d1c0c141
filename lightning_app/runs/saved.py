"""Read checkpoints: each is verified first, so that a damaged one is never used."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from lightning_app.core.errors import UserError
from lightning_app.core.files import Damaged, check_archive
from lightning_app.runs.folder import IDENTITY


def is_finite(state: Mapping[str, Any]) -> bool:
    """Whether all numbers of a state dict are finite."""
    # Parts of tensors sharded over several processes are skipped.
    tensors = (value for value in state.values() if type(value) is torch.Tensor)
    return all(bool(torch.isfinite(value).all()) for value in tensors)


RUN = "run"
"""The entry of a checkpoint that names the run that wrote it: its id, its seed, its parent's id."""


SEALED = "sealed"
"""The entry of a checkpoint written with a seal, so that a missing seal shows a change."""


class OtherRun(UserError):
    """A checkpoint names a run other than the one whose folder contains it."""


def read_checkpoint(path: Path, folder: Path | None = None) -> dict[str, Any]:
    """Return a checkpoint after checking its file; its tensors are memory-mapped.

    Args:
        path: The file.
        folder: The folder of the run it must belong to; None for the folder that contains it.

    Raises:
        OtherRun: if it names a run other than the folder's.
        UserError: naming the file, if it is damaged or not a checkpoint of this program.
    """
    try:
        is_sealed = check_archive(path)
        checkpoint = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        _ = checkpoint["hyper_parameters"]["block"], checkpoint["hyper_parameters"]["architecture"]
        _ = checkpoint["global_step"], checkpoint["vocab_size"]
        finite = is_finite(checkpoint["state_dict"])
        if checkpoint.get(SEALED) and not is_sealed:
            raise Damaged("damaged: it was changed after it was written, as it has lost its seal")
    except Damaged as error:
        raise UserError(f"{path}: {error}") from error
    except Exception as error:
        # Other files fail in many ways, which all get the same message.
        reason = " ".join(str(error).split())
        raise UserError(f"{path}: not a checkpoint of this program ({reason})") from error
    if not finite and _was_finite(checkpoint):
        raise UserError(f"{path}: damaged: holds weights that are not finite, as its run's were")
    if folder is None:
        folder = path.parents[1] if path.parent.name == "checkpoints" else path.parent
    _check_run(path, checkpoint.get(RUN), folder / IDENTITY)
    return checkpoint


def _check_run(path: Path, named: Any, identity: Path) -> None:
    """Refuse a checkpoint that names a run other than that in the folder's `identity.json`.

    Checkpoints without a name are from an earlier version. A run may also continue from the
    checkpoints listed in its identity.
    """
    try:
        known = json.loads(identity.read_text(encoding="utf-8")) if named else {}
    except (OSError, ValueError):
        return  # not a run's folder, or a damaged file, which its own reader reports
    if not named or known.get("id") in (None, named["id"]):
        return
    if begun := known.get("config", {}).get("continued_from"):
        with path.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest()[:16] in begun:
                return
    raise OtherRun(other_run(path, named, known["id"]))


def other_run(path: Path, named: Mapping[str, Any], identity: str) -> str:
    """Report that a checkpoint belongs to a run other than the one with this id."""
    return (
        f"{path}: is of another run (id {named['id']}, seed {named['seed']}) than this one "
        f"(id {identity})"
    )


def data_state(checkpoint: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the saved `TextDataModule.state_dict`; None in old checkpoints without one.

    Lightning stores it under the name of the class, which may be a user's.
    """
    known = {"digest", "tokenizer_sha256"}
    found = (
        each for each in checkpoint.values() if isinstance(each, Mapping) and known <= set(each)
    )
    return next(found, None)


def _was_finite(checkpoint: Mapping[str, Any]) -> bool:
    """Whether the weights were finite when saved; for an older checkpoint, whether the loss was."""
    monitor = checkpoint.get("callbacks", {}).get("DivergenceMonitor", {})
    return checkpoint.get("finite", not monitor.get("first_bad"))
