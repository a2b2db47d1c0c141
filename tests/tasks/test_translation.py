from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import sacrebleu
import torch

from lightning_app.core.errors import UserError
from lightning_app.data.config import DataConfig
from lightning_app.data.prepare import PreparedCorpus, prepare
from lightning_app.data.tokenizer import BOS, EOS, PAD
from lightning_app.models.loss import Evaluated, ObjectiveConfig
from lightning_app.models.search import Hypothesis
from lightning_app.tasks.translation import (
    Translation,
    TranslationBatch,
    TranslationRows,
    bleu,
    check_language,
    language_code,
)

FOUND = Evaluated(nll=1.0, tokens=1)


@pytest.fixture
def corpus(write_pairs, text_config) -> PreparedCorpus:
    return prepare(text_config(write_pairs()))


def test_batch_is_the_text(corpus: PreparedCorpus):
    batch = TranslationRows(corpus, "train")[0, np.array([0, 1])]
    encode = corpus.tokenizer.encode
    long, short = encode("der hund sieht die katze ."), encode("die katze schläft .")
    assert batch.source.tolist() == [[*long, EOS], [*short, EOS, PAD, PAD]]
    long, short = encode("the dog sees the cat ."), encode("the cat sleeps .")
    assert batch.target.tolist() == [[BOS, *long, EOS], [BOS, *short, EOS, PAD, PAD]]
    assert batch.index.tolist() == [0, 1]
    assert batch.predicted_tokens == 7 + 5
    assert {part.dtype for part in batch} == {torch.int64}
    blank = TranslationRows(corpus, "train", None, 1, 2)[0, np.array([3])]
    assert (blank.source.tolist(), blank.target.tolist()) == ([[EOS]], [[PAD, PAD]])


class FakeData:
    """What the scores ask of the data: the text of tokens, and the lines of a split."""

    tokenizer = SimpleNamespace(decode=lambda tokens: " ".join(WORDS[token] for token in tokens))

    def __init__(
        self, targets: list[str], references: list[str], *, tokenized: bool, language: str = "en"
    ) -> None:
        self._targets, self._references, self.tokenized = targets, references, tokenized
        self.config = SimpleNamespace(target_language=language)

    def targets(self, split: str) -> list[str]:
        return self._targets

    def references(self, split: str) -> list[str]:
        return self._references


WORDS = {5: "the", 6: "dog", 7: "sees", 8: "cat", 9: ".", 10: "The", 11: "a", 12: "house"}
LOWER, CASED = [5, 6, 7, 5, 8, 9], [10, 6, 7, 5, 8, 9]
SEARCH = "lightning_app.tasks.translation.search"
LINES = ["the dog sees the cat .", "The dog sees the cat ."]


def scored(
    monkeypatch: pytest.MonkeyPatch, stage: str, hypotheses: list[list[int]], data: FakeData
) -> tuple[Translation, dict[str, float]]:
    """Return the task and the scores of the given hypotheses, which the search finds in turn."""
    task = Translation(ObjectiveConfig(validation_bleu=len(hypotheses)))
    given = iter(hypotheses)

    def found(model: object, rows: torch.Tensor, *_: object) -> list[Hypothesis]:
        return [Hypothesis(next(given), 0.0) for _ in rows]

    monkeypatch.setattr(SEARCH, found)
    task.start_decoding()
    task.decode(cast(Any, None), pairs(range(len(hypotheses))), stage)
    return task, task.scores(stage, data, FOUND)


def pairs(index: Iterable[int]) -> TranslationBatch:
    numbers = torch.tensor(list(index))
    text = torch.full((len(numbers), 3), 5)
    return TranslationBatch(text, text, numbers, torch.tensor(1.0))


