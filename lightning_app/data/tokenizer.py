"""Text to ids and back: pieces of SentencePiece, or bytes. The special ids live here."""

import hashlib
import io
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lightning_app.core.errors import UserError
from lightning_app.data.config import TokenizerKind

if TYPE_CHECKING:
    from lightning_app.scores.offsets import PieceOffsets


PAD, UNK, BOS, EOS, MASK = range(5)
SPECIALS = 5  # smaller ids are not pieces of text
MASK_PIECE = "<mask>"
_SPECIAL_PIECES = ("<pad>", "<unk>", "<s>", "</s>", MASK_PIECE)  # in text they become UNK
_SPACE = "▁"  # how SentencePiece writes a space
_LONGEST = 1 << 24  # bytes of a line; SentencePiece leaves longer ones out of its training
_PLACES, _PRIME = 1 << 22, 0x9E3779B97F4A7C15  # for `windows_in_train`
_LONGEST_WORD = 65_535  # bytes; SentencePiece fails slightly above this
THREADS = 1  # the model's bytes depend on it, so it is pinned
_EVERY_SPACE: dict[str, Any] = {"add_dummy_prefix": False, "remove_extra_whitespaces": False}
_BYTES = b"bytes of UTF-8\n"  # the file of a tokenizer that has no model


class Tokenizer(ABC):
    """Turns lines of text into ids and back. `load_tokenizer` reads one from a file."""

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """Number of ids, the five special ones included."""

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Return the ids of one line, without BOS and EOS."""

    @abstractmethod
    def encode_lines(self, lines: list[str]) -> list[list[int]]:
        """Return the ids of each line, each ended by EOS."""

    @abstractmethod
    def word_starts(self) -> list[bool]:
        """Return for each id whether it begins a word; a special id does."""

    @abstractmethod
    def offsets(self, text: str) -> "PieceOffsets":
        """Return the ids of `encode` with the characters that each of them covers."""

    @abstractmethod
    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of `ids`; special ids other than UNK are dropped."""


class Pieces(Tokenizer):
    """A trained SentencePiece model, lossless up to unknown pieces; `char` keeps every space.

    Adjacent unknown words or characters are one UNK. Pieces and words lose repeated spaces and
    those at the ends of a line.

    Args:
        path: the model file.
    """

    def __init__(self, path: Path) -> None:
        import sentencepiece

        self._model = sentencepiece.SentencePieceProcessor(model_file=str(path))

    @property
    def vocab_size(self) -> int:
        """Number of ids, the five special ones included."""
        return self._model.get_piece_size()

    def encode(self, text: str) -> list[int]:
        """Return the ids of one line, without BOS and EOS."""
        return self._model.encode(text)

    def encode_lines(self, lines: list[str]) -> list[list[int]]:
        """Return the ids of each line, each ended by EOS; long lines are encoded in parts."""
        if not any(map(_is_long, lines)):
            return self._model.encode(lines, add_eos=True, num_threads=THREADS)
        return [[*self._encode_long(line), EOS] for line in lines]

    def _encode_long(self, line: str) -> list[int]:
        ids: list[int] = []
        keeps_spaces = bool(self._model.encode(" "))  # only then parts start without a mark
        for part in _parts(line, inside_words=keeps_spaces) if _is_long(line) else [line]:
            found = self._model.encode(part)
            if ids and found and ids[-1] == found[0] == UNK:
                del found[0]  # adjacent unknown pieces are one UNK
            ids += found
        return ids

    def word_starts(self) -> list[bool]:
        """Return for each id whether it begins a word: pieces with a space mark do.

        UNK is part of the word around it, unless every piece is a whole word.
        """
        pieces = [self._model.id_to_piece(id_) for id_ in range(SPECIALS, self.vocab_size)]
        begin = [piece.startswith(_SPACE) for piece in pieces]
        found = [True] * SPECIALS + begin
        found[UNK] = all(begin)
        return found

    def offsets(self, text: str) -> "PieceOffsets":
        """Return the ids of `encode` with the characters that each of them covers."""
        from lightning_app.scores.offsets import piece_offsets

        return piece_offsets(self._model, text)

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of `ids`; special ids other than UNK are dropped."""
        return self._model.decode([int(i) for i in ids if i == UNK or i >= SPECIALS])


class Bytes(Tokenizer):
    """The bytes of the text in UTF-8, each with its own id: nothing is trained or unknown."""

    @property
    def vocab_size(self) -> int:
        """Number of ids, the five special ones included."""
        return SPECIALS + 256

    def encode(self, text: str) -> list[int]:
        """Return the ids of one line, without BOS and EOS."""
        return [SPECIALS + byte for byte in text.encode()]

    def encode_lines(self, lines: list[str]) -> list[list[int]]:
        """Return the ids of each line, each ended by EOS."""
        return [[*self.encode(line), EOS] for line in lines]

    def word_starts(self) -> list[bool]:
        """Return true for each id: bytes are never grouped into words."""
        return [True] * self.vocab_size

    def offsets(self, text: str) -> "PieceOffsets":
        """Return the ids of `encode`; each byte covers the character it belongs to."""
        from lightning_app.scores.offsets import PieceOffsets

        begins = np.array(
            [place for place, character in enumerate(text) for _ in character.encode()],
            dtype=np.int64,
        )
        return PieceOffsets(text, np.array(self.encode(text), dtype=np.int64), begins, begins + 1)

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of `ids`, with U+FFFD where bytes are not UTF-8."""
        return bytes(int(i) - SPECIALS for i in ids if i >= SPECIALS).decode(errors="replace")


