"""From the characters of a text to the pieces of SentencePiece that cover them, and back."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from sentencepiece import SentencePieceProcessor

from lightning_app.core.errors import UserError

SPACE_MARK = "▁"  # SentencePiece's space; in text it also means a space and may be dropped


@dataclass(frozen=True, eq=False)
class PieceOffsets:
    """The pieces of one text: piece i covers the characters begins[i] to ends[i] - 1.

    A piece owns the spaces before it. The first one may be a space mark that covers nothing.
    Adjacent unknown characters are one piece.
    """

    text: str
    ids: NDArray[np.int64]
    begins: NDArray[np.int64]
    ends: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.ids)

    def visible(self) -> NDArray[np.bool_]:
        """Return which pieces cover a character other than whitespace."""
        return np.array([bool(self.text_of(i, i)) for i in range(len(self))], dtype=bool)

    def text_of(self, first: int, last: int) -> str:
        """Return the characters of the pieces `first` to `last`, without whitespace at the ends.

        Raises:
            UserError: if there are no such pieces.
        """
        if not 0 <= first <= last < len(self):
            raise UserError(
                f"offsets: pieces {first} to {last} of {len(self)}; 0 <= first <= last < "
                f"{len(self)} is needed"
            )
        return self.text[self.begins[first] : self.ends[last]].strip()

    def pieces_of(self, start: int, end: int) -> tuple[int, int]:
        """Return the first and the last piece that cover characters `start` to `end` - 1.

        first = min {i: ends[i] > start}, last = max {i: begins[i] < end}.

        Raises:
            UserError: for no characters, characters outside the text, or only whitespace.
        """
        if not 0 <= start < end <= len(self.text):
            raise UserError(
                f"offsets: characters {start} to {end} of a text of {len(self.text)}; "
                f"0 <= start < end <= {len(self.text)} is needed"
            )
        if not self.text[start:end].replace(SPACE_MARK, " ").strip():
            raise UserError(
                f"offsets: characters {start} to {end} are whitespace; an answer has a visible one"
            )
        first = int(np.searchsorted(self.ends, start, side="right"))
        last = int(np.searchsorted(self.begins, end, side="left")) - 1
        return first, last


def piece_offsets(model: SentencePieceProcessor, text: str) -> PieceOffsets:
    """Return the pieces of `text` with their offsets in characters.

    The offsets are checked: they cover the text without gaps, except spaces at its ends.
    `return_type="proto"` of SentencePiece returns byte offsets instead, which are wrong after the
    first character outside ASCII.

    Raises:
        UserError: if the pieces do not cover the text: the model drops characters, or the version
            of SentencePiece returns other offsets.
    """
    encoded = model.encode(text, return_type="offset_mapping")
    pairs = np.array(encoded["offsets"], dtype=np.int64).reshape(-1, 2)
    begins, ends = pairs[:, 0], pairs[:, 1]
    covered = (int(begins[0]), int(ends[-1])) if len(pairs) else (0, 0)
    if (
        (begins > ends).any()
        or (begins[1:] != ends[:-1]).any()
        or covered[1] > len(text)
        or (text[: covered[0]] + text[covered[1] :]).strip(f" {SPACE_MARK}")
    ):
        raise UserError(
            f"offsets: SentencePiece's pieces cover characters {covered[0]} to {covered[1]} of "
            f"'{text:.40}' ({len(text)} characters) or leave gaps; a model that keeps all "
            f"characters and SentencePiece's offsets in characters (since 0.2.2) are needed"
        )
    return PieceOffsets(text, np.array(encoded["ids"], dtype=np.int64), begins, ends)
