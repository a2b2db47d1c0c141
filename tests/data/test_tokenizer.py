import hashlib
import itertools
import math
import random
import re
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
from hypothesis import given
from hypothesis import strategies as st

from lightning_app.core.errors import UserError
from lightning_app.data import tokenizer
from lightning_app.data.config import TokenizerKind
from lightning_app.data.tokenizer import (
    BOS,
    EOS,
    MASK,
    MASK_PIECE,
    PAD,
    UNK,
    Pieces,
    flatten,
    train,
    unigram_entropy,
    windows_in_train,
)

LINES = ["the dog sees the cat .", "the cat sleeps , often .", "a small house"] * 5


@pytest.fixture
def word(tmp_path: Path) -> Pieces:
    return tokenizer_of(LINES, "word", None, tmp_path)


@pytest.fixture
def bpe(tmp_path: Path) -> Pieces:
    return tokenizer_of(LINES, "bpe", 40, tmp_path)


def test_null_vocabulary_has_every_word_and_the_unknown_is_one_id(word: Pieces, tmp_path: Path):
    """Long lines are not dropped."""
    assert word.vocab_size == len({w for line in LINES for w in line.split()}) + 5
    for line in LINES:
        assert UNK not in word.encode(line)
        assert len(word.encode(line)) == len(line.split())
    assert word.encode("the 😀 cat")[1] == UNK
    assert MASK not in word.encode("<mask>")
    lines = [*LINES, "word " * 3000 + "unique"]
    assert UNK not in tokenizer_of(lines, "word", None, tmp_path).encode("unique")


@pytest.mark.parametrize("kind", ["bpe", "word"])
def test_round_trip_and_specials(request: pytest.FixtureRequest, tmp_path: Path, kind: str):
    made = request.getfixturevalue(kind)
    model = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / f"{kind}.model"))
    assert [model.pad_id(), model.unk_id(), model.bos_id(), model.eos_id()] == [PAD, UNK, BOS, EOS]
    assert model.piece_to_id(MASK_PIECE) == MASK
    for line in LINES:
        assert made.decode(made.encode(line)) == line
        assert made.encode_lines([line]) == [[*made.encode(line), EOS]]
    assert made.decode(np.array([BOS, *made.encode("the cat"), MASK, EOS, PAD, PAD])) == "the cat"
    assert (made.encode(""), made.decode([])) == ([], "")


@pytest.mark.parametrize(("kind", "size"), [("bpe", 40), ("word", 9)])
def test_training_is_deterministic(kind, size: int):
    one, two = (train(lambda: iter(LINES), kind, size) for _ in range(2))
    assert hashlib.sha256(one).digest() == hashlib.sha256(two).digest()


@pytest.mark.parametrize("kind", ["bpe", "word"])
def test_too_large_a_vocabulary_names_the_largest(kind, tmp_path: Path):
    with pytest.raises(UserError, match=r"data\.vocab_size is 5000:") as error:
        train(lambda: iter(LINES), kind, 5000)
    largest = int(re.findall(r"\d+", str(error.value))[-1])
    assert tokenizer_of(LINES, kind, largest, tmp_path).vocab_size == largest
    with pytest.raises(UserError):
        train(lambda: iter(LINES), kind, largest + 1)


def test_too_small_a_vocabulary_names_the_smallest(tmp_path: Path):
    with pytest.raises(UserError, match=r"data\.vocab_size is 6: .* need (\d+)") as error:
        train(lambda: iter(LINES), "bpe", 6)
    smallest = int(str(error.value).split()[-1])
    assert tokenizer_of(LINES, "bpe", smallest, tmp_path).vocab_size == smallest


def test_unigram_entropy_by_hand():
    assert unigram_entropy(np.array([5, 5, 7, 9])) == pytest.approx(1.5 * math.log(2))
    assert unigram_entropy(np.array([4, 4, 4])) == 0


@given(st.lists(st.lists(st.integers(0, 2**31 - 1))))
def test_flatten_keeps_rows(rows: list[list[int]]):
    ids, offsets = flatten(rows)
    assert ids.dtype == np.int32
    assert offsets.dtype == np.int64
    assert [ids[a:b].tolist() for a, b in itertools.pairwise(offsets)] == rows


