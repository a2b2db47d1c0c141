"""Windows, answers and scores of SQuAD 1.1 and 2.0 (Rajpurkar et al. 2016, 2018).

A window is [CLS] question [SEP] part of the context [SEP], as in BERT's `run_squad.py` (Devlin et
al. 2019, 1810.04805); position 0 is [CLS] and means "no answer". Spans name their first and last
token, both inside. Exact match and F1, in percent, follow the published scripts `evaluate-v1.1.py`
and `evaluate-v2.0.py`.

In version 2.0 (section 4.3), difference = null score - score of the best answer, and the answer is
"" if difference > threshold. The threshold is 0 unless chosen otherwise; the best one on
the evaluated set is optimistic, so report it only as `best_f1`.
"""

import math
import re
import string
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from lightning_app.core.errors import UserError

SPECIAL_TOKENS = 3  # [CLS] and two [SEP]
NULL = (0, 0)  # start and end position for no answer

Floats = NDArray[np.floating]


@dataclass(frozen=True, kw_only=True)
class ContextWindow:
    """Context tokens `start` to `start + length - 1`, the first of them at position `offset`."""

    start: int
    length: int
    offset: int

    @property
    def stop(self) -> int:
        """The context token after the last one."""
        return self.start + self.length

    @property
    def positions(self) -> int:
        """Number of positions including special tokens, without padding."""
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
        question_tokens: tokens of the question; tokens after `max_question` are dropped.
        context_tokens: tokens of the context.
        max_question: maximum tokens of a question.
        max_length: maximum positions of a window, including special tokens.
        stride: tokens between the STARTS of windows. The `stride` of Hugging Face's tokenizers is
            the overlap, so the same number means other windows there.
    """
    question = min(question_tokens, max_question)
    room = max_length - question - SPECIAL_TOKENS
    assert room > 0, "checked with the corpus"
    windows = []
    start = 0
    while True:
        length = min(room, context_tokens - start)
        windows.append(ContextWindow(start=start, length=length, offset=question + 2))
        if start + length == context_tokens:
            return windows
        # A stride longer than the window would skip tokens between two windows.
        start += min(length, stride)


def max_context_windows(windows: Sequence[ContextWindow]) -> NDArray[np.int64]:
    """Return for each context token the window with most context, the only one where it can start.

    max over windows of min(tokens left, tokens right) + 0.01 length, the first one in a tie.
    """
    best = np.full(windows[-1].stop, -math.inf)
    owner = np.zeros(len(best), dtype=np.int64)
    for index, window in enumerate(windows):
        left = np.arange(window.length)
        # In float64, as in the original: rounding breaks a few ties.
        score = np.minimum(left, left[::-1]) + 0.01 * window.length
        inside = slice(window.start, window.stop)
        owner[inside] = np.where(score > best[inside], index, owner[inside])
        best[inside] = np.maximum(score, best[inside])
    return owner


def window_label(window: ContextWindow, span: tuple[int, int] | None) -> tuple[int, int]:
    """Return the start and end position of an answer in a window.

    It is (0, 0) if the window does not contain the whole answer or there is no answer.

    Args:
        window: the window.
        span: first and last context token of the answer; None for no answer.
    """
    if span is None:
        return NULL
    first, last = span
    if first < window.start or last >= window.stop:
        return NULL
    return first - window.start + window.offset, last - window.start + window.offset


@dataclass(frozen=True, kw_only=True)
class BestSpan:
    """The best answer to a question, and the score of "no answer"."""

    span: tuple[int, int] | None
    """First and last context token; None if no valid span is among the best starts and ends."""
    score: float
    """Its sum of logits; -inf without a span."""
    null_score: float
    """min over windows of start[0] + end[0]."""

    @property
    def difference(self) -> float:
        """null_score - score; +inf without a span, so that no threshold gives an answer."""
        return self.null_score - self.score


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

    Invalid are positions outside the context, a start in a window that is not the max-context
    window of its token, an end before the start, more than `max_answer` tokens, and spans that
    show no character. In a tie the first window wins, then the better start. A question
    without a valid span has no answer; the original program fails there in version 2.0.

    Args:
        windows: all windows of the context.
        start_logits: one array per window, with a logit per position. Padding may follow and does
            not count, so the answer is the same in every batch (the original counts it).
        end_logits: the same for ends.
        visible: for each context token, whether it shows a character (`PieceOffsets.visible`).
        n_best: number of starts and of ends to combine in each window.
        max_answer: maximum tokens of an answer.
    """
    owner = max_context_windows(windows)
    shown = np.concatenate([[0], np.cumsum(visible)])  # visible tokens before token i
    best, span, null_score = -math.inf, None, math.inf
    for index, window in enumerate(windows):
        starts = _logits(start_logits[index], window)
        ends = _logits(end_logits[index], window)
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
    """Return the positions of the n largest logits, the larger first, in a tie the earlier."""
    return np.argsort(-logits, kind="stable")[:n]


def _logits(values: Floats, window: ContextWindow) -> Floats:
    # Sums of float16 would be rounded: different starts could have equal sums.
    logits = np.asarray(values, dtype=np.float64)[: window.positions]
    if np.isnan(logits).any() or (logits == math.inf).any() or not math.isfinite(logits[0]):
        raise UserError("spans: a window has logits of NaN or inf, or -inf at position 0")
    return logits


Golds = Mapping[str, Sequence[str]]
"""The gold answers of each question, by its id; empty if version 2.0 has no answer."""

_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")


