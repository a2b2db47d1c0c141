"""Books in the public domain and the articles of WikiText-2, for pretraining with documents."""

from collections.abc import Iterator, Sequence
from itertools import chain, pairwise
from pathlib import Path

from lightning_app.data.config import CORPORA, CorpusReader, DataConfig
from lightning_app.data.corpora.wikitext2 import articles, is_heading
from lightning_app.data.source import Source, split_sizes
from lightning_app.errors import UserError

MOST_BYTES = 20_000_000
"""Of the books in one split: more would take longer to prepare than a small grid to train on."""
_TITLE = "# Title: "
_MARK = "-------"  # the files have one below the title of each book, which is left out


@CORPORA.register("books")
class Books(CorpusReader):
    """The first whole books of a split, up to `MOST_BYTES`, and all its articles, as documents.

    The folder holds `books_en/train.txt` and `wikitext-2/wiki.train.tokens`, and so on.
    """

    pairs = False
    needs_root = False
    folder = "."
    parallel = False
    tokenized = False
    base = "pretrain_books.yaml"

    def file_names(self, config: DataConfig, stem: str) -> dict[str, tuple[str, ...]]:
        """Return the names of both files."""
        return {
            "books": (f"books_en/{stem}.txt",),
            "articles": (f"wikitext-2/wiki.{stem}.tokens",),
        }

    def download_name(self, config: DataConfig) -> str:
        """Refuse: there is no public download of the books."""
        raise UserError(
            "data.root is null: data.name 'books' needs the folder that holds books_en and "
            "wikitext-2, in data.root or LIGHTNING_APP_DATA"
        )

    def parse(self, columns: dict[str, list[str]], path: Path) -> dict[str, list[str]]:
        """Return one text; a line of dashes begins each document, headings are Markdown's.

        Raises:
            UserError: there is no book, or the first book alone is larger than `MOST_BYTES`.
        """
        books = list(_whole_books(columns["books"]))
        if not books:
            raise UserError(
                f"{path}: no book that begins with a line '{_TITLE}...' and has at most "
                f"{MOST_BYTES:,} bytes"
            )
        documents = chain(books, _articles(columns["articles"]))
        return {"text": [line for of in documents for line in (_MARK, *filter(str.strip, of))]}

    def documents(self, config: DataConfig, lines: Sequence[str]) -> list[int]:
        """Return the lines of dashes."""
        return [place for place, line in enumerate(lines) if line == _MARK]

    def left_out(self, config: DataConfig, line: str) -> bool:
        """Return whether a line is one of dashes, or a heading."""
        return line == _MARK or line.startswith("#")

    def protocol(
        self, source: Source, lines: dict[str, dict[str, list[str]]], counts: dict[str, int]
    ) -> str:
        """Return the numbers of documents and of bytes."""
        documents = split_sizes({split: of["text"].count(_MARK) for split, of in lines.items()})
        sizes = {
            split: sum(len(line.encode()) + 1 for line in of["text"]) for split, of in lines.items()
        }
        return (
            f"the first books of up to {MOST_BYTES:,} bytes and the articles of WikiText-2: "
            f"{documents} documents, {split_sizes(sizes)} bytes"
        )


def _whole_books(lines: list[str]) -> Iterator[list[str]]:
    """Yield the lines of whole books while all of them together have at most `MOST_BYTES`."""
    begins = [place for place, line in enumerate(lines) if line.startswith(_TITLE)]
    size = 0
    for begin, end in pairwise([*begins, len(lines)]):
        book = lines[begin:end]
        size += sum(len(line.encode()) + 1 for line in book)
        if size > MOST_BYTES:
            return
        yield [line for line in book if line != _MARK]


def _articles(lines: list[str]) -> Iterator[list[str]]:
    """Yield the lines of each article, its headings written as those of the books."""
    for begin, end in pairwise([*articles(lines), len(lines)]):
        yield [f"# {line.strip(' =')}" if is_heading(line) else line for line in lines[begin:end]]
