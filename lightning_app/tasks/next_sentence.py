"""Pairs of texts for next sentence prediction (Devlin et al. 2019, 1810.04805, appendix A.2).

The rules are those of google-research/bert, `create_pretraining_data.py`, with three differences:
a random text is never from the same document (there: after ten draws it may be); the length of each
pair is drawn separately (there: once for all pairs of a document, which may be a whole book here);
and pairs are redrawn in every epoch instead of a fixed number of times before training.
"""

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple, final

import numpy as np
import torch
from torch import Tensor

from lightning_app.data.batching import EpochSampler, Item
from lightning_app.data.prepare import PreparedCorpus, share
from lightning_app.data.tokenizer import BOS, EOS, MASK, PAD, SPECIALS
from lightning_app.models.encoder_heads import NEXT, RANDOM
from lightning_app.tasks.labelled import MarkedRows, Texts, cut_lengths

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
        words = (tokens != EOS) & (tokens != BOS) & (tokens != PAD)
        if self._starts is not None:
            return _whole_words(key, words, self._starts[tokens], budgets)
        key[~words] = np.iinfo(np.uint64).max
        rank = np.empty(key.shape, dtype=np.int64)
        np.put_along_axis(rank, key.argsort(axis=1), np.arange(key.shape[1])[None], axis=1)
        return (rank < budgets[:, None]) & words

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
    before = np.zeros_like(words)
    before[:, 1:] = words[:, :-1]
    begins = words & (begins | ~before)
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
        if self._drawn[0] != epoch:
            self._drawn = (epoch, self._draw(epoch))
        return self._drawn[1]

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


def described(rows: Mapping[str, PairRows]) -> str:
    """Return the numbers of pairs of the splits, for the corpus description."""
    splits = list(rows.values())
    counts = " / ".join(f"{len(of):,}" for of in splits)
    shares = " / ".join(f"{100 * of.random_share:.1f}" for of in splits)
    return (
        f"; {counts} pairs of texts of at most {splits[0].window} tokens, of which {shares} % have "
        "a random second text; training pairs are drawn again in every epoch"
    )
