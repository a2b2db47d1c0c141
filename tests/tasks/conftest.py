"""The tests of tasks use the corpora of the tests of data, and a running text."""

from pathlib import Path

import pytest

from lightning_app.data.prepare import PreparedCorpus, prepare
from tests.data.conftest import _no_environment, shared_data, text_config, write_pairs

__all__ = ["_no_environment", "shared_data", "text_config", "write_pairs"]

TEXT = {
    "train": "the dog  sees\n\n  the cat .\nit runs , and runs\n" * 9,
    "valid": "the cat sees\n\n\nthe dog .\n it runs\n",
    "test": "the dog runs .",
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for split, text in TEXT.items():
        (tmp_path / f"{split}.txt").write_bytes(text.encode())
    return tmp_path


@pytest.fixture
def corpus(root: Path, text_config) -> PreparedCorpus:
    return prepare(text_config(root, task="causal_lm", tokenizer="char"))
