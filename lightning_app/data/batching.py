"""Token-budget batches, the same list on every rank, and a loader that resumes in mid-epoch.

A global batch is the batch of one step, whatever the number of devices; rank r of n takes its rows
r, r + n, r + 2n, ... Every rank builds the same list of global batches from only the lengths, the
seed and the epoch, so all ranks take the same number of steps.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import DataLoader

from lightning_app.core.errors import UserError

Item = tuple[int, np.ndarray]  # (epoch, rows of a global batch)

AHEAD = 2
"""The number of batches that are built and pinned in advance while a GPU computes."""


class Batch(Protocol):
    """One rank's share of a global batch, a named tuple of tensors; a part may be None.

    Attributes:
        index: (batch,) int64, row of the split; -1 for a blank row, which predicts nothing.
        predicted_tokens: () int64, tokens that the global batch predicts over all ranks.
    """

    @property
    def index(self) -> torch.Tensor: ...

    @property
    def predicted_tokens(self) -> torch.Tensor: ...

    def __iter__(self) -> Iterator[torch.Tensor | None]: ...


class Rows(Protocol):
    """Builds batches for one rank."""

    def __getitem__(self, item: Item, /) -> Batch:
        """Return this rank's share of the global batch (epoch, rows)."""
        ...


class SplitRows(Rows, Protocol):
    """A split of a corpus as batches, for one rank."""

    def __len__(self) -> int: ...

    def sampler(self, tokens_per_batch: int) -> "EpochSampler":
        """Return the global batches of each epoch, each with at most that many tokens."""
        ...

    def targets(self, rows: np.ndarray | None = None) -> np.ndarray:
        """Return every token that is predicted in one epoch; only those in `rows`, unless None."""
        ...


def padded(
    ids: np.ndarray, offsets: np.ndarray, rows: np.ndarray, fill: int, bos: int | None = None
) -> torch.Tensor:
    """Return rows of flat ids as one padded matrix, (rows, longest) int64, each after any `bos`."""
    starts = offsets[rows]
    lengths = offsets[rows + 1] - starts
    places = np.arange(lengths.max())
    # there is little padding, so reading too much and overwriting it is fastest
    taken = ids.take(starts[:, None] + places, mode="clip")
    lead = 0 if bos is None else 1
    out = np.empty((len(rows), len(places) + lead), dtype=np.int64)
    if bos is not None:
        out[:, 0] = bos
    out[:, lead:] = np.where(places < lengths[:, None], taken, fill)
    return torch.from_numpy(out)


