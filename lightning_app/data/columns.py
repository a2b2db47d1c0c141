"""The kinds of rows of a corpus: a line, a pair of lines, texts with a label, or a question."""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, ClassVar

from lightning_app.scores.task_facts import TASKS

if TYPE_CHECKING:
    from lightning_app.scores.offsets import PieceOffsets

Columns = dict[str, list[Any]]
Dropped = dict[str, int]
Offsets = Callable[[str], "PieceOffsets"]
LEAST_WORDS = 5
"""The least words of a line that is looked up in train; shorter ones, such as headings, recur
often."""

Share = tuple[int, int]  # (number, total)


class RowKind:
    """Lines of one language, in the column `text`; subclasses are other kinds.

    Attributes:
        unit: The name of the rows.
        predicted: The column whose tokens are predicted.
        unused: Config fields that do not affect a prepared folder.
        strips: Whether the white space around lines is stripped.
        beside: The columns that no model reads: labels and data for scores.
    """

    unit: ClassVar[str] = "lines"
    predicted: ClassVar[str] = "text"
    unused: ClassVar[Sequence[str]] = ("source_language", "max_length", "document_separator")
    strips: ClassVar[bool] = True
    beside: ClassVar[Sequence[str]] = ()

    def languages(self, source: str, target: str) -> list[str]:
        """Return the columns to read."""
        return [target]

    def usable(self, rows: Columns, split: str, max_ratio: float | None) -> tuple[Columns, Dropped]:
        """Drop unusable rows, counting them by reason; `max_ratio` is `Corpus.max_ratio`.

        None without `strips`.
        """
        if not self.strips:
            return rows, {}
        kept = [line for line in rows["text"] if line]
        return {"text": kept}, {"empty": len(rows["text"]) - len(kept)}

    def short(self, rows: Columns, max_length: int) -> tuple[Columns, Dropped]:
        """Drop tokenised training rows of more than `max_length` tokens, not counting EOS."""
        return rows, {}

    def texts(
        self, rows: Columns, reference: Sequence[str] | None, plain: Callable[[str], str]
    ) -> Mapping[str, Sequence[str]]:
        """Return the texts of an evaluated split to keep in addition to its tokens, by kind.

        `reference` holds published plain target lines; `plain` turns a target line into one.
        """
        return {}

    def labels(self, rows: Columns, offsets: Offsets) -> Sequence[Any] | None:
        """Return the label of each row, numbers of one shape; None for rows without labels.

        `offsets` returns the tokens of a text and the characters that they cover.
        """
        return None

    def comparable(self, rows: Columns) -> Mapping[str, Iterable[Any]]:
        """Return the texts to look up in the rows of train, by name."""
        words = f"lines of at least {LEAST_WORDS} words"
        return {words: (line for line in rows["text"] if len(line.split()) >= LEAST_WORDS)}

    def left_out(self, dropped: Mapping[str, Dropped]) -> str:
        """Return the description's text about the rows dropped by `usable`."""
        return "; blank lines left out" if any(of.get("empty") for of in dropped.values()) else ""

    def counts(self, rows: Columns, *, every_space: bool) -> Mapping[str, int]:
        """Return the counts besides tokens by which the scores of a split are divided."""
        return {}


class RunningText(RowKind):
    """The lines of a running text in order, including blank ones, with their white space."""

    strips = False
    unused = ("source_language", "max_length")

    def counts(self, rows: Columns, *, every_space: bool) -> Mapping[str, int]:
        """Return the bytes (UTF-8) and the words of the text that the tokens spell.

        Each line end counts as a byte and, as in the published counts of WikiText, as a word.
        Unless `every_space`, the tokens hold runs of spaces as one space and none at the ends of a
        line, and dropped spaces are not counted.
        """
        lines: list[str] = rows["text"]
        if not every_space:
            lines = [re.sub(" +", " ", line).strip(" ") for line in lines]
        return {
            "bytes": sum(len(line.encode()) + 1 for line in lines),
            # like `len(line.split())`, but without the memory for all words of a long line
            "words": sum(sum(1 for _ in re.finditer(r"\S+", line)) + 1 for line in lines),
        }


class SentencesOfDocuments(RowKind):
    """Sentences in the order of the text, whose documents are known."""

    unit = "sentences"
    unused = ("source_language", "max_length")


