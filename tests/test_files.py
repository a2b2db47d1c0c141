"""A file is written whole or not at all, and a refusal is told for what it is."""

import errno
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_app.errors import UserError
from lightning_app.files import is_disk_full, write_whole, writing_in

LIMITED = """
import resource, signal, sys
from pathlib import Path
from lightning_app.files import write_whole
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
try:
    write_whole(Path(sys.argv[1]), "x" * 5000)
except OSError as error:
    sys.exit(error.errno)
"""


def test_text_and_bytes(tmp_path):
    path = tmp_path / "new" / "file"
    write_whole(path, "é")
    assert path.read_bytes() == "é".encode()
    write_whole(path, b"\x00\xff")
    assert path.read_bytes() == b"\x00\xff"
    assert list(path.parent.iterdir()) == [path]


def test_no_room_leaves_the_old_file_and_nothing_else(tmp_path):
    """The kernel refuses the write in the middle, as on a full disk."""
    path = tmp_path / "file"
    path.write_text("old")
    done = subprocess.run([sys.executable, "-c", LIMITED, str(path)], check=False)
    assert done.returncode == errno.EFBIG
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"file/inside: cannot be written"):
        write_whole(tmp_path / "file" / "inside" / "name", "text")


def test_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_whole(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_whole(path, "new \ud800")
    assert path.read_text() == "old"
    write_whole(path, "new")
    assert [each.name for each in tmp_path.iterdir()] == ["a.json"]
    assert path.read_text() == "new"


def test_a_refusal_names_the_folder() -> None:
    said = "there: cannot be written: Read-only file system"
    with pytest.raises(UserError, match=said), writing_in(Path("there")):
        raise OSError(errno.EROFS, "Read-only file system")
    with pytest.raises(FileNotFoundError), writing_in(Path("there")):
        raise FileNotFoundError(errno.ENOENT, "gone")


def test_a_full_disk_is_known_in_all_its_forms() -> None:
    assert is_disk_full(OSError(errno.ENOSPC, "x"))
    assert is_disk_full(OSError(errno.EDQUOT, "x"))
    assert is_disk_full(RuntimeError("[enforce fail] . PytorchStreamWriter failed writing file"))
    nested = ValueError("outer")
    nested.__cause__ = OSError(errno.ENOSPC, "x")
    assert is_disk_full(nested)
    assert not is_disk_full(OSError(errno.EIO, "x"))
    assert not is_disk_full(RuntimeError("CUDA out of memory"))