def normalise_answer(text: str) -> str:
    """Lower case, then no ASCII punctuation, then no articles as words, then single spaces.

    The order matters: "the-end" becomes the one word "theend", and "A." becomes an article.
    """
    bare = text.lower().translate(_NO_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", bare).split())


def exact_match(prediction: str, gold: str) -> float:
    """1 if both are the same after normalisation, else 0."""
    return float(normalise_answer(prediction) == normalise_answer(gold))


def f1_v1(prediction: str, gold: str) -> float:
    """2 P R / (P + R) of the two bags of normalised words, a fraction; 0 if they share no word.

    Two texts without any word, such as "The" and "a", have F1 0 although they match exactly.
    """
    predicted, true = normalise_answer(prediction).split(), normalise_answer(gold).split()
    same = (Counter(predicted) & Counter(true)).total()
    if not same:
        return 0.0
    precision, recall = same / len(predicted), same / len(true)
    return 2 * precision * recall / (precision + recall)


def f1_v2(prediction: str, gold: str) -> float:
    """Like `f1_v1`, but if either side has no words: 1 if neither has any, otherwise 0."""
    words = normalise_answer(prediction) and normalise_answer(gold)
    return f1_v1(prediction, gold) if words else exact_match(prediction, gold)


@dataclass(frozen=True, kw_only=True)
class AnswerScores:
    """Means over questions, in percent."""

    exact: float
    f1: float


@dataclass(frozen=True, kw_only=True)
class SquadScores:
    """The scores of version 2.0: for all questions and for its two kinds of questions."""

    every: AnswerScores
    has_answer: AnswerScores | None
    """HasAns; None without such questions."""
    no_answer: AnswerScores | None
    """NoAns; None without such questions."""


ByQuestion = dict[str, tuple[float, float]]
"""Exact match and F1, each the maximum over the golds."""


def score_v1(golds: Golds, predictions: Mapping[str, str]) -> AnswerScores:
    """Return the means over all questions of version 1.1."""
    return _means(golds, _of_each(golds, predictions, f1_v1))


def score_v2(golds: Golds, predictions: Mapping[str, str]) -> SquadScores:
    """Return the scores of version 2.0; the prediction "" means that there is no answer.

    A gold without words after normalisation does not count; a question without golds gets "".
    """
    scores = score_each_v2(golds, predictions)
    has = [question for question, texts in golds.items() if texts]
    no = [question for question, texts in golds.items() if not texts]
    return SquadScores(
        every=_means(golds, scores),
        has_answer=_means(has, scores) if has else None,
        no_answer=_means(no, scores) if no else None,
    )


def score_each_v2(golds: Golds, predictions: Mapping[str, str]) -> ByQuestion:
    """Return exact match and F1 of each question by the rules of version 2.0."""
    counted = {
        question: [gold for gold in golds[question] if normalise_answer(gold)] or [""]
        for question in predictions
    }
    return _of_each(counted, predictions, f1_v2)


def _of_each(
    golds: Golds, predictions: Mapping[str, str], f1: Callable[[str, str], float]
) -> ByQuestion:
    return {
        question: (
            max(exact_match(prediction, gold) for gold in golds[question]),
            max(f1(prediction, gold) for gold in golds[question]),
        )
        for question, prediction in predictions.items()
    }


def _means(questions: Collection[str], scores: ByQuestion) -> AnswerScores:
    of = [scores[question] for question in questions]
    return AnswerScores(
        exact=100 * sum(exact for exact, _ in of) / len(of),
        f1=100 * sum(f1 for _, f1 in of) / len(of),
    )


def apply_null_threshold(
    answers: Mapping[str, str], differences: Mapping[str, float], threshold: float = 0.0
) -> dict[str, str]:
    """Return the predictions: "" if the difference is above the threshold, otherwise the answer.

    Args:
        answers: the best non-empty answer by question; "" if there is no such answer.
        differences: null score minus its score; +inf if there is no answer.
        threshold: in units of logits.
    """
    return {
        question: "" if differences[question] > threshold else answer
        for question, answer in answers.items()
    }


@dataclass(frozen=True, kw_only=True)
class BestThreshold:
    """The highest mean over questions of any threshold, and the lowest such threshold."""

    score: float
    """In percent."""
    threshold: float
    """In units of logits; the float below all differences if answering nothing is best."""


def best_threshold(
    golds: Golds,
    answers: Mapping[str, str],
    differences: Mapping[str, float],
    metric: Literal["exact", "f1"],
) -> BestThreshold:
    """max over thresholds of the mean score, `best_exact` or `best_f1` of `evaluate-v2.0.py`.

    The thresholds tried are the differences, in rising order, as in the script. Where that is
    inconsistent this differs, so that the result is always the score of its threshold:
    questions of equal difference change together (the script takes the best of their order in the
    file); if answering nothing is best, the threshold is below all differences (the script returns
    0); an unanswerable question loses nothing by an answer without words, such as "the" (the script
    takes 1 off).
    """
    which = 0 if metric == "exact" else 1
    answered = score_each_v2(golds, answers)
    refused = score_each_v2(golds, dict.fromkeys(answers, ""))
    finite = sorted((d, q) for q, d in differences.items() if math.isfinite(d))

    total = best = sum(score[which] for score in refused.values())
    threshold = math.nextafter(finite[0][0], -math.inf) if finite else 0.0
    for difference, group in groupby(finite, key=lambda pair: pair[0]):
        total += math.fsum(answered[q][which] - refused[q][which] for _, q in group)
        # Sums in another order differ in the last bits, which does not make a threshold better.
        if total > best + 1e-9:
            best, threshold = total, difference
    return BestThreshold(score=100 * best / len(golds), threshold=threshold)
