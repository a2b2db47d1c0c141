import hashlib
import itertools
import math
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
from hypothesis import given
from hypothesis import strategies as st

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
)
from lightning_app.errors import UserError

LINES = ["the dog sees the cat .", "the cat sleeps , often .", "a small house"] * 5


@pytest.fixture
def word(tmp_path: Path) -> Pieces:
    path = tmp_path / "word.model"
    path.write_bytes(train(lambda: iter(LINES), "word", None))
    return Pieces(path)


@pytest.fixture
def bpe(tmp_path: Path) -> Pieces:
    path = tmp_path / "bpe.model"
    path.write_bytes(train(lambda: iter(LINES), "bpe", 40))
    return Pieces(path)


@pytest.mark.parametrize("kind", ["bpe", "word"])
def test_special_ids(request: pytest.FixtureRequest, tmp_path: Path, kind: str):
    request.getfixturevalue(kind)
    model = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / f"{kind}.model"))
    assert [model.pad_id(), model.unk_id(), model.bos_id(), model.eos_id()] == [PAD, UNK, BOS, EOS]
    assert model.piece_to_id(MASK_PIECE) == MASK


def test_null_vocabulary_has_every_word(word: Pieces):
    words = {w for line in LINES for w in line.split()}
    assert word.vocab_size == len(words) + 5
    for line in LINES:
        assert UNK not in word.encode(line)
        assert len(word.encode(line)) == len(line.split())


@pytest.mark.parametrize("kind", ["bpe", "word"])
def test_round_trip(request: pytest.FixtureRequest, kind: str):
    made = request.getfixturevalue(kind)
    for line in LINES:
        assert made.decode(made.encode(line)) == line
        assert made.encode_lines([line]) == [[*made.encode(line), EOS]]


@pytest.mark.parametrize("kind", ["bpe", "word"])
def test_specials_leave_no_trace_and_empty_is_empty(request: pytest.FixtureRequest, kind: str):
    made = request.getfixturevalue(kind)
    ids = made.encode("the cat")
    assert made.decode(np.array([BOS, *ids, MASK, EOS, PAD, PAD])) == "the cat"
    assert made.encode("") == []
    assert made.decode([]) == ""


def test_unknown_is_one_id(word: Pieces):
    assert word.encode("the 😀 cat")[1] == UNK
    assert MASK not in word.encode("<mask>")


@pytest.mark.parametrize(("kind", "size"), [("bpe", 40), ("word", 9)])
def test_training_is_deterministic(kind, size: int):
    one, two = (train(lambda: iter(LINES), kind, size) for _ in range(2))
    assert hashlib.sha256(one).digest() == hashlib.sha256(two).digest()


@pytest.mark.parametrize("kind", ["bpe", "word"])
def test_too_large_a_vocabulary_names_the_largest(kind, tmp_path: Path):
    with pytest.raises(UserError, match=r"data\.vocab_size is 5000: .* at most (\d+)") as error:
        train(lambda: iter(LINES), kind, 5000)
    largest = int(str(error.value).split()[-1])
    path = tmp_path / "model"
    path.write_bytes(train(lambda: iter(LINES), kind, largest))
    assert Pieces(path).vocab_size == largest
    with pytest.raises(UserError):
        train(lambda: iter(LINES), kind, largest + 1)


def test_too_small_a_vocabulary_names_the_smallest(tmp_path: Path):
    with pytest.raises(UserError, match=r"data\.vocab_size is 6: .* need (\d+)") as error:
        train(lambda: iter(LINES), "bpe", 6)
    smallest = int(str(error.value).split()[-1])
    path = tmp_path / "model"
    path.write_bytes(train(lambda: iter(LINES), "bpe", smallest))
    assert Pieces(path).vocab_size == smallest


def test_long_lines_are_not_dropped(tmp_path: Path):
    long = "word " * 3000 + "unique"
    path = tmp_path / "model"
    path.write_bytes(train(lambda: iter([*LINES, long]), "word", None))
    assert UNK not in Pieces(path).encode("unique")


def test_unigram_entropy_by_hand():
    assert unigram_entropy(np.array([5, 5, 7, 9])) == pytest.approx(1.5 * math.log(2))
    assert unigram_entropy(np.array([4, 4, 4])) == 0


@given(st.lists(st.lists(st.integers(0, 2**31 - 1))))
def test_flatten_keeps_rows(rows: list[list[int]]):
    ids, offsets = flatten(rows)
    assert ids.dtype == np.int32
    assert offsets.dtype == np.int64
    assert [ids[a:b].tolist() for a, b in itertools.pairwise(offsets)] == rows
