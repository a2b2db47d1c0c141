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
