"""Token-budget batches, the same list on every rank, and a loader that resumes in mid-epoch.

A global batch is the batch of one step whatever the number of devices; rank r of n takes its rows
r, r + n, r + 2n, ... Every rank builds the same list of global batches from lengths, seed and epoch
alone, so all ranks take the same number of steps.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch.utils.data import DataLoader

Item = tuple[int, np.ndarray]  # (epoch, rows of a global batch)


class TranslationBatch(NamedTuple):
    """One rank's share of a global batch of pairs.

    Attributes:
        source: (batch, source) int64, each row ended by EOS, padded with PAD.
        target: (batch, target) int64, BOS ... EOS, padded with PAD.
        index: (batch,) int64, row of the split; -1 for a blank row, which predicts nothing.
        normalizer: () float32, predicted tokens of the whole global batch / number of ranks.
    """

    source: torch.Tensor
    target: torch.Tensor
    index: torch.Tensor  # pyright: ignore[reportIncompatibleMethodOverride]
    normalizer: torch.Tensor


class MaskedBatch(NamedTuple):
    """One rank's share of a global batch of windows.

    Attributes:
        tokens: (batch, window) int64, after masking.
        positions: (predicted,) int64, flat indices into batch * window, ascending.
        labels: (predicted,) int64, what stood there.
        index: (batch,) int64, number of the window; -1 for a blank row, which predicts nothing.
        normalizer: () float32, predicted tokens of the whole global batch / number of ranks.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    labels: torch.Tensor
    index: torch.Tensor  # pyright: ignore[reportIncompatibleMethodOverride]
    normalizer: torch.Tensor


class Rows(Protocol):
    """A split that makes this rank's share of a global batch from (epoch, rows)."""

    def __getitem__(self, item: Item, /) -> TranslationBatch | MaskedBatch: ...


def gather(
    ids: np.ndarray, offsets: np.ndarray, rows: np.ndarray, fill: int, bos: int | None = None
) -> torch.Tensor:
    """Return rows of flat ids as one padded matrix, (rows, longest) int64, after `bos` if given."""
    starts = offsets[rows]
    lengths = offsets[rows + 1] - starts
    places = np.arange(lengths.max())
    # little is padding, so taking too much and overwriting it is the fastest way
    taken = ids.take(starts[:, None] + places, mode="clip")
    lead = 0 if bos is None else 1
    out = np.empty((len(rows), len(places) + lead), dtype=np.int64)
    if bos is not None:
        out[:, 0] = bos
    out[:, lead:] = np.where(places < lengths[:, None], taken, fill)
    return torch.from_numpy(out)


class EpochSampler:
    """Holds the epoch, which Lightning sets through `set_epoch` before the first batch of each.

    Args:
        batches: the global batches of an epoch; always the same number of them.
    """

    def __init__(self, batches: Callable[[int], list[np.ndarray]]) -> None:
        self.epoch = 0
        self._batches = batches
        self._length = len(batches(0))

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the next pass."""
        self.epoch = epoch

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Item]:
        for rows in self._batches(self.epoch):
            yield self.epoch, rows


class ResumableLoader:
    """Batches of one rank, epoch after epoch; its state counts the batches handed over.

    Lightning stores `state_dict` in a checkpoint, calls `load_state_dict` on resume, and calls
    `set_epoch` on `sampler`. It is no `torch.utils.data.DataLoader`, so that Lightning leaves the
    sharding to us. With workers, batches fetched ahead are not counted, so none is skipped.
    """

    batch_sampler = None

    def __init__(self, rows: Rows, sampler: EpochSampler, num_workers: int) -> None:
        self.sampler = sampler
        self._rows = rows
        self._num_workers = num_workers
        self._state = {"epoch": 0, "consumed": 0}
        self._resume = False

    def __len__(self) -> int:
        return len(self.sampler)

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch and how many of its batches were handed over."""
        return dict(self._state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next pass over the stored epoch begin after the stored batch."""
        self._state = dict(state)
        self._resume = True

    def __iter__(self) -> Iterator[TranslationBatch | MaskedBatch]:
        # A generator runs from its first `next` on: Lightning makes the iterator before it says
        # which epoch it is for.
        items = list(self.sampler)
        epoch = self.sampler.epoch
        begin = 0
        if self._resume and self._state["epoch"] == epoch:
            begin = self._state["consumed"]
        self._resume = False
        self._state = {"epoch": epoch, "consumed": begin}
        loader = DataLoader(
            self._rows,  # pyright: ignore[reportArgumentType]
            batch_size=None,
            sampler=items[begin:],
            num_workers=self._num_workers,
            generator=torch.Generator(),  # the default would draw from the global generator
        )
        for consumed, batch in enumerate(loader, start=begin + 1):
            self._state["consumed"] = consumed
            yield batch
