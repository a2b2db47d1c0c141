"""The run that a model starts from, `model.init_from`: its checkpoint, tokenizer and identity.

Fast to import: without torch.
"""

import hashlib
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from lightning_app.core.errors import UserError, named
from lightning_app.runs.folder import RunFolder
from lightning_app.runs.run import DamagedRun, Run

FIELD = "model.init_from"


class Parent(NamedTuple):
    """The files of a run from which another run starts.

    Attributes:
        checkpoint: Its checkpoint; may be missing for a run that ended non-finite.
        tokenizer: The tokenizer of its data.
        config: Its config.
        id: The id of its experiment.
        non_finite: Whether the run ended non-finite, so that no weights can be taken.
        steps: The step at which the run ended, and its checkpoint's, if its folder was named.
    """

    checkpoint: Path
    tokenizer: Path
    config: Path
    id: str
    non_finite: bool = False
    steps: int | None = None

    @property
    def digest(self) -> str:
        """The SHA-256 of the checkpoint."""
        stat = self.checkpoint.stat()
        return _digest(self.checkpoint, stat.st_size, stat.st_mtime_ns)

    @property
    def name(self) -> str:
        """Its name in the id of a child: its id, and its weights if it has any."""
        return f"{self.id}@{'non_finite' if self.non_finite else self.digest[:16]}"


@lru_cache(maxsize=1024)
def _digest(path: Path, size: int, time: int) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def find_parent(given: str) -> Parent:
    """Return the run that `model.init_from` names: the folder of a finished run or a checkpoint.

    A folder means its `checkpoints/last.ckpt`, or no weights if the run ended non-finite. The
    tokenizer, the config and the identity of a checkpoint are in the folder of its run or next to
    it.

    Raises:
        UserError: naming the file that is missing.
    """
    path = Path(given).expanduser()
    if path.is_dir():
        folder, checkpoint = RunFolder(path), RunFolder(path).checkpoint("last")
        if not folder.result.is_file():
            raise UserError(
                f"{FIELD}: {path} has no {folder.result.name}: a finished run is needed, "
                "or one checkpoint file of a run"
            )
    elif path.is_file():
        checkpoint = path
        inside = path.parent.name == "checkpoints"
        folder = RunFolder(path.parent.parent if inside else path.parent)
    else:
        raise UserError(f"{FIELD}: there is no run folder or checkpoint {path}")
    _check_beside(folder)
    with named(FIELD):
        identity = Run(folder).id or ""
    non_finite, steps = False, None
    if path.is_dir():
        non_finite, steps = _ending(Run(folder, identity))
        if not checkpoint.is_file() and not non_finite:
            raise UserError(
                f"{FIELD}: {path} keeps no {checkpoint.relative_to(path)}; name another of its "
                "checkpoint files, or train it with checkpoints: last"
            )
    return Parent(checkpoint, folder.tokenizer, folder.config, identity, non_finite, steps)


def _check_beside(folder: RunFolder) -> None:
    """Refuse a parent that lacks files needed to use its checkpoint."""
    for file in (folder.tokenizer, folder.config, folder.identity):
        if not file.is_file():
            raise UserError(
                f"{FIELD}: {file} is missing: a checkpoint is used together with the "
                f"{folder.tokenizer.name}, {folder.config.name} and {folder.identity.name} of its "
                "finished run"
            )


def _ending(run: Run) -> tuple[bool, int | None]:
    """Whether a run ended non-finite, and its last step."""
    try:
        result = run.result
    except DamagedRun as error:
        raise UserError(f"{FIELD}: {error.path}: {error}") from error
    return (False, None) if result is None else (result["outcome"] == "non_finite", result["steps"])


def with_parent(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config in which the parent is named by content, not by path.

    A changed checkpoint thus makes another child; a moved one does not.

    Raises:
        UserError: if there is no such parent.
    """
    given = config["model"].get("init_from")
    if given is None:
        return dict(config)
    return {
        **config,
        "model": {**config["model"], "init_from": find_parent(given).name},
        "data": {**config["data"], "init_from": None},
    }


def origin_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parent's part in the provenance of a run; empty if it has no parent."""
    given = config["model"].get("init_from")
    if given is None:
        return {}
    parent = find_parent(given)
    place = str(parent.checkpoint)
    digest = None if parent.non_finite else parent.digest
    return {"parent": {"id": parent.id, "sha256": digest, "checkpoint": place}}
