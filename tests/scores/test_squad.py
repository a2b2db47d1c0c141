"""SQuAD's scores by hand, and against a naive form of the published scripts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_app.scores.squad import (
    exact_match,
    f1_v1,
    f1_v2,
    normalise_answer,
    score_v1,
    score_v2,
)
from tests.scores import naive_squad


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("The Cat", "cat"),
        ("  a  big\tdog \n", "big dog"),
        ("the-end", "theend"),  # punctuation first: no article is left
        ("A. Smith", "smith"),
        ("an apple, the pear & a fig", "apple pear fig"),
        ("them and another theatre", "them and another theatre"),
        ("$3.5 million", "35 million"),
        ("“the” end", "“ ” end"),  # quotation marks outside ASCII stay, and end a word
        ("l'ÉTAT – the state", "létat – state"),
        ("a_b", "ab"),
        ("the的", "the的"),  # a letter of any script goes on with the word
        ("東京 THE 😀", "東京 😀"),
        ("the", ""),
        ("...", ""),
        ("", ""),
    ],
)
def test_normalisation_by_hand(text: str, normal: str) -> None:
    assert normalise_answer(text) == normal
    assert " ".join(naive_squad.words_of(text)) == normal


@given(st.text(alphabet="aAnNtThHeE .,-'–\u00a0é的😀_1", max_size=20))
def test_normalisation_is_the_naive_one(text: str) -> None:
    assert normalise_answer(text) == " ".join(naive_squad.words_of(text))


def test_f1_by_hand() -> None:
    """Two of three words, two of four: P 2/3, R 1/2, F1 4/7."""
    assert f1_v1("big red dog", "the big old dog's red") == pytest.approx(4 / 7)
    assert f1_v1("red red", "red") == pytest.approx(2 / 3)  # a bag, not a set
    assert f1_v1("dog red", "red dog") == 1
    assert exact_match("dog red", "red dog") == 0


@pytest.mark.parametrize(
    ("prediction", "gold", "first", "second"),
    [("", "", 0, 1), ("the", "", 0, 1), ("", "dog", 0, 0), ("dog", "", 0, 0), ("the", "A", 0, 1)],
)
def test_f1_of_empty_texts(prediction: str, gold: str, first: float, second: float) -> None:
    assert f1_v1(prediction, gold) == first
    assert f1_v2(prediction, gold) == second


GOLDS = {
    "correct": ["Saint Bernadette Soubirous"],
    "article": ["the Main Building"],
    "partial": ["a golden statue of the Virgin Mary"],
    "several": ["1976", "in 1976", "the year 1976"],
    "empty": ["Denver Broncos"],
    "unicode": ["Kraków", "Krakow"],
    "money": ["$1.2 million", "1.2 million"],
    "wrong": ["Carolina"],
    "other": ["gold"],
}
PREDICTIONS = {
    "correct": "saint bernadette  soubirous.",
    "article": "Main building",
    "partial": "golden statue",
    "several": "year 1976",
    "empty": "",
    "unicode": "kraków",
    "money": "$12 million",
    "wrong": "the Panthers",
    "other": "silver",
}


def test_version_1_by_hand() -> None:
    """F1 of "golden statue" in five words is 4/7; all others are 1 or 0."""
    scores = score_v1(GOLDS, PREDICTIONS)
    exact = ["correct", "article", "several", "unicode", "money"]
    assert scores.exact == pytest.approx(100 * len(exact) / 9)
    assert scores.f1 == pytest.approx(100 * (len(exact) + 4 / 7) / 9)
    assert naive_squad.v1(GOLDS, PREDICTIONS) == pytest.approx((scores.exact, scores.f1))


UNANSWERABLE = {"none": [], "none_wrong": [], "none_other": [], "none_article": []}
PREDICTIONS_2 = PREDICTIONS | {
    **{"none": "", "none_wrong": "a guess"},
    **{"none_other": "another", "none_article": "the"},
}


def test_version_2_by_hand_and_a_gold_without_words_in_version_1_alone() -> None:
    scores = score_v2(GOLDS | UNANSWERABLE, PREDICTIONS_2)
    assert scores.has_answer is not None
    assert scores.no_answer is not None
    assert scores.has_answer == score_v1(GOLDS, PREDICTIONS)
    # "the" has no word, so it says the same as "".
    assert (scores.no_answer.exact, scores.no_answer.f1) == (50, 50)
    assert scores.every.exact == pytest.approx(100 * (5 + 2) / 13)
    assert scores.every.f1 == pytest.approx(100 * (5 + 4 / 7 + 2) / 13)
    golds = {"q": ["the", "dog"]}
    assert score_v1(golds, {"q": "a"}).exact == 100
    assert score_v1(golds, {"q": "a"}).f1 == 0
    assert score_v2(golds, {"q": "a"}).every.exact == 0
    assert score_v2(golds, {"q": "dog"}).every.f1 == 100
    # All golds without words: the question is answerable, but "" is right.
    assert score_v2({"q": ["the"]}, {"q": ""}).has_answer == score_v2({"q": []}, {"q": ""}).every
    # One kind of questions alone.
    assert score_v2({"q": []}, {"q": ""}).has_answer is None
    assert score_v2({"q": ["dog"]}, {"q": "dog"}).no_answer is None


WORDS = st.lists(st.sampled_from(["a", "the", "dog", "cat", "Dog.", "é", "“", "…"]), max_size=4)
TEXTS = WORDS.map(" ".join)
QUESTIONS = st.dictionaries(
    st.sampled_from("abcdef"), st.tuples(st.lists(TEXTS, max_size=3), TEXTS), min_size=1
)


@given(QUESTIONS)
def test_equal_to_the_naive_form(questions: dict[str, tuple[list[str], str]]) -> None:
    golds = {question: texts for question, (texts, _) in questions.items()}
    predictions = {question: text for question, (_, text) in questions.items()}
    ours = score_v2(golds, predictions).every
    exact, f1 = naive_squad.raw_v2(golds, predictions)
    assert ours.exact == pytest.approx(100 * sum(exact.values()) / len(golds))
    assert ours.f1 == pytest.approx(100 * sum(f1.values()) / len(golds))
    answerable = {question: texts for question, texts in golds.items() if texts}
    if answerable:
        given = {q: text for q, text in predictions.items() if q in answerable}
        first = score_v1(answerable, given)
        assert naive_squad.v1(answerable, given) == pytest.approx((first.exact, first.f1))
