"""Make a folder so that it appears complete or not at all, with any number of processes.

A folder that is found damaged is renamed and made again.
"""

import errno
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock

from lightning_app.atomic_write import free_name
from lightning_app.errors import UserError

_NOT_OURS = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST}


def complete(
    folder: Path, make: Callable[[Path], None], find_damage: Callable[[Path], str | None]
) -> Path:
    """Return `folder`, made by `make(partial folder)` if it is missing or damaged.

    One process makes it under a lock, the others wait. The next process that holds the lock removes
    the files that a killed process left.

    Args:
        folder: The path of the folder.
        make: Fills an empty folder, which is then renamed to `folder`.
        find_damage: Describes the damage of an existing folder, None if it is intact.

    Raises:
        UserError: the folder above cannot be written.
        OSError: the disk is full; nothing is left behind.
    """
    damage = find_damage(folder) if folder.is_dir() else ""
    if damage is None:
        return folder
    above = folder.parent
    try:
        above.mkdir(parents=True, exist_ok=True)
        # in a read-only folder the lock would wait forever
        probe = above / f".{folder.name}.{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        if error.errno not in _NOT_OURS:
            raise
        why = f"{folder}: damaged: {damage}; " if damage else ""
        raise UserError(
            f"{why}{above}: cannot be written to ({error.strerror}); give another folder as "
            f"data.cache or LIGHTNING_APP_CACHE"
        ) from error
    with FileLock(above / f"{folder.name}.lock"):
        if folder.is_dir():
            damage = find_damage(folder)
            if damage is None:
                return folder
            aside = free_name(above / f"{folder.name}.damaged")
            folder.rename(aside)
            print(
                f"{folder}: damaged: {damage}; renamed to {aside.name} and made again",
                file=sys.stderr,
                flush=True,
            )
        partial = above / f"{folder.name}.partial"
        if partial.exists():
            shutil.rmtree(partial)
        partial.mkdir()
        try:
            make(partial)
            os.replace(partial, folder)
        finally:
            if partial.exists():
                shutil.rmtree(partial)
    return folder
