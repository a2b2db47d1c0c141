"""The files of a corpus, and its text in memory."""

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from datasets import Dataset


@dataclass(frozen=True, kw_only=True)
class Source:
    """The files of a corpus.

    Attributes:
        columns: split -> column -> file; the columns are `source` and `target`, or `text`. A
            local corpus may have no test split.
        references: split -> file of cased, untokenised target lines, if one is published.
        notes: a file that describes how a downloaded folder was made, if there is one.
    """

    columns: dict[str, dict[str, Path]] = field(default_factory=dict)
    references: dict[str, Path] = field(default_factory=dict)
    notes: Path | None = None

    def files(self) -> dict[str, Path]:
        """Return every file by its role, such as `train.source`."""
        files = {f"{s}.{c}": path for s, of in self.columns.items() for c, path in of.items()}
        files |= {f"{split}.reference": path for split, path in self.references.items()}
        return files if self.notes is None else files | {"notes": self.notes}

    def digests(self) -> dict[str, str]:
        """Return the SHA-256 of every file on disk, by role."""
        digests = {}
        for role, path in self.files().items():
            with path.open("rb") as file:
                digests[role] = hashlib.file_digest(file, "sha256").hexdigest()
        return digests


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Text in memory.

    Attributes:
        splits: split -> dataset with the columns `source` and `target`, or `text`.
        references: split -> cased, untokenised target lines, if they are published.
        protocol: a description of the splits in one sentence.
        tokenized: whether words and punctuation are separated by spaces, so that `detokenize`
            restores plain text.
        documents: split -> the line at which each document of a running text begins; empty where
            the corpus has no documents.
        max_ratio: the largest ratio of the longer to the shorter side, in words, that the protocol
            allows in a training pair; None without a limit.
    """

    splits: dict[str, "Dataset"]
    references: dict[str, list[str]]
    protocol: str
    tokenized: bool
    documents: dict[str, list[int]] = field(default_factory=dict)
    max_ratio: float | None = None


def split_sizes(counts: dict[str, int]) -> str:
    """Return the number of lines of each split as text, such as ``30,000 / 500 / 500``."""
    return " / ".join(f"{count:,}" for count in counts.values())
