"""Small files written whole or not at all, and the ways in which a disk refuses them."""

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lightning_app.errors import UserError

_FULL = (errno.ENOSPC, errno.EDQUOT)
_LITTLE = 1 << 16  # bytes


def write_whole(path: Path, text: str) -> None:
    """Write `text` to a temporary file beside `path` and move it there in one step.

    One writer at a time; what a killed writer left behind is overwritten by the next.
    """
    temporary = path.with_name(f".{path.name}.part")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


@contextmanager
def writing_in(folder: Path) -> Iterator[None]:
    """Turn a refusal to write in `folder` into a `UserError` that names it."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR):
            raise
        raise UserError(f"{folder}: cannot be written: {error.strerror}") from error


def is_disk_full(error: BaseException) -> bool:
    """Whether a full disk or an exhausted quota is what caused `error`.

    `torch.save` reports it as a RuntimeError without a number.
    """
    link: BaseException | None = error
    while link is not None:
        if isinstance(link, OSError) and link.errno in _FULL:
            return True
        if "No space left on device" in str(link) or "PytorchStreamWriter failed" in str(link):
            return True
        link = link.__cause__ or link.__context__
    return False


def disk_full(folder: Path) -> OSError:
    """The error that stops a grid whose disk is full."""
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))


def has_no_room(folder: Path) -> bool:
    return shutil.disk_usage(folder).free < _LITTLE
