"""What is wrong with a checkpoint, if anything."""

import zipfile
from pathlib import Path

from lightning_app.records import Unsound

_FIRST = b"PK\x03\x04"
_LAST = b"PK\x05\x06"  # of the record that ends an archive
_LAST_SIZE = 22  # bytes


def check_checkpoint(path: Path, contents: bool) -> None:
    """Check that a checkpoint is a whole archive and, with `contents`, its sums. `Unsound`."""
    with path.open("rb") as file:
        first = file.read(len(_FIRST))
        size = file.seek(0, 2)
        file.seek(max(0, size - _LAST_SIZE))
        last = file.read(len(_LAST))
    if first != _FIRST or last != _LAST:
        raise Unsound(f"torn or damaged: no whole checkpoint ({size:,} bytes)")
    if not contents:
        return
    try:
        with zipfile.ZipFile(path) as archive:
            broken = archive.testzip()
    except Exception as error:
        # A damaged archive fails in many ways; all of them mean the same.
        raise Unsound(f"damaged: {error}") from error
    if broken is not None:
        raise Unsound(f"damaged: the sum of its part {broken} is wrong")
