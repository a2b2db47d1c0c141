"""A file is written completely or not at all, and an error of the disk is reported as such."""

import errno
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_app.core.errors import UserError
from lightning_app.core.files import is_disk_full, output_folder, write_whole, writing_in

LIMITED = """
import resource, signal, sys
from pathlib import Path
from lightning_app.core.files import write_whole
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
try:
    write_whole(Path(sys.argv[1]), "x" * 5000)
except OSError as error:
    sys.exit(error.errno)
"""


def test_no_room_leaves_the_old_file_and_nothing_else(tmp_path):
    """The kernel refuses the write in the middle, as on a full disk."""
    path = tmp_path / "file"
    path.write_text("old")
    done = subprocess.run([sys.executable, "-c", LIMITED, str(path)], check=False)
    assert done.returncode == errno.EFBIG
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "new" / "file"
    for text, content in (("é", "é".encode()), (b"\x00\xff", b"\x00\xff"), ("old", b"old")):
        write_whole(path, text)
        assert path.read_bytes() == content
    with pytest.raises(UnicodeEncodeError):
        write_whole(path, "new \ud800")
    assert path.read_text() == "old"
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/proc/x/file", "/proc/x: cannot be written: "),
        *(("/proc/file", "/proc: cannot be written: "), ("x" * 300 + "/file", "x:.*written:")),
        *(("x" * 300, "cannot be"), ("", "cannot be"), ("made", "made:.*written:")),
        ("file/inside/name", "file/inside: cannot be written"),
    ],
)
def test_what_no_folder_takes(tmp_path: Path, monkeypatch, path: str, words: str) -> None:
    monkeypatch.chdir(tmp_path)
    Path("made").mkdir()
    Path("file").touch()
    with pytest.raises(UserError, match=words):
        write_whole(Path(path), "text")
    assert {path.name for path in tmp_path.rglob("*")} == {"made", "file"}


@pytest.mark.parametrize("path", ["/proc/x", "/proc", "file/inside", "x" * 300])
def test_an_output_folder_is_refused_before_the_work(tmp_path: Path, monkeypatch, path) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("")
    with pytest.raises(UserError, match="cannot be written"), output_folder(Path(path)):
        raise AssertionError("the work began")


def test_an_output_folder_goes_again_where_the_work_fails_and_left_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "deep"

    def work(left: Path | None = None) -> None:
        assert list(folder.iterdir()) == []
        if left is not None:
            left.write_text("")
        raise ValueError("work")

    with pytest.raises(ValueError, match="work"), output_folder(folder):
        work()
    assert not (tmp_path / "new").exists()
    with pytest.raises(ValueError, match="work"), output_folder(folder):
        work(tmp_path / "new" / "kept")
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["kept"]
    folder.mkdir()
    with pytest.raises(ValueError, match="work"), output_folder(folder):
        work()
    assert folder.is_dir()  # it was there before


def test_a_full_disk_is_known_and_a_refusal_names_the_folder() -> None:
    assert is_disk_full(OSError(errno.ENOSPC, "x"))
    assert is_disk_full(OSError(errno.EDQUOT, "x"))
    assert is_disk_full(RuntimeError("[enforce fail] . PytorchStreamWriter failed writing file"))
    nested = ValueError("outer")
    nested.__cause__ = OSError(errno.ENOSPC, "x")
    assert is_disk_full(nested)
    assert not is_disk_full(OSError(errno.EIO, "x"))
    assert not is_disk_full(RuntimeError("CUDA out of memory"))
    said = "there: cannot be written: Read-only file system"
    with pytest.raises(UserError, match=said), writing_in(Path("there")):
        raise OSError(errno.EROFS, "Read-only file system")
    with pytest.raises(OSError, match="broken"), writing_in(Path("there")):
        raise OSError(errno.EIO, "broken")
