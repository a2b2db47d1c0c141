"""Windows of questions: their form, their labels, whole questions in a batch, and answers back."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_app.core.errors import UserError
from lightning_app.data.config import DataConfig, Splits
from lightning_app.data.prepare import PreparedCorpus, prepare
from lightning_app.data.tokenizer import BOS, EOS, PAD
from lightning_app.scores.squad import score_v1, score_v2
from lightning_app.tasks.squad import QuestionRows, QuestionTexts
from tests import questions


def prepared(root: Path, name: str = "squad2", **fields: Any) -> tuple[PreparedCorpus, DataConfig]:
    questions.write_squad(root, name)
    config = DataConfig(**{**questions.answering(root, name)["data"], "task": "squad", **fields})
    return prepare(config), config


def rows_of(corpus: PreparedCorpus, split: str = "valid", **given: Any) -> QuestionRows:
    return QuestionRows(corpus, split, **{"window": 14, "stride": 5, "seed": None, **given})


def reference(
    corpus: PreparedCorpus, window: int, stride: int, longest: int = 64
) -> list[tuple[int, list[int], list[int], list[int]]]:
    """Question, tokens, segments and label of each row, by the loops of google-research/bert."""
    found, context = [], []
    split = "valid"
    labels = corpus.labels(split).astype(int).tolist()
    texts = {
        name: np.split(corpus.ids(split, name), corpus.offsets(split, name)[1:-1])
        for name in ("question", "context")
    }
    for number, (first, last) in enumerate(labels):
        asked = texts["question"][number][:-1].tolist()[:longest]
        context = texts["context"][number][:-1].tolist() or context
        room, start = window - len(asked) - 3, 0
        while True:
            length = min(len(context) - start, room)
            tokens = [BOS, *asked, EOS, *context[start : start + length], EOS]
            segments = [0] * (len(asked) + 2) + [1] * (length + 1)
            label = [0, 0]
            if first >= start and last < start + length and first >= 0:
                label = [place - start + len(asked) + 2 for place in (first, last)]
            found.append((number, tokens, segments, label))
            if start + length == len(context):
                break
            start += min(length, stride)
    return found


@pytest.mark.parametrize(("window", "stride"), [(14, 5), (14, 128), (40, 9), (6, 1)])
def test_rows_are_berts(tmp_path: Path, window: int, stride: int) -> None:
    corpus, _ = prepared(tmp_path)
    rows = rows_of(corpus, window=window, stride=stride)
    expected = reference(corpus, window, stride)
    assert len(rows) == len(expected)
    batch = rows[0, np.arange(len(rows))]
    for row, (_, tokens, segments, label) in enumerate(expected):
        padding = [0] * (batch.tokens.shape[1] - len(tokens))
        assert batch.tokens[row].tolist() == tokens + [PAD for _ in padding]
        assert batch.segments[row].tolist() == segments + padding
        assert batch.labels[row].tolist() == label
    assert rows.lengths.tolist() == [len(tokens) for _, tokens, _, _ in expected]
    counts = np.bincount([number for number, *_ in expected])
    assert np.diff(rows.first_rows).tolist() == counts.tolist()
    assert [len(of) for of in rows.windows] == counts.tolist()
    assert rows.without_answer() == sum(label == [0, 0] for *_, label in expected)
    assert (np.diff(rows.first_rows).max() > 1) == (window < 40)


def test_a_long_question_is_cut_to_64_tokens(tmp_path: Path) -> None:
    def lengthen(text: str) -> str:
        return text.replace('"question": "', '"question": "' + "w1 " * 70, 1)

    root = questions.write_squad(tmp_path, "squad2")
    (root / "dev-v2.0.json").write_text(lengthen((root / "dev-v2.0.json").read_text()))
    corpus = prepare(DataConfig(**{**questions.answering(root, "squad2")["data"], "task": "squad"}))
    rows = rows_of(corpus, window=80)
    assert rows.cut == 1
    assert rows[0, np.array([0])].tokens[0].tolist() == reference(corpus, 80, 5)[0][1]
    with pytest.raises(UserError, match=r"data\.window is 67: .* 64 tokens, .* at least 68"):
        rows_of(corpus, window=67)
    assert len(rows_of(corpus, window=68)) > len(rows)


def test_batches_hold_the_budget_and_whole_questions(tmp_path: Path) -> None:
    corpus, _ = prepared(tmp_path)
    rows = rows_of(corpus)
    counts = np.diff(rows.first_rows)
    question = np.repeat(np.arange(35), counts)
    for budget in (1, 60, 200):
        for _, of in rows.sampler(budget):
            assert len(of) == np.isin(question, question[of]).sum()
            assert len(of) * int(rows.lengths[of].max()) <= budget or len(set(question[of])) == 1


def test_labels_as_logits_give_the_answers_back(tmp_path: Path) -> None:
    """Of contexts in several windows; a question without an answer has the difference of 2."""
    corpus, _ = prepared(tmp_path, "squad2")
    rows, texts = rows_of(corpus), QuestionTexts(corpus, "valid")
    for number, windows in enumerate(rows.windows):
        mine = np.arange(rows.first_rows[number], rows.first_rows[number + 1])
        logits = [np.eye(int(rows.lengths[row]))[rows.labels[row]] for row in mine]
        answer = texts.answer(int(rows.holders[number]), windows, logits)
        if texts.golds[number]:
            assert answer.text == texts.golds[number][0]
            assert answer.difference <= 0
        else:
            assert answer.difference > 0


@pytest.mark.slow
@pytest.mark.parametrize(("name", "total"), [("squad1", 10_570), ("squad2", 11_873)])
@pytest.mark.parametrize(("window", "stride"), [(384, 128), (128, 48)])
def test_golds_survive_rows_and_decoding(
    name: str, total: int, window: int, stride: int, shared_data: Path, cache: str, capsys
) -> None:
    """Labels as logits, on both whole dev sets: at least 99 % exact matches."""
    section: dict[str, Any] = {"name": name, "root": str(shared_data / "squad"), "task": "squad"}
    section |= {"cache": cache, "vocab_size": 8000, "splits": Splits(train="dev")}
    corpus = prepare(DataConfig(**section))
    assert "paragraphs of valid" in corpus.meta["protocol"]
    rows, texts = rows_of(corpus, window=window, stride=stride), QuestionTexts(corpus, "valid")
    golds = dict(zip(texts.ids, texts.golds, strict=True))
    found = {}
    for number, windows in enumerate(rows.windows):
        mine = range(rows.first_rows[number], rows.first_rows[number + 1])
        logits = [10 * np.eye(int(rows.lengths[row]))[rows.labels[row]] for row in mine]
        answer = texts.answer(int(rows.holders[number]), windows, logits)
        found[texts.ids[number]] = "" if answer.difference > 0 else answer.text
    assert len(golds) == total
    scores = score_v1(golds, found) if name == "squad1" else score_v2(golds, found).every
    with capsys.disabled():
        print(f"\n{name}: {scores.exact:.2f} EM, {scores.f1:.2f} F1 of {len(golds)} questions")
    assert scores.exact >= 99
