"""Questions with windows of their contexts as rows, and the answers from windows."""

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple, final

import numpy as np

from lightning_app.core.errors import UserError
from lightning_app.data.batching import EpochSampler
from lightning_app.data.prepare import PreparedCorpus
from lightning_app.scores.offsets import PieceOffsets
from lightning_app.scores.squad import (
    NULL,
    SPECIAL_TOKENS,
    ContextWindow,
    best_span,
    context_windows,
    window_label,
)
from lightning_app.tasks.labelled import LabelledSplit, MarkedRows, Texts, stored_texts

CONTEXTS = 4
"""The number of contexts whose tokens are cached: questions about a context are consecutive."""


class Answer(NamedTuple):
    """The best non-empty answer, or "" if there is no such answer, and null score - its score."""

    text: str
    difference: float


@final
class QuestionTexts:
    """The questions of a split by number: their ids, contexts and golds.

    Args:
        corpus: A prepared corpus of questions.
        split: valid or test.

    Attributes:
        ids: The id of each question.
        golds: The texts of its gold answers; empty if it has no answer.
    """

    def __init__(self, corpus: PreparedCorpus, split: str) -> None:
        self.ids: list[str] = [json.loads(line) for line in corpus.lines(split, "id")]
        self.golds: list[list[str]] = [json.loads(line) for line in corpus.lines(split, "answers")]
        self._contexts: list[str] = [json.loads(line) for line in corpus.lines(split, "context")]
        self._offsets = lru_cache(CONTEXTS)(corpus.tokenizer.offsets)

    def offsets(self, holder: int) -> PieceOffsets:
        """Return the tokens of the context stored with question `holder`."""
        return self._offsets(self._contexts[holder])

    def answer(
        self, holder: int, windows: Sequence[ContextWindow], logits: Sequence[np.ndarray]
    ) -> Answer:
        """Return the best answer in the context stored with question `holder`.

        Args:
            holder: The question with which the context is stored.
            windows: All windows of the question.
            logits: (2, token) per window: for starts and ends.

        Raises:
            UserError: if a logit is not finite.
        """
        context = self.offsets(holder)
        starts, ends = [of[0] for of in logits], [of[1] for of in logits]
        best = best_span(windows, starts, ends, context.visible())
        text = "" if best.span is None else context.text_of(*best.span)
        return Answer(text, best.difference)


MAX_QUESTION = 64
"""The maximum tokens of a question, as in google-research/bert, `run_squad.py`; the rest is cut."""


