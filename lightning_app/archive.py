"""Whole archives: sealed with the digest of their bytes when written, checked before they are read.

`torch.save` writes a zip archive. Its seal is the comment that ends it: a part of the same file, so
that no kill can separate the two, and readers of zip files accept it. The sums in a zip archive do
not cover its headers and padding; the seal covers every bit.
"""

import hashlib
import os
import zipfile
from io import BufferedRandom, BufferedReader
from pathlib import Path

_FIRST = b"PK\x03\x04"
_LAST = b"PK\x05\x06"  # of the record that ends an archive
_LAST_SIZE = 22  # bytes of that record, without the comment
_MARK = b"sha256 "
_SEAL_SIZE = len(_MARK) + 64
_CHUNK = 1 << 20


class Damaged(Exception):
    """The bytes of an archive changed after it was written; the message describes the damage."""


def seal(file: BufferedRandom) -> None:
    """Append the SHA-256 of its content to an archive that is open for reading and writing."""
    file.seek(-2, os.SEEK_END)  # the position of the comment's length
    file.write(_SEAL_SIZE.to_bytes(2, "little"))
    file.write(_MARK + _digest(file, file.tell()).encode())


def check_archive(path: Path, contents: bool = True) -> None:
    """Check that an archive is complete and, with `contents`, that none of its bytes changed.

    In an archive without a seal the checksums of its parts are checked.

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
        if not contents:
            return
        if is_sealed:
            if _digest(file, size - _SEAL_SIZE) != seal[len(_MARK) :].decode("latin-1"):
                raise Damaged("damaged: its bytes are not those that were written")
            return
    _check_sums(path)


def _digest(file: BufferedReader | BufferedRandom, size: int) -> str:
    digest = hashlib.sha256()
    file.seek(0)
    while size > 0:
        chunk = file.read(min(size, _CHUNK))
        if not chunk:
            break
        digest.update(chunk)
        size -= len(chunk)
    return digest.hexdigest()


def _check_sums(path: Path) -> None:
    try:
        with zipfile.ZipFile(path) as archive:
            broken = archive.testzip()
    except Exception as error:
        # A damaged archive fails in many ways; all of them mean the same.
        raise Damaged(f"damaged: {' '.join(str(error).split())}") from error
    if broken is not None:
        raise Damaged(f"damaged: the sum of its part {broken} is wrong")
