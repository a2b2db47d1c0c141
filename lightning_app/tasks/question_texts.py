"""The texts of the questions of an evaluated split, and answers from logits of their windows."""

import json
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple, final

import numpy as np

from lightning_app.data.prepare import PreparedCorpus
from lightning_app.scores.answer_spans import ContextWindow, best_span
from lightning_app.scores.offsets import PieceOffsets

CONTEXTS = 4
"""Contexts whose tokens are kept: the questions of a context follow each other."""


class Answer(NamedTuple):
    """The best answer that is not empty, or "" without one, and null score - its score."""

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
        golds: The texts of its gold answers; none where it has no answer.
    """

    def __init__(self, corpus: PreparedCorpus, split: str) -> None:
        self.ids: list[str] = [json.loads(line) for line in corpus.lines(split, "id")]
        self.golds: list[list[str]] = [json.loads(line) for line in corpus.lines(split, "answers")]
        self._contexts: list[str] = [json.loads(line) for line in corpus.lines(split, "context")]
        self._offsets = lru_cache(CONTEXTS)(corpus.tokenizer.offsets)

    def offsets(self, holder: int) -> PieceOffsets:
        """Return the tokens of the context that question `holder` holds."""
        return self._offsets(self._contexts[holder])

    def answer(
        self, holder: int, windows: Sequence[ContextWindow], logits: Sequence[np.ndarray]
    ) -> Answer:
        """Return the best answer in the context that question `holder` holds.

        Args:
            holder: The question that holds the context.
            windows: All windows of the question.
            logits: (2, token) of each window: of starts and of ends.

        Raises:
            UserError: a logit is not finite.
        """
        context = self.offsets(holder)
        starts, ends = [of[0] for of in logits], [of[1] for of in logits]
        best = best_span(windows, starts, ends, context.visible())
        text = "" if best.span is None else context.text_of(*best.span)
        return Answer(text, best.difference)