@final
class QuestionRows(LabelledSplit):
    """Windows of contexts with the positions of an answer. A row is a window.

    A row is ``BOS question EOS window EOS``. Its label holds the positions of the first and the
    last token of the first gold answer; (0, 0), which is BOS, if the window does not contain all of
    it or the question has no answer.

    An epoch contains every window once, in batches of similar length. In an evaluation all windows
    of a question are in one global batch, so an evaluation of only some batches has whole
    questions.

    Args:
        corpus: A prepared corpus of questions.
        split: train, valid or test.
        window: The maximum tokens of a row, with marks.
        stride: Tokens between the starts of two windows.
        seed: The seed of the order of batches; None for an evaluation, ordered by length.
        rank: The rank of this process.
        world_size: Number of processes.

    Attributes:
        windows: The windows of each question.
        first_rows: The row of the first window of each question, and the number of all rows.
        labels: (row, 2) int64.
        holders: For each question, the question with which its context is stored.
        cut: The number of questions that lost tokens.

    Raises:
        UserError: if `window` has no room for a context token next to the longest question.
    """

    def __init__(
        self,
        corpus: PreparedCorpus,
        split: str,
        *,
        window: int,
        stride: int,
        seed: int | None,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        check_window(corpus, split, window)
        asked, contexts = (stored_texts(corpus, split, name) for name in ("question", "context"))
        self.cut = int(np.sum(asked.lengths > MAX_QUESTION))
        asked = asked._replace(lengths=np.minimum(asked.lengths, MAX_QUESTION))
        self.holders = holders(contexts.lengths)
        sizes = zip(asked.lengths.tolist(), contexts.lengths[self.holders].tolist(), strict=True)
        self.windows = [
            context_windows(
                question, context, max_question=MAX_QUESTION, max_length=window, stride=stride
            )
            for question, context in sizes
        ]
        counts = np.array([len(of) for of in self.windows])
        self.first_rows = np.concatenate([[0], np.cumsum(counts)])
        question = np.repeat(np.arange(len(counts)), counts)
        places = np.array([(w.start, w.length) for of in self.windows for w in of])
        spans = np.asarray(corpus.labels(split)).astype(np.int64)
        labels = np.array(
            [
                window_label(w, None if first < 0 else (first, last))
                for of, (first, last) in zip(self.windows, spans.tolist(), strict=True)
                for w in of
            ],
            dtype=np.int64,
        )
        starts = contexts.starts[self.holders][question] + places[:, 0]
        texts = MarkedRows(
            Texts(asked.ids, asked.starts[question], asked.lengths[question]),
            Texts(contexts.ids, starts, places[:, 1]),
        )
        super().__init__(texts, labels, seed, rank, world_size)
        self.window, self.stride = window, stride

    def sampler(self, tokens_per_batch: int) -> EpochSampler:
        """Return the batches of an epoch, each of at most that many tokens with padding.

        In an evaluation the windows of a single question may have more.
        """
        if self._seed is not None:
            return super().sampler(tokens_per_batch)
        batches = whole_questions(self.lengths, self.first_rows, tokens_per_batch)
        return EpochSampler(lambda _: batches)

    def without_answer(self) -> int:
        """Return the number of rows labelled with no answer."""
        return int(np.sum((self.labels == NULL).all(axis=1)))


def check_window(corpus: PreparedCorpus, split: str, window: int) -> None:
    """Refuse a window without room for a context token next to the longest question.

    Raises:
        UserError: naming the split and the required window.
    """
    longest = min(MAX_QUESTION, int(corpus.lengths(split, "question").max()) - 1)
    if window <= longest + SPECIAL_TOKENS:
        raise UserError(
            f"data.window is {window}: a question of {split} has {longest} tokens, which with "
            f"{SPECIAL_TOKENS} marks and a token of its context need at least "
            f"{longest + SPECIAL_TOKENS + 1}"
        )


def holders(lengths: np.ndarray) -> np.ndarray:
    """Return for each question the one that stores its context: the last one with a text."""
    return np.maximum.accumulate(np.where(lengths > 0, np.arange(len(lengths)), 0))


def whole_questions(
    lengths: np.ndarray, first_rows: np.ndarray, tokens_per_batch: int
) -> list[np.ndarray]:
    """Return global batches that contain all rows of each of their questions.

    Questions are ordered by their longest row. rows * longest <= tokens_per_batch, except for
    a question that has more.

    Args:
        lengths: The tokens of each row.
        first_rows: The first row of each question, and the number of all rows.
        tokens_per_batch: The budget, with padding.
    """
    longest = np.maximum.reduceat(lengths, first_rows[:-1])
    batches: list[np.ndarray] = []
    taken: list[np.ndarray] = []
    count = 0
    for question in np.argsort(longest, kind="stable"):
        rows = np.arange(*first_rows[question : question + 2].tolist())
        if taken and (count + len(rows)) * longest[question] > tokens_per_batch:
            batches.append(np.concatenate(taken))
            taken, count = [], 0
        taken.append(rows)
        count += len(rows)
    return [*batches, np.concatenate(taken)]


def described_windows(rows: Mapping[str, QuestionRows]) -> str:
    """Return the windows of each split, for the corpus description."""
    counts, null, cut = (
        " / ".join(f"{count:,}" for count in of)
        for of in zip(*((len(x), x.without_answer(), x.cut) for x in rows.values()), strict=True)
    )
    first = next(iter(rows.values()))
    return (
        f"; {counts} windows of at most {first.window} tokens with their question, whose starts "
        f"are {first.stride} tokens apart, {null} of them without the whole answer; {cut} "
        f"questions cut to {MAX_QUESTION} tokens"
    )
