import errno
from pathlib import Path

import pytest

from lightning_app.ablation.files import is_disk_full, write_whole, writing_in
from lightning_app.errors import UserError


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
