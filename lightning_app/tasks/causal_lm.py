"""Causal language modelling: every token of a text is predicted from the tokens before it."""

import math
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple, final

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from lightning_app.data.batching import EpochSampler, Item
from lightning_app.data.config import DataConfig
from lightning_app.data.prepare import PreparedCorpus
from lightning_app.data.token_batching import equal_batches, share
from lightning_app.data.tokenizer import EOS, PAD, SPECIALS, UNK
from lightning_app.errors import UserError
from lightning_app.models.auxiliary_heads import watched
from lightning_app.models.heads import CausalLanguageModel
from lightning_app.objectives.auxiliary_sums import sums_of_all_heads
from lightning_app.objectives.base import Evaluated, LossSums
from lightning_app.objectives.chunked_cross_entropy import output_sums
from lightning_app.tasks.base import Predictions, Task, task


class CausalBatch(NamedTuple):
    """One rank's share of a global batch of windows.

    Attributes:
        tokens: (batch, window) int64, what the model reads.
        labels: (batch, predicted) int64, the tokens after the last `predicted` ones of `tokens`;
            PAD where none is predicted.
        index: (batch,) int64, number of the window; -1 for a blank row, which predicts nothing.
        predicted_tokens: () int64, tokens that the global batch predicts on all ranks together.
    """

    tokens: Tensor
    labels: Tensor
    index: Tensor  # pyright: ignore[reportIncompatibleMethodOverride]
    predicted_tokens: Tensor


