import os
from pathlib import Path

import pytest

from lightning_app.runs.folder import RunFolder


def test_attempts_count_by_their_numbers(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert folder.last_attempt() == 0
    for name in ("2", "10", "9", "notes"):
        (folder.attempts / name).mkdir(parents=True)
    assert folder.last_attempt() == 10


@pytest.mark.parametrize(
    ("text", "line"),
    [(None, None), ("a\nb  \n\n", "b"), ("", "no message"), ("x\u2028y\n", "x\u2028y")],
)
def test_an_attempts_error_is_one_line(tmp_path: Path, text: str | None, line: str | None) -> None:
    attempt = RunFolder(tmp_path).attempt(1)
    attempt.path.mkdir(parents=True)
    if text is not None:
        attempt.error.write_text(text)
    assert attempt.error_line() == line


def test_the_grid_of_a_run_is_named_by_its_place(tmp_path: Path) -> None:
    assert RunFolder(tmp_path / "mine" / "runs" / "one").grid == "mine"
    assert RunFolder(tmp_path / "mine" / "other" / "one").grid is None


def test_own_files_are_regular_and_have_names_that_a_run_writes(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "best.ckpt").write_text("private")
    folder = RunFolder(tmp_path / "run")
    for name in (
        *("result.json", "attempts/2/log-rank1.txt", "plugins/mine.py", "notes.txt", "e.html"),
    ):
        (folder.path / name).parent.mkdir(parents=True, exist_ok=True)
        (folder.path / name).write_text(name)
    (folder.path / "attempts/2/deeper").mkdir()
    (folder.path / "attempts/2/deeper/log.txt").write_text("of a stranger")
    (folder.path / "links.txt").symlink_to(secret / "best.ckpt")
    folder.metrics.symlink_to(secret / "best.ckpt")
    folder.checkpoints.symlink_to(secret)
    os.mkfifo(folder.environment)
    files, others = ({path.name for path in of} for of in folder.own_files())
    assert files == {"result.json", "log-rank1.txt", "mine.py"}
    assert others == {"metrics.csv", "checkpoints", "env.json"}