def load_tokenizer(path: Path) -> Tokenizer:
    """Return the tokenizer in a file written by `train`."""
    return Bytes() if path.read_bytes() == _BYTES else Pieces(path)


def train(lines: Callable[[], Iterator[str]], kind: TokenizerKind, vocab_size: int | None) -> bytes:
    """Train a tokenizer and return its model file; the same lines give the same bytes.

    Args:
        lines: returns the training lines, from the start at each call.
        kind: `bpe` (byte-pair encoding), `word` (the text between two spaces), `char` or `byte`.
        vocab_size: number of ids with the five special ones; None for every word or character.

    Raises:
        UserError: if the corpus does not allow such a vocabulary; names the nearest size that
            works.
    """
    if kind == "byte":
        return _BYTES
    if kind == "char":
        return _train_on_all(lines, "char", len(_characters(lines())) + SPECIALS, **_EVERY_SPACE)
    if kind == "word":
        found = {match[0] for line in lines() for match in re.finditer("[^ ▁]+", line)}
        words = {word for word in found if not any(piece in word for piece in _SPECIAL_PIECES)}
        for word in words:
            if len(word) * 4 > _LONGEST_WORD and (size := len(word.encode())) > _LONGEST_WORD:
                raise UserError(
                    f"data.tokenizer is 'word': the training split has a word of {size:,} bytes, "
                    f"'{word[:20]}...'; at most {_LONGEST_WORD:,}, or 'bpe', 'char' or 'byte'"
                )
        largest = len(words) + SPECIALS
        size = largest if vocab_size is None else vocab_size
        if size > largest:
            raise _too_large(size, largest)
        return _train_on_all(lines, "word", size)
    assert vocab_size is not None, "checked by DataConfig"
    smallest = len(_characters(lines())) + SPECIALS
    if vocab_size < smallest:
        raise UserError(
            f"data.vocab_size is {vocab_size}: the characters of the training split need {smallest}"
        )
    try:
        return _train(lines(), "bpe", vocab_size)
    except RuntimeError as error:
        largest = _count_pieces(_train(lines(), "bpe", vocab_size, hard_vocab_limit=False))
        if largest >= vocab_size:
            raise
        raise _too_large(vocab_size, largest) from error


def _train_on_all(
    lines: Callable[[], Iterator[str]], model_type: str, vocab_size: int, **more: Any
) -> bytes:
    """Train on every character, even the rarest ones of a large text.

    SentencePiece adds up their shares in 32 bits and stops at 1.0: in texts of more than a few
    million characters it drops the last ones, and then fails for words but not for `char`.

    Raises:
        UserError: if SentencePiece cannot be trained on this text.
    """
    try:
        model = _train(lines(), model_type, vocab_size, **more)
    except RuntimeError:
        model = None
    if model is None or _count_pieces(model) < vocab_size:
        needed = "".join(sorted(_characters(lines()) - {_SPACE}))
        try:
            return _train(lines(), model_type, vocab_size, required_chars=needed, **more)
        except RuntimeError as error:
            raise UserError(
                f"data.tokenizer is '{model_type}': SentencePiece cannot be trained on the "
                f"training split ({error})"
            ) from error
    return model


def _characters(lines: Iterator[str]) -> set[str]:
    return set().union(*lines) - {" "} | {_SPACE}


