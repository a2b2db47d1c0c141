"""Read checkpoints: each is verified first, so that a damaged one is never used."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from lightning_app.archive import Damaged, check_archive
from lightning_app.errors import UserError


def is_finite(state: Mapping[str, Any]) -> bool:
    """Whether all numbers of a state dict are finite."""
    # Parts of a tensor that several processes share are left out.
    tensors = (value for value in state.values() if type(value) is torch.Tensor)
    return all(bool(torch.isfinite(value).all()) for value in tensors)


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Return a checkpoint after checking its file; its tensors are memory-mapped.

    Raises:
        UserError: naming the file, if it is damaged or not a checkpoint of this program.
    """
    try:
        check_archive(path)
        checkpoint = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        _ = checkpoint["hyper_parameters"]["block"], checkpoint["hyper_parameters"]["architecture"]
        _ = checkpoint["global_step"], checkpoint["vocab_size"]
        finite = is_finite(checkpoint["state_dict"])
    except Damaged as error:
        raise UserError(f"{path}: {error}") from error
    except Exception as error:
        # Other files fail in many ways; the user gets one message for all of them.
        reason = " ".join(str(error).split())
        raise UserError(f"{path}: not a checkpoint of this program ({reason})") from error
    if not finite and _was_finite(checkpoint):
        raise UserError(f"{path}: damaged: holds weights that are not finite, as its run's were")
    return checkpoint


def data_state(checkpoint: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return what `TextDataModule.state_dict` gave; None in old checkpoints, which have no record.

    Lightning keeps it under the name of the class, which may be a user's.
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
