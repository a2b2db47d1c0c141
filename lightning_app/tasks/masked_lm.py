"""Masked language modelling (Devlin et al. 2019, 1810.04805)."""

import math
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple, Unpack, final

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from lightning_app.blocks.config import BlockConfig
from lightning_app.core.errors import UserError
from lightning_app.data.batching import EpochSampler, Item, reshuffled
from lightning_app.data.config import DataConfig
from lightning_app.data.prepare import PreparedCorpus, equal_batches, share
from lightning_app.data.tokenizer import BOS, EOS, MASK, PAD, SPECIALS
from lightning_app.models.auxiliary_heads import watched
from lightning_app.models.encoder_heads import NEXT, RANDOM, MaskedLanguageModel, add_next_sentence
from lightning_app.models.heads import ArchitectureConfig
from lightning_app.models.loss import (
    Evaluated,
    LossSums,
    output_sums,
    sums_of_all_heads,
)
from lightning_app.tasks.base import EncoderTask, Predictions, Reading, join_ranks, task
from lightning_app.tasks.labelled import MarkedRows, Texts, cut_lengths

_MARKS = (PAD, BOS, EOS)  # never predicted
FIXED_SEED = 0  # for validation and test masks, whatever the run's seed


class MaskedBatch(NamedTuple):
    """One rank's share of a global batch of windows, or of pairs of texts.

    Attributes:
        tokens: (batch, window) int64, after masking; pairs have padding on the right.
        positions: (predicted,) int64, flat indices into batch * window, ascending.
        labels: (predicted,) int64, the tokens at these positions before masking.
        index: (batch,) int64, number of the row; -1 for a blank row, which predicts nothing.
        predicted_tokens: () int64, tokens that the global batch predicts over all ranks.
        segments: (batch, window) int64, 0 or 1 for the text of a pair that contains the token, 0
            for padding; None for windows.
        follows: (batch,) int64, `NEXT` or `RANDOM` of `NextSentenceHead`; None for windows.
        pairs: () int64, pairs of the global batch over all ranks; None for windows.
    """

    tokens: Tensor
    positions: Tensor
    labels: Tensor
    index: Tensor  # pyright: ignore[reportIncompatibleMethodOverride]
    predicted_tokens: Tensor
    segments: Tensor | None = None
    follows: Tensor | None = None
    pairs: Tensor | None = None


