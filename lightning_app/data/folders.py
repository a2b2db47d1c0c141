"""A folder that appears whole or not at all, however many processes want it at once.

One that was damaged since is put aside and made again.
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
    """Return `folder`, made by `make(partial folder)` if it is not there yet, or is damaged.

    One process makes it under a lock, the others wait. What a killed process left is removed by
    the next one that holds the lock.

    Args:
        folder: The folder that is wanted.
        make: Fills an empty folder, which then gets that name.
        find_damage: Says what is wrong with a folder that is there, None for nothing.

    Raises:
        UserError: the folder above may not be written to.
        OSError: the disk is full; nothing is left behind.
    """
    damage = find_damage(folder) if folder.is_dir() else ""
    if damage is None:
        return folder
    above = folder.parent
    try:
        above.mkdir(parents=True, exist_ok=True)
        # a read-only folder would make the lock wait forever
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
                f"{folder}: damaged: {damage}; put aside as {aside.name} and made again",
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
