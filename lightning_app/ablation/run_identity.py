"""Check that the folder of a run holds no other experiment."""

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from lightning_app.errors import UserError, named
from lightning_app.identity.record import Record, read_record
from lightning_app.identity.relevant import completed, relevant
from lightning_app.records import Unsound, read_yaml
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
    found = read_record(folder.path) or _of_config_alone(folder, record)
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


def _of_config_alone(folder: RunFolder, record: Record) -> Record:
    """The record of a folder with a `config.yaml` and no run, which a user may have put there."""
    if folder.result.exists() or folder.last_attempt():
        raise UserError(
            f"{folder.identity}: missing, so that nothing says which run the folder holds; move "
            "the folder away"
        )
    try:
        with named(folder.config):
            return replace(record, config=relevant(completed(read_yaml(folder.config))))
    except (Unsound, LookupError, TypeError, AttributeError) as error:
        reason = str(error) if isinstance(error, Unsound) else "damaged"
        raise UserError(f"{folder.config}: {reason}; move the run's folder away") from error
