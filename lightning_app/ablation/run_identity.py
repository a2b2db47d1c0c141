"""Check that the folder of a run holds no other experiment."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_app.errors import UserError
from lightning_app.identity.record import Record, read_record
from lightning_app.run_folder import RunFolder


def check_folder(
    folder: RunFolder, record: Record, tree: Mapping[str, Any], resumed: bool
) -> Record | None:
    """Refuse the folder of another experiment: of another config, block or corpus.

    Args:
        folder: The folder of the new run.
        record: The values that its id is computed from.
        tree: Its resolved config.
        resumed: Whether it continues from a checkpoint; it may then train more steps.

    Returns:
        The record of the run that the folder holds, None if it holds none.

    Raises:
        UserError: naming the first difference, or the damaged file.
    """
    if not folder.config.exists():
        return None
    found = read_record(folder.path)
    if found is None:
        raise UserError(
            f"{folder.identity}: missing, so that nothing says which run the folder holds; move "
            "the folder away"
        )
    there, here = found.apart(), record
    if resumed:
        steps = {"trainer.max_steps": tree["trainer"]["max_steps"]}
        there, here = there.with_config(steps), here.with_config(steps)
    if there.id != here.id:
        raise UserError(
            f"{folder}: holds another run ({there.difference(here)}; its id is {there.id}, the id "
            f"of this run is {here.id}); set trainer.default_root_dir to another folder"
        )
    return found


def with_checkpoint(
    record: Record, there: Record | None, checkpoint: Path, folder: RunFolder
) -> Record:
    """The record of a run that starts from a checkpoint; one of another run is part of its id.

    `there` is the record of the run that the folder holds.
    """
    own = checkpoint.resolve().parent == folder.checkpoints.resolve()
    with checkpoint.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return record.going_on(there if own else None, digest[:16])
