"""Tiny Shakespeare: a million characters of plays (Karpathy 2015), in nanoGPT's split."""

import hashlib
from pathlib import Path

from lightning_app.data.config import CORPORA, CorpusReader, DataConfig
from lightning_app.data.download import get
from lightning_app.data.source import Source

_URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
_SHARE = 0.9  # of the characters in the training split
_PUBLISHED = {
    "train": "0c7f7801faf0f6fed809ca8e5b0468ab77d29a6bc45db02e1d723efbafb95bd3",
    "valid": "e6c148291b90ff9e3b132fd2e783786d7876f5bd1faa4776f3ec53f0b2693bf3",
}
"""SHA-256 of the lines of nanoGPT's splits, without white space around them."""


@CORPORA.register("tinyshakespeare")
class TinyShakespeare(CorpusReader):
    """The first 90 % of the characters train, the rest validates; there is no test split."""

    pairs = False
    needs_root = False
    folder = "tinyshakespeare"
    base = "tinyshakespeare.yaml"

    def file_names(self, config: DataConfig, stem: str) -> dict[str, tuple[str, ...]]:
        """Return the name of a local file."""
        return {"text": (f"{stem}.txt",)}

    def download_name(self, config: DataConfig) -> str:
        """Return the name of the folder."""
        if config.root is not None:
            return super().download_name(config)
        return self.folder

    def download(self, config: DataConfig, folder: Path) -> None:
        """Cut the public file in two, where nanoGPT does."""
        text = get(config, _URL).decode("utf-8")
        cut = int(_SHARE * len(text))
        for split, part in (("train", text[:cut]), ("valid", text[cut:])):
            (folder / f"{split}.txt").write_bytes(part.encode())

    def protocol(
        self, source: Source, lines: dict[str, dict[str, list[str]]], counts: dict[str, int]
    ) -> str:
        """Return the number of characters, and whether the text is that of nanoGPT's split."""
        texts = {split: "\n".join(of["text"]) for split, of in lines.items()}
        sizes = " / ".join(f"{len(text):,}" for text in texts.values())
        found = {}
        for split, of in lines.items():
            text = "\n".join(line.strip() for line in of["text"])
            found[split] = hashlib.sha256(text.encode()).hexdigest()
        same = "nanoGPT's split" if found == _PUBLISHED else "not nanoGPT's split"
        return f"Tiny Shakespeare: {sizes} characters, line ends inside a split counted, {same}"
