"""Write small files completely or not at all, and explain the errors of a disk."""

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path

from lightning_app.errors import UserError

_REFUSED = (
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST),
    *(errno.ENOENT, errno.ENAMETOOLONG, errno.ELOOP),  # ENOENT: /proc refuses a new name with it
)
_FULL = (errno.ENOSPC, errno.EDQUOT)
_LITTLE = 1 << 16  # bytes


def write_whole(path: Path, content: str | bytes) -> None:
    """Write `content` to a temporary file beside `path` and move it there in one step.

    A missing folder is made. Only one process may write at a time; it overwrites the temporary file
    that a killed one has left.

    Raises:
        UserError: if the folder cannot be written, or `path` is a folder.
        OSError: if the disk is full; `path` is then unchanged.
    """
    data = content.encode() if isinstance(content, str) else content
    with writing_in(path.parent):
        if path.is_dir():
            raise UserError(f"{path}: cannot be written: it is a folder")
    # TensorBoard would read a file whose name contains "tfevents".
    temporary = path.with_name(f".{path.name}.part".replace("tfevents", "index"))
    try:
        with writing_in(path.parent):
            path.parent.mkdir(parents=True, exist_ok=True)
            with temporary.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
    except (OSError, UserError):
        with suppress(OSError):
            temporary.unlink()
        raise


@contextmanager
def output_folder(folder: Path) -> Iterator[None]:
    """Make `folder` and check that it can be written, before the work that needs it begins.

    If the work fails, folders that were made and are still empty are removed.

    Raises:
        UserError: if the folder cannot be written.
    """
    made: list[Path] = []
    try:
        with writing_in(folder):
            made += [each for each in (folder, *folder.parents) if not each.exists()]
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=folder):
                pass
        yield
    except BaseException:
        for each in made:
            with suppress(OSError):
                each.rmdir()
        raise


@contextmanager
def writing_in(folder: Path) -> Iterator[None]:
    """Turn an error of writing in `folder` into a `UserError` that names it."""
    try:
        yield
    except OSError as error:
        if error.errno not in _REFUSED:
            raise
        raise UserError(f"{folder}: cannot be written: {error.strerror}") from error


def free_name(path: Path) -> Path:
    """Return `path` or, if it exists, `path` with the first free number from 2 on."""
    if not os.path.lexists(path):
        return path
    numbered = (path.with_name(f"{path.name}.{number}") for number in count(2))
    return next(each for each in numbered if not os.path.lexists(each))


def move(source: Path, target: Path) -> Path:
    """Rename a file or folder to `target` or, if that exists, to a free name beside it.

    Returns its new path. Raises `UserError` if a folder cannot be written.
    """
    target = free_name(target)
    with writing_in(target.parent):
        target.parent.mkdir(parents=True, exist_ok=True)
    with writing_in(source.parent):
        return source.rename(target)


def is_disk_full(error: BaseException) -> bool:
    """Whether a full disk or an exhausted quota caused `error`.

    `torch.save` reports it as a RuntimeError without an error number.
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
