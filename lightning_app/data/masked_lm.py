"""Windows of packed text with tokens masked on the fly (Devlin et al. 2019, section 3.1)."""

from typing import final

import numpy as np
import torch

from lightning_app.data.batching import EpochSampler, Item, MaskedBatch
from lightning_app.data.cutting import equal_batches, share
from lightning_app.data.prepare import PreparedCorpus
from lightning_app.data.tokenizer import EOS, MASK, SPECIALS
from lightning_app.errors import UserError

FIXED_SEED = 0  # of validation and test masks, whatever the seed of the run


@final
class MaskedRows:
    """A split of windows: (epoch, windows of a global batch) -> this rank's `MaskedBatch`.

    Sentences follow each other, each ended by EOS; what does not fill the last window is dropped.

    Args:
        corpus: a prepared corpus of one language.
        split: train, valid or test.
        window: tokens a window.
        probability: share of a window's tokens that is predicted, rounded to at least one token.
        seed: of the masks; None for masks that are the same in every run and epoch.
        rank: of this process.
        world_size: number of processes.
    """

    def __init__(
        self,
        corpus: PreparedCorpus,
        split: str,
        *,
        window: int,
        probability: float,
        seed: int | None,
        rank: int,
        world_size: int,
    ) -> None:
        ids = corpus.ids(split, "text")
        count = len(ids) // window
        if count == 0:
            raise UserError(
                f"data.window is {window}, but the {split} split has {len(ids)} tokens in all"
            )
        self.remainder = len(ids) - count * window
        self._windows = ids[: count * window].reshape(count, window)
        self._predicted = max(1, round(probability * window))
        self._seed = seed
        self._vocab_size = corpus.meta["vocab_size"]
        self._rank = rank
        self._world_size = world_size

    def __len__(self) -> int:
        return len(self._windows)

    def labels(self) -> np.ndarray:
        """Return every token that is predicted in one pass with the masks of epoch 0."""
        rows = np.arange(len(self))
        tokens = self._windows[rows].astype(np.int64)
        return tokens[self._choose(0, rows, tokens)]

    def __getitem__(self, item: Item) -> MaskedBatch:
        epoch, rows = item
        tokens = self._windows[rows].astype(np.int64)
        chosen = self._choose(epoch, rows, tokens)
        normalizer = torch.tensor(chosen.sum() / self._world_size, dtype=torch.float32)
        mine = share(rows, self._rank, self._world_size)
        if len(mine) == 0:
            nothing = torch.empty(0, dtype=torch.int64)
            return MaskedBatch(
                tokens=torch.full((1, tokens.shape[1]), EOS),
                positions=nothing,
                labels=nothing,
                index=torch.full((1,), -1),
                normalizer=normalizer,
            )
        tokens, chosen = (share(of, self._rank, self._world_size) for of in (tokens, chosen))
        labels = tokens[chosen]
        shown = np.where(chosen, self._replace(epoch, mine, tokens), tokens)
        return MaskedBatch(
            tokens=torch.from_numpy(shown),
            positions=torch.from_numpy(np.flatnonzero(chosen)),
            labels=torch.from_numpy(labels),
            index=torch.from_numpy(mine.astype(np.int64)),
            normalizer=normalizer,
        )

    def _choose(self, epoch: int, rows: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Return which places are predicted, (rows, window): the same number in each window.

        EOS is never predicted; a window with too few other tokens predicts fewer.
        """
        key = self._noise(epoch, rows, stream=0)
        key[tokens == EOS] = np.iinfo(np.uint64).max
        first = np.argpartition(key, self._predicted - 1, axis=1)[:, : self._predicted]
        chosen = np.zeros(tokens.shape, dtype=bool)
        np.put_along_axis(chosen, first, True, axis=1)
        return chosen & (tokens != EOS)

    def _replace(self, epoch: int, rows: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Return what stands in a chosen place: 80 % MASK, 10 % any piece, 10 % the token."""
        die = self._noise(epoch, rows, stream=1) % 10
        pieces = np.uint64(self._vocab_size - SPECIALS)
        piece = (self._noise(epoch, rows, stream=2) % pieces).astype(np.int64) + SPECIALS
        return np.where(die < 8, MASK, np.where(die == 8, piece, tokens))

    def _noise(self, epoch: int, rows: np.ndarray, stream: int) -> np.ndarray:
        """Return (rows, window) uint64 that depend on seed, epoch, window and place alone."""
        seed, epoch = (FIXED_SEED, 0) if self._seed is None else (self._seed, epoch)
        key = np.array([stream], dtype=np.uint64)
        for part in (seed, epoch):
            key = _mix(key + np.uint64(part))
        key = _mix(key + rows.astype(np.uint64))
        return _mix(key[:, None] + np.arange(self._windows.shape[1], dtype=np.uint64))


def _mix(x: np.ndarray) -> np.ndarray:
    """One step of SplitMix64 (Steele et al. 2014): neighbouring inputs give unrelated outputs."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def masked_sampler(
    rows: MaskedRows, tokens_per_batch: int, window: int, seed: int | None
) -> EpochSampler:
    """Return the batches of a split; `seed` None keeps the windows in the order of the text."""
    per_batch = max(1, tokens_per_batch // window)
    return EpochSampler(
        lambda epoch: equal_batches(len(rows), per_batch, None if seed is None else (seed, epoch))
    )
