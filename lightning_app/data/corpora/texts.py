"""Corpora of text: the user's files, synthetic pairs, plays, WikiText-2 and books."""

import hashlib
import lzma
import re
from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import Any

from lightning_app.core.errors import UserError
from lightning_app.data.config import CORPORA, CorpusReader, DataConfig, Lines, Source, split_sizes
from lightning_app.data.sources import GeneratedCorpus, get, load_from_hub, write_lines

_PAIRS = files("lightning_app.data") / "synthetic.tsv.xz"
_PAIRS_SHA256 = "18b83f5896f147b05f1afbf2ecbea35696dabe1de4dabd4d9dedaadacf5721cf"
_SEED = 1
_SIZES = {"train": 30_000, "valid": 500, "test": 500}


@CORPORA.register("synthetic")
class Synthetic(GeneratedCorpus):
    """Pairs from a German-English grammar, in a file that the package contains."""

    tokenized = True
    languages = ("de", "en")
    base = "synthetic.yaml"

    def generate(self, config: DataConfig) -> Lines:
        """Return the sides named in the config.

        Raises:
            UserError: if the file is not the packaged one.
        """
        packed = _PAIRS.read_bytes()
        if hashlib.sha256(packed).hexdigest() != _PAIRS_SHA256:
            raise UserError(f"{_PAIRS}: damaged; install the package again")
        rows = lzma.decompress(packed).decode().splitlines()
        pairs = iter([row.split("\t") for row in rows])
        sides = {"de": 0, "en": 1}
        wanted = {"text": config.target_language}
        if config.pairs:
            wanted = {"source": config.source_language, "target": config.target_language}
        return {
            split: {c: [pair[sides[language]] for pair in of] for c, language in wanted.items()}
            for split, size in _SIZES.items()
            for of in [list(islice(pairs, size))]
        }

    def digest(self, config: DataConfig) -> str:
        """Return a constant: a plan does not read the file."""
        return hashlib.sha256(f"synthetic-{_SEED}".encode()).hexdigest()

    def protocol(self, source: Source, lines: Lines, counts: dict[str, int]) -> str:
        """Return the seed and the number of pairs.

        Results record it: with another wording, equal data would have two protocols.
        """
        return (
            f"synthetic German-English grammar, seed {_SEED}: {split_sizes(counts)} "
            f"distinct pairs; no sentence of either language stands in two splits"
        )


_MARKDOWN_HEADING = re.compile("#{1,6} ")  # Markdown's headings


@CORPORA.register("text")
class Text(CorpusReader):
    """Files of lines in `data.root`, of one language or of two."""

    separated = True

    def file_names(self, config: DataConfig, stem: str) -> dict[str, tuple[str, ...]]:
        """Return column -> names; a file of one language may also end in .txt."""
        names = super().file_names(config, stem)
        return names if config.pairs else {"text": (*names["text"], f"{stem}.txt")}

    def documents(self, config: DataConfig, lines: Sequence[str]) -> list[int]:
        """Return the first line, and each after a separator, which is the last of its document."""
        separates = [line.strip() == config.document_separator.strip() for line in lines]
        begins = [
            place
            for place, apart in enumerate(separates)
            if not apart and (place == 0 or separates[place - 1])
        ]
        return [0, *begins[1:]]  # separators before the first document belong to it

    def left_out(self, config: DataConfig, line: str) -> bool:
        """Return whether a line is a separator, or a Markdown heading."""
        separates = line.strip() == config.document_separator.strip()
        return separates or _MARKDOWN_HEADING.match(line.strip()) is not None


_URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
_SHARE = 0.9  # of the characters in the training split
_PUBLISHED = {
    "train": "0c7f7801faf0f6fed809ca8e5b0468ab77d29a6bc45db02e1d723efbafb95bd3",
    "valid": "e6c148291b90ff9e3b132fd2e783786d7876f5bd1faa4776f3ec53f0b2693bf3",
}
"""SHA-256 of the lines of nanoGPT's splits, stripped of surrounding white space."""


@CORPORA.register("tinyshakespeare")
class TinyShakespeare(CorpusReader):
    """The first 90 % of the characters are train, the rest validation; there is no test split."""

    pairs = False
    needs_root = False
    folder = "tinyshakespeare"
    base = "nanogpt_shakespeare.yaml"

    def file_names(self, config: DataConfig, stem: str) -> dict[str, tuple[str, ...]]:
        return {"text": (f"{stem}.txt",)}

    def download_name(self, config: DataConfig) -> str:
        """Return the name of the folder."""
        return self.folder if config.root is None else super().download_name(config)

    def download(self, config: DataConfig, folder: Path) -> None:
        """Cut the public file in two where nanoGPT does."""
        text = get(config, _URL).decode("utf-8")
        cut = int(_SHARE * len(text))
        for split, part in (("train", text[:cut]), ("valid", text[cut:])):
            (folder / f"{split}.txt").write_bytes(part.encode())

    def protocol(self, source: Source, lines: Lines, counts: dict[str, int]) -> str:
        """Return the number of characters, and whether the text matches nanoGPT's split."""
        texts = {split: "\n".join(of["text"]) for split, of in lines.items()}
        sizes = " / ".join(f"{len(text):,}" for text in texts.values())
        same = "nanoGPT's split" if _digests(lines) == _PUBLISHED else "not nanoGPT's split"
        return f"Tiny Shakespeare: {sizes} characters, line ends inside a split counted, {same}"


