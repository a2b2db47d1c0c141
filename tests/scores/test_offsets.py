"""Answers to pieces and back: by hand, and with the golds of both SQuAD dev sets as oracle."""

import io
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
from hypothesis import given
from hypothesis import strategies as st
from sentencepiece import SentencePieceProcessor

from lightning_app.core.errors import UserError
from lightning_app.data.config import TokenizerKind
from lightning_app.data.tokenizer import UNK, train
from lightning_app.scores.offsets import piece_offsets
from lightning_app.scores.squad import score_v2
from tests.scores.corpora import folder_of_corpora, read_squad

LINES = ["the cat sat on the mat in japan", "a hat for the cat"] * 20
KINDS: list[TokenizerKind] = ["bpe", "word", "char"]


@lru_cache
def model(kind: TokenizerKind) -> SentencePieceProcessor:
    proto = train(lambda: iter(LINES), kind, 40 if kind == "bpe" else None)
    return SentencePieceProcessor(model_proto=proto)


JAPANESE, MARKED = "cat 東京都 mat", "the cafe\u0301 cat\u00a0mat\tsat\nhat"
# Each is one character, but two units of UTF-16 and four bytes of UTF-8.
WIDE = "the 😀 cat 𝔘 sat 🏴󠁧󠁢󠁥󠁮󠁧󠁿 on the mat"


@pytest.mark.parametrize(
    ("kind", "text", "answer", "given_back"),
    [
        *((kind, WIDE, word, word) for kind in KINDS for word in ("mat", "sat")),
        *(("bpe", JAPANESE, "東京都", "東京都"), ("bpe", JAPANESE, "mat", "mat")),
        ("bpe", JAPANESE, "京", "東京都"),  # inside one piece it cannot be told apart
        ("word", "in japan the", "jap", "japan"),
        *(("char", MARKED, word, word) for word in ("cafe\u0301", "mat", "hat", "cat\u00a0mat")),
    ],
)
def test_an_answer_comes_back(kind: TokenizerKind, text: str, answer: str, given_back: str) -> None:
    offsets = piece_offsets(model(kind), text)
    start = text.index(answer)
    assert offsets.text_of(*offsets.pieces_of(start, start + len(answer))) == given_back
    assert offsets.ends[-1] == len(text)


@pytest.mark.parametrize(
    ("kind", "text", "parts", "visible"),
    [
        ("word", "the   cat  sat", ["the", "   cat", "  sat"], [True, True, True]),
        ("word", "  the cat  ", ["the", " cat"], [True, True]),
        ("char", "a  cat", ["a", " ", " ", "c", "a", "t"], [True, False, False, True, True, True]),
        *(("bpe", "", [], []), ("bpe", "   ", [], [])),
    ],
)
def test_a_piece_owns_the_spaces_before_it(
    kind: TokenizerKind, text: str, parts: list[str], visible: list[bool]
) -> None:
    offsets = piece_offsets(model(kind), text)
    places = zip(offsets.begins, offsets.ends, strict=True)
    assert [text[a:b] for a, b in places] == parts
    assert offsets.visible().tolist() == visible


def test_a_first_space_mark_covers_nothing() -> None:
    """The dummy space before an unknown first character: (0, 0), which no answer may start at."""
    offsets = piece_offsets(model("bpe"), "東京 cat")
    assert (offsets.begins[0], offsets.ends[0]) == (0, 0)
    assert offsets.visible().tolist()[:2] == [False, True]
    assert offsets.pieces_of(0, 2) == (1, 1)
    assert offsets.text_of(0, 1) == "東京"
    assert np.count_nonzero(piece_offsets(model("bpe"), JAPANESE).ids == UNK) == 1


TEXTS = st.text(alphabet="the cat  ▁😀𝔘東京é\u0301\u00a0\t\nx<s>", min_size=1, max_size=24)


@given(TEXTS, st.sampled_from(KINDS), st.data())
def test_pieces_contain_their_answer(text: str, kind: TokenizerKind, data: st.DataObject) -> None:
    offsets = piece_offsets(model(kind), text)
    assert offsets.ids.tolist() == model(kind).encode(text)
    start = data.draw(st.integers(0, len(text) - 1))
    end = data.draw(st.integers(start + 1, len(text)))
    answer = text[start:end].replace("▁", " ").strip()  # SentencePiece takes the mark for a space
    if not answer:
        with pytest.raises(UserError, match="are whitespace"):
            offsets.pieces_of(start, end)
        return
    first, last = offsets.pieces_of(start, end)
    assert 0 <= first <= last < len(offsets)
    assert answer in offsets.text_of(first, last).replace("▁", " ")
    # No piece fewer would do: the first one ends after the start, the last one begins before the
    # end, and their neighbours do not.
    assert offsets.ends[first] > start
    assert first == 0 or offsets.ends[first - 1] <= start
    assert offsets.begins[last] < end
    assert last == len(offsets) - 1 or offsets.begins[last + 1] >= end
    if kind == "char":
        known = set("".join(LINES))
        # Pieces of one character each, but for unknown ones side by side.
        given_back = offsets.text_of(first, last).replace("▁", " ").strip()
        assert given_back == answer or not set(text) <= known | {"▁"}
    shown = [bool(offsets.text_of(i, i)) for i in range(len(offsets))]
    assert offsets.visible().tolist() == shown


