"""A running text in contiguous streams: each batch goes on where the batch before it ended."""

from collections.abc import Mapping
from typing import final

import numpy as np
import torch

from lightning_app.data.batching import EpochSampler, Item
from lightning_app.data.prepare import PreparedCorpus
from lightning_app.data.token_batching import equal_batches, share
from lightning_app.data.tokenizer import EOS, PAD
from lightning_app.errors import UserError
from lightning_app.tasks.causal_windows import CausalBatch, blank_batch


@final
class CausalStreams:
    """A split of B streams: (epoch, windows of a global batch) -> this rank's `CausalBatch`.

    The text is cut into B contiguous streams of equal length, and these into segments of one window
    each (Dai et al. 2019, 1901.02860). Window ``t B + b`` is segment t of stream b; a batch has one
    segment of every stream, in the same order at every step and in every epoch. The first token of
    a stream is predicted from the token before it in the text, that of the text from an EOS.

    Args:
        corpus: A prepared corpus of running text.
        split: train, valid or test.
        window: Tokens in a segment.
        streams: B.
        whole: Read the text to its last token, as an evaluation does; otherwise each stream ends
            with its last whole segment.
        rank: The rank of this process.
        world_size: Number of processes.

    Attributes:
        ids: Every token of the split, int32.
        counts: What `RunningText.counts` has counted in the split.
        remainder: The number of tokens that no segment predicts.
    """

    def __init__(
        self,
        corpus: PreparedCorpus,
        split: str,
        window: int,
        streams: int,
        *,
        whole: bool,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self.ids = corpus.ids(split, "text")
        self.counts: Mapping[str, int] = corpus.meta["text"][split]
        self.window = window
        self.streams = streams
        self._rank = rank
        self._world_size = world_size
        tokens = len(self.ids)
        length = -(-tokens // streams) if whole else tokens // streams
        self.segments = -(-length // window) if whole else length // window
        self._starts = np.arange(streams) * length
        ends = self._starts + (length if whole else self.segments * window)
        self._ends = np.minimum(ends, tokens)
        self.remainder = tokens - int(np.maximum(0, self._ends - self._starts).sum())
        if not self.segments:
            raise UserError(
                f"data.window is {window} and data.tokens_per_batch has {streams} of them, but the "
                f"{split} split has {tokens} tokens in all"
            )
        if not whole and streams < world_size:
            raise UserError(
                f"data.tokens_per_batch has {streams} windows of {window} tokens, but there are "
                f"{world_size} processes: each needs a stream of its own"
            )

    def __len__(self) -> int:
        return self.segments * self.streams

    def sampler(self, tokens_per_batch: int) -> EpochSampler:
        """Return the batches of an epoch: one segment of every stream each."""
        return EpochSampler(lambda _: equal_batches(len(self), self.streams), in_order=True)

    def targets(self, rows: np.ndarray | None = None) -> np.ndarray:
        """Return every token that is predicted in one epoch; in `rows` if they are given."""
        places, real = self._places(np.arange(len(self)) if rows is None else rows)
        return self.ids[places[real]]

    def reading(self) -> str:
        """Say how the split is read."""
        streams = "1 stream" if self.streams == 1 else f"{self.streams:,} streams side by side"
        return f"{streams} of {self.segments:,} segments of {self.window} tokens, one after another"

    def __getitem__(self, item: Item) -> CausalBatch:
        _, rows = item
        predicted = int(self._places(rows)[1].sum())
        mine = share(rows, self._rank, self._world_size)
        if len(mine) == 0:
            return blank_batch(predicted)
        places, real = self._places(mine)
        labels = np.where(real, self._take(places), PAD)
        tokens = np.where(real, np.where(places == 0, EOS, self._take(places - 1)), PAD)
        return CausalBatch(
            tokens=torch.from_numpy(tokens),
            labels=torch.from_numpy(labels),
            index=torch.from_numpy(mine.astype(np.int64)),
            predicted_tokens=torch.tensor(predicted),
            streams=torch.tensor(self.streams),
        )

    def _places(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the places of the tokens that windows predict, and which are in their stream."""
        segment, stream = rows[:, None] // self.streams, rows[:, None] % self.streams
        places = self._starts[stream] + segment * self.window + np.arange(self.window)
        return places, places < self._ends[stream]

    def _take(self, places: np.ndarray) -> np.ndarray:
        """Return the tokens at `places`, int64; any tokens at places outside the text."""
        return self.ids.take(places, mode="clip").astype(np.int64)
