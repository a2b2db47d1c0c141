"""Answers to pieces and back: by hand, and with the golds of both SQuAD dev sets as oracle."""

import io
import math
from collections.abc import Iterator
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
from lightning_app.scores.offsets import PieceOffsets, piece_offsets
from lightning_app.scores.squad import (
    best_span,
    context_windows,
    exact_match,
    score_v1,
    score_v2,
    window_label,
)
from tests.scores.corpora import folder_of_corpora, read_squad

LINES = ["the cat sat on the mat in japan", "a hat for the cat"] * 20
KINDS: list[TokenizerKind] = ["bpe", "word", "char"]


@lru_cache
def model(kind: TokenizerKind) -> SentencePieceProcessor:
    proto = train(lambda: iter(LINES), kind, 40 if kind == "bpe" else None)
    return SentencePieceProcessor(model_proto=proto)


def pieces(offsets: PieceOffsets) -> list[str]:
    places = zip(offsets.begins, offsets.ends, strict=True)
    return [offsets.text[begin:end] for begin, end in places]


def back(offsets: PieceOffsets, answer: str) -> str:
    start = offsets.text.index(answer)
    return offsets.text_of(*offsets.pieces_of(start, start + len(answer)))


def test_a_piece_owns_the_spaces_before_it() -> None:
    offsets = piece_offsets(model("word"), "the   cat  sat")
    assert pieces(offsets) == ["the", "   cat", "  sat"]
    assert offsets.pieces_of(6, 9) == (1, 1)
    assert offsets.pieces_of(4, 8) == (1, 1)  # from inside the run of spaces
    assert offsets.text_of(1, 1) == "cat"
    assert offsets.text_of(1, 2) == "cat  sat"


def test_spaces_at_the_ends_belong_to_no_piece() -> None:
    offsets = piece_offsets(model("word"), "  the cat  ")
    assert pieces(offsets) == ["the", " cat"]
    assert offsets.pieces_of(0, 11) == (0, 1)
    assert offsets.text_of(0, 1) == "the cat"


def test_characters_outside_the_bmp_count_once() -> None:
    """Each is one character, but two units of UTF-16 and four bytes of UTF-8."""
    text = "the 😀 cat 𝔘 sat 🏴󠁧󠁢󠁥󠁮󠁧󠁿 on the mat"
    for kind in KINDS:
        offsets = piece_offsets(model(kind), text)
        assert back(offsets, "mat") == "mat"
        assert back(offsets, "sat") == "sat"
        assert offsets.ends[-1] == len(text)


def test_unknown_characters_side_by_side_are_one_piece() -> None:
    offsets = piece_offsets(model("bpe"), "cat 東京都 mat")
    assert [pieces(offsets)[i] for i in np.flatnonzero(offsets.ids == UNK)] == ["東京都"]
    assert back(offsets, "東京都") == "東京都"
    assert back(offsets, "京") == "東京都"  # an answer inside one piece cannot be told apart
    assert back(offsets, "mat") == "mat"


def test_a_first_space_mark_covers_nothing() -> None:
    """The dummy space before an unknown first character: (0, 0), which no answer may start at."""
    offsets = piece_offsets(model("bpe"), "東京 cat")
    assert (offsets.begins[0], offsets.ends[0]) == (0, 0)
    assert offsets.visible().tolist()[:2] == [False, True]
    assert offsets.pieces_of(0, 2) == (1, 1)
    assert offsets.text_of(0, 1) == "東京"


def test_a_lone_space_mark_shows_nothing() -> None:
    offsets = piece_offsets(model("char"), "a  cat")
    assert pieces(offsets) == ["a", " ", " ", "c", "a", "t"]
    assert offsets.visible().tolist() == [True, False, False, True, True, True]
    assert offsets.text_of(1, 2) == ""


def test_combining_marks_and_other_spaces() -> None:
    text = "the cafe\u0301 cat\u00a0mat\tsat\nhat"
    offsets = piece_offsets(model("char"), text)
    for answer in ("cafe\u0301", "cat", "mat", "sat", "hat", "cat\u00a0mat"):
        assert back(offsets, answer) == answer


def test_part_of_a_piece_gives_the_whole_piece() -> None:
    assert back(piece_offsets(model("word"), "in japan the"), "jap") == "japan"