def tokenizer_of(lines: list[str], kind: TokenizerKind, size: int | None, folder: Path) -> Pieces:
    path = folder / f"{kind}.model"
    path.write_bytes(train(lambda: iter(lines), kind, size))
    return Pieces(path.read_bytes())


LONG = " ".join(random.Random(1).choices(["ab", "ba", "é", "<s>", "cab", "  x"], k=4000))


@pytest.mark.parametrize(("kind", "size"), [("char", None), ("word", None), ("bpe", 20)])
def test_a_line_above_the_limit_is_read_as_if_there_were_none(kind, size, tmp_path, monkeypatch):
    whole = tokenizer_of([LONG, "a line"], kind, size, tmp_path)
    unseen = LONG.replace("x", "é ü ö").replace("cab", "unknown")
    expected = whole.encode_lines([LONG, unseen, "a line", ""])
    monkeypatch.setattr(tokenizer, "_LONGEST", 400)
    parts = tokenizer_of([LONG, "a line"], kind, size, tmp_path)
    assert parts.vocab_size == whole.vocab_size
    assert parts.encode_lines([LONG, unseen, "a line", ""]) == expected
    assert sum(map(len, expected)) > 4000


@pytest.mark.parametrize("kind", ["char", "bpe"])
def test_a_line_of_no_space(kind: TokenizerKind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    line = "".join(random.Random(1).choices(["a", "b", "a<s>b", "é"], k=3000))
    monkeypatch.setattr(tokenizer, "_LONGEST", 400)
    found = tokenizer_of([line, "a b"], kind, None if kind == "char" else 15, tmp_path)
    assert found.decode(found.encode_lines([line])[0]).replace(" ⁇ ", "<s>") == line


def test_the_parts_of_a_line_are_the_line(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tokenizer, "_LONGEST", 40)
    lines = (LONG, "a" * 95, "<mask>" * 40, "x " * 50 + "y" * 30 + " z", " " * 60, "", "é " * 25)
    for line in lines:
        for inside in (True, False):
            parts = list(tokenizer._parts(line, inside_words=inside))
            assert "".join(parts) == line
            assert inside or all(part.endswith(" ") or part == line for part in parts[:-1])
            assert sum(part.count("<mask>") for part in parts) == line.count("<mask>")
            if inside:
                assert all(len(part.encode()) <= 40 for part in parts)


def test_words_that_no_vocabulary_has(tmp_path: Path):
    """Those with a mark inside are left out, and one that no model can have is refused."""
    found = tokenizer_of(["a<s>b c", "p q<unk>", "<mask> c"], "word", None, tmp_path)
    assert found.vocab_size == 5 + len({"c", "p"})
    assert found.encode("a<s>b c") == [UNK, *found.encode("c")]
    with pytest.raises(UserError, match=r"70,000 bytes, 'x+\.\.\.'"):
        train(lambda: iter(["a b", "x" * 70_000]), "word", None)


@pytest.mark.parametrize("kind", ["char", "word"])
def test_every_character_is_trained_on(kind: TokenizerKind, tmp_path: Path, monkeypatch):
    """SentencePiece, which adds up shares in 32 bits, leaves some out; here by a smaller share."""
    trainer = sentencepiece.SentencePieceTrainer
    usual = trainer.train
    less = {"character_coverage": 0.99}
    monkeypatch.setattr(trainer, "train", lambda **given: usual(**{**given, **less}))
    lines = ["a b c d"] * 100 + ["é ü"]
    assert UNK not in tokenizer_of(lines, kind, None, tmp_path).encode_lines(lines)[-1]


def test_windows_that_are_in_train_at_any_place(monkeypatch: pytest.MonkeyPatch):
    ids = np.random.default_rng(1).integers(0, 9, 5000).astype(np.int32)
    other = np.random.default_rng(2).integers(0, 9, 640).astype(np.int32)
    assert windows_in_train(other, ids, 32) == (0, 20)
    other[32:96] = ids[1001:1065]
    assert windows_in_train(other, ids, 32) == (2, 20)
    assert windows_in_train(ids, ids, 8) == (625, 625)
    assert windows_in_train(other[:31], ids, 32) == (0, 0)
    assert windows_in_train(other, ids[:20], 32) == (0, 20)
    monkeypatch.setattr(tokenizer, "_PLACES", 100)  # across the parts of train
    assert windows_in_train(ids[37:4997], ids, 16) == (310, 310)
