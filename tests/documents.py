"""A small corpus of documents, each of words of one topic, and the runs that read it."""

from pathlib import Path
from typing import Any

import numpy as np

from tests import tables

TOPICS, WORDS = 4, 5
BOOKS = """# Title: One

## Author: A

-------
The first line. It goes on.

# Chapter
Another line.
# Title: Two
-------
A second book.
"""
ARTICLES = """
 = First =

 Some text .

 = = Part = =

 More text .

 = Second =

 The end .
"""


def write_documents(root: Path, *, topics: bool = True, documents: int = 40) -> Path:
    """Write splits of documents of 12 lines; without topics every document has all words."""
    random = np.random.default_rng(0)
    root.mkdir(parents=True, exist_ok=True)
    for split, count in (("train", documents), ("valid", documents), ("test", 4)):
        texts = []
        for document in range(count):
            low, span = (document % TOPICS * WORDS, WORDS) if topics else (0, TOPICS * WORDS)
            lines = (random.integers(0, span, random.integers(2, 5)) + low for _ in range(12))
            texts.append("\n".join(" ".join(f"w{word}" for word in line) for line in lines))
        (root / f"{split}.txt").write_text("\n\n".join(texts) + "\n")
    return root


def write_books(root: Path) -> Path:
    """Write the files of the corpus `books`: two books and two articles in each of three splits."""
    for folder in ("books_en", "wikitext-2"):
        (root / folder).mkdir(parents=True, exist_ok=True)
    for split in ("train", "valid", "test"):
        (root / f"books_en/{split}.txt").write_text(BOOKS)
        (root / f"wikitext-2/wiki.{split}.tokens").write_text(ARTICLES)
    return root


def data_fields(root: Path, **changes: Any) -> dict[str, Any]:
    """The section `data` for these documents."""
    given = {"name": "text", "root": str(root), "cache": str(root / "cache"), "window": 16}
    return {**given, "tokenizer": "word", "vocab_size": None, "tokens_per_batch": 512, **changes}


def run_tree(root: Path, **objective: Any) -> dict[str, Any]:
    """A config as a user writes it."""
    tree = tables.fine_tuning(root, "rte")
    tree["model"] |= {"block": {"preset": "pre_ln"}}
    tree["model"]["objective"] = {"kind": "masked_lm", "next_sentence": True, **objective}
    return {**tree, "data": data_fields(root)}