@pytest.mark.parametrize(
    ("start", "end", "message"),
    [
        *((3, 3, "characters 3 to 3.*7"), (-1, 3, "characters -1 to 3")),
        *((5, 8, "characters 5 to 8.*7"), (3, 4, "characters 3 to 4")),
    ],
)
def test_mistakes_in_characters(start: int, end: int, message: str) -> None:
    with pytest.raises(UserError, match=message):
        piece_offsets(model("word"), "the cat").pieces_of(start, end)


@pytest.mark.parametrize(("first", "last"), [(-1, 0), (1, 0), (0, 2)])
def test_mistakes_in_pieces(first: int, last: int) -> None:
    with pytest.raises(UserError, match=f"pieces {first} to {last} of 2"):
        piece_offsets(model("word"), "the cat").text_of(first, last)


class OtherOffsets:
    """A model whose offsets are not those of characters."""

    def __init__(self, pairs: list[tuple[int, int]]) -> None:
        self.pairs = pairs

    def encode(self, text: str, return_type: str) -> dict:
        return {"ids": list(range(len(self.pairs))), "offsets": self.pairs}


@pytest.mark.parametrize(
    "pairs",
    [
        [(0, 2), (2, 6)],  # bytes: "é" has two
        [(0, 1), (2, 5)],  # a gap
        [(0, 3), (2, 5)],  # an overlap
        [(0, 1), (1, 4)],  # the end is missing
        [(1, 5)],  # the beginning is missing
        [],
    ],
)
def test_other_offsets_are_refused(pairs: list[tuple[int, int]]) -> None:
    with pytest.raises(UserError, match="SentencePiece's pieces cover"):
        piece_offsets(OtherOffsets(pairs), "é cat")  # pyright: ignore[reportArgumentType]


def test_offsets_in_bytes_of_sentencepiece_are_refused() -> None:
    text = "the é cat"
    proto = model("char").encode(text, return_type="proto")
    pairs = [(piece.begin, piece.end) for piece in proto.pieces]
    assert pairs[-1][1] == len(text.encode()) == len(text) + 1
    with pytest.raises(UserError, match="cover characters 0 to 10"):
        piece_offsets(OtherOffsets(pairs), text)  # pyright: ignore[reportArgumentType]


def test_a_model_that_normalises_has_offsets_of_the_text_before_it() -> None:
    """NFKC makes one character of "…" into three, which gives empty pieces without gaps."""
    proto = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([*LINES, "... and"] * 3),
        model_writer=proto,
        model_type="char",
        vocab_size=30,
        hard_vocab_limit=False,
        normalization_rule_name="nfkc",
        num_threads=1,
        minloglevel=2,
    )
    offsets = piece_offsets(SentencePieceProcessor(model_proto=proto.getvalue()), "the … ﬁ cat")
    for start, end in ((4, 5), (8, 11)):
        assert offsets.text_of(*offsets.pieces_of(start, end)) == offsets.text[start:end]


# The two dev sets, whole. Questions: 10,570, and 11,873 of which 5,928 have an answer.


def test_no_answer_everywhere_has_the_known_score(shared_data: Path) -> None:
    """50.07 for both numbers of version 2.0."""
    golds = {
        question["id"]: [answer["text"] for answer in question["answers"]]
        for paragraph in read_squad(shared_data, "2.0")
        for question in paragraph["qas"]
    }
    scores = score_v2(golds, dict.fromkeys(golds, ""))
    assert (round(scores.every.exact, 2), round(scores.every.f1, 2)) == (50.07, 50.07)
    assert scores.has_answer is not None
    assert scores.has_answer.exact == 0
    assert sum(map(bool, golds.values())) == 5928


def test_a_missing_corpus_fails_none_skips(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LIGHTNING_APP_DATA", str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"dev-v1\.1\.json\.xz"):
        read_squad(folder_of_corpora(), "1.1")
    monkeypatch.delenv("LIGHTNING_APP_DATA")
    with pytest.raises(pytest.skip.Exception, match="LIGHTNING_APP_DATA is unset"):
        folder_of_corpora()
