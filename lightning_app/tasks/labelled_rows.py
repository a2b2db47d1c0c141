"""Rows of one or two texts with a label, in batches of rows of similar length."""

from collections.abc import Mapping
from typing import NamedTuple, final

import numpy as np
import torch
from torch import Tensor

from lightning_app.data.batching import EpochSampler, Item
from lightning_app.data.prepare import PreparedCorpus
from lightning_app.data.token_batching import global_batches, share
from lightning_app.data.tokenizer import BOS, EOS, PAD


class LabelledBatch(NamedTuple):
    """One rank's share of a global batch of rows.

    Attributes:
        tokens: (batch, token) int64, BOS, the first text, EOS, the second text, EOS, padding; a row
            of one text ends at its EOS.
        segments: (batch, token) int64, 1 for the second text and its EOS, else 0.
        labels: (batch,) float64, the class from 0 on, or the score.
        index: (batch,) int64, row of the split; -1 for a blank row, which counts nowhere.
        predicted_tokens: () int64, rows of the global batch on all ranks together: each predicts
            one label.
    """

    tokens: Tensor
    segments: Tensor
    labels: Tensor
    index: Tensor  # pyright: ignore[reportIncompatibleMethodOverride]
    predicted_tokens: Tensor


def cut_lengths(first: np.ndarray, second: np.ndarray, longest: int) -> tuple[np.ndarray, ...]:
    """Return the tokens of both texts after the longer one lost its last, down to `longest`.

    Where both are as long the second one loses a token (google-research/bert,
    `_truncate_seq_pair`).
    """
    over = np.maximum(0, first + second - longest)
    # First the longer text loses tokens until both are as long, then they take turns.
    difference = np.minimum(over, np.abs(first - second))
    turns = over - difference
    of_first = np.where(first > second, difference, 0) + turns // 2
    of_second = np.where(first > second, 0, difference) + turns - turns // 2
    return first - of_first, second - of_second


@final
class LabelledRows:
    """A split: (epoch, rows of a global batch) -> this rank's `LabelledBatch`.

    BERT's [CLS] and [SEP] are our BOS and EOS. An epoch has every row once. Rows are sorted into
    batches of similar length, so that little is padding.

    Args:
        corpus: A prepared corpus with labels.
        split: train, valid or test.
        window: The most tokens of a row, with its marks; longer texts are cut.
        seed: Of the order of batches; None for the order of length.
        rank: Of this process.
        world_size: Number of processes.
        regression: Whether labels are scores.

    Attributes:
        labels: The label of each row, float64.
        cut: The number of rows that lost tokens.
    """

    def __init__(
        self,
        corpus: PreparedCorpus,
        split: str,
        *,
        window: int,
        seed: int | None,
        rank: int = 0,
        world_size: int = 1,
        regression: bool = False,
    ) -> None:
        self.regression = regression
        self.labels = np.asarray(corpus.labels(split))
        self._ids = {"first": corpus.ids(split, "first")}
        self._starts = {"first": np.asarray(corpus.offsets(split, "first"))[:-1]}
        first = np.diff(corpus.offsets(split, "first")) - 1  # a stored text ends in EOS
        second, marks = np.zeros_like(first), 2
        self.pair = (corpus.folder / f"{split}.second.ids.npy").exists()
        if self.pair:
            self._ids["second"] = corpus.ids(split, "second")
            self._starts["second"] = np.asarray(corpus.offsets(split, "second"))[:-1]
            second, marks = np.diff(corpus.offsets(split, "second")) - 1, 3
        assert len(first) == len(second) == len(self.labels)
        self.cut = int(np.sum(first + second > window - marks))
        self._first, self._second = cut_lengths(first, second, window - marks)
        self.lengths = self._first + self._second + marks
        self._seed, self._rank, self._world_size = seed, rank, world_size

    def __len__(self) -> int:
        return len(self.labels)

    def sampler(self, tokens_per_batch: int) -> EpochSampler:
        """Return the batches of an epoch, of at most that many tokens with padding."""
        seed, lengths = self._seed, self.lengths

        def batches(epoch: int) -> list[np.ndarray]:
            shuffle = None if seed is None else (seed, epoch)
            return global_batches(lengths, lengths, tokens_per_batch, shuffle)

        return EpochSampler(batches)

    def targets(self, rows: np.ndarray | None = None) -> np.ndarray:
        """Return the labels; only those of `rows`, if they are given."""
        return self.labels if rows is None else self.labels[rows]

    def take(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return tokens (rows, longest) and their segments."""
        place = np.arange(self.lengths[rows].max())
        end, last = (
            self._first[rows, None] + 1,
            self.lengths[rows, None] - 1,
        )  # the places of both EOS
        tokens = np.full((len(rows), len(place)), PAD, dtype=np.int64)
        tokens[:, 0] = BOS
        tokens[(place == end) | (place == last)] = EOS
        self._fill(tokens, "first", rows, (place > 0) & (place < end), place - 1)
        if self.pair:
            self._fill(tokens, "second", rows, (place > end) & (place < last), place - end - 1)
        return tokens, ((place > end) & (place <= last)).astype(np.int64)

    def _fill(
        self, tokens: np.ndarray, text: str, rows: np.ndarray, inside: np.ndarray, at: np.ndarray
    ) -> None:
        source = (self._starts[text][rows, None] + at)[inside]
        tokens[inside] = self._ids[text][source]

    def __getitem__(self, item: Item) -> LabelledBatch:
        _, rows = item
        tokens, segments = self.take(rows)
        mine = share(np.arange(len(rows)), self._rank, self._world_size)
        index = rows[mine].astype(np.int64)
        if len(mine) == 0:  # a rank without a row reads the first one, which does not count
            mine, index = np.array([0]), np.array([-1])
        return LabelledBatch(
            torch.from_numpy(tokens[mine]),
            torch.from_numpy(segments[mine]),
            torch.from_numpy(self.labels[rows[mine]]),
            torch.from_numpy(index),
            torch.tensor(len(rows)),
        )


def described_cuts(rows: Mapping[str, LabelledRows]) -> str:
    """Return how many rows of each split are cut, for the description of the corpus."""
    cut = " / ".join(f"{of.cut:,}" for of in rows.values())
    return f"; texts of {cut} rows cut at the end, the longer one first"