def _is_long(line: str) -> bool:
    return len(line) * 4 > _LONGEST and len(line.encode()) > _LONGEST


def _parts(line: str, *, inside_words: bool) -> Iterator[str]:
    """Cut a long line behind spaces; without a space, inside a word or at its end.

    A mark such as `<s>` is never cut.
    """
    most, begin = _LONGEST // 4, 0  # a character has at most 4 bytes
    while len(line) - begin > most:
        end = line.rfind(" ", begin, begin + most) + 1
        if not end and inside_words:
            end = begin + most
            mark = line.rfind("<", end - max(map(len, _SPECIAL_PIECES)), end)
            end = mark if mark > begin else end
        yield line[begin : (end := end or line.find(" ", begin) + 1 or len(line))]
        begin = end
    yield line[begin:]


def _too_large(size: int, largest: int) -> UserError:
    return UserError(
        f"data.vocab_size is {size}: the training split allows at most {largest}; use at most "
        f"{largest}, or data.tokenizer 'word' with data.vocab_size null"
    )


def _train(
    lines: Iterator[str],
    model_type: str,
    vocab_size: int,
    hard_vocab_limit: bool = True,
    **more: Any,
) -> bytes:
    import sentencepiece

    model = io.BytesIO()
    fitting = (
        part
        for line in lines
        for part in (_parts(line, inside_words=True) if _is_long(line) else [line])
    )
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=fitting,
        model_writer=model,
        model_type=model_type,
        vocab_size=vocab_size,
        hard_vocab_limit=hard_vocab_limit,
        character_coverage=1.0,
        normalization_rule_name="identity",
        max_sentence_length=_LONGEST,  # the default of 4192 bytes drops lines silently
        num_threads=THREADS,
        pad_id=PAD,
        unk_id=UNK,
        bos_id=BOS,
        eos_id=EOS,
        control_symbols=[MASK_PIECE],
        minloglevel=2,
        **more,
    )
    return model.getvalue()


def _count_pieces(model: bytes) -> int:
    import sentencepiece

    return sentencepiece.SentencePieceProcessor(model_proto=model).get_piece_size()


def sha256(data: bytes) -> str:
    """Return the SHA-256 of `data` as 64 hex digits."""
    return hashlib.sha256(data).hexdigest()


def unigram_entropy(ids: np.ndarray) -> float:
    """H = -sum_v p(v) ln p(v), in nats, with p the relative frequency of each id in `ids`.

    It is the loss of the best model without context, so a run that ends near it has stalled.
    """
    counts = np.unique(ids, return_counts=True)[1]
    p = counts / counts.sum()
    return float(-(p * np.log(p)).sum())


def flatten(rows: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Return (ids, offsets): row i is ids[offsets[i]:offsets[i + 1]], int32 and int64."""
    offsets = np.zeros(len(rows) + 1, dtype=np.int64)
    np.cumsum([len(row) for row in rows], out=offsets[1:])
    ids = np.fromiter(chain.from_iterable(rows), dtype=np.int32, count=int(offsets[-1]))
    return ids, offsets


def windows_in_train(other: np.ndarray, train: np.ndarray, window: int) -> tuple[int, int]:
    """Return how many consecutive windows of `other` occur anywhere in train, and their total.

    They are compared by a 64-bit hash, sum over j of (ids[j] + 1) p^(window - 1 - j). That of
    2 w tokens is computed from two of w tokens, so `window` must be a power of 2.
    """

    def hashes(ids: np.ndarray) -> np.ndarray:
        found, width, power = ids.astype(np.uint64) + np.uint64(1), 1, _PRIME
        while width < window:
            found = found[:-width] * np.uint64(power) + found[width:]
            width, power = 2 * width, power * power % 2**64
        return found

    if min(len(train), len(other)) < window:
        return 0, len(other) // window
    wanted = hashes(other)[::window]
    order = np.unique(wanted)
    there = np.zeros(len(order), dtype=bool)
    for begin in range(0, len(train), _PLACES):  # in parts, since hashes are twice the size of ids
        part = train[begin : begin + _PLACES + window - 1]
        if len(part) >= window:
            of_train = hashes(part)
            place = np.searchsorted(order, of_train).clip(max=len(order) - 1)
            there[place[order[place] == of_train]] = True
    seen = there[np.searchsorted(order, wanted)]
    return int(seen.sum()), len(seen)