def test_a_validation_or_a_part_decodes_first_sentences_no_blank_row(monkeypatch) -> None:
    asked: list[int] = []

    def found(model: object, rows: torch.Tensor, *_: object) -> list[Hypothesis]:
        asked.append(len(rows))
        return [Hypothesis([6], 0.0) for _ in rows]

    monkeypatch.setattr(SEARCH, found)
    task = Translation(ObjectiveConfig(validation_bleu=3))
    for batch in ([4, 2, -1, 3], [3, 5], [0, 1]):  # sentences are sorted by length
        task.decode(cast(Any, None), pairs(batch), "val")
    assert asked == [1, 2]
    # Only the lines 0, 1 and 2 are compared: "dog" is right in each of them.
    source = FakeData(["dog"] * 3 + ["cat"] * 3, [], tokenized=True)
    alone = sacrebleu.BLEU(tokenize="none").corpus_score(["dog"] * 3, [["dog"] * 3]).score
    assert task.scores("val", source, FOUND) == {"val/bleu": alone}
    none = Translation(ObjectiveConfig(validation_bleu=0))
    none.decode(cast(Any, None), pairs([0, 1]), "val")
    assert none.scores("val", source, FOUND) == {}
    # The rows that `trainer.limit_val_batches` leaves are any rows of the split.
    task, left = Translation(ObjectiveConfig(validation_bleu=3)), [[90, 17, -1], [55, 31], [40]]
    task.evaluated = np.array([row for batch in left for row in batch if row >= 0])
    task.start_decoding()
    for batch in left:
        task.decode(cast(Any, None), pairs(batch), "val")
    right = ["dog" if row in (17, 31, 40) else "cat" for row in range(100)]
    assert task.scores("val", FakeData(right, [], tokenized=True), FOUND) == {"val/bleu": alone}


@pytest.mark.parametrize(("targets", "mixed"), [(LINES, True), (LINES[:1] * 2, False)])
def test_sacrebleu_sees_case_where_the_corpus_has_it(monkeypatch, targets, mixed: bool) -> None:
    source = FakeData(targets, ["The dog sees the cat."] * 2, tokenized=False)
    task, scores = scored(monkeypatch, "test", [LOWER, LOWER], source)
    assert (scores["test/sacrebleu"] < 99) == mixed
    assert f"case:{'mixed' if mixed else 'lc'}" in task.signatures["sacrebleu_signature"]
    assert "tok:13a" in task.signatures["bleu_signature"]
    assert task.hypotheses == [LINES[0]] * 2
    assert task.targets == targets


