"""Masked language modelling (Devlin et al. 2019, 1810.04805)."""

import math
from collections.abc import Mapping
from functools import partial
from typing import Any, Unpack, final

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from lightning_app.blocks.config import BlockConfig
from lightning_app.core.errors import UserError
from lightning_app.data.batching import EpochSampler
from lightning_app.data.config import DataConfig
from lightning_app.data.prepare import PreparedCorpus, equal_batches
from lightning_app.data.tokenizer import MASK, SPECIALS
from lightning_app.models.auxiliary_heads import watched
from lightning_app.models.encoder_heads import MaskedLanguageModel, add_next_sentence
from lightning_app.models.heads import ArchitectureConfig
from lightning_app.models.loss import (
    Evaluated,
    LossSums,
    ObjectiveConfig,
    output_sums,
    sums_of_all_heads,
)
from lightning_app.tasks.base import Predictions, Reading, Task, join_ranks, task
from lightning_app.tasks.next_sentence import MaskedBatch, MaskedSplit, PairRows, described

PREDICTED = 0.15
"""The share of a random batch to predict."""


@final
class MaskedRows(MaskedSplit):
    """Full windows of packed text: consecutive sentences, each ended by EOS.

    Tokens are masked as in Devlin et al. 2019, section 3.1. The last tokens of the split, which
    fill no window, are dropped: `remainder` of them.
    """

    def _read(self, corpus: PreparedCorpus, split: str) -> None:
        self.ids = corpus.ids(split, "text")
        count, self.remainder = divmod(len(self.ids), self.window)
        if count == 0:
            raise UserError(
                f"data.window is {self.window}, but the {split} split has {len(self.ids)} tokens "
                "in all"
            )
        self._windows = self.ids[: count * self.window].reshape(count, self.window)

    def __len__(self) -> int:
        return len(self._windows)

    def sampler(self, tokens_per_batch: int) -> EpochSampler:
        """Return the batches of an epoch, all with the same number of windows except the last."""
        count, per_batch, seed = len(self), max(1, tokens_per_batch // self.window), self._seed

        def batches(epoch: int) -> list[np.ndarray]:
            return equal_batches(count, per_batch, None if seed is None else (seed, epoch))

        return EpochSampler(batches)

    def _whole(self, epoch: int, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        predicted = max(1, round(self._probability * self.window))
        return self._windows[rows].astype(np.int64), np.full(len(rows), predicted)


def packed(rows: Mapping[str, MaskedRows]) -> str:
    """Return the numbers of windows of the splits, for the corpus description."""
    splits = list(rows.values())
    counts = " / ".join(f"{len(of):,}" for of in splits)
    dropped = " / ".join(str(of.remainder) for of in splits)
    return (
        f"; packed into {counts} windows of {splits[0].window} tokens, the last {dropped} tokens "
        "left out"
    )


@task("masked_lm")
@final
class MaskedLanguageModelling(Task):
    """The mean negative log-likelihood of masked tokens; only their positions are scored.

    With `next_sentence` rows are pairs of texts, and `NextSentenceHead` adds its loss to that of
    the masked tokens, which is the only part of `train/nll` and `val/nll`. An evaluation reports
    the mean loss of the pairs in nats, `nsp_nll`, and the share of pairs whose likelier label is
    right, `nsp_accuracy`. Probes read the predictions of masked tokens.
    """

    def __init__(self, config: ObjectiveConfig) -> None:
        super().__init__(config)
        self._scored: dict[int, tuple[float, bool]] = {}  # for the pairs of an evaluation, by row
        self._last: dict[int, tuple[float, bool]] = {}  # for the previous batch

    def build_model(
        self, architecture: ArchitectureConfig, block: BlockConfig, vocab_size: int
    ) -> nn.Module:
        """Return the model, with the next-sentence head if those are predicted."""
        model = super().build_model(architecture, block, vocab_size)
        if self.config.next_sentence:
            add_next_sentence(model)
        return model

    @classmethod
    def _rows(
        cls, corpus: PreparedCorpus, split: str, data: DataConfig, **part: Unpack[Reading]
    ) -> MaskedRows | PairRows:
        """Return a split of windows or of pairs, masked with `data.mask_probability`."""
        kind = PairRows if data.next_sentence else MaskedRows
        return kind(
            corpus,
            split,
            window=data.window,
            probability=data.mask_probability,
            word_starts=corpus.tokenizer.word_starts() if data.whole_word else None,
            **part,
        )

    @classmethod
    def describe(cls, rows: Mapping[str, Any]) -> str:
        """Describe how the text is packed into windows or pairs."""
        return described(rows) if isinstance(rows["train"], PairRows) else packed(rows)

    def logits(self, model: MaskedLanguageModel, batch: MaskedBatch) -> Tensor:
        """Return the logits at the predicted positions, ``(predicted, vocabulary)``."""
        return model(batch.tokens, batch.positions, batch.segments)

    def sums(self, model: MaskedLanguageModel, batch: MaskedBatch) -> LossSums:
        """Return the sums over the predicted tokens of `batch`."""
        seen, every = watched(model.auxiliary), torch.ones_like(batch.labels, dtype=torch.bool)
        states, first = model.states_of_heads(batch.tokens, batch.positions, batch.segments, seen)
        self._last = {} if first is None else self._score(model, first, batch)
        smoothing, bias = self.config.smoothing, model.output_bias
        sums = partial(output_sums, label_smoothing=smoothing, bias=bias)
        finish = partial(model.finished, positions=batch.positions)
        return sums_of_all_heads(sums, model, states, batch.labels, every, seen, finish)

    def _score(
        self, model: MaskedLanguageModel, first: Float[Tensor, "pair model"], batch: MaskedBatch
    ) -> dict[int, tuple[float, bool]]:
        """In training, store the loss of pairs in the head; in an evaluation, return it by row."""
        assert model.next_sentence is not None
        assert batch.follows is not None
        assert batch.pairs is not None
        real = batch.index >= 0
        found = model.next_sentence.score(
            first, batch.follows, real, batch.pairs, batch.predicted_tokens
        )
        if torch.is_grad_enabled():
            return {}
        rows = zip(batch.index.tolist(), found.nll.tolist(), found.correct.tolist(), strict=True)
        return {row: (nll, correct) for row, nll, correct in rows if row >= 0}

    def start_decoding(self) -> None:
        """Discard the pairs of the previous evaluation."""
        self._scored = {}

    def decode(self, model: MaskedLanguageModel, batch: MaskedBatch, stage: str) -> None:
        """Keep the scores of the pairs in the batch scored last, which is this one."""
        self._scored |= self._last

    def scores(self, stage: str, datamodule: Any, found: Evaluated) -> dict[str, float]:
        """Return the loss and the accuracy of the pairs, each counted once."""
        if not self.config.next_sentence:
            return {}
        pairs = join_ranks(self._scored)
        nll = math.fsum(loss for loss, _ in pairs.values())
        return {
            f"{stage}/nsp_nll": nll / len(pairs),
            f"{stage}/nsp_accuracy": sum(right for _, right in pairs.values()) / len(pairs),
        }

    def rows_of(self, batch: MaskedBatch) -> Int[Tensor, " token"]:
        """Return the window of each predicted token."""
        return batch.index[batch.positions // batch.tokens.shape[1]]

    def predict(
        self, model: MaskedLanguageModel, batch: MaskedBatch, datamodule: Any
    ) -> list[tuple[int, str]]:
        """Return (number, text) of each window, with masked tokens filled by the likeliest ones."""
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
        """Return the row of the predicted `token`, with all its predictions."""
        row, place = divmod(int(batch.positions[token]), batch.tokens.shape[1])
        return _row(batch, row, batch.tokens.shape[1])._replace(
            positions=batch.positions.new_tensor([place]), labels=batch.labels[token : token + 1]
        )

    def real_tokens(self, batch: MaskedBatch) -> dict[str, Bool[Tensor, "row token"]]:
        """Return every token of windows, which are full, and all tokens of pairs except padding."""
        return {"encoder": (batch.index >= 0)[:, None] & (batch.tokens != self.pad)}

    def longest(self, batch: MaskedBatch) -> MaskedBatch:
        """Return the first row with the most tokens."""
        lengths = (batch.tokens != self.pad).sum(dim=1)
        row = int(lengths.argmax())
        return _row(batch, row, int(lengths[row]))._replace(
            positions=batch.positions.new_zeros(1), labels=batch.labels[:1]
        )

    def texts(self, batch: MaskedBatch) -> tuple[Int[Tensor, "row token"], ...]:
        """Return the window with its masks."""
        return (batch.tokens,)

    def random_batch(self, rows: int, length: int, vocabulary: int) -> MaskedBatch:
        """Return rows of random tokens without padding, 15 % of them masked and predicted."""
        tokens = torch.randint(SPECIALS, vocabulary, (rows, length))
        count = max(1, round(PREDICTED * tokens.numel()))
        positions = torch.randperm(tokens.numel())[:count].sort().values
        labels = tokens.flatten()[positions]
        tokens.view(-1)[positions] = MASK
        batch = MaskedBatch(tokens, positions, labels, torch.arange(rows), torch.tensor(count))
        if not self.config.next_sentence:
            return batch
        halves = (torch.arange(length) >= length // 2).long().expand(rows, length)
        follows = torch.randint(2, (rows,))
        return batch._replace(segments=halves, follows=follows, pairs=torch.tensor(rows))


def _row(batch: MaskedBatch, row: int, length: int) -> MaskedBatch:
    """Return the first `length` tokens of one row as a batch, with the predictions of all rows."""

    def part(of: Tensor | None) -> Tensor | None:
        return None if of is None else of[row : row + 1]

    return batch._replace(
        tokens=batch.tokens[row : row + 1, :length],
        segments=None if batch.segments is None else batch.segments[row : row + 1, :length],
        index=batch.index[row : row + 1],
        follows=part(batch.follows),
        pairs=None if batch.pairs is None else batch.pairs.new_ones(()),
    )
