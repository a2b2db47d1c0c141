"""Which tokens of a row are masked, and what the model reads in their place."""

from abc import ABC, abstractmethod
from typing import NamedTuple, final

import numpy as np
import torch
from torch import Tensor

from lightning_app.data.batching import Item
from lightning_app.data.prepare import PreparedCorpus, share
from lightning_app.data.tokenizer import BOS, EOS, MASK, PAD, SPECIALS

FIXED_SEED = 0  # for validation and test masks, whatever the run's seed


class MaskedBatch(NamedTuple):
    """One rank's share of a global batch of windows, or of pairs of texts.

    Attributes:
        tokens: (batch, window) int64, after masking; pairs have padding on the right.
        positions: (predicted,) int64, flat indices into batch * window, ascending.
        labels: (predicted,) int64, the tokens at these positions before masking.
        index: (batch,) int64, number of the row; -1 for a blank row, which predicts nothing.
        predicted_tokens: () int64, tokens that the global batch predicts over all ranks.
        segments: (batch, window) int64, 0 or 1 for the text of a pair that contains the token, 0
            for padding; None for windows.
        follows: (batch,) int64, `NEXT` or `RANDOM` of `NextSentenceHead`; None for windows.
        pairs: () int64, pairs of the global batch over all ranks; None for windows.
    """

    tokens: Tensor
    positions: Tensor
    labels: Tensor
    index: Tensor  # pyright: ignore[reportIncompatibleMethodOverride]
    predicted_tokens: Tensor
    segments: Tensor | None = None
    follows: Tensor | None = None
    pairs: Tensor | None = None