@pytest.mark.parametrize("stage", ["val", "test"])
def test_bleu_ignores_case_and_no_advice_to_detokenise(monkeypatch, caplog, stage: str) -> None:
    """SacreBLEU gives it at 100 lines that end with a separate period, and scores them all."""
    source = FakeData(LINES[::-1], LINES[::-1], tokenized=True)
    task, scores = scored(monkeypatch, stage, [LOWER, CASED], source)
    assert scores[f"{stage}/bleu"] == pytest.approx(100)
    if stage == "test":
        assert "case:lc" in task.signatures["bleu_signature"]
        assert "tok:none" in task.signatures["bleu_signature"]
    count = 120
    source = FakeData(LINES[:1] * count, ["The dog sees the cat."] * count, tokenized=True)
    rows = [LOWER, [5, 8, 7, 5, 6, 9]] * (count // 2)
    task, scores = scored(monkeypatch, stage, rows, source)
    assert caplog.records == []
    texts = [source.tokenizer.decode(row) for row in rows]
    plain = sacrebleu.BLEU(tokenize="none", lowercase=True)
    assert scores[f"{stage}/bleu"] == plain.corpus_score(texts, [LINES[:1] * count]).score
    assert any("forgot to detokenize" in record.message for record in caplog.records)
    if stage == "test":
        assert task.signatures["bleu_signature"] == str(plain.get_signature())


def test_advice_on_text_that_should_be_plain_stays(monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    count = 120
    source = FakeData(LINES[:1] * count, LINES[:1] * count, tokenized=False)
    assert scored(monkeypatch, "val", [LOWER] * count, source)[1]["val/bleu"] > 99
    assert any("forgot to detokenize" in record.message for record in caplog.records)


def test_own_lines_with_plain_ones_beside_them_are_compared_as_plain_text(monkeypatch) -> None:
    """`text` with `test.raw.en`: its own lines are tokenised, whatever the corpus says."""
    spaced, plain = ["It 's the dog 's house ."], ["It's the dog's house."]
    for own, references in ((spaced, plain), (spaced, spaced), (plain, plain)):
        source = FakeData(own * 2, references * 2, tokenized=False)
        source.tokenizer = SimpleNamespace(decode=lambda tokens, text=own[0]: text)
        _, scores = scored(monkeypatch, "test", [CASED, CASED], source)
        assert scores["test/sacrebleu"] == pytest.approx(100)


@pytest.mark.parametrize(
    ("language", "how"), [("en", "13a"), ("zh", "zh"), ("th", "char"), ("de", "13a")]
)
def test_words_are_of_the_language(monkeypatch, language: str, how: str) -> None:
    """A line of Chinese or Thai is one word for sacreBLEU's 13a, which is right or wrong."""
    lines = ["\u732b\u770b\u89c1\u4e86\u4e00\u53ea\u72d7"] * 2
    source = FakeData(lines, lines, tokenized=False, language=language)
    source.tokenizer = SimpleNamespace(decode=lambda tokens: lines[0][:-1])
    task, scores = scored(monkeypatch, "test", [LOWER, LOWER], source)
    for kind in ("bleu", "sacrebleu"):
        assert f"tok:{how}|" in task.signatures[f"{kind}_signature"]
        assert (scores[f"test/{kind}"] > 50) == (how != "13a")


@pytest.mark.parametrize("language", ["ja", "ko"])
def test_a_language_without_its_tokenizer_is_refused_before_training(
    corpus: PreparedCorpus, language: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lacking(**_: object) -> None:
        raise RuntimeError("Please install MeCab")

    monkeypatch.setattr("lightning_app.tasks.translation.sacrebleu.BLEU", lacking)
    config = DataConfig(name="text", root="x", target_language=language)
    said = rf"data.target_language: {language}: .*sacrebleu\[{language}"
    with pytest.raises(UserError, match=said):
        Translation.rows(corpus, "train", config, seed=None)


@pytest.mark.parametrize("suffix", ["zh-CN", "zh_cn", "ZH", "cmn", "zho", "cn"])
def test_a_suffix_names_its_language(suffix: str) -> None:
    found, line = ["我们昨天在城里看到一只很小的猫。"], ["我们昨天在城里看到一只小的猫。"]
    expected = sacrebleu.BLEU(tokenize="zh", lowercase=True).corpus_score(found, [line]).score
    assert bleu(suffix).corpus_score(found, [line]).score == expected > 50
    thai = sacrebleu.BLEU(tokenize="char").corpus_score(["แมวดำ"], [["แมวขาว"]]).score
    assert bleu("th-TH").corpus_score(["แมวดำ"], [["แมวขาว"]]).score == thai
    codes = [language_code(code) for code in ("jp", "kor", "de_AT", "pt-BR")]
    assert codes == ["ja", "ko", "de", "pt"]


@pytest.mark.parametrize(
    "line", ["我们昨天看到 IWSLT 的猫。", "เมื่อวานเราเห็นแมว", "きのう猫を見ました"]
)
def test_text_without_spaces_needs_the_code_of_its_language(line: str) -> None:
    with pytest.raises(UserError, match=r"data\.target_language: tgt: \d+% of its characters"):
        check_language("tgt", ["", line])
    check_language("zh-TW", [line])
    check_language("tgt", ["", "Wir sahen die Katze 猫, ее и γάτα."])


def test_hypotheses_that_the_limit_ends_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = (Hypothesis(LOWER, 0.0, limit) for limit in (True, False, True))
    monkeypatch.setattr(SEARCH, lambda model, rows, *_: [next(ends) for _ in rows])
    task = Translation(ObjectiveConfig())
    task.decode(cast(Any, None), pairs(range(3)), "test")
    task.scores("test", FakeData(LINES[:1] * 3, LINES[:1] * 3, tokenized=False), FOUND)
    assert task.signatures["cut_hypotheses"] == 2
