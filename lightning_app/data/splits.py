"""The file stems of the splits of a corpus."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Splits:
    """File stem of each split, for local files."""

    train: str = "train"
    """stem of the training files"""
    valid: str = "valid"
    """stem of the validation files"""
    test: str = "test"
    """stem of the test files"""

    def items(self) -> list[tuple[str, str]]:
        """Return (split, stem) in the order train, valid, test."""
        return [("train", self.train), ("valid", self.valid), ("test", self.test)]


DEFAULT_SPLITS = Splits()
