"""Files that are written completely or not at all, and seals that reveal later changes.

Seals find accidents and casual edits. They are not signatures: a process that can write a file can
also seal it. The seal of a record, a mapping written as JSON, is one of its fields.
`torch.save` writes a zip archive. Its seal is the comment at its end: part of the same file, so
that no kill can separate the two, and readers of zip files accept it. The sums in a zip archive do
not cover its headers and padding; the seal covers every bit.
"""

import errno
import hashlib
import json
import os
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from io import BufferedRandom, BufferedReader
from itertools import count
from pathlib import Path
from typing import Any

from lightning_app.core.errors import UserError, causes

_REFUSED = (  # /proc refuses a new name with ENOENT
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST, errno.EXDEV),
    *(errno.ENOENT, errno.ENAMETOOLONG, errno.ELOOP),
)
_FULL = (errno.ENOSPC, errno.EDQUOT)


def write_whole(path: Path, content: str | bytes) -> None:
    """Write `content` to a temporary file next to `path` and move it there in one step.

    A missing folder is created. Only one process may write at a time; it overwrites the temporary
    file of a killed process.

    Raises:
        UserError: if the folder cannot be written, or `path` is a folder.
        OSError: if the disk is full; `path` is then unchanged.
    """
    data = content.encode() if isinstance(content, str) else content
    with writing_in(path.parent):
        if path.is_dir():
            raise UserError(f"{path}: cannot be written: it is a folder")
        with replacing(path) as file:
            file.write(data)


@contextmanager
def replacing(path: Path) -> Iterator[BufferedRandom]:
    """Yield a file that replaces `path` once complete and on disk."""
    # TensorBoard would read a file whose name contains "tfevents".
    temporary = path.with_name(f".{path.name}.part".replace("tfevents", "index"))
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with temporary.open("w+b") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise


@contextmanager
def output_folder(folder: Path) -> Iterator[None]:
    """Create `folder` and check that it is writable, before the work that needs it begins.

    If the work fails, created folders that are still empty are removed.

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
    """Turn an error while writing in `folder` into a `UserError` that names it."""
    try:
        yield
    except OSError as error:
        if error.errno not in _REFUSED:
            raise
        raise UserError(f"{folder}: cannot be written: {error.strerror}") from error


def free_name(path: Path) -> Path:
    """Return `path` or, if it exists, `path` with the first free number, from 2."""
    if not os.path.lexists(path):
        return path
    numbered = (path.with_name(f"{path.name}.{number}") for number in count(2))
    return next(each for each in numbered if not os.path.lexists(each))


def move(source: Path, target: Path) -> Path:
    """Rename a file or folder to `target` or, if that exists, to a free name next to it.

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
    said = ("No space left on device", "PytorchStreamWriter failed")
    return any(
        (isinstance(link, OSError) and link.errno in _FULL) or any(s in str(link) for s in said)
        for link in causes(error)
    )


SEAL = "seal"
"""The field of a record that holds its seal."""

_FIRST = b"PK\x03\x04"
_LAST = b"PK\x05\x06"  # of the record that ends an archive
_LAST_SIZE = 22  # bytes of that record, without the comment
_MARK = b"sha256 "
_SEAL_SIZE = len(_MARK) + 64
_CHUNK = 1 << 20


class Damaged(Exception):
    """A file changed after it was written; the message describes the damage."""


def with_seal(tree: Mapping[str, Any], files: Mapping[str, str]) -> dict[str, Any]:
    """A record with its seal over itself and over files with these digests."""
    body = {key: value for key, value in tree.items() if key != SEAL}
    return {**body, SEAL: {"sha256": _content_digest(body, files), "files": dict(files)}}


def check_seal(tree: Mapping[str, Any]) -> dict[str, str]:
    """Check the content of a sealed record, and return the digests of files in its seal.

    Raises:
        Damaged: if there is no seal, or the record was changed.
    """
    seal = tree.get(SEAL)
    if not isinstance(seal, dict) or not isinstance(files := seal.get("files"), dict):
        raise Damaged(f"its {SEAL} is missing or damaged")
    body = {key: value for key, value in tree.items() if key != SEAL}
    if seal.get("sha256") != _content_digest(body, files):
        raise Damaged(f"damaged: its content is not what its {SEAL} says; it was changed")
    return files


def sha256_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _content_digest(body: Mapping[str, Any], files: Mapping[str, Any]) -> str:
    text = json.dumps([body, files], sort_keys=True, separators=(",", ":"), allow_nan=False)
    return sha256_of(text.encode())


def seal(file: BufferedRandom) -> None:
    """Append the SHA-256 of its content to an archive that is open for reading and writing."""
    file.seek(-2, os.SEEK_END)  # the position of the comment's length
    file.write(_SEAL_SIZE.to_bytes(2, "little"))
    file.write(_MARK + _digest(file, file.tell()).encode())


def check_archive(path: Path) -> bool:
    """Check that an archive is complete and that no byte changed.

    In an archive without a seal the checksums of its parts are checked. Returns whether it has one.

    Raises:
        Damaged: with a description of the damage.
    """
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(0)
        first = file.read(len(_FIRST))
        file.seek(max(0, size - _LAST_SIZE - _SEAL_SIZE))
        last = file.read()
        seal = last[_LAST_SIZE:]
        # One changed bit cannot make a sealed archive look like one without a seal.
        is_plain = last[-_LAST_SIZE:].startswith(_LAST)
        is_sealed = last.startswith(_LAST) and seal.startswith(_MARK)
        if first != _FIRST or not (is_plain or is_sealed):
            raise Damaged(f"torn or damaged: not a complete checkpoint ({size:,} bytes)")
        if is_sealed:
            if _digest(file, size - _SEAL_SIZE) != seal[len(_MARK) :].decode("latin-1"):
                raise Damaged("damaged: its bytes are not those that were written")
            return True
    try:
        with zipfile.ZipFile(path) as archive:
            broken = archive.testzip()
    except Exception as error:
        # A damaged archive fails in many ways; all of them mean the same.
        raise Damaged(f"damaged: {' '.join(str(error).split())}") from error
    if broken is not None:
        raise Damaged(f"damaged: the sum of its part {broken} is wrong")
    return False


def _digest(file: BufferedReader | BufferedRandom, size: int) -> str:
    digest = hashlib.sha256()
    file.seek(0)
    while chunk := file.read(min(size, _CHUNK)):
        digest.update(chunk)
        size -= len(chunk)
    return digest.hexdigest()
