"""Masked language modelling (Devlin et al. 2019, 1810.04805)."""

import math
from collections.abc import Mapping
from functools import partial
from typing import Any, final

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from lightning_app.blocks.config import BlockConfig
from lightning_app.data.batching import Item
from lightning_app.data.config import DataConfig
from lightning_app.data.prepare import PreparedCorpus
from lightning_app.data.tokenizer import EOS, MASK, SPECIALS
from lightning_app.data.windows import Windows, packed
from lightning_app.models.auxiliary_heads import watched
from lightning_app.models.encoder_heads import MaskedLanguageModel, add_next_sentence
from lightning_app.models.heads import ArchitectureConfig
from lightning_app.models.loss import Evaluated, LossSums, ObjectiveConfig, sums_of_all_heads
from lightning_app.models.output_loss import output_sums
from lightning_app.tasks.base import Predictions, Task, join_ranks, task
from lightning_app.tasks.masking import MaskedBatch, Masking
from lightning_app.tasks.next_sentence import PairRows, described

PREDICTED = 0.15
"""The share of a random batch that is predicted."""


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
        word_starts: See `Masking`.
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
        word_starts: list[bool] | None = None,
    ) -> None:
        super().__init__(corpus, split, window, seed, rank, world_size)
        self._predicted = max(1, round(probability * window))
        self._masking = Masking(corpus.meta["vocab_size"], seed, word_starts)

    def targets(self, rows: np.ndarray | None = None) -> np.ndarray:
        """Return every token that is predicted in one epoch; where masks change, all but EOS.

        Only those in `rows`, if they are given.
        """
        if self.seed is not None and rows is None:
            return self.ids[self.ids != EOS]
        rows = np.arange(len(self)) if rows is None else rows
        tokens = self.take(rows)
        return tokens[self._masking.choose(0, rows, tokens, self._budgets(rows))]

    def __getitem__(self, item: Item) -> MaskedBatch:
        epoch, rows = item
        tokens, budgets = self.take(rows), self._budgets(rows)
        return self._masking.batch(epoch, rows, tokens, budgets, self.rank, self.world_size)

    def _budgets(self, rows: np.ndarray) -> np.ndarray:
        """Return how many tokens each window predicts, unless it has fewer."""
        return np.full(len(rows), self._predicted)


@task("masked_lm")
@final
class MaskedLanguageModelling(Task):
    """The mean negative log-likelihood of masked tokens; only their positions are scored.

    With `next_sentence` rows are pairs of texts, and `NextSentenceHead` adds its loss to that of
    the masked tokens, which alone is `train/nll` and `val/nll`. An evaluation reports the mean loss
    of the pairs in nats, `nsp_nll`, and the share of pairs whose likelier label is right,
    `nsp_accuracy`. Probes read the predictions of masked tokens.
    """

    def __init__(self, config: ObjectiveConfig) -> None:
        super().__init__(config)
        self._scored: dict[int, tuple[float, bool]] = {}  # of the pairs of an evaluation, by row
        self._last: dict[int, tuple[float, bool]] = {}  # of the batch before

    def build_model(
        self, architecture: ArchitectureConfig, block: BlockConfig, vocab_size: int
    ) -> nn.Module:
        """Return the model, with the head of next sentences if they are predicted."""
        model = super().build_model(architecture, block, vocab_size)
        if self.config.next_sentence:
            add_next_sentence(model)
        return model

    @classmethod
    def rows(
        cls,
        corpus: PreparedCorpus,
        split: str,
        data: DataConfig,
        seed: int | None,
        rank: int = 0,
        world_size: int = 1,
    ) -> MaskedRows | PairRows:
        """Return a split of windows or of pairs, masked with `data.mask_probability`."""
        kind = PairRows if data.next_sentence else MaskedRows
        return kind(
            corpus,
            split,
            window=data.window,
            probability=data.mask_probability,
            seed=seed,
            rank=rank,
            world_size=world_size,
            word_starts=corpus.tokenizer.word_starts() if data.whole_word else None,
        )

    @classmethod
    def describe(cls, rows: Mapping[str, Any]) -> str:
        """Say how the text is packed into windows, or into pairs."""
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
        """Leave the loss of pairs with the head in training; in an evaluation, return it by row."""
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
        """Forget the pairs of the evaluation before."""
        self._scored = {}

    def decode(self, model: MaskedLanguageModel, batch: MaskedBatch, stage: str) -> None:
        """Keep the scores of the pairs of the batch that was scored last, which is this one."""
        self._scored |= self._last

    def scores(self, stage: str, datamodule: Any, found: Evaluated) -> dict[str, float]:
        """Return the loss and the accuracy of the pairs, each of them counted once."""
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
        """Return the row of the predicted `token`, which is all that it predicts."""
        row, place = divmod(int(batch.positions[token]), batch.tokens.shape[1])
        return _row(batch, row, batch.tokens.shape[1])._replace(
            positions=batch.positions.new_tensor([place]), labels=batch.labels[token : token + 1]
        )

    def real_tokens(self, batch: MaskedBatch) -> dict[str, Bool[Tensor, "row token"]]:
        """Return every token of windows, which are full, and of pairs all except padding."""
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