class EpochSampler:
    """Yield the batches of an epoch, which Lightning sets with `set_epoch` before the first one.

    Args:
        batches: the global batches of an epoch; always the same number of them.
        in_order: whether a batch depends on earlier ones.
        grows: whether batches are smaller in the first steps.
    """

    def __init__(
        self,
        batches: Callable[[int], list[np.ndarray]],
        *,
        in_order: bool = False,
        grows: bool = False,
    ) -> None:
        self.epoch = 0
        self.in_order = in_order
        self.grows = grows
        self._batches = batches
        self._cut = (0, batches(0))
        self._length = len(self._cut[1])

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next pass, which determines the order."""
        self.epoch = epoch

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Item]:
        epoch = self.epoch
        if self._cut[0] != epoch:
            self._cut = (epoch, self._batches(epoch))
        for rows in self._cut[1]:
            yield epoch, rows


Shuffle = tuple[int, int] | None  # (seed, epoch); None for the order of the text or of lengths


def reshuffled(seed: int | None, batches: Callable[[Shuffle], list[np.ndarray]]) -> EpochSampler:
    """Return batches in another order in every epoch, or always in the same if `seed` is None."""
    return EpochSampler(lambda epoch: batches(None if seed is None else (seed, epoch)))


def in_random_order(sampler: EpochSampler) -> EpochSampler:
    """Return the batches of an evaluation in a random order, the same in every run.

    Sorted by length, the first batches would hold only the shortest sentences, which is not a
    sample of the split. Batches that depend on earlier ones keep their order.
    """
    if sampler.in_order:
        return sampler
    batches = [rows for _, rows in sampler]
    order = np.random.default_rng(0).permutation(len(batches))
    return EpochSampler(lambda _: [batches[place] for place in order])


def pinned_ahead(rows: Rows, items: Iterable[Item], device: torch.device) -> Iterator[Batch]:
    """Yield the batches of `items` in pinned memory; a thread builds `AHEAD` of them in advance.

    Neither the host nor `device`, a GPU, waits for the copy of such a batch.
    """

    def make(item: Item) -> Batch:
        batch: Any = rows[item]
        return batch._make(None if part is None else part.pin_memory() for part in batch)

    # By default a new thread uses the first GPU instead of this process's.
    with ThreadPoolExecutor(1, initializer=torch.cuda.set_device, initargs=(device,)) as maker:
        todo = iter(items)
        pending = deque(maker.submit(make, item) for item in islice(todo, AHEAD))
        while pending:
            batch = pending.popleft().result()
            pending.extend(maker.submit(make, item) for item in islice(todo, 1))
            yield batch


def warmed_up(sampler: EpochSampler, share: Callable[[int], float], per_epoch: int) -> EpochSampler:
    """Return the batches of a training, each reduced to a share of its rows.

    The rows are spread evenly over their batch, which may be sorted by length. Which rows a step
    reads depends only on its number, so that every rank and a resumed run read the same.

    Args:
        sampler: The whole batches.
        share: The share of a step, from 1.
        per_epoch: The number of steps of an epoch.

    Raises:
        UserError: for batches that depend on earlier ones.
    """
    if sampler.in_order:
        raise UserError(
            "model.schedule.batch_warmup_steps: each batch of this task continues the one before, "
            "so that none of its rows can be left out; use 0"
        )

    def batches(epoch: int) -> list[np.ndarray]:
        sampler.set_epoch(epoch)
        found: list[np.ndarray] = []
        for step, (_, rows) in enumerate(sampler, start=epoch * per_epoch + 1):
            kept = max(1, round(share(step) * len(rows)))
            found.append(rows[np.arange(kept) * len(rows) // kept])
        return found

    return EpochSampler(batches, grows=True)


class ResumableLoader:
    """Batches of one rank, epoch after epoch; its state counts the batches yielded so far.

    Lightning stores `state_dict` in a checkpoint, calls `load_state_dict` on resume, and calls
    `set_epoch` on `sampler`. It is not a `torch.utils.data.DataLoader`, so that Lightning does not
    shard it. Batches built in advance by workers or the GPU thread are not counted, so that
    no batch is skipped on resume.

    Args:
        rows: builds a batch; torch's loaders call it `dataset`.
        sampler: selects its rows.
        num_workers: processes that build batches; 0 to use this one.
        gpu: the GPU for which batches are pinned; None without a GPU.
    """

    batch_sampler = None

    def __init__(
        self, rows: Rows, sampler: EpochSampler, num_workers: int, gpu: torch.device | None = None
    ) -> None:
        self.sampler = sampler
        self.dataset = rows
        self._num_workers = num_workers
        self._gpu = gpu
        self._state = {"epoch": 0, "consumed": 0}
        self._resume = False

    def __len__(self) -> int:
        return len(self.sampler)

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch and the number of its batches that were yielded."""
        return dict(self._state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Make the next pass over the stored epoch begin after the stored batch."""
        self._state = dict(state)
        self._resume = True

    def __iter__(self) -> Iterator[Batch]:
        # A generator starts at its first `next`: Lightning creates the iterator before it sets the
        # epoch.
        items = list(self.sampler)
        epoch = self.sampler.epoch
        begin = 0
        if self._resume and self._state["epoch"] == epoch:
            begin = self._state["consumed"]
        self._resume = False
        self._state = {"epoch": epoch, "consumed": begin}
        for consumed, batch in enumerate(self._batches(items[begin:]), start=begin + 1):
            self._state["consumed"] = consumed
            yield batch

    def _batches(self, items: list[Item]) -> Iterable[Batch]:
        if self._num_workers:
            return DataLoader(
                self.dataset,  # pyright: ignore[reportArgumentType]
                batch_size=None,
                sampler=items,
                num_workers=self._num_workers,
                pin_memory=self._gpu is not None,
                generator=torch.Generator(),  # the default would draw from the global generator
            )
        if self._gpu is not None:
            return pinned_ahead(self.dataset, items, self._gpu)
        return (self.dataset[item] for item in items)