class SentencePairs(RowKind):
    """Pairs of a `source` and a `target` line. Sentences become batches with padding."""

    unit = "pairs"
    predicted = "target"
    unused = ("document_separator",)

    def languages(self, source: str, target: str) -> list[str]:
        return [source, target]

    def usable(self, rows: Columns, split: str, max_ratio: float | None) -> tuple[Columns, Dropped]:
        """Drop training pairs with an empty side or with one side much longer than the other.

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

    def comparable(self, rows: Columns) -> Mapping[str, Iterable[Any]]:
        """Return the pairs, and their source sides."""
        pairs = zip(rows["source"], rows["target"], strict=True)
        return {"pairs": pairs, "source sides": rows["source"]}

    def left_out(self, dropped: Mapping[str, Dropped]) -> str:
        """Return nothing: the readers of pairs describe what they drop."""
        return ""

    def short(self, rows: Columns, max_length: int) -> tuple[Columns, Dropped]:
        """Drop pairs with a side of more than `max_length` tokens."""
        pairs = list(zip(rows["source"], rows["target"], strict=True))
        kept = [pair for pair in pairs if max(map(len, pair)) <= max_length + 1]
        return _columns(kept), {"too_long": len(pairs) - len(kept)}

    def texts(
        self, rows: Columns, reference: Sequence[str] | None, plain: Callable[[str], str]
    ) -> Mapping[str, Sequence[str]]:
        """Return both sides, and the target as plain text, either published or derived here."""
        if reference is None:
            reference = [plain(line) for line in rows["target"]]
        return {**rows, "reference": reference}


class LabelledTexts(RowKind):
    """One or two texts, in the columns `first` and `second`, and the number in `label`.

    A label is a class, from 0, or a score. No row is dropped, so that scores cover whole
    splits.
    """

    unit = "rows"
    predicted = "first"
    strips = False  # a table row may end in empty columns
    beside = ("label",)

    def comparable(self, rows: Columns) -> Mapping[str, Iterable[Any]]:
        """Return the texts of each row, whatever its label."""
        texts = [column for name, column in rows.items() if name not in self.beside]
        return {"rows, without their labels,": zip(*texts, strict=True)}

    def labels(self, rows: Columns, offsets: Offsets) -> Sequence[Any] | None:
        return rows["label"]


class Questions(RowKind):
    """A `question` on a `context`, with its `id`, the texts of its `answers`, and its `article`.

    `starts` holds the character of the context at which each answer begins. A context is stored
    only with the first of its questions; the next ones have an empty one. No row is dropped.
    """

    unit = "questions"
    predicted = "question"
    strips = False
    beside = ("id", "answers", "starts", "article")

    def texts(
        self, rows: Columns, reference: Sequence[str] | None, plain: Callable[[str], str]
    ) -> Mapping[str, Sequence[str]]:
        """Return the texts from which answers are cut and with which they are compared, as JSON."""
        kept = ("id", "context", "answers")
        return {name: [json.dumps(x, ensure_ascii=False) for x in rows[name]] for name in kept}

    def comparable(self, rows: Columns) -> Mapping[str, Iterable[Any]]:
        """Return the questions with their contexts, and the contexts."""
        contexts = accumulate(rows["context"], lambda last, context: context or last)
        return {
            "questions with their contexts": zip(rows["question"], contexts, strict=True),
            "contexts": filter(None, rows["context"]),
        }

    def labels(self, rows: Columns, offsets: Offsets) -> Sequence[Any] | None:
        """Return the first and last token of the first answer in the context; -1, -1 for none."""
        found, pieces = [], None
        for context, answers, starts in zip(
            rows["context"], rows["answers"], rows["starts"], strict=True
        ):
            pieces = offsets(context) if context else pieces
            assert pieces is not None, "the first question has its context"
            span = pieces.pieces_of(starts[0], starts[0] + len(answers[0])) if answers else (-1, -1)
            found.append(span)
        return found


def row_kind(task: str, *, next_sentence: bool = False) -> RowKind:
    """Return the kind of rows of a task's corpus."""
    facts = TASKS[task]
    if next_sentence:
        return SentencesOfDocuments()
    if facts.pairs:
        return SentencePairs()
    if facts.labelled:
        return {"numbers": LabelledTexts, "answers": Questions}[facts.labelled]()
    return RunningText() if facts.running_text else RowKind()


def also_in_train(kind: RowKind, splits: Mapping[str, Columns]) -> dict[str, dict[str, Share]]:
    """Return for each evaluated split the share of `comparable` texts that also occur in train."""
    found: dict[str, dict[str, Share]] = {split: {} for split in splits if split != "train"}
    train = kind.comparable(splits["train"])
    for what in train:
        known = set(train[what])
        for split in found:
            rows = list(kind.comparable(splits[split])[what])
            found[split][what] = sum(row in known for row in rows), len(rows)
    return found


def said_of_overlap(overlap: Mapping[str, Mapping[str, Share]]) -> str:
    """Return the description's text about evaluated rows that also occur in train."""
    found = [
        f"{count:,} of {total:,} {what} of {split}"
        for split, of in overlap.items()
        for what, (count, total) in of.items()
        if count
    ]
    return f"; also in train: {', '.join(found)}" if found else ""


def _columns(pairs: Sequence[tuple[Any, Any]]) -> Columns:
    return {"source": [s for s, _ in pairs], "target": [t for _, t in pairs]}
