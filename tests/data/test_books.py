"""Books beside articles: which documents there are, and what is refused."""

from pathlib import Path

import pytest

from lightning_app.cli import main
from lightning_app.core.errors import UserError
from lightning_app.data.config import DataConfig
from lightning_app.data.corpora import texts
from lightning_app.data.prepare import prepare
from lightning_app.data.sources import locate, read
from tests.documents import BOOKS, write_books
from tests.told import told


def config(root: Path | None, **fields) -> DataConfig:
    where = None if root is None else str(root)
    known = {"task": "masked_lm", "next_sentence": True, "tokenizer": "word", "vocab_size": None}
    return DataConfig(name="books", root=where, cache=str(root), **(known | fields))


def test_books_and_articles_are_documents_and_books_end_at_the_limit(tmp_path, monkeypatch) -> None:
    write_books(tmp_path)
    corpus = read(locate(config(tmp_path)), config(tmp_path))
    assert corpus.splits["train"]["text"] == [
        *("The first line.", "It goes on.", "Another line.", "A second book."),
        *("Some text .", "More text .", "The end ."),
    ]
    assert corpus.documents["train"] == [0, 3, 4, 6]
    assert "articles of WikiText-2: 4 / 4 / 4 documents" in corpus.protocol
    assert prepare(config(tmp_path)).meta["protocol"] == corpus.protocol
    first = BOOKS[: BOOKS.index("# Title: Two")]
    monkeypatch.setattr(texts, "MOST_BYTES", len(first))
    assert read(locate(config(tmp_path)), config(tmp_path)).documents["train"] == [0, 3, 5]
    monkeypatch.setattr(texts, "MOST_BYTES", len(first) - 1)
    with pytest.raises(UserError, match=r"train\.txt:.*'# Title: "):
        read(locate(config(tmp_path)), config(tmp_path))


def test_a_file_that_is_not_there_is_one_line(tmp_path: Path, monkeypatch, capsys) -> None:
    write_books(tmp_path)
    (tmp_path / "wikitext-2/wiki.train.tokens").unlink()
    with pytest.raises(UserError, match=r"has no file wikitext-2/wiki\.train\.tokens\[\.gz\|\.xz"):
        locate(config(tmp_path))
    monkeypatch.delenv("LIGHTNING_APP_DATA", raising=False)
    assert main(["prepare", "--data", "books"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert told("data.root is null: data.name 'books' … books_en and").search(said)


@pytest.mark.slow
def test_the_real_books(shared_data: Path) -> None:
    real = config(shared_data)
    corpus = read(locate(real), real)
    found = {split: len(of) for split, of in corpus.documents.items()}
    assert found == {"train": 642, "valid": 66, "test": 67}
