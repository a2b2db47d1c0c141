"""Write a file whole or not at all."""

import errno
import os
from pathlib import Path

from lightning_app.errors import UserError

REFUSED = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST)


def write_whole(path: Path, content: str | bytes) -> None:
    """Write to a temporary name beside `path`, then rename over it.

    Raises `UserError` naming the folder where it may not be written; a full disk stays an `OSError`
    and leaves `path` as it was.
    """
    data = content.encode() if isinstance(content, str) else content
    temporary = path.with_name(f".{path.name[:60]}.{os.getpid()}.part".replace("tfevents", "index"))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(data)
        os.replace(temporary, path)
    except OSError as error:
        if temporary.is_file():
            temporary.unlink()
        if error.errno in REFUSED:
            raise UserError(f"{path.parent}: cannot write {path.name}: {error.strerror}") from error
        raise
