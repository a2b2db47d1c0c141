"""Text to ids and back, by a tokenizer trained here or a ready one. The special ids live here."""

import io
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

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
_PLACES, _PRIME = 1 << 22, 0x9E3779B97F4A7C15  # ids in memory at once, and for hashes
_LONGEST_WORD = 65_535  # bytes; SentencePiece fails slightly above this
THREADS = 1  # the model's bytes depend on it, so it is pinned
_EVERY_SPACE: dict[str, Any] = {"add_dummy_prefix": False, "remove_extra_whitespaces": False}
_BYTES = b"bytes of UTF-8\n"  # the file of a tokenizer that has no model
_IDS = b"ids below "  # the file of a corpus of ids, before their number
_SIDES = b"vocabularies "  # before those of both sides of pairs, as JSON, and the file of all ids


class Tokenizer(ABC):
    """Turns lines of text into ids and back. `load_tokenizer` reads one from a file.

    Attributes:
        shift: What is added to the ids of a ready tokenizer, since the special ones come first.
    """

    shift: ClassVar[int] = 0

    @property
    def source(self) -> "Tokenizer":
        """That of source texts: the same, unless the sides of pairs have separate vocabularies."""
        return self

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """Number of ids, the five special ones included."""

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Return the ids of one line, without BOS and EOS."""

    def encode_lines(self, lines: list[str]) -> list[list[int]]:
        """Return the ids of each line, each ended by EOS."""
        return [[*self.encode(line), EOS] for line in lines]

    def word_starts(self) -> list[bool]:
        """Return for each id whether it begins a word; all do where ids are no pieces of words."""
        return [True] * self.vocab_size

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
        model: the content of the model file.
    """

    def __init__(self, model: bytes) -> None:
        import sentencepiece

        self._model = sentencepiece.SentencePieceProcessor(model_proto=model)

    @property
    def vocab_size(self) -> int:
        return self._model.get_piece_size()

    def encode(self, text: str) -> list[int]:
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
        from lightning_app.scores.offsets import piece_offsets

        return piece_offsets(self._model, text)

    def decode(self, ids: Iterable[int]) -> str:
        return self._model.decode([int(i) for i in ids if i == UNK or i >= SPECIALS])


class Bytes(Tokenizer):
    """The bytes of the text in UTF-8, each with its own id: nothing is trained or unknown."""

    @property
    def vocab_size(self) -> int:
        return SPECIALS + 256

    def encode(self, text: str) -> list[int]:
        return [SPECIALS + byte for byte in text.encode()]

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


class Ready(Tokenizer):
    """A tokenizer made elsewhere, whose id i is i + 5 here: the special ids come first.

    Nothing of its own marks or ends a text, and its unknown piece is a piece like others.

    Args:
        size: The number of its ids.
        encode: Returns its ids of a text, as (ids, begins, ends) in characters.
        decode: Returns the text of its ids.
    """

    shift = SPECIALS

    def __init__(
        self,
        size: int,
        encode: Callable[[str], tuple[Sequence[int], Sequence[int], Sequence[int]]],
        decode: Callable[[list[int]], str],
    ) -> None:
        self._size, self._encode, self._decode = size, encode, decode

    @property
    def vocab_size(self) -> int:
        return SPECIALS + self._size

    def encode(self, text: str) -> list[int]:
        return [SPECIALS + id_ for id_ in self._encode(text)[0]]

    def offsets(self, text: str) -> "PieceOffsets":
        from lightning_app.scores.offsets import PieceOffsets

        ids, begins, ends = (np.array(each, dtype=np.int64) for each in self._encode(text))
        left = list(text)
        for begin, end in zip(begins, ends, strict=True):
            left[begin:end] = " " * (end - begin)
        if len(left) > len(text) or "".join(left).strip() or (np.diff(begins) < 0).any():
            raise UserError(
                f"data.tokenizer_file: its pieces do not cover '{text:.40}' in order; a task with "
                "answers in a text needs a tokenizer that keeps all characters"
            )
        return PieceOffsets(text, SPECIALS + ids, begins, ends)

    def decode(self, ids: Iterable[int]) -> str:
        return self._decode([int(i) - SPECIALS for i in ids if i >= SPECIALS])


def numbers(size: int) -> Ready:
    """Return the tokenizer of a corpus of ids: a text names ids below `size` in decimals."""

    def encode(text: str) -> tuple[list[int], list[int], list[int]]:
        for word in text.split():
            if not (word.isdecimal() and int(word) < size):
                raise UserError(
                    f"'{word}' is not an id: the corpus has no tokenizer, so a text is numbers "
                    f"below {size:,} with spaces between them"
                )
        return [int(word) for word in text.split()], [], []

    return Ready(size, encode, lambda ids: " ".join(map(str, ids)))


def numbers_file(size: int) -> bytes:
    """Return the file of `numbers`."""
    return _IDS + b"%d\n" % size


