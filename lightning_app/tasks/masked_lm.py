"""Masked language modelling (Devlin et al. 2019, 1810.04805)."""

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple, final

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from lightning_app.data.batching import Item
from lightning_app.data.config import DataConfig
from lightning_app.data.prepare import PreparedCorpus
from lightning_app.data.tokenizer import EOS, MASK, SPECIALS
from lightning_app.data.windows import Windows, packed
from lightning_app.models.auxiliary_heads import watched
from lightning_app.models.heads import MaskedLanguageModel
from lightning_app.objectives.auxiliary_sums import sums_of_all_heads
from lightning_app.objectives.base import LossSums
from lightning_app.objectives.chunked_cross_entropy import output_sums
from lightning_app.tasks.base import Predictions, Task, task

FIXED_SEED = 0  # of validation and test masks, whatever the seed of the run
PREDICTED = 0.15
"""The share of a random batch that is predicted."""


class MaskedBatch(NamedTuple):
    """One rank's share of a global batch of windows.

    Attributes:
        tokens: (batch, window) int64, after masking.
        positions: (predicted,) int64, flat indices into batch * window, ascending.
        labels: (predicted,) int64, the tokens at these positions before masking.
        index: (batch,) int64, number of the window; -1 for a blank row, which predicts nothing.
        predicted_tokens: () int64, tokens that the global batch predicts on all ranks together.
    """

    tokens: Tensor
    positions: Tensor
    labels: Tensor
    index: Tensor  # pyright: ignore[reportIncompatibleMethodOverride]
    predicted_tokens: Tensor


