"""The digests of a folder's files at the time when the folder was made.

The list is canonical: it can be rendered again from the files and compared byte for byte, so that
one changed bit in any file is found, the list included.
"""

import hashlib
from pathlib import Path

LIST = "digests.sha256"


def write_list(folder: Path) -> None:
    """Write the list of the files in `folder`."""
    (folder / LIST).write_bytes(_render(folder))


def find_damage(folder: Path) -> str | None:
    """Return the damage: the first file of `folder` that differs from its list, else None."""
    try:
        listed = (folder / LIST).read_bytes()
    except FileNotFoundError:
        return f"{LIST} is missing"
    found = _render(folder)
    if found == listed:
        return None
    lines = set(listed.splitlines())
    changed = [line.split(b" ")[-1] for line in found.splitlines() if line not in lines]
    return f"{changed[0].decode() if changed else 'a file'} is not as it was written"


def digest_of(folder: Path, without: str) -> str:
    """Return the SHA-256 of the list of `folder` without the line of the file `without`."""
    lines = (folder / LIST).read_bytes().splitlines(keepends=True)
    ending = f" {without}\n".encode()
    return hashlib.sha256(b"".join(line for line in lines if not line.endswith(ending))).hexdigest()


def _render(folder: Path) -> bytes:
    """Return a line for each file: SHA-256, size and name, ordered by name."""
    lines = []
    # A file browser or NFS may add hidden files.
    for path in sorted(p for p in folder.iterdir() if p.name != LIST and p.name[0] != "."):
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            lines.append(f"{digest} {file.tell()} {path.name}\n")
    return "".join(lines).encode()