@final
class CausalRows:
    """A split of windows: (epoch, windows of a global batch) -> this rank's `CausalBatch`.

    The text is one row of tokens, in which each line ends in EOS; the first is predicted from an
    EOS before it. Window w begins `stride` tokens after window w - 1 and predicts the tokens that
    no window before it predicts: all of its own without overlap, and otherwise its last `stride`,
    from at least ``window - stride`` tokens before them. So each token of a split is
    predicted once, except those after the last whole window of training.

    Args:
        corpus: A prepared corpus of running text.
        split: train, valid or test.
        window: Tokens in a window.
        stride: Tokens between the starts of two windows; None for `window`.
        seed: The seed of the order of windows; None for the order of the text, to its last token.
        rank: The rank of this process.
        world_size: Number of processes.

    Attributes:
        ids: Every token of the split, int32.
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
    ) -> None:
        self.ids = corpus.ids(split, "text")
        self.counts: Mapping[str, int] = corpus.meta["text"][split]
        self.window = window
        self.stride = stride or window
        self._seed = seed
        self._rank = rank
        self._world_size = world_size
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

    def __getitem__(self, item: Item) -> CausalBatch:
        _, rows = item
        predicted = sum(end - begin for begin, end in map(self._predicted, rows))
        mine = share(rows, self._rank, self._world_size)
        if len(mine) == 0:
            return CausalBatch(
                tokens=torch.full((1, 1), EOS),
                labels=torch.full((1, 1), PAD),
                index=torch.full((1,), -1),
                predicted_tokens=torch.tensor(predicted),
            )
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
        )

    def _predicted(self, row: int) -> tuple[int, int]:
        """Return the place of the first token that a window predicts, and of the last, plus 1."""
        end = row * self.stride + self.window
        return (end - self.stride if row else 0), min(end, len(self.ids))

    def _take(self, places: np.ndarray) -> np.ndarray:
        """Return the tokens at `places`, int64; any tokens at places outside the text."""
        return self.ids.take(places, mode="clip").astype(np.int64)


@task("causal_lm")
@final
class CausalLanguageModelling(Task):
    """The mean negative log-likelihood of every token, given those before it in its window."""

    @classmethod
    def rows(
        cls,
        corpus: PreparedCorpus,
        split: str,
        data: DataConfig,
        seed: int | None,
        rank: int = 0,
        world_size: int = 1,
    ) -> CausalRows:
        """Return a split of windows, with `data.evaluation_stride` where `seed` is None."""
        stride = data.evaluation_stride if seed is None else None
        return CausalRows(corpus, split, data.window, stride, seed, rank, world_size)

    @classmethod
    def describe(cls, rows: Mapping[str, CausalRows]) -> str:
        """Say how the text is cut into windows, and what its scores are divided by."""
        train = rows["train"]
        evaluated = {split: of for split, of in rows.items() if split != "train"}
        said = (
            f"; read in {len(train):,} windows of {train.window} tokens, the last "
            f"{train.remainder} tokens left out"
        )
        for split, of in evaluated.items():
            said += (
                f"; {split}: each of {len(of.ids):,} tokens is predicted once, in windows that "
                f"begin every {of.stride} tokens; {of.counts['bytes']:,} bytes and "
                f"{of.counts['words']:,} words, the end of a line counted as one of each"
            )
            if unknown := _unknown(of.ids):
                said += f"; {unknown:,} tokens are unknown, so bits per byte are undefined"
        return said

    def logits(self, model: CausalLanguageModel, batch: CausalBatch) -> Tensor:
        """Return the logits of every predicted token, (batch, predicted, vocabulary)."""
        return model(batch.tokens)[:, -batch.labels.shape[1] :]

    def sums(self, model: CausalLanguageModel, batch: CausalBatch) -> LossSums:
        """Return the sums over the predicted tokens of `batch`."""
        labels, seen = batch.labels, watched(model.auxiliary)
        states = model.states(batch.tokens, seen)[:, -labels.shape[1] :]
        sums = partial(output_sums, label_smoothing=self.config.smoothing)
        # Windows of training do not overlap, so that the states of all layers are as many.
        return sums_of_all_heads(sums, model, states, labels, labels != PAD, seen)

    def rows_of(self, batch: CausalBatch) -> Int[Tensor, " token"]:
        """Return the window of each predicted token, with those of padding."""
        return batch.index.repeat_interleave(batch.labels.shape[1])

    def scores(self, stage: str, datamodule: Any, found: Evaluated) -> dict[str, float]:
        """Return bits per byte and the perplexity of a word, of a split that was read whole.

        ``sum nll / (ln 2 * bytes)`` and ``exp(sum nll / words)``, which compare across tokenizers:
        the sum is over all tokens, and `RunningText.counts` says what bytes and words are. A text
        with unknown tokens has neither: it costs less to predict that a token is unknown than
        to predict what it spells.
        """
        corpus = datamodule.corpus
        split = "valid" if stage == "val" else stage
        ids = corpus.ids(split, "text")
        if found.tokens != len(ids) or _unknown(ids):
            return {}
        counts = corpus.meta["text"][split]
        return {
            f"{stage}/bits_per_byte": found.nll / (math.log(2) * counts["bytes"]),
            f"{stage}/word_perplexity": _exp(found.nll / counts["words"]),
        }

    def predict(
        self, model: CausalLanguageModel, batch: CausalBatch, datamodule: Any
    ) -> list[tuple[int, str]]:
        """Return (number, text) of each window: the likeliest token at each predicted place."""
        best = self.logits(model, batch).argmax(dim=-1)
        return [
            (number, datamodule.tokenizer.decode(row[label != PAD].tolist()))
            for number, row, label in zip(batch.index.tolist(), best, batch.labels, strict=True)
            if number >= 0
        ]

    def predictions(self, model: CausalLanguageModel, batch: CausalBatch) -> Predictions:
        """Return logits and labels of all predicted tokens."""
        counted = batch.labels != PAD
        return Predictions(self.logits(model, batch)[counted], batch.labels[counted])

    def alone(self, batch: CausalBatch, token: int) -> CausalBatch:
        """Return the window of the predicted `token`, cut behind the place that predicts it."""
        row, place = (batch.labels != PAD).nonzero()[token].tolist()
        before = batch.tokens.shape[1] - batch.labels.shape[1]
        return batch._replace(
            tokens=batch.tokens[row : row + 1, : before + place + 1],
            labels=batch.labels[row : row + 1, : place + 1],
        )

    def real_tokens(self, batch: CausalBatch) -> dict[str, Bool[Tensor, "row token"]]:
        """Return the tokens that predict one."""
        real = torch.zeros_like(batch.tokens, dtype=torch.bool)
        real[:, -batch.labels.shape[1] :] = batch.labels != PAD
        return {"decoder": real}

    def longest(self, batch: CausalBatch) -> CausalBatch:
        """Return the window with the most tokens, without padding."""
        row = int((batch.tokens != PAD).sum(dim=1).argmax())
        length = int((batch.tokens[row] != PAD).sum())
        before = batch.tokens.shape[1] - batch.labels.shape[1]
        return batch._replace(
            tokens=batch.tokens[row : row + 1, :length],
            labels=batch.labels[row : row + 1, : length - before],
            index=batch.index[row : row + 1],
        )

    def texts(self, batch: CausalBatch) -> tuple[Int[Tensor, "row token"], ...]:
        """Return the window."""
        return (batch.tokens,)

    def random_batch(self, rows: int, length: int, vocabulary: int) -> CausalBatch:
        """Return windows of random tokens, each of which is predicted."""
        tokens = torch.randint(SPECIALS, vocabulary, (rows, length + 1))
        return CausalBatch(
            tokens=tokens[:, :-1],
            labels=tokens[:, 1:],
            index=torch.arange(rows),
            predicted_tokens=torch.tensor(rows * length),
        )


def _unknown(ids: np.ndarray) -> int:
    """Return the number of tokens that mean text outside the vocabulary."""
    return int(np.count_nonzero(ids == UNK))


def _exp(x: float) -> float:
    """Return e^x; infinity where it is too large for a float."""
    try:
        return math.exp(x)
    except OverflowError:
        return math.inf
