"""Rows of one or two texts with a label, in batches of similar length, and their tasks."""

from functools import partial
from typing import NamedTuple, final

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from lightning_app.data.batching import EpochSampler, Item, reshuffled
from lightning_app.data.prepare import PreparedCorpus, global_batches, share
from lightning_app.data.tokenizer import BOS, EOS, PAD
from lightning_app.tasks.base import EncoderTask


class LabelledBatch(NamedTuple):
    """One rank's share of a global batch of rows.

    Attributes:
        tokens: (batch, token) int64, BOS, the first text, EOS, the second text, EOS, padding; a row
            of one text ends at its EOS.
        segments: (batch, token) int64, 1 for the second text and its EOS, else 0.
        labels: (batch,) float64, the class from 0, or the score; (batch, 2) int64, the positions of
            the first and the last token of an answer.
        index: (batch,) int64, row of the split; -1 for a blank row, which is ignored everywhere.
        predicted_tokens: () int64, rows of the global batch over all ranks: each predicts
            one label.
    """

    tokens: Tensor
    segments: Tensor
    labels: Tensor
    index: Tensor  # pyright: ignore[reportIncompatibleMethodOverride]
    predicted_tokens: Tensor


def cut_lengths(first: np.ndarray, second: np.ndarray, longest: int) -> tuple[np.ndarray, ...]:
    """Return the tokens of both texts after dropping the longer one's last tokens to fit `longest`.

    If both are equally long, the second loses a token (google-research/bert,
    `_truncate_seq_pair`).
    """
    over = np.maximum(0, first + second - longest)
    # First the longer text loses tokens until both are equally long, then they take turns.
    difference = np.minimum(over, np.abs(first - second))
    turns = over - difference
    of_first = np.where(first > second, difference, 0) + turns // 2
    of_second = np.where(first > second, 0, difference) + turns - turns // 2
    return first - of_first, second - of_second


class Texts(NamedTuple):
    """One text of each row: tokens `starts` to `starts + lengths` of `ids`."""

    ids: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray


@final
class MarkedRows:
    """Rows ``BOS first EOS`` or ``BOS first EOS second EOS``: our BOS and EOS are [CLS] and [SEP].

    Attributes:
        lengths: The tokens of each row, with marks.
    """

    def __init__(self, first: Texts, second: Texts | None) -> None:
        self._first, self._second = first, second
        self.lengths = first.lengths + 2
        if second is not None:
            self.lengths = self.lengths + second.lengths + 1

    def take(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return tokens (rows, longest) and their segments."""
        place = np.arange(self.lengths[rows].max())
        # the positions of both EOS
        end, last = self._first.lengths[rows, None] + 1, self.lengths[rows, None] - 1
        tokens = np.full((len(rows), len(place)), PAD, dtype=np.int64)
        tokens[:, 0] = BOS
        tokens[(place == end) | (place == last)] = EOS
        _fill(tokens, self._first, rows, (place > 0) & (place < end), place - 1)
        if self._second is not None:
            inside = (place > end) & (place < last)
            _fill(tokens, self._second, rows, inside, place - end - 1)
        return tokens, ((place > end) & (place <= last)).astype(np.int64)


class LabelledSplit:
    """A split of `MarkedRows`: (epoch, rows of a global batch) -> this rank's `LabelledBatch`.

    Args:
        texts: The rows.
        labels: The label of each row.
        seed: The seed of the order of batches; None to order by length.
        rank: The rank of this process.
        world_size: Number of processes.
    """

    def __init__(
        self, texts: MarkedRows, labels: np.ndarray, seed: int | None, rank: int, world_size: int
    ) -> None:
        self.texts, self.labels, self.lengths = texts, labels, texts.lengths
        self._seed, self._rank, self._world_size = seed, rank, world_size

    def __len__(self) -> int:
        return len(self.labels)

    def sampler(self, tokens_per_batch: int) -> EpochSampler:
        """Return the batches of an epoch, each of at most that many tokens with padding."""
        batches = partial(global_batches, self.lengths, self.lengths, tokens_per_batch)
        return reshuffled(self._seed, batches)

    def targets(self, rows: np.ndarray | None = None) -> np.ndarray:
        """Return the labels; only those of `rows`, unless None."""
        return self.labels if rows is None else self.labels[rows]

    def __getitem__(self, item: Item) -> LabelledBatch:
        rows = item[1]
        tokens, segments = self.texts.take(rows)
        mine = share(np.arange(len(rows)), self._rank, self._world_size)
        index = rows[mine].astype(np.int64)
        if len(mine) == 0:  # a rank without rows reads the first row, which does not count
            mine, index = np.array([0]), np.array([-1])
        return LabelledBatch(
            torch.from_numpy(tokens[mine]),
            torch.from_numpy(segments[mine]),
            torch.from_numpy(self.labels[rows[mine]]),
            torch.from_numpy(index),
            torch.tensor(len(rows)),
        )


def _fill(
    tokens: np.ndarray, texts: Texts, rows: np.ndarray, inside: np.ndarray, at: np.ndarray
) -> None:
    tokens[inside] = texts.ids[(texts.starts[rows, None] + at)[inside]]


def one_row(batch: LabelledBatch, row: int, length: int) -> LabelledBatch:
    """Return the first `length` tokens of one row as a batch."""
    return LabelledBatch(
        batch.tokens[row : row + 1, :length],
        batch.segments[row : row + 1, :length],
        batch.labels[row : row + 1],
        batch.index[row : row + 1],
        batch.predicted_tokens.new_ones(()),
    )


@final
class LabelledRows(LabelledSplit):
    """One or two texts with a class or a score.

    An epoch contains every row once. Rows are sorted into batches of similar length, so that little
    is padding.

    Args:
        corpus: A prepared corpus with labels.
        split: train, valid or test.
        window: The maximum tokens of a row, with marks; longer texts are cut.
        seed: The seed of the order of batches; None to order by length.
        rank: The rank of this process.
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
        labels = np.asarray(corpus.labels(split))
        first = stored_texts(corpus, split, "first")
        second, marks, lengths = None, 2, np.zeros_like(first.lengths)
        if (corpus.folder / f"{split}.second.ids.npy").exists():
            second, marks = stored_texts(corpus, split, "second"), 3
            lengths = second.lengths
        assert len(first.lengths) == len(lengths) == len(labels)
        self.cut = int(np.sum(first.lengths + lengths > window - marks))
        kept, others = cut_lengths(first.lengths, lengths, window - marks)
        texts = MarkedRows(
            first._replace(lengths=kept),
            None if second is None else second._replace(lengths=others),
        )
        super().__init__(texts, labels, seed, rank, world_size)


def stored_texts(corpus: PreparedCorpus, split: str, column: str) -> Texts:
    """Return the texts of a column of a prepared corpus, without the EOS at their ends."""
    offsets = np.asarray(corpus.offsets(split, column))
    return Texts(corpus.ids(split, column), offsets[:-1], np.diff(offsets) - 1)


class LabelledTask(EncoderTask):
    """A task with `LabelledBatch`es, whose scores need all rows of an evaluation."""

    def rows_of(self, batch: LabelledBatch) -> Int[Tensor, " token"]:
        """Return the row of each label, -1 for a blank row."""
        return batch.index

    def longest(self, batch: LabelledBatch) -> LabelledBatch:
        lengths = (batch.tokens != PAD).sum(dim=1)
        row = int(lengths.argmax())
        return one_row(batch, row, int(lengths[row]))