_WIKITEXT_TITLE = re.compile("= (?!= ).*(?<! =) =")
_WIKITEXT_HEADING = re.compile("= .* =")
_WIKITEXT = {
    "train": "680dda268eba037d114841af125989d47a932230b2047a4cf8fcc6f81bf127ec",
    "valid": "0f4c2e4bad0113c455ff10e3049e5dbec4161ecf03ab955d6ff7098f0cad6ce3",
    "test": "8478aba25f5dc4cae6e2fc005c52856414f5bf2ad83be0f2f6e478df1eb1aa3d",
}
"""The SHA-256 of the lines of the published files, without the spaces around each."""


def _digests(lines: Mapping[str, Mapping[str, Sequence[str]]]) -> dict[str, str]:
    """Return the SHA-256 of the text of each split, without white space around its lines."""
    texts = {split: "\n".join(map(str.strip, of["text"])) for split, of in lines.items()}
    return {split: hashlib.sha256(text.encode()).hexdigest() for split, text in texts.items()}


def articles(lines: Sequence[str]) -> list[int]:
    """Return the titles of the articles: ``= Title =`` between two blank lines."""

    def blank(place: int) -> bool:
        return not 0 <= place < len(lines) or not lines[place].strip()

    titles = [
        place
        for place, line in enumerate(lines)
        if _WIKITEXT_TITLE.fullmatch(line.strip()) and blank(place - 1) and blank(place + 1)
    ]
    return [0, *titles[1:]]  # the blank line before the first article belongs to it


def is_heading(line: str) -> bool:
    """Return whether a line is the title of an article or the heading of a section."""
    return _WIKITEXT_HEADING.fullmatch(line.strip()) is not None


@CORPORA.register("wikitext2")
class WikiText2(CorpusReader):
    """The word-level form, from local files or the hub; blank lines are kept in a running text."""

    pairs = False
    needs_root = False
    folder = "wikitext-2"
    hub = "Salesforce/wikitext"
    tokenized = True
    base = "mlm.yaml"

    def file_names(self, config: DataConfig, stem: str) -> dict[str, tuple[str, ...]]:
        return {"text": (f"wiki.{stem}.tokens",)}

    def download(self, config: DataConfig, folder: Path) -> None:
        """Write the files of the hub's dataset, which holds parquet files on its main branch."""
        splits: dict[str, Any] = load_from_hub(config, self.hub, "wikitext-2-v1", None)
        for split, rows in splits.items():
            write_lines(folder / f"wiki.{split}.tokens", (row["text"] for row in rows))

    def documents(self, config: DataConfig, lines: Sequence[str]) -> list[int]:
        return articles(lines)

    def left_out(self, config: DataConfig, line: str) -> bool:
        return is_heading(line)

    def protocol(self, source: Source, lines: Lines, counts: dict[str, int]) -> str:
        """Return the number of lines, and whether the text is that of the published splits."""
        expected = {split: _WIKITEXT[split] for split in counts}
        official = (
            "the official splits without the spaces around lines"
            if _digests(lines) == expected
            else "not the text of the official splits"
        )
        return f"WikiText-2, word level with <unk>: {split_sizes(counts)} lines, {official}"


MOST_BYTES = 20_000_000
"""The limit of books in one split: more take longer to prepare than a small grid takes to train."""
_BOOK_TITLE = "# Title: "
_MARK = "-------"  # one follows the title of each book in the files; it is dropped


@CORPORA.register("books")
class Books(CorpusReader):
    """The first whole books of a split, up to `MOST_BYTES`, and all its articles, as documents.

    The folder holds `books_en/train.txt` and `wikitext-2/wiki.train.tokens`, and so on.
    """

    pairs = False
    needs_root = False
    folder = "."
    parallel = False
    base = "pretrain_books.yaml"

    def file_names(self, config: DataConfig, stem: str) -> dict[str, tuple[str, ...]]:
        return {"books": (f"books_en/{stem}.txt",), "articles": (f"wikitext-2/wiki.{stem}.tokens",)}

    def download_name(self, config: DataConfig) -> str:
        """Refuse: there is no public download of the books."""
        raise UserError(
            "data.root is null: data.name 'books' needs the folder that holds books_en and "
            "wikitext-2, in data.root or LIGHTNING_APP_DATA"
        )

    def parse(self, columns: dict[str, list[str]], path: Path) -> dict[str, list[str]]:
        """Return one text; a line of dashes begins each document, headings are as in Markdown.

        Raises:
            UserError: if there is no book, or the first book is already larger than `MOST_BYTES`.
        """
        books = list(_whole_books(columns["books"]))
        if not books:
            raise UserError(
                f"{path}: no book that begins with a line '{_BOOK_TITLE}...' and has at most "
                f"{MOST_BYTES:,} bytes"
            )
        documents = chain(books, _articles(columns["articles"]))
        return {"text": [line for of in documents for line in (_MARK, *filter(str.strip, of))]}

    def documents(self, config: DataConfig, lines: Sequence[str]) -> list[int]:
        return [place for place, line in enumerate(lines) if line == _MARK]

    def left_out(self, config: DataConfig, line: str) -> bool:
        """Return whether a line is one of dashes, or a heading."""
        return line == _MARK or line.startswith("#")

    def protocol(self, source: Source, lines: Lines, counts: dict[str, int]) -> str:
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
    begins = [place for place, line in enumerate(lines) if line.startswith(_BOOK_TITLE)]
    size = 0
    for begin, end in pairwise([*begins, len(lines)]):
        book = lines[begin:end]
        size += sum(len(line.encode()) + 1 for line in book)
        if size > MOST_BYTES:
            return
        yield [line for line in book if line != _MARK]


def _articles(lines: list[str]) -> Iterator[list[str]]:
    """Yield the lines of each article, with headings written as in the books."""
    for begin, end in pairwise([*articles(lines), len(lines)]):
        yield [f"# {line.strip(' =')}" if is_heading(line) else line for line in lines[begin:end]]
