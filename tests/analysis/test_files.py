"""A file is written whole or not at all."""

import errno
import subprocess
import sys

import pytest

from lightning_app.analysis.files import write_whole
from lightning_app.errors import UserError

LIMITED = """
import resource, signal, sys
from pathlib import Path
from lightning_app.analysis.files import write_whole
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
    with pytest.raises(UserError, match=r"file/inside: cannot write name"):
        write_whole(tmp_path / "file" / "inside" / "name", "text")