@pytest.mark.parametrize("text", ["", "   "])
def test_a_text_without_pieces(text: str) -> None:
    offsets = piece_offsets(model("bpe"), text)
    assert len(offsets) == 0
    assert offsets.visible().shape == (0,)


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
    assert back(offsets, "cat") == "cat"
    assert back(offsets, "…") == "…"


# The two dev sets, whole. Questions: 10,570, and 11,873 of which 5,928 have an answer.


def contexts(paragraphs: list[dict]) -> Iterator[str]:
    return (paragraph["context"] for paragraph in paragraphs)


def trained(paragraphs: list[dict]) -> SentencePieceProcessor:
    return SentencePieceProcessor(model_proto=train(lambda: contexts(paragraphs), "bpe", 8000))


@pytest.mark.parametrize(("version", "total"), [("1.1", 10570), ("2.0", 11873)])
def test_golds_survive_the_round_trip(version: str, total: int, shared_data: Path, capsys) -> None:
    """The first gold of each question, mapped to pieces and back, is an exact match of it."""
    paragraphs = read_squad(shared_data, version)
    tokenizer = trained(paragraphs)
    golds: dict[str, list[str]] = {}
    predictions: dict[str, str] = {}
    matches, answers = 0.0, 0
    for paragraph in paragraphs:
        offsets = piece_offsets(tokenizer, paragraph["context"])
        for question in paragraph["qas"]:
            trips = []
            for answer in question["answers"]:
                start, text = answer["answer_start"], answer["text"]
                assert offsets.text[start : start + len(text)] == text
                trips.append(offsets.text_of(*offsets.pieces_of(start, start + len(text))))
                matches += exact_match(trips[-1], text)
                answers += 1
            golds[question["id"]] = [answer["text"] for answer in question["answers"]]
            predictions[question["id"]] = trips[0] if trips else ""
    assert len(golds) == total
    if version == "1.1":
        scores = score_v1(golds, predictions)
    else:
        parts = score_v2(golds, predictions)
        assert parts.no_answer is not None
        assert parts.has_answer is not None
        assert parts.no_answer.exact == 100
        assert sum(not texts for texts in golds.values()) == 5945
        scores = parts.has_answer
    with capsys.disabled():
        print(
            f"\nSQuAD {version}: {answers} golds, {100 * matches / answers:.2f} % exact; {scores}"
        )
    assert 100 * matches / answers >= 99
    assert scores.exact >= 99


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


@pytest.mark.parametrize(("max_length", "stride"), [(384, 128), (96, 32)])
def test_labels_as_logits_give_answers(max_length: int, stride: int, shared_data: Path) -> None:
    """Windows, labels and decoding together, on every 20th question; at most 30 pieces."""
    paragraphs = read_squad(shared_data, "1.1")
    tokenizer = trained(paragraphs)
    several = 0  # questions with several windows
    for paragraph in paragraphs[::4]:
        offsets = piece_offsets(tokenizer, paragraph["context"])
        visible = offsets.visible()
        for question in paragraph["qas"][::5]:
            answer = question["answers"][0]
            start = answer["answer_start"]
            span = offsets.pieces_of(start, start + len(answer["text"]))
            asked = tokenizer.encode(question["question"])
            sizes = {"max_length": max_length, "stride": stride}
            windows = context_windows(len(asked), len(offsets), **sizes)
            labels = [window_label(window, span) for window in windows]
            pairs = list(zip(windows, labels, strict=True))
            starts = [np.eye(window.positions)[s] for window, (s, _) in pairs]
            ends = [np.eye(window.positions)[e] for window, (_, e) in pairs]
            best = best_span(windows, starts, ends, visible)
            assert math.isfinite(best.null_score)
            if span[1] - span[0] < 30:
                several += len(windows) > 1
                assert best.span == span
    assert several > (400 if max_length == 96 else 10)


def test_a_missing_corpus_fails_none_skips(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LIGHTNING_APP_DATA", str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"dev-v1\.1\.json\.xz"):
        read_squad(folder_of_corpora(), "1.1")
    monkeypatch.delenv("LIGHTNING_APP_DATA")
    with pytest.raises(pytest.skip.Exception, match="LIGHTNING_APP_DATA is unset"):
        folder_of_corpora()