class Side(Tokenizer):
    """The ids of a tokenizer that occur on one side of the training pairs, numbered in their order.

    The other ids are UNK, as in fairseq, whose dictionaries have the pieces of one language each.

    Args:
        whole: The tokenizer of both sides.
        kept: The ids of `whole`, in rising order, the special ones first.
        source: The tokenizer of the other side, if this is the target's.
    """

    def __init__(self, whole: Tokenizer, kept: Sequence[int], source: "Side | None" = None) -> None:
        self._whole, self._kept, self._source = whole, kept, source
        self._ids = np.full(whole.vocab_size, UNK)
        self._ids[kept] = np.arange(len(kept))

    @property
    def source(self) -> Tokenizer:
        return self._source or self

    @property
    def vocab_size(self) -> int:
        return len(self._kept)

    def narrowed(self, ids: Sequence[int]) -> list[int]:
        """Return ids of the tokenizer of both sides as those of this one."""
        return self._ids[ids].tolist() if len(ids) else []

    def encode(self, text: str) -> list[int]:
        return self.narrowed(self._whole.encode(text))

    def offsets(self, text: str) -> "PieceOffsets":
        found = self._whole.offsets(text)
        return replace(found, ids=self._ids[found.ids])

    def decode(self, ids: Iterable[int]) -> str:
        return self._whole.decode(self._kept[int(id_)] for id_ in ids)


def sides_file(model: bytes, source: Iterable[int], target: Iterable[int]) -> bytes:
    """Return the file of a tokenizer with the ids that occur in source and in target texts."""
    special = set(range(SPECIALS))
    kept = [sorted(special.union(ids)) for ids in (source, target)]
    return _SIDES + json.dumps(kept).encode() + b"\n" + model


def _of_json(data: bytes, path: Path) -> Ready:
    try:
        from tokenizers import Tokenizer as Json
    except ImportError as error:
        raise UserError(f"{path}: needs a package: pip install tokenizers") from error
    model: Any = Json.from_buffer(data)
    model.no_truncation()
    model.no_padding()

    def encode(text: str) -> tuple[list[int], list[int], list[int]]:
        found = model.encode(text, add_special_tokens=False)
        return found.ids, [begin for begin, _ in found.offsets], [end for _, end in found.offsets]

    decode = partial(model.decode, skip_special_tokens=False)
    return Ready(1 + max(model.get_vocab().values()), encode, decode)


def _of_pieces(data: bytes) -> Tokenizer:
    import sentencepiece

    model: Any = sentencepiece.SentencePieceProcessor()
    model.LoadFromSerializedProto(data)  # the constructor takes no bytes for no model
    special = (model.pad_id(), model.unk_id(), model.bos_id(), model.eos_id())
    if special == (PAD, UNK, BOS, EOS) and model.id_to_piece(MASK) == MASK_PIECE:
        return Pieces(data)

    def encode(text: str) -> tuple[Sequence[int], Sequence[int], Sequence[int]]:
        found = model.encode(text, return_type="offset_mapping")
        begins, ends = np.array(found["offsets"], dtype=np.int64).reshape(-1, 2).T.tolist()
        return found["ids"], begins, ends

    return Ready(model.get_piece_size(), encode, model.decode)


def load_tokenizer(path: Path) -> Tokenizer:
    """Return the tokenizer in a file: of this package, a SentencePiece model or tokenizer.json.

    Raises:
        UserError: for any other file.
    """
    return _read(path.read_bytes(), path)


def _read(data: bytes, path: Path) -> Tokenizer:
    if data == _BYTES:
        return Bytes()
    if data.startswith(_IDS):
        return numbers(int(data.removeprefix(_IDS)))
    try:
        if data.startswith(_SIDES):
            kept, _, model = data.removeprefix(_SIDES).partition(b"\n")
            whole, (source, target) = _read(model, path), json.loads(kept)
            return Side(whole, target, Side(whole, source))
        return _of_json(data, path) if data[:1] == b"{" else _of_pieces(data)
    except UserError:
        raise
    except Exception as error:  # what both libraries raise for a damaged file
        kinds = "a SentencePiece model or a tokenizer.json"
        raise UserError(f"{path}: is not {kinds} ({error})") from error


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
        found = {word for line in lines() for word in re.findall("[^ ▁]+", line)}
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


def spelled(tokenizer: Tokenizer, ids: np.ndarray) -> dict[str, int]:
    """Count the bytes and the words of the text of `ids`, with each EOS as one of both.

    Empty if the ids are not those of a text.
    """
    lines = np.split(ids, np.flatnonzero(ids == EOS) + 1)
    text = "\n".join(tokenizer.decode(line.tolist()) for line in lines)
    if "\ufffd" in text:
        return {}
    words = sum(1 for _ in re.finditer(r"\S+", text))
    return {"bytes": len(text.encode()), "words": words + text.count("\n")}


def unigram_entropy(ids: np.ndarray) -> float:
    """H = -sum_v p(v) ln p(v), in nats, with p the relative frequency of each id in `ids`.

    It is the loss of the best model without context, so a run that ends near it has stalled.
    """
    if len(ids) > _PLACES:  # sorting them would take eight bytes an id
        counts = np.zeros(int(ids.max()) + 1, dtype=np.int64)
        for begin in range(0, len(ids), _PLACES):
            counts += np.bincount(ids[begin : begin + _PLACES], minlength=len(counts))
        counts = counts[counts > 0]
    else:
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