@final
class Masking:
    """The masks of a split, which depend only on seed, epoch, row and position.

    Devlin et al. 2019 (1810.04805), section 3.1. With `word_starts` all pieces of a word are masked
    together (google-research/bert, whole word masking): words are taken in random order until the
    budget of the row is spent, and a word with more pieces than remain in it is skipped. Each
    piece is still replaced separately. Without it the budget is always spent if there are enough
    tokens.

    Args:
        vocab_size: The number of ids.
        seed: The seed of the masks; None for masks that are the same in every run and epoch.
        word_starts: Whether each id begins a word; None to mask pieces separately.
    """

    def __init__(
        self, vocab_size: int, seed: int | None, word_starts: list[bool] | None = None
    ) -> None:
        self._vocab_size = vocab_size
        self._seed = seed
        self._starts = None if word_starts is None else np.array(word_starts)

    def choose(
        self, epoch: int, rows: np.ndarray, tokens: np.ndarray, budgets: np.ndarray
    ) -> np.ndarray:
        """Return which positions are predicted, (rows, window).

        Marks and padding never are. A row has `budgets` of them, fewer if it has fewer tokens.
        """
        key = self._noise(epoch, rows, tokens.shape[1], stream=0)
        words = (tokens != EOS) & (tokens != BOS) & (tokens != PAD)
        if self._starts is not None:
            return _whole_words(key, words, self._starts[tokens], budgets)
        key[~words] = np.iinfo(np.uint64).max
        rank = np.empty(key.shape, dtype=np.int64)
        np.put_along_axis(rank, key.argsort(axis=1), np.arange(key.shape[1])[None], axis=1)
        return (rank < budgets[:, None]) & words

    def batch(
        self,
        epoch: int,
        rows: np.ndarray,
        tokens: np.ndarray,
        budgets: np.ndarray,
        rank: int,
        world_size: int,
    ) -> MaskedBatch:
        """Return this rank's share of the global batch of `rows` with these tokens."""
        chosen = self.choose(epoch, rows, tokens, budgets)
        # At least 1: with whole words a small batch may predict none, and a step divides by their
        # number.
        predicted = torch.tensor(max(1, int(chosen.sum())))
        mine, tokens, chosen = (share(of, rank, world_size) for of in (rows, tokens, chosen))
        if len(mine) == 0:
            nothing = torch.empty(0, dtype=torch.int64)
            return MaskedBatch(
                tokens=torch.full((1, tokens.shape[1]), EOS),
                positions=nothing,
                labels=nothing,
                index=torch.full((1,), -1),
                predicted_tokens=predicted,
            )
        labels = tokens[chosen]
        shown = np.where(chosen, self._replace(epoch, mine, tokens), tokens)
        return MaskedBatch(
            tokens=torch.from_numpy(shown),
            positions=torch.from_numpy(np.flatnonzero(chosen)),
            labels=torch.from_numpy(labels),
            index=torch.from_numpy(mine.astype(np.int64)),
            predicted_tokens=predicted,
        )

    def _replace(self, epoch: int, rows: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Return the input at a chosen position: 80 % MASK, 10 % any piece, 10 % the token."""
        width = tokens.shape[1]
        die = self._noise(epoch, rows, width, stream=1) % 10
        pieces = np.uint64(self._vocab_size - SPECIALS)
        piece = (self._noise(epoch, rows, width, stream=2) % pieces).astype(np.int64) + SPECIALS
        return np.where(die < 8, MASK, np.where(die == 8, piece, tokens))

    def _noise(self, epoch: int, rows: np.ndarray, width: int, stream: int) -> np.ndarray:
        """Return (rows, width) uint64 that depend only on seed, epoch, row and position."""
        seed, epoch = (FIXED_SEED, 0) if self._seed is None else (self._seed, epoch)
        key = np.array([stream], dtype=np.uint64)
        for part in (seed, epoch):
            key = _mix(key + np.uint64(part))
        key = _mix(key + rows.astype(np.uint64))
        return _mix(key[:, None] + np.arange(width, dtype=np.uint64))


def _whole_words(
    key: np.ndarray, words: np.ndarray, begins: np.ndarray, budgets: np.ndarray
) -> np.ndarray:
    """Return the positions of the chosen words, ordered by the `key` of their first pieces.

    `words` is false at marks and padding; the token after one begins a word, even if the piece
    continues a word that begins before the row.
    """
    before = np.zeros_like(words)
    before[:, 1:] = words[:, :-1]
    begins = words & (begins | ~before)
    chosen = np.zeros_like(words)
    for row, left in enumerate(budgets.tolist()):
        starts = np.flatnonzero(begins[row])
        # A word ends where the next one begins, or before the next mark.
        ends = np.append(starts[1:], words.shape[1])
        sizes = np.add.reduceat(words[row].astype(np.int64), starts) if len(starts) else starts
        for at in key[row, starts].argsort().tolist():
            size = int(sizes[at])
            if size <= left:
                chosen[row, starts[at] : ends[at]] = True
                left -= size
            if not left:
                break
    return chosen & words


def _mix(x: np.ndarray) -> np.ndarray:
    """One step of SplitMix64 (Steele et al. 2014): neighbouring inputs have unrelated outputs."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


class MaskedSplit(ABC):
    """A split whose tokens are masked when a batch is built.

    (epoch, rows of a global batch) -> this rank's `MaskedBatch`.

    Args:
        corpus: A prepared corpus of one language.
        split: train, valid or test.
        window: The maximum tokens of a row, with marks.
        probability: The share of a row's tokens to predict, rounded to at least one.
        seed: The seed of rows, masks and order; None for rows and masks that are the same in
            every run and epoch, in the order of the text.
        rank: The rank of this process.
        world_size: Number of processes.
        word_starts: See `Masking`.

    Attributes:
        ids: Every token of the split, int32.
    """

    ids: np.ndarray

    def __init__(
        self,
        corpus: PreparedCorpus,
        split: str,
        *,
        window: int,
        probability: float,
        seed: int | None,
        rank: int = 0,
        world_size: int = 1,
        word_starts: list[bool] | None = None,
    ) -> None:
        self.window, self._probability = window, probability
        self._seed, self._rank, self._world_size = seed, rank, world_size
        self._masking = Masking(corpus.meta["vocab_size"], seed, word_starts)
        self._read(corpus, split)

    @abstractmethod
    def _read(self, corpus: PreparedCorpus, split: str) -> None:
        """Cut the text of a split into rows."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def _whole(self, epoch: int, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens of rows before masking, and how many of each to predict."""

    def targets(self, rows: np.ndarray | None = None) -> np.ndarray:
        """Return every token that is predicted in one epoch; if masks change, all except EOS.

        Only those in `rows`, unless None.
        """
        if self._seed is not None and rows is None:
            return self.ids[self.ids != EOS]
        rows = np.arange(len(self)) if rows is None else rows
        tokens, budgets = self._whole(0, rows)
        return tokens[self._masking.choose(0, rows, tokens, budgets)]

    def __getitem__(self, item: Item) -> MaskedBatch:
        epoch, rows = item
        return self._masked(epoch, rows, *self._whole(epoch, rows))

    def _masked(
        self, epoch: int, rows: np.ndarray, tokens: np.ndarray, budgets: np.ndarray
    ) -> MaskedBatch:
        return self._masking.batch(epoch, rows, tokens, budgets, self._rank, self._world_size)
