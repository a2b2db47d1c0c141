"""Join books and the articles of WikiText-2 to one text with documents, for `pretrain_small`.

`python docs/pretraining_text.py FOLDER [--megabytes 20]` reads `books_en` and `wikitext-2` in the
folder that LIGHTNING_APP_DATA names, and writes `train.txt` and `valid.txt` into FOLDER: the first
whole books of up to 20 MB, and of up to 1 MB for validation, then all articles of the same split.
A line `-------` begins each document. Headings become those of Markdown, which pairs of texts leave
out.
"""

import argparse
import lzma
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from lightning_app.data.config import DataConfig
from lightning_app.data.corpora.wikitext2 import WikiText2

MARK = "-------"


def read(path: Path) -> list[str]:
    """Return the lines of a file, without their ends."""
    with lzma.open(path, "rt", encoding="utf-8", newline="\n") as file:
        return file.read().split("\n")


def books(lines: Iterable[str], most: int) -> Iterator[str]:
    """Yield the lines of whole books while all of them together have at most `most` bytes."""
    size, book = 0, []
    for line in [*lines, "# Title: "]:
        if line.startswith("# Title: ") and book:
            size += sum(len(each.encode()) + 1 for each in book)
            if size > most:
                return
            yield MARK
            yield from book
            book = []
        if line != MARK:  # the files have it below the title
            book.append(line)


def articles(lines: list[str]) -> Iterator[str]:
    """Yield the lines of the articles, each of which begins with its title."""
    reader, config = WikiText2(), DataConfig(name="wikitext2", task="masked_lm")
    begins = set(reader.documents(config, lines))
    for place, line in enumerate(lines):
        if place in begins:
            yield MARK
        left_out = reader.left_out(config, line)
        yield "# " + line.strip(" =") if left_out else line


def main() -> None:
    """Write both files."""
    parser = argparse.ArgumentParser(description="Join books and articles.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--megabytes", type=float, default=20.0, help="of books for training")
    given = parser.parse_args()
    source = Path(os.environ["LIGHTNING_APP_DATA"])
    given.folder.mkdir(parents=True, exist_ok=True)
    for split, most in (("train", given.megabytes), ("valid", 1.0)):
        of_books = read(source / "books_en" / f"{split}.txt.xz")
        of_articles = read(source / "wikitext-2" / f"wiki.{split}.tokens.xz")
        lines = [*books(of_books, int(most * 1e6)), *articles(of_articles)]
        text = "\n".join(line for line in lines if line.strip()) + "\n"
        (given.folder / f"{split}.txt").write_text(text, encoding="utf-8", newline="\n")
        counts = f"{lines.count(MARK)} documents, {len(text.encode()):,} bytes"
        print(f"{given.folder / split}.txt: {counts}")


if __name__ == "__main__":
    main()
