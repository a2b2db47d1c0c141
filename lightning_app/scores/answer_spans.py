"""Windows over long contexts, labels of answers, and answers from logits, as BERT's run_squad.py.

Devlin et al. 2019 (arXiv 1810.04805). A window is [CLS] question [SEP] part of the context [SEP],
position 0 is [CLS] and means "no answer". Spans name their first and last token, both inside.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lightning_app.errors import UserError

SPECIAL_TOKENS = 3  # [CLS] and two [SEP]
NULL = (0, 0)  # start and end position of no answer

Floats = NDArray[np.floating]


@dataclass(frozen=True, kw_only=True)
class ContextWindow:
    """Context tokens `start` to `start + length - 1`, of which the first has position `offset`."""

    start: int
    length: int
    offset: int

    @property
    def stop(self) -> int:
        """The context token after the last one."""
        return self.start + self.length

    @property
    def positions(self) -> int:
        """Number of positions with the special tokens, without padding."""
        return self.offset + self.length + 1


def context_windows(
    question_tokens: int,
    context_tokens: int,
    *,
    max_question: int = 64,
    max_length: int = 384,
    stride: int = 128,
) -> list[ContextWindow]:
    """Return the windows of a context, the last of which ends with it.

    Args:
        question_tokens: tokens of the question; those after `max_question` are cut off.
        context_tokens: tokens of the context.
        max_question: most tokens of a question.
        max_length: most positions of a window, special tokens included.
        stride: tokens between the STARTS of windows. The `stride` of Hugging Face's tokenizers is
            the overlap instead, so the same number gives other windows there.

    Raises:
        UserError: no context, no room for it beside the question, or a stride below 1.
    """
    if context_tokens < 1:
        raise UserError(f"spans: context_tokens is {context_tokens}; at least 1 is needed")
    if stride < 1:
        raise UserError(f"spans: stride is {stride}; at least 1 is needed")
    if question_tokens < 0 or max_question < 0:
        raise UserError(
            f"spans: question_tokens is {question_tokens} and max_question {max_question}; "
            f"neither may be negative"
        )
    question = min(question_tokens, max_question)
    room = max_length - question - SPECIAL_TOKENS
    if room < 1:
        raise UserError(
            f"spans: max_length is {max_length}; a question of {question} tokens with "
            f"{SPECIAL_TOKENS} special ones needs at least {question + SPECIAL_TOKENS + 1}"
        )
    windows = []
    start = 0
    while True:
        length = min(room, context_tokens - start)
        windows.append(ContextWindow(start=start, length=length, offset=question + 2))
        if start + length == context_tokens:
            return windows
        # A stride longer than the window would leave out tokens between two windows.
        start += min(length, stride)


def max_context_windows(windows: Sequence[ContextWindow]) -> NDArray[np.int64]:
    """Return for each context token the window that shows most around it: the start's only window.

    max over windows of min(tokens left, tokens right) + 0.01 length, the first one of equals.
    """
    best = np.full(windows[-1].stop, -math.inf)
    owner = np.zeros(len(best), dtype=np.int64)
    for index, window in enumerate(windows):
        left = np.arange(window.length)
        # In float64, as the original: rounding decides between a few sums that are equal.
        score = np.minimum(left, left[::-1]) + 0.01 * window.length
        inside = slice(window.start, window.stop)
        owner[inside] = np.where(score > best[inside], index, owner[inside])
        best[inside] = np.maximum(score, best[inside])
    return owner


def window_label(window: ContextWindow, span: tuple[int, int] | None) -> tuple[int, int]:
    """Return the start and end position of an answer in a window.

    (0, 0) where the window does not hold the whole answer, or the question has none.

    Args:
        window: the window.
        span: first and last context token of the answer; None for no answer.

    Raises:
        UserError: the span ends before it starts, or starts before the context.
    """
    if span is None:
        return NULL
    first, last = span
    if not 0 <= first <= last:
        raise UserError(f"spans: the answer is {first} to {last}; 0 <= first <= last is needed")
    if first < window.start or last >= window.stop:
        return NULL
    return first - window.start + window.offset, last - window.start + window.offset


@dataclass(frozen=True, kw_only=True)
class BestSpan:
    """The best answer to a question, and what "no answer" scores."""

    span: tuple[int, int] | None
    """First and last context token; None where no valid span is among the best starts and ends."""
    score: float
    """Its sum of logits; -inf without a span."""
    null_score: float
    """min over windows of start[0] + end[0]."""

    @property
    def difference(self) -> float:
        """null_score - score; +inf without a span, so that no threshold gives an answer."""
        return self.null_score - self.score

    def is_null(self, threshold: float = 0.0) -> bool:
        """Return whether "" is the answer of version 2.0: difference > threshold."""
        return self.difference > threshold


def best_span(
    windows: Sequence[ContextWindow],
    start_logits: Sequence[Floats],
    end_logits: Sequence[Floats],
    visible: NDArray[np.bool_],
    *,
    n_best: int = 20,
    max_answer: int = 30,
) -> BestSpan:
    """max over windows, starts, ends of start[i] + end[j], over the best `n_best` of each.

    Not valid are positions outside the context, a start in a window that is not the max-context
    window of its token, an end before the start, more than `max_answer` tokens, and spans that
    show no character. Of equal sums the first window, then the better start wins. A question
    without a valid span has none; the original program fails there in version 2.0.

    Args:
        windows: all windows of the context.
        start_logits: one array a window, a logit for each position. Padding may follow and does
            not count, so that the answer is the same in every batch (the original counts it).
        end_logits: the same for ends.
        visible: for each context token whether it shows a character (`PieceOffsets.visible`).
        n_best: number of starts and of ends that are combined in each window.
        max_answer: most tokens of an answer.

    Raises:
        UserError: lengths do not fit, a logit is NaN or +inf, or that of position 0 is not finite.
    """
    if n_best < 1 or max_answer < 1:
        raise UserError(
            f"spans: n_best is {n_best} and max_answer {max_answer}; at least 1 is needed"
        )
    if not len(windows) == len(start_logits) == len(end_logits) or not windows:
        raise UserError(
            f"spans: {len(windows)} windows, {len(start_logits)} start_logits and "
            f"{len(end_logits)} end_logits; each window has one of both"
        )
    if len(visible) != windows[-1].stop:
        raise UserError(
            f"spans: visible has {len(visible)} tokens; the context has {windows[-1].stop}"
        )
    owner = max_context_windows(windows)
    shown = np.concatenate([[0], np.cumsum(visible)])  # characters are shown before token i
    best, span, null_score = -math.inf, None, math.inf
    for index, window in enumerate(windows):
        starts = _logits("start_logits", index, start_logits[index], window)
        ends = _logits("end_logits", index, end_logits[index], window)
        null_score = min(null_score, float(starts[0] + ends[0]))
        i, j = np.ix_(_top(starts, n_best), _top(ends, n_best))
        first, last = i - window.offset + window.start, j - window.offset + window.start
        valid = (first >= window.start) & (last < window.stop) & (first <= last)
        valid &= last - first < max_answer
        inside_first = np.clip(first, 0, len(owner) - 1)
        inside_last = np.clip(last, 0, len(owner) - 1)
        valid &= owner[inside_first] == index
        valid &= shown[inside_last + 1] > shown[inside_first]
        sums = np.where(valid, starts[i] + ends[j], -math.inf)
        row, column = np.unravel_index(int(sums.argmax()), sums.shape)
        if sums[row, column] > best:
            best = float(sums[row, column])
            span = int(first[row, 0]), int(last[0, column])
    return BestSpan(span=span, score=best, null_score=null_score)


def _top(logits: Floats, n: int) -> NDArray[np.int64]:
    """Return the positions of the n largest logits, the larger first, of equals the earlier."""
    return np.argsort(-logits, kind="stable")[:n]


def _logits(name: str, index: int, given: Floats, window: ContextWindow) -> Floats:
    # Sums of float16 would be rounded: starts that differ could give equal sums.
    logits = np.asarray(given, dtype=np.float64)[: window.positions]
    if logits.ndim != 1 or len(logits) < window.positions:
        raise UserError(
            f"spans: {name} of window {index} has shape {logits.shape}; one logit for each of at "
            f"least {window.positions} positions is needed"
        )
    if np.isnan(logits).any() or (logits == math.inf).any() or not math.isfinite(logits[0]):
        raise UserError(
            f"spans: {name} of window {index} holds NaN or inf, or -inf at position 0; finite "
            f"logits are needed, -inf for masked positions"
        )
    return logits
