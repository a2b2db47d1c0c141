"""A running text in windows: those of a batch in any order, each of which is a text alone."""

from collections.abc import Mapping
from typing import NamedTuple, final

import numpy as np
import torch
from torch import Tensor

from lightning_app.data.batching import EpochSampler, Item
from lightning_app.data.prepare import PreparedCorpus
from lightning_app.data.token_batching import equal_batches, share
from lightning_app.data.tokenizer import EOS, PAD
from lightning_app.errors import UserError


class CausalBatch(NamedTuple):
    """One rank's share of a global batch of windows.

    Attributes:
        tokens: (batch, window) int64, what the model reads.
        labels: (batch, predicted) int64, the tokens after the last `predicted` ones of `tokens`;
            PAD where none is predicted.
        index: (batch,) int64, number of the window; -1 for a blank row, which predicts nothing.
        predicted_tokens: () int64, tokens that the global batch predicts on all ranks together.
        streams: () int64, the number of streams of the global batch, whose window ``t streams + b``
            is segment t of stream b; 0 where each window is a text of its own.
        documents: (batch, window) int64, the number of the document of the token after each of
            `tokens`, which belongs to that document too; None where documents are joined.
    """

    tokens: Tensor
    labels: Tensor
    index: Tensor  # pyright: ignore[reportIncompatibleMethodOverride]
    predicted_tokens: Tensor
    streams: Tensor = torch.tensor(0)
    documents: Tensor | None = None


def blank_batch(predicted: int, documents: Tensor | None = None) -> CausalBatch:
    """Return the share of a rank without windows of a batch that predicts `predicted` tokens."""
    return CausalBatch(
        tokens=torch.full((1, 1), EOS),
        labels=torch.full((1, 1), PAD),
        index=torch.full((1,), -1),
        predicted_tokens=torch.tensor(predicted),
        documents=documents,
    )


@final
class CausalRows:
    """A split of windows: (epoch, windows of a global batch) -> this rank's `CausalBatch`.

    The text is one row of tokens, in which each line ends in EOS; the first is predicted from an
    EOS before it. Window w begins `stride` tokens after window w - 1 and predicts the tokens that
    no window before it predicts: all of its own without overlap, and otherwise its last `stride`,
    from at least ``window - stride`` tokens before them. So each token of a split is
    predicted once, except those after the last whole window of training.

    With `masked` documents the EOS at the end of one is the mark before the next: the first token
    of a document is predicted from that EOS alone, like the first of the text.

    Args:
        corpus: A prepared corpus of running text.
        split: train, valid or test.
        window: Tokens in a window.
        stride: Tokens between the starts of two windows; None for `window`.
        seed: The seed of the order of windows; None for the order of the text, to its last token.
        rank: The rank of this process.
        world_size: Number of processes.
        masked: Whether batches say which document a token is of (intra-document masking).

    Attributes:
        ids: Every token of the split, int32.
        documents: The place of the first token of each document, int64, if they are `masked`.
        counts: What `RunningText.counts` has counted in the split.
        remainder: The number of tokens that no window predicts.
    """

    def __init__(
        self,
        corpus: PreparedCorpus,
        split: str,
        window: int,
        stride: int | None = None,
        seed: int | None = None,
        rank: int = 0,
        world_size: int = 1,
        *,
        masked: bool = False,
    ) -> None:
        self.ids = corpus.ids(split, "text")
        self.documents = corpus.documents(split) if masked else None
        self.counts: Mapping[str, int] = corpus.meta["text"][split]
        self.window = window
        self.stride = stride or window
        self._seed = seed
        self._rank = rank
        self._world_size = world_size
        if seed is not None and self.documents is not None and len(self.documents) == 1:
            raise UserError(
                f"data.intra_document_masking is true, but the {split} split is one document; "
                "false needed, or, for data.name 'text', another data.document_separator"
            )
        beyond = len(self.ids) - window
        if seed is None:
            self._count, self.remainder = 1 + max(0, -(-beyond // self.stride)), 0
        elif beyond < 0:
            raise UserError(
                f"data.window is {window}, but the {split} split has {len(self.ids)} tokens in all"
            )
        else:
            self._count, self.remainder = divmod(len(self.ids), window)

    def __len__(self) -> int:
        return self._count

    def sampler(self, tokens_per_batch: int) -> EpochSampler:
        """Return the batches of an epoch, all with the same number of windows but the last.

        With overlap the first window, which predicts more than the others, is a separate batch.
        """
        alone = int(self.stride < self.window)
        count, per_batch = len(self) - alone, max(1, tokens_per_batch // self.window)
        first = [np.zeros(1, dtype=np.int64)] * alone
        seed = self._seed

        def batches(epoch: int) -> list[np.ndarray]:
            shuffle = None if seed is None else (seed, epoch)
            return first + [alone + rows for rows in equal_batches(count, per_batch, shuffle)]

        return EpochSampler(batches)

    def targets(self, rows: np.ndarray | None = None) -> np.ndarray:
        """Return every token that is predicted in one epoch; in `rows` if they are given."""
        if rows is None:
            return self.ids[: len(self.ids) - self.remainder]
        return np.concatenate([self.ids[slice(*self._predicted(row))] for row in rows])

    def reading(self) -> str:
        """Say how the split is read."""
        said = f"windows of {self.window} tokens that begin every {self.stride} tokens"
        if self.documents is None:
            return said
        return f"{said}, each of {len(self.documents):,} documents alone"

    def __getitem__(self, item: Item) -> CausalBatch:
        _, rows = item
        predicted = sum(end - begin for begin, end in map(self._predicted, rows))
        mine = share(rows, self._rank, self._world_size)
        if len(mine) == 0:
            return blank_batch(predicted, self._documents(np.zeros((1, 1), np.int64)))
        places = mine[:, None] * self.stride + np.arange(self.window)
        width = self.window if 0 in rows else self.stride
        seen_before = (np.arange(self.window) < self.window - self.stride) & (mine[:, None] > 0)
        after = places >= len(self.ids)
        labels = np.where(after | seen_before, PAD, self._take(places))
        tokens = np.where(after, PAD, np.where(places == 0, EOS, self._take(places - 1)))
        return CausalBatch(
            tokens=torch.from_numpy(tokens),
            labels=torch.from_numpy(labels[:, self.window - width :]),
            index=torch.from_numpy(mine.astype(np.int64)),
            predicted_tokens=torch.tensor(predicted),
            documents=self._documents(places),
        )

    def _documents(self, places: np.ndarray) -> Tensor | None:
        """Return the number of the document of the tokens at `places`, from 0."""
        if self.documents is None:
            return None
        return torch.from_numpy(np.searchsorted(self.documents, places, side="right") - 1)

    def _predicted(self, row: int) -> tuple[int, int]:
        """Return the place of the first token that a window predicts, and of the last, plus 1."""
        end = row * self.stride + self.window
        return (end - self.stride if row else 0), min(end, len(self.ids))

    def _take(self, places: np.ndarray) -> np.ndarray:
        """Return the tokens at `places`, int64; any tokens at places outside the text."""
        return self.ids.take(places, mode="clip").astype(np.int64)