@final
class MaskedRows(Windows):
    """A split of windows: (epoch, windows of a global batch) -> this rank's `MaskedBatch`.

    Tokens are masked when a batch is made (Devlin et al. 2019, section 3.1).

    Args:
        corpus: A prepared corpus of one language.
        split: train, valid or test.
        window: Tokens in a window.
        probability: Share of a window's tokens that is predicted, rounded to at least one token.
        seed: Of the masks and of the order; None for masks that are the same in every run and
            epoch, and windows in the order of the text.
        rank: Of this process.
        world_size: Number of processes.
    """

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
    ) -> None:
        super().__init__(corpus, split, window, seed, rank, world_size)
        self._predicted = max(1, round(probability * window))
        self._vocab_size = corpus.meta["vocab_size"]

    def targets(self, rows: np.ndarray | None = None) -> np.ndarray:
        """Return every token that is predicted in one epoch; where masks change, all but EOS.

        Only those in `rows`, if they are given.
        """
        if self.seed is not None and rows is None:
            return self.ids[self.ids != EOS]
        rows = np.arange(len(self)) if rows is None else rows
        tokens = self.take(rows)
        return tokens[self._choose(0, rows, tokens)]

    def __getitem__(self, item: Item) -> MaskedBatch:
        epoch, rows = item
        tokens = self.take(rows)
        chosen = self._choose(epoch, rows, tokens)
        predicted = torch.tensor(int(chosen.sum()))
        mine = self.mine(rows)
        if len(mine) == 0:
            nothing = torch.empty(0, dtype=torch.int64)
            return MaskedBatch(
                tokens=torch.full((1, tokens.shape[1]), EOS),
                positions=nothing,
                labels=nothing,
                index=torch.full((1,), -1),
                predicted_tokens=predicted,
            )
        tokens, chosen = (self.mine(of) for of in (tokens, chosen))
        labels = tokens[chosen]
        shown = np.where(chosen, self._replace(epoch, mine, tokens), tokens)
        return MaskedBatch(
            tokens=torch.from_numpy(shown),
            positions=torch.from_numpy(np.flatnonzero(chosen)),
            labels=torch.from_numpy(labels),
            index=torch.from_numpy(mine.astype(np.int64)),
            predicted_tokens=predicted,
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
        """Return the input at a chosen position: 80 % MASK, 10 % any piece, 10 % the token."""
        die = self._noise(epoch, rows, stream=1) % 10
        pieces = np.uint64(self._vocab_size - SPECIALS)
        piece = (self._noise(epoch, rows, stream=2) % pieces).astype(np.int64) + SPECIALS
        return np.where(die < 8, MASK, np.where(die == 8, piece, tokens))

    def _noise(self, epoch: int, rows: np.ndarray, stream: int) -> np.ndarray:
        """Return (rows, window) uint64 that depend on seed, epoch, window and place alone."""
        seed, epoch = (FIXED_SEED, 0) if self.seed is None else (self.seed, epoch)
        key = np.array([stream], dtype=np.uint64)
        for part in (seed, epoch):
            key = _mix(key + np.uint64(part))
        key = _mix(key + rows.astype(np.uint64))
        return _mix(key[:, None] + np.arange(self.window, dtype=np.uint64))


def _mix(x: np.ndarray) -> np.ndarray:
    """One step of SplitMix64 (Steele et al. 2014): neighbouring inputs give unrelated outputs."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@task("masked_lm")
@final
class MaskedLanguageModelling(Task):
    """The mean negative log-likelihood of masked tokens; only their positions are scored."""

    @classmethod
    def rows(
        cls,
        corpus: PreparedCorpus,
        split: str,
        data: DataConfig,
        seed: int | None,
        rank: int = 0,
        world_size: int = 1,
    ) -> MaskedRows:
        """Return a split of windows, masked with `data.mask_probability`."""
        return MaskedRows(
            corpus,
            split,
            window=data.window,
            probability=data.mask_probability,
            seed=seed,
            rank=rank,
            world_size=world_size,
        )

    @classmethod
    def describe(cls, rows: Mapping[str, Any]) -> str:
        """Say how the text is packed into windows."""
        return packed(rows)

    def logits(self, model: MaskedLanguageModel, batch: MaskedBatch) -> Tensor:
        """Return the logits at the predicted positions, ``(predicted, vocabulary)``."""
        return model(batch.tokens, batch.positions)

    def sums(self, model: MaskedLanguageModel, batch: MaskedBatch) -> LossSums:
        """Return the sums over the predicted tokens of `batch`."""
        seen, every = watched(model.auxiliary), torch.ones_like(batch.labels, dtype=torch.bool)
        states = model.states(batch.tokens, batch.positions, seen)
        smoothing, bias = self.config.smoothing, model.output_bias
        sums = partial(output_sums, label_smoothing=smoothing, bias=bias)
        finish = partial(model.finished, positions=batch.positions)
        return sums_of_all_heads(sums, model, states, batch.labels, every, seen, finish)

    def rows_of(self, batch: MaskedBatch) -> Int[Tensor, " token"]:
        """Return the window of each predicted token."""
        return batch.index[batch.positions // batch.tokens.shape[1]]

    def predict(
        self, model: MaskedLanguageModel, batch: MaskedBatch, datamodule: Any
    ) -> list[tuple[int, str]]:
        """Return (number, text) of each window, masked tokens filled by the likeliest ones."""
        tokens = batch.tokens.flatten().clone()
        tokens[batch.positions] = self.logits(model, batch).argmax(dim=-1)
        rows = tokens.view_as(batch.tokens).tolist()
        return [
            (number, datamodule.tokenizer.decode(row))
            for number, row in zip(batch.index.tolist(), rows, strict=True)
            if number >= 0
        ]

    def predictions(self, model: MaskedLanguageModel, batch: MaskedBatch) -> Predictions:
        """Return logits and labels of the masked tokens."""
        return Predictions(self.logits(model, batch), batch.labels)

    def alone(self, batch: MaskedBatch, token: int) -> MaskedBatch:
        """Return the window of the predicted `token`, which is all that it predicts."""
        row, place = divmod(int(batch.positions[token]), batch.tokens.shape[1])
        return batch._replace(
            tokens=batch.tokens[row : row + 1],
            positions=batch.positions.new_tensor([place]),
            labels=batch.labels[token : token + 1],
        )

    def real_tokens(self, batch: MaskedBatch) -> dict[str, Bool[Tensor, "row token"]]:
        """Return every token: windows are full."""
        return {"encoder": (batch.index >= 0)[:, None].expand_as(batch.tokens)}

    def longest(self, batch: MaskedBatch) -> MaskedBatch:
        """Return the first window; all are equally long."""
        return batch._replace(
            tokens=batch.tokens[:1],
            positions=batch.positions.new_zeros(1),
            labels=batch.labels[:1],
            index=batch.index[:1],
        )

    def texts(self, batch: MaskedBatch) -> tuple[Int[Tensor, "row token"], ...]:
        """Return the window with its masks."""
        return (batch.tokens,)

    def random_batch(self, rows: int, length: int, vocabulary: int) -> MaskedBatch:
        """Return windows of random tokens, 15 % of them masked and predicted."""
        tokens = torch.randint(SPECIALS, vocabulary, (rows, length))
        count = max(1, round(PREDICTED * tokens.numel()))
        positions = torch.randperm(tokens.numel())[:count].sort().values
        labels = tokens.flatten()[positions]
        tokens.view(-1)[positions] = MASK
        return MaskedBatch(tokens, positions, labels, torch.arange(rows), torch.tensor(count))
