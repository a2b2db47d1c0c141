"""A folder that appears whole or not at all, however many processes want it at once."""

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock

from lightning_app.errors import UserError

_NOT_OURS = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST}


def complete(folder: Path, make: Callable[[Path], None]) -> Path:
    """Return `folder`, made by `make(partial folder)` if it is not there yet.

    One process makes it under a lock, the others wait. What a killed process left is removed by
    the next one that holds the lock.

    Raises:
        UserError: the folder above may not be written to.
        OSError: the disk is full; nothing is left behind.
    """
    if folder.is_dir():
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
        raise UserError(
            f"{above}: cannot be written to ({error.strerror}); give another folder as data.cache "
            f"or LIGHTNING_APP_CACHE"
        ) from error
    with FileLock(above / f"{folder.name}.lock"):
        if folder.is_dir():
            return folder
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
