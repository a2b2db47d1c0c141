"""What a row of a corpus is: a line of one language, or a pair of a source and a target line."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

Columns = dict[str, list[Any]]
Dropped = dict[str, int]


class RowKind:
    """Lines of one language, in the column `text`; a subclass is of another kind.

    Attributes:
        unit: What the rows are called.
        predicted: The column whose tokens are predicted.
        unused: Fields of the config that change nothing in a prepared folder.
        budgets: The tokens of a batch for which the share of padding is written down; windows of
            packed text have none.
    """

    unit: ClassVar[str] = "lines"
    predicted: ClassVar[str] = "text"
    unused: ClassVar[Sequence[str]] = ("source_language", "max_length")
    budgets: ClassVar[Sequence[int]] = ()

    def languages(self, source: str, target: str) -> list[str]:
        """Return those that are read."""
        return [target]

    def usable(self, rows: Columns, split: str, max_ratio: float | None) -> tuple[Columns, Dropped]:
        """Leave out rows that cannot be used, counted by reason; `max_ratio` is of `Corpus`."""
        kept = [line for line in rows["text"] if line]
        return {"text": kept}, {"empty": len(rows["text"]) - len(kept)}

    def short(self, rows: Columns, max_length: int) -> tuple[Columns, Dropped]:
        """Leave out tokenised training rows of more than `max_length` tokens, EOS not counted."""
        return rows, {}

    def texts(
        self, rows: Columns, reference: Sequence[str] | None, plain: Callable[[str], str]
    ) -> Mapping[str, Sequence[str]]:
        """Return the texts of an evaluated split that are kept beside its tokens, by kind.

        `reference` holds published plain target lines; `plain` turns a target line into one.
        """
        return {}


class SentencePairs(RowKind):
    """Pairs of a `source` and a `target` line. Sentences become batches with padding."""

    unit = "pairs"
    predicted = "target"
    unused = ()
    budgets = (1024, 4096, 32768)

    def languages(self, source: str, target: str) -> list[str]:
        """Return both."""
        return [source, target]

    def usable(self, rows: Columns, split: str, max_ratio: float | None) -> tuple[Columns, Dropped]:
        """Leave out training pairs with an empty side, or one much longer than the other.

        Validation and test pairs are all kept, so that scores stay comparable.
        """
        if split != "train":
            return rows, {}
        reasons = Counter(empty=0) if max_ratio is None else Counter(empty=0, ratio=0)
        kept = []
        for pair in zip(rows["source"], rows["target"], strict=True):
            words = sorted(len(line.split()) for line in pair)
            if words[0] == 0:
                reasons["empty"] += 1
            elif max_ratio is not None and words[1] > max_ratio * words[0]:
                reasons["ratio"] += 1
            else:
                kept.append(pair)
        return _columns(kept), dict(reasons)

    def short(self, rows: Columns, max_length: int) -> tuple[Columns, Dropped]:
        """Leave out pairs with a side of more than `max_length` tokens."""
        pairs = list(zip(rows["source"], rows["target"], strict=True))
        kept = [pair for pair in pairs if max(map(len, pair)) <= max_length + 1]
        return _columns(kept), {"too_long": len(pairs) - len(kept)}

    def texts(
        self, rows: Columns, reference: Sequence[str] | None, plain: Callable[[str], str]
    ) -> Mapping[str, Sequence[str]]:
        """Return both sides, and the target as plain text, which is published or made here."""
        if reference is None:
            reference = [plain(line) for line in rows["target"]]
        return {**rows, "reference": reference}


def _columns(pairs: Sequence[tuple[Any, Any]]) -> Columns:
    return {"source": [s for s, _ in pairs], "target": [t for _, t in pairs]}