@final
class Masking:
    """The masks of a split, which depend only on seed, epoch, row and position.

    Devlin et al. 2019 (1810.04805), section 3.1. With `word_starts` all pieces of a word are masked
    together (google-research/bert, whole word masking): words are taken in random order until the
    budget of the row is spent, and a word with more pieces than remain in it is skipped. Each
    piece is still replaced separately. Without it the budget is always spent if there are enough
    tokens.

    Args:
        vocab_size: The number of ids.
        seed: The seed of the masks; None for masks that are the same in every run and epoch.
        word_starts: Whether each id begins a word; None to mask pieces separately.
    """

    def __init__(
        self, vocab_size: int, seed: int | None, word_starts: list[bool] | None = None
    ) -> None:
        self._vocab_size = vocab_size
        self._seed = seed
        self._starts = None if word_starts is None else np.array(word_starts)

    def choose(
        self, epoch: int, rows: np.ndarray, tokens: np.ndarray, budgets: np.ndarray
    ) -> np.ndarray:
        """Return which positions are predicted, (rows, window).

        Marks and padding never are. A row has `budgets` of them, fewer if it has fewer tokens.
        """
        key = self._noise(epoch, rows, tokens.shape[1], stream=0)
        words = ~np.isin(tokens, _MARKS)
        if self._starts is not None:
            return _whole_words(key, words, self._starts[tokens], budgets)
        key[~words] = np.iinfo(np.uint64).max
        rank = np.empty(key.shape, dtype=np.int64)
        np.put_along_axis(rank, key.argsort(axis=1), np.arange(key.shape[1])[None], axis=1)
        return (rank < budgets[:, None]) & words

    def never(self, tokens: np.ndarray, budgets: np.ndarray) -> float:
        """Return the share of words with more pieces than their row predicts."""
        if self._starts is None:
            return 0.0
        words = ~np.isin(tokens, _MARKS)
        begins = _first_pieces(words, self._starts[tokens])
        sizes = np.bincount(begins.cumsum()[words.ravel()])[1:]
        return float((sizes > np.repeat(budgets, begins.sum(axis=1))).sum()) / max(len(sizes), 1)

    def batch(
        self,
        epoch: int,
        rows: np.ndarray,
        tokens: np.ndarray,
        budgets: np.ndarray,
        rank: int,
        world_size: int,
    ) -> MaskedBatch:
        """Return this rank's share of the global batch of `rows` with these tokens."""
        chosen = self.choose(epoch, rows, tokens, budgets)
        # At least 1: with whole words a small batch may predict none, and a step divides by their
        # number.
        predicted = torch.tensor(max(1, int(chosen.sum())))
        mine, tokens, chosen = (share(of, rank, world_size) for of in (rows, tokens, chosen))
        if len(mine) == 0:
            nothing = torch.empty(0, dtype=torch.int64)
            return MaskedBatch(
                tokens=torch.full((1, tokens.shape[1]), EOS),
                positions=nothing,
                labels=nothing,
                index=torch.full((1,), -1),
                predicted_tokens=predicted,
            )
        labels = tokens[chosen]
        shown = np.where(chosen, self._replace(epoch, mine, tokens), tokens)
        return MaskedBatch(
            tokens=torch.from_numpy(shown),
            positions=torch.from_numpy(np.flatnonzero(chosen)),
            labels=torch.from_numpy(labels),
            index=torch.from_numpy(mine.astype(np.int64)),
            predicted_tokens=predicted,
        )

    def _replace(self, epoch: int, rows: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Return the input at a chosen position: 80 % MASK, 10 % any piece, 10 % the token."""
        width = tokens.shape[1]
        die = self._noise(epoch, rows, width, stream=1) % 10
        pieces = np.uint64(self._vocab_size - SPECIALS)
        piece = (self._noise(epoch, rows, width, stream=2) % pieces).astype(np.int64) + SPECIALS
        return np.where(die < 8, MASK, np.where(die == 8, piece, tokens))

    def _noise(self, epoch: int, rows: np.ndarray, width: int, stream: int) -> np.ndarray:
        """Return (rows, width) uint64 that depend only on seed, epoch, row and position."""
        seed, epoch = (FIXED_SEED, 0) if self._seed is None else (self._seed, epoch)
        key = np.array([stream], dtype=np.uint64)
        for part in (seed, epoch):
            key = _mix(key + np.uint64(part))
        key = _mix(key + rows.astype(np.uint64))
        return _mix(key[:, None] + np.arange(width, dtype=np.uint64))


def _whole_words(
    key: np.ndarray, words: np.ndarray, begins: np.ndarray, budgets: np.ndarray
) -> np.ndarray:
    """Return the positions of the chosen words, ordered by the `key` of their first pieces.

    `words` is false at marks and padding; the token after one begins a word, even if the piece
    continues a word that begins before the row.
    """
    begins = _first_pieces(words, begins)
    chosen = np.zeros_like(words)
    for row, left in enumerate(budgets.tolist()):
        starts = np.flatnonzero(begins[row])
        # A word ends where the next one begins, or before the next mark.
        ends = np.append(starts[1:], words.shape[1])
        sizes = np.add.reduceat(words[row].astype(np.int64), starts) if len(starts) else starts
        for at in key[row, starts].argsort().tolist():
            size = int(sizes[at])
            if size <= left:
                chosen[row, starts[at] : ends[at]] = True
                left -= size
            if not left:
                break
    return chosen & words


def _first_pieces(words: np.ndarray, begins: np.ndarray) -> np.ndarray:
    before = np.zeros_like(words)
    before[:, 1:] = words[:, :-1]
    return words & (begins | ~before)


def _mix(x: np.ndarray) -> np.ndarray:
    """One step of SplitMix64 (Steele et al. 2014): neighbouring inputs have unrelated outputs."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


class MaskedSplit(ABC):
    """A split whose tokens are masked when a batch is built.

    (epoch, rows of a global batch) -> this rank's `MaskedBatch`.

    Args:
        corpus: A prepared corpus of one language.
        split: train, valid or test.
        window: The maximum tokens of a row, with marks.
        probability: The share of a row's tokens to predict, rounded to at least one.
        seed: The seed of rows, masks and order; None for rows and masks that are the same in
            every run and epoch, in the order of the text.
        rank: The rank of this process.
        world_size: Number of processes.
        word_starts: See `Masking`.

    Attributes:
        ids: Every token of the split, int32.
    """

    ids: np.ndarray

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
        self.window, self._probability = window, probability
        self._seed, self._rank, self._world_size = seed, rank, world_size
        self._masking = Masking(corpus.meta["vocab_size"], seed, word_starts)
        self._read(corpus, split)

    @abstractmethod
    def _read(self, corpus: PreparedCorpus, split: str) -> None:
        """Cut the text of a split into rows."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def _whole(self, epoch: int, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens of rows before masking, and how many of each to predict."""

    def targets(self, rows: np.ndarray | None = None) -> np.ndarray:
        """Return every token that is predicted in one epoch; if masks change, all except EOS.

        Only those in `rows`, unless None.
        """
        if self._seed is not None and rows is None:
            return self.ids[self.ids != EOS]
        rows = np.arange(len(self)) if rows is None else rows
        tokens, budgets = self._whole(0, rows)
        return tokens[self._masking.choose(0, rows, tokens, budgets)]

    def never_masked(self) -> float:
        """Return the share of words with too many pieces, in up to 2^14 even rows of epoch 0."""
        rows = np.linspace(0, len(self) - 1, min(len(self), 1 << 14)).astype(np.int64)
        return self._masking.never(*self._whole(0, rows))

    def __getitem__(self, item: Item) -> MaskedBatch:
        epoch, rows = item
        return self._masked(epoch, rows, *self._whole(epoch, rows))

    def _masked(
        self, epoch: int, rows: np.ndarray, tokens: np.ndarray, budgets: np.ndarray
    ) -> MaskedBatch:
        return self._masking.batch(epoch, rows, tokens, budgets, self._rank, self._world_size)


MARKS = 3  # BOS before a pair, EOS after each of its texts
SHORT = 0.1
"""The probability of a pair shorter than the maximum."""


class Spans(NamedTuple):
    """Pairs of texts.

    Attributes:
        first: (pair, 2) int64, the index of the first token of the first text, and of its last
            plus 1.
        second: (pair, 2) int64, the same for the second text.
        random: (pair,) bool, whether the second text is from another document.
    """

    first: np.ndarray
    second: np.ndarray
    random: np.ndarray

    @property
    def lengths(self) -> tuple[np.ndarray, np.ndarray]:
        """The number of tokens of both texts, (pair,) each."""
        return self.first[:, 1] - self.first[:, 0], self.second[:, 1] - self.second[:, 0]


def draw_spans(
    starts: Sequence[int], documents: Sequence[int], longest: int, random: np.random.Generator
) -> Spans:
    """Return the pairs of all documents in order, before cutting them to `longest` tokens.

    Sentences are gathered until they have the target length: `longest`, or with probability `SHORT`
    a number drawn from 2 to `longest`. Of n sentences the first text gets the first 1 to n - 1.
    With probability 1/2 the second text is the rest. Otherwise, and always if n = 1, it is text
    from a random other document, starting at a random sentence, and the rest is gathered again. So
    more than half of the pairs are random: P(random) = (1 + P(n = 1)) / 2.

    Args:
        starts: The index of the first token of each sentence, and the number of all tokens.
        documents: The first sentence of each document, and the number of all sentences.
        longest: The maximum tokens of a pair, without marks.
        random: The generator.
    """
    first: list[tuple[int, int]] = []
    second: list[tuple[int, int]] = []
    labels: list[bool] = []
    others = len(documents) - 2
    for document, (begin, end) in enumerate(pairwise(documents)):
        at = begin
        while at < end:
            target = longest
            if random.random() < SHORT:
                target = int(random.integers(2, longest, endpoint=True))
            stop = _gathered(starts, at, end, target)
            cut = at + 1 if stop - at == 1 else int(random.integers(at + 1, stop))
            is_random = stop - at == 1 or random.random() < 0.5
            if is_random:
                other = int(random.integers(others))
                other += other >= document
                low, high = documents[other], documents[other + 1]
                begins = int(random.integers(low, high))
                wanted = target - (starts[cut] - starts[at])
                ends = _gathered(starts, begins, high, wanted)
                second.append((starts[begins], starts[ends]))
            else:
                second.append((starts[cut], starts[stop]))
            first.append((starts[at], starts[cut]))
            labels.append(is_random)
            at = cut if is_random else stop
    return Spans(np.array(first), np.array(second), np.array(labels))


def _gathered(starts: Sequence[int], begin: int, end: int, target: int) -> int:
    """Return the end of the fewest sentences from `begin` that reach `target` tokens.

    It is `end` if all sentences have fewer tokens.
    """
    return min(bisect_left(starts, starts[begin] + target, begin + 1, end + 1), end)


def cut_to(spans: Spans, longest: int, random: np.random.Generator) -> Spans:
    """Drop tokens of the longer text (the second in a tie) down to `longest`.

    Each is dropped at the front or at the back, decided by a fair coin.
    """
    one, two = spans.lengths
    kept = cut_lengths(one, two, longest)

    def shortened(text: np.ndarray, dropped: np.ndarray) -> np.ndarray:
        front = random.binomial(dropped, 0.5)
        return np.stack([text[:, 0] + front, text[:, 1] - (dropped - front)], axis=1)

    first, second = shortened(spans.first, one - kept[0]), shortened(spans.second, two - kept[1])
    return Spans(first, second, spans.random)


@final
class PairRows(MaskedSplit):
    """Pairs of texts.

    A row is BOS, the first text, EOS, the second text, EOS: BERT's [CLS] and [SEP] are our BOS and
    EOS. A pair of n tokens, including marks, predicts the share `probability` of n.

    An epoch goes through the text once. It has as many batches as epoch 0, all with the same number
    of pairs, to within one; the number of pairs, and so the size of a batch, differs between
    epochs.
    """

    def _read(self, corpus: PreparedCorpus, split: str) -> None:
        ids = corpus.ids(split, "text")
        offsets = np.asarray(corpus.offsets(split, "text"))
        self.ids = ids[ids != EOS]  # sentences end in EOS; texts of several have none inside
        self._starts = (offsets - np.arange(len(offsets))).tolist()
        assert self._starts[-1] == len(self.ids)
        documents = np.searchsorted(offsets, np.asarray(corpus.documents(split)))
        self._documents = [*documents.tolist(), len(offsets) - 1]
        first = self._draw(0)
        self._count, self.random_share = len(first.random), float(first.random.mean())
        self._drawn = (0, first)

    def __len__(self) -> int:
        """Return the number of pairs of epoch 0; of every epoch if `seed` is None."""
        return self._count

    def _draw(self, epoch: int) -> Spans:
        seed, epoch = (FIXED_SEED, 0) if self._seed is None else (self._seed, epoch)
        random = np.random.default_rng((seed, epoch, 1))
        longest = self.window - MARKS
        return cut_to(draw_spans(self._starts, self._documents, longest, random), longest, random)

    def spans(self, epoch: int) -> Spans:
        """Return the pairs of an epoch, in the order of the text."""
        epoch = 0 if self._seed is None else epoch
        drawn = self._drawn  # another loader may replace it
        if drawn[0] != epoch:
            self._drawn = drawn = epoch, self._draw(epoch)
        return drawn[1]

    def sampler(self, tokens_per_batch: int) -> EpochSampler:
        """Return the batches of an epoch; those of epoch 0 have at most that many tokens."""
        batches_of_all = -(-len(self) // max(1, tokens_per_batch // self.window))
        seed = self._seed

        def batches(epoch: int) -> list[np.ndarray]:
            count = len(self.spans(epoch).random)
            order = np.arange(count)
            if seed is not None:
                order = np.random.default_rng((seed, epoch)).permutation(count)
            # No batch is empty: with one pair per batch, an epoch with fewer pairs repeats some.
            order = np.resize(order, max(count, batches_of_all))
            return np.array_split(order, batches_of_all)

        return EpochSampler(batches)

    def take(self, epoch: int, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return tokens (rows, longest), their segments, and the length of each row with marks."""
        spans = self.spans(epoch)
        first, second = (
            Texts(self.ids, of[rows, 0], of[rows, 1] - of[rows, 0])
            for of in (spans.first, spans.second)
        )
        texts = MarkedRows(first, second)
        return *texts.take(np.arange(len(rows))), texts.lengths

    def _whole(self, epoch: int, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        tokens, _, lengths = self.take(epoch, rows)
        return tokens, self._budgets(lengths)

    def _budgets(self, lengths: np.ndarray) -> np.ndarray:
        return np.maximum(1, np.rint(self._probability * lengths)).astype(np.int64)

    def __getitem__(self, item: Item) -> MaskedBatch:
        epoch, rows = item
        tokens, segments, lengths = self.take(epoch, rows)
        batch = self._masked(epoch, rows, tokens, self._budgets(lengths))
        mine = share(np.arange(len(rows)), self._rank, self._world_size)
        labels = np.where(self.spans(epoch).random[rows[mine]], RANDOM, NEXT)
        if len(mine) == 0:
            segments, labels, mine = np.zeros_like(segments[:1]), np.array([NEXT]), [0]
        return batch._replace(
            segments=torch.from_numpy(segments[mine]),
            follows=torch.from_numpy(labels),
            pairs=torch.tensor(len(rows)),
        )


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
        per_batch = max(1, tokens_per_batch // self.window)
        return reshuffled(self._seed, partial(equal_batches, len(self), per_batch))

    def _whole(self, epoch: int, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        predicted = max(1, round(self._probability * self.window))
        return self._windows[rows].astype(np.int64), np.full(len(rows), predicted)


@task("masked_lm")
@final
class MaskedLanguageModelling(EncoderTask):
    """The mean negative log-likelihood of masked tokens; only their positions are scored.

    With `next_sentence` rows are pairs of texts, and `NextSentenceHead` adds its loss to that of
    the masked tokens, which is the only part of `train/nll` and `val/nll`. An evaluation reports
    the mean loss of the pairs in nats, `nsp_nll`, and the share of pairs whose likelier label is
    right, `nsp_accuracy`; `scored` has both of each pair. Probes read the predictions of masked
    tokens.
    """

    def build_model(
        self, architecture: ArchitectureConfig, block: BlockConfig, vocab_size: int
    ) -> nn.Module:
        """Return the model, with the next-sentence head if those are predicted."""
        model = super().build_model(architecture, block, vocab_size)
        if self.config.next_sentence:
            add_next_sentence(model)
        return model

    @classmethod
    def rows(
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
        """Describe how the text is packed into windows or pairs, and the words never masked."""
        splits = list(rows.values())
        counts, first = " / ".join(f"{len(of):,}" for of in splits), splits[0]
        if isinstance(first, PairRows):
            shares = " / ".join(f"{100 * of.random_share:.1f}" for of in splits)
            said = f"; {counts} pairs of texts of at most {first.window} tokens, of which {shares} "
            said += "% have a random second text; training pairs are drawn again in every epoch"
        else:
            dropped = " / ".join(str(of.remainder) for of in splits)
            said = f"; packed into {counts} windows of {first.window} tokens, the last {dropped} "
            said += "tokens left out"
        if share := rows["train"].never_masked():
            said += f"; {100 * share:.2g} % of training words have more pieces than a row predicts"
        return said

    def logits(self, model: MaskedLanguageModel, batch: MaskedBatch) -> Tensor:
        """Return the logits at the predicted positions, ``(predicted, vocabulary)``."""
        return model(batch.tokens, batch.positions, batch.segments)

    def sums(self, model: MaskedLanguageModel, batch: MaskedBatch) -> LossSums:
        seen, every = watched(model.auxiliary), torch.ones_like(batch.labels, dtype=torch.bool)
        states, first = model.states_of_heads(batch.tokens, batch.positions, batch.segments, seen)
        self.last = {} if first is None else self._score(model, first, batch)
        smoothing, bias = self.config.smoothing, model.output_bias
        sums = partial(output_sums, label_smoothing=smoothing, bias=bias, z_loss=self.config.z_loss)
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

    def scores(self, stage: str, datamodule: Any, found: Evaluated) -> dict[str, float]:
        """Return the loss and the accuracy of the pairs, each counted once."""
        if not self.config.next_sentence:
            return {}
        pairs = join_ranks(self.scored)
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
        return Predictions(self.logits(model, batch), batch.labels)

    def alone(self, batch: MaskedBatch, token: int) -> MaskedBatch:
        """Return the row of the predicted `token`, with all its predictions."""
        row, place = divmod(int(batch.positions[token]), batch.tokens.shape[1])
        return _row(batch, row, batch.tokens.shape[1])._replace(
            positions=batch.positions.new_tensor([place]), labels=batch.labels[token : token + 1]
        )

    def longest(self, batch: MaskedBatch) -> MaskedBatch:
        lengths = (batch.tokens != self.pad).sum(dim=1)
        row = int(lengths.argmax())
        return _row(batch, row, int(lengths[row]))._replace(
            positions=batch.positions.new_zeros(1), labels=batch.labels[:1]
        )


def _row(batch: MaskedBatch, row: int, length: int) -> MaskedBatch:
    """Return the first `length` tokens of one row as a batch, with the predictions of all rows."""
    return batch._replace(
        tokens=batch.tokens[row : row + 1, :length],
        segments=None if batch.segments is None else batch.segments[row : row + 1, :length],
        index=batch.index[row : row + 1],
        follows=None if batch.follows is None else batch.follows[row : row + 1],
        pairs=None if batch.pairs is None else batch.pairs.new_ones(()),
    )
