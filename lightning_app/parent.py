"""The run that a model starts from, `model.init_from`: its checkpoint, tokenizer and identity.

Fast to import: without torch.
"""

import hashlib
import json
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from lightning_app.errors import UserError
from lightning_app.run_folder import RunFolder

FIELD = "model.init_from"


class Parent(NamedTuple):
    """The files of a run that another one starts from.

    Attributes:
        checkpoint: Its checkpoint.
        tokenizer: The tokenizer of its data.
        id: The id of its experiment; empty for a checkpoint that was moved out of its run's folder.
    """

    checkpoint: Path
    tokenizer: Path
    id: str

    @property
    def digest(self) -> str:
        """The SHA-256 of the checkpoint."""
        stat = self.checkpoint.stat()
        return _digest(self.checkpoint, stat.st_size, stat.st_mtime_ns)


@lru_cache(maxsize=64)
def _digest(path: Path, size: int, time: int) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def find_parent(given: str) -> Parent:
    """Return the run that `model.init_from` names: the folder of a finished run, or a checkpoint.

    A folder means its `checkpoints/last.ckpt`. The tokenizer of a checkpoint lies in the folder of
    its run, or beside it.

    Raises:
        UserError: naming the file that is missing.
    """
    path = Path(given).expanduser()
    if path.is_dir():
        run = RunFolder(path)
        if not run.result.is_file():
            raise UserError(
                f"{FIELD}: {path} has no {run.result.name}: a run that is finished is needed, or "
                "one checkpoint file"
            )
        checkpoint, above = run.checkpoint("last"), path
        if not checkpoint.is_file():
            raise UserError(
                f"{FIELD}: {path} keeps no {checkpoint.relative_to(path)}; name one of its "
                "checkpoint files, or train it with checkpoints: last"
            )
    elif path.is_file():
        checkpoint = path
        above = path.parent.parent if path.parent.name == "checkpoints" else path.parent
    else:
        raise UserError(f"{FIELD}: there is no run folder or checkpoint {path}")
    run = RunFolder(above)
    if not run.tokenizer.is_file():
        raise UserError(
            f"{FIELD}: {run.tokenizer} is missing: the tokenizer of {checkpoint.name} is in the "
            "folder of its finished run"
        )
    return Parent(checkpoint, run.tokenizer, _id(run))


def _id(run: RunFolder) -> str:
    try:
        return str(json.loads(run.identity.read_text(encoding="utf-8"))["id"])
    except FileNotFoundError:
        return ""
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{FIELD}: {run.identity}: damaged") from error


def with_parent(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config in which the parent is named by what it is, not by where it lies.

    So a changed checkpoint makes another child, and a moved one does not.

    Raises:
        UserError: there is no such parent.
    """
    given = config["model"].get("init_from")
    if given is None:
        return dict(config)
    parent = find_parent(given)
    named = f"{parent.id or 'unknown'}@{parent.digest[:16]}"
    return {
        **config,
        "model": {**config["model"], "init_from": named},
        "data": {**config["data"], "init_from": None},
    }
