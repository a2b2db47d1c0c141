"""The run that a model starts from, `model.init_from`: its checkpoint, tokenizer and identity.

Fast to import: without torch.
"""

import hashlib
import json
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from lightning_app.core.errors import UserError, named
from lightning_app.core.files import Damaged, check_archive
from lightning_app.runs.folder import IDENTITY, RunFolder
from lightning_app.runs.run import DamagedRun, Run


def is_finite(state: Mapping[str, Any]) -> bool:
    """Whether all numbers of a state dict are finite."""
    import torch

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

    It must belong to the run in `folder`, by default the one whose folder contains it.

    Raises:
        OtherRun: if it names a run other than the folder's.
        UserError: naming the file, if it is damaged or not a checkpoint of this program.
    """
    import torch

    try:
        is_sealed = check_archive(path)
        checkpoint = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        _ = checkpoint["hyper_parameters"]["block"], checkpoint["hyper_parameters"]["architecture"]
        _ = checkpoint["global_step"], checkpoint["vocab_size"]
        sound = is_finite(checkpoint["state_dict"]) or not checkpoint["finite"]
        if checkpoint.get(SEALED) and not is_sealed:
            raise Damaged("damaged: it was changed after it was written, as it has lost its seal")
    except Damaged as error:
        raise UserError(f"{path}: {error}") from error
    except Exception as error:
        # Other files fail in many ways, which all get the same message.
        reason = " ".join(str(error).split())
        raise UserError(f"{path}: not a checkpoint of this program ({reason})") from error
    if not sound:
        raise UserError(f"{path}: damaged: holds weights that are not finite, as its run's were")
    if folder is None:
        folder = path.parents[1] if path.parent.name == "checkpoints" else path.parent
    _check_run(path, checkpoint.get(RUN), folder / IDENTITY)
    return checkpoint


def _check_run(path: Path, named: Any, identity: Path) -> None:
    """Refuse a checkpoint that names a run other than that in the folder's `identity.json`.

    A run may also continue from the checkpoints listed in its identity. Those of other programs
    have no name.
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
    """Return the saved `TextDataModule.state_dict`; None in checkpoints of other programs.

    Lightning stores it under the name of the class, which may be a user's.
    """
    known = {"digest", "tokenizer_sha256"}
    held = (each for each in checkpoint.values() if isinstance(each, Mapping))
    return next((each for each in held if known <= each.keys()), None)


FIELD = "model.init_from"


class Parent(NamedTuple):
    """The files of a run from which another run starts."""

    checkpoint: Path  # may be missing for a run that ended non-finite
    tokenizer: Path
    config: Path
    id: str  # of its experiment
    non_finite: bool = False  # so that no weights can be taken
    steps: int | None = None  # at its end, and of its checkpoint, if its folder was named

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
    for file in (folder.tokenizer, folder.config, folder.identity):
        if not file.is_file():
            raise UserError(
                f"{FIELD}: {file} is missing: a checkpoint is used together with the "
                f"{folder.tokenizer.name}, {folder.config.name} and {folder.identity.name} of its "
                "finished run"
            )
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


def _ending(run: Run) -> tuple[bool, int | None]:
    """Whether a finished run ended non-finite, and its last step."""
    try:
        state = run.state
    except DamagedRun as error:
        raise UserError(f"{FIELD}: {error.path}: {error}") from error
    if state.short:
        raise UserError(
            f"{FIELD}: {run.folder.path}: its run was {state.error}: a finished run is needed, or "
            "one checkpoint file of a run"
        )
    result = state.result
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
