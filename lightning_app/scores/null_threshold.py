"""Answers and null scores of SQuAD 2.0: when no answer is given, and the best such threshold.

difference = null score - score of the best answer; the answer is "" where difference > threshold.
Devlin et al. 2019 (arXiv 1810.04805), section 4.3. The threshold is 0 unless something else chose
it; the best one on the set that it is scored on is optimistic, so report it as `best_f1` only.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

from lightning_app.errors import UserError
from lightning_app.scores.squad import Golds, score_each_v2


def apply_null_threshold(
    answers: Mapping[str, str], differences: Mapping[str, float], threshold: float = 0.0
) -> dict[str, str]:
    """Return the predictions: "" where the difference is above the threshold, else the answer.

    Args:
        answers: the best answer that is not empty, by question; "" if no such one exists.
        differences: null score minus its score; +inf where there is no answer.
        threshold: a finite number in units of logits.

    Raises:
        UserError: the two are of other questions, a difference is NaN or -inf, an answer is empty
            with a finite difference or not empty with +inf, or the threshold is not finite.
    """
    _check_answers(answers, differences)
    if not math.isfinite(threshold):
        raise UserError(f"squad: threshold is {threshold}; a finite number is needed")
    return {
        question: "" if differences[question] > threshold else answer
        for question, answer in answers.items()
    }


@dataclass(frozen=True, kw_only=True)
class BestThreshold:
    """The highest mean over questions that a threshold reaches, and the lowest such threshold."""

    score: float
    """In percent."""
    threshold: float
    """In units of logits; the float below all differences where no answer at all is best."""


def best_threshold(
    golds: Golds,
    answers: Mapping[str, str],
    differences: Mapping[str, float],
    metric: Literal["exact", "f1"],
) -> BestThreshold:
    """max over thresholds of the mean score, `best_exact` or `best_f1` of `evaluate-v2.0.py`.

    The thresholds tried are the differences, in rising order, as there. Where the script is
    inconsistent this differs, so that the result is always the score of its threshold:
    questions of equal difference change together (the script takes the best of their order in the
    file); where no answer at all is best the threshold is below all differences (the script says
    0); an unanswerable question loses nothing by an answer without words, such as "the" (the script
    takes 1 off); a missing prediction counts 0 (the script leaves it out).

    Raises:
        UserError: as `apply_null_threshold` and `score_each_v2`; no answers.
    """
    _check_answers(answers, differences)
    if not answers:
        raise UserError("squad: answers has 0 questions; a threshold needs at least one")
    which = 0 if metric == "exact" else 1
    answered = score_each_v2(golds, answers)
    refused = score_each_v2(golds, dict.fromkeys(answers, ""))
    finite = sorted((d, q) for q, d in differences.items() if math.isfinite(d))

    total = best = sum(score[which] for score in refused.values())
    threshold = math.nextafter(finite[0][0], -math.inf) if finite else 0.0
    for difference, group in groupby(finite, key=lambda pair: pair[0]):
        total += math.fsum(answered[q][which] - refused[q][which] for _, q in group)
        # Sums in another order differ in their last bits, which is no better threshold.
        if total > best + 1e-9:
            best, threshold = total, difference
    return BestThreshold(score=100 * best / len(golds), threshold=threshold)


def _check_answers(answers: Mapping[str, str], differences: Mapping[str, float]) -> None:
    for question in sorted({*answers} ^ {*differences}):
        name = "answer" if question in differences else "difference"
        raise UserError(f"squad: question '{question}' has no {name}; each needs both")
    for question, difference in differences.items():
        if math.isnan(difference) or difference == -math.inf:
            raise UserError(
                f"squad: the difference of question '{question}' is {difference}; a finite number "
                f"is needed, or inf where there is no answer"
            )
        # Predictions to which a threshold was applied before would hide every answer above it.
        if (answers[question] == "") != (difference == math.inf):
            raise UserError(
                f"squad: question '{question}' has the answer '{answers[question]:.40}' with the "
                f"difference {difference}; its best answer is needed, or '' with inf"
            )
