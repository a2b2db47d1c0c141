"""Exact match and F1 of answers to SQuAD (1.1: Rajpurkar et al. 2016, 2.0: 2018), in percent.

The rules are those of the published scripts `evaluate-v1.1.py` and `evaluate-v2.0.py`.
"""

import re
import string
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from lightning_app.errors import UserError

Golds = Mapping[str, Sequence[str]]
"""The gold answers of each question, by its id; none where version 2.0 has no answer."""

_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")


def normalise_answer(text: str) -> str:
    """Lower case, then no ASCII punctuation, then no articles as words, then single spaces.

    The order matters: "the-end" becomes the one word "theend", and "A." an article.
    """
    bare = text.lower().translate(_NO_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", bare).split())


def exact_match(prediction: str, gold: str) -> float:
    """1 if both are the same after normalisation, else 0."""
    return float(normalise_answer(prediction) == normalise_answer(gold))


def f1_v1(prediction: str, gold: str) -> float:
    """2 P R / (P + R) of the two bags of normalised words, a fraction; 0 where they share none.

    Two texts without any word, such as "The" and "a", have F1 0 although they match exactly.
    """
    return _bag_f1(normalise_answer(prediction).split(), normalise_answer(gold).split())


def f1_v2(prediction: str, gold: str) -> float:
    """As `f1_v1`, but if either side has no word: 1 if the other has none either, else 0."""
    predicted, true = normalise_answer(prediction).split(), normalise_answer(gold).split()
    return _bag_f1(predicted, true) if predicted and true else float(predicted == true)


def _bag_f1(predicted: list[str], true: list[str]) -> float:
    same = (Counter(predicted) & Counter(true)).total()
    if not same:
        return 0.0
    precision, recall = same / len(predicted), same / len(true)
    return 2 * precision * recall / (precision + recall)


@dataclass(frozen=True, kw_only=True)
class AnswerScores:
    """Means over questions, in percent."""

    exact: float
    f1: float
    total: int
    """Number of questions."""
    missing: int
    """Number of those without a prediction, which count 0."""


@dataclass(frozen=True, kw_only=True)
class SquadScores:
    """The scores of version 2.0: of all questions, and of its two kinds of questions."""

    every: AnswerScores
    has_answer: AnswerScores | None
    """HasAns; None without such questions."""
    no_answer: AnswerScores | None
    """NoAns; None without such questions."""


ByQuestion = dict[str, tuple[float, float]]
"""Exact match and F1, each the maximum over the golds; questions with a prediction only."""


def score_v1(golds: Golds, predictions: Mapping[str, str]) -> AnswerScores:
    """Return the means over all questions of version 1.1; a missing prediction counts 0.

    Raises:
        UserError: no questions, a question without golds, or predictions of other questions.
    """
    _check(golds, predictions)
    for question, texts in golds.items():
        if not texts:
            raise UserError(
                f"squad: question '{question}' has no gold answer; SQuAD 1.1 has one for each, "
                f"and version 2.0 has its own score"
            )
    scores = {
        question: (
            max(exact_match(prediction, gold) for gold in golds[question]),
            max(f1_v1(prediction, gold) for gold in golds[question]),
        )
        for question, prediction in predictions.items()
    }
    return _means(golds, scores)


def score_v2(golds: Golds, predictions: Mapping[str, str]) -> SquadScores:
    """Return the scores of version 2.0; the prediction "" says that there is no answer.

    A gold without any word after normalisation does not count; a question without golds has "".
    A missing prediction counts 0, for questions without an answer too.

    Raises:
        UserError: no questions, or predictions of other questions.
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
    """Return exact match and F1 of each predicted question by the rules of version 2.0.

    Raises:
        UserError: no questions, or predictions of other questions.
    """
    _check(golds, predictions)
    scores: ByQuestion = {}
    for question, prediction in predictions.items():
        texts = [gold for gold in golds[question] if normalise_answer(gold)] or [""]
        scores[question] = (
            max(exact_match(prediction, gold) for gold in texts),
            max(f1_v2(prediction, gold) for gold in texts),
        )
    return scores


def _means(questions: Collection[str], scores: ByQuestion) -> AnswerScores:
    present = [scores[question] for question in questions if question in scores]
    return AnswerScores(
        exact=100 * sum(exact for exact, _ in present) / len(questions),
        f1=100 * sum(f1 for _, f1 in present) / len(questions),
        total=len(questions),
        missing=len(questions) - len(present),
    )


def _check(golds: Golds, predictions: Mapping[str, str]) -> None:
    if not golds:
        raise UserError("squad: golds has 0 questions; a score needs at least one")
    for question, texts in golds.items():
        # The letters of a string would pass as golds of one character each.
        if isinstance(texts, str) or not all(isinstance(text, str) for text in texts):
            raise UserError(
                f"squad: golds of question '{question}' are {texts!r:.80}; a list of texts "
                f"is needed"
            )
    for question, prediction in predictions.items():
        if question not in golds:
            raise UserError(
                f"squad: the prediction of question '{question}' has no golds; predictions and "
                f"golds must be of the same set"
            )
        if not isinstance(prediction, str):
            raise UserError(
                f"squad: the prediction of question '{question}' is {prediction!r:.80}; a text is "
                f'needed, "" for no answer'
            )
