"""Small corpora on disk, and the real ones if they exist."""

from collections.abc import Callable
from pathlib import Path

import pytest

from lightning_app.data.config import DataConfig
from tests.scores.corpora import folder_of_corpora

GERMAN = ["der hund sieht die katze .", "die katze schläft .", "ein haus ist groß ."] * 20
ENGLISH = ["the dog sees the cat .", "the cat sleeps .", "a house is big ."] * 20


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Remove the environment variables that change the folders of a test."""
    monkeypatch.delenv("LIGHTNING_APP_DATA", raising=False)
    monkeypatch.delenv("LIGHTNING_APP_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real corpora. Tests that need it fail, not skip, if a file of it is missing."""
    return folder_of_corpora()


@pytest.fixture
def write_pairs(tmp_path: Path) -> Callable[..., Path]:
    """Write a parallel corpus; keywords replace the lines of a file, such as train_de=[...]."""

    def write(**lines: list[str]) -> Path:
        root = tmp_path / "corpus"
        root.mkdir(exist_ok=True)
        for split in ("train", "valid", "test"):
            for language, default in (("de", GERMAN), ("en", ENGLISH)):
                of = lines.get(f"{split}_{language}", default)
                path = root / f"{split}.{language}"
                path.write_bytes("".join(line + "\n" for line in of).encode())
        return root

    return write


@pytest.fixture
def text_config(tmp_path: Path) -> Callable[..., DataConfig]:
    """A config of a local word-level corpus, cached below the test's folder."""

    def make(root: Path, **fields) -> DataConfig:
        given = {"tokenizer": "word", "vocab_size": None, "cache": str(tmp_path / "cache")}
        return DataConfig(name="text", root=str(root), **(given | fields))

    return make
