"""Pairs of texts for next sentence prediction (Devlin et al. 2019, 1810.04805, appendix A.2).

The rules are those of google-research/bert, `create_pretraining_data.py`, with three differences:
a random text is never from the same document (there: after ten draws it may be); the length of each
pair is drawn separately (there: once for all pairs of a document, which may be a whole book here);
and pairs are redrawn in every epoch instead of a fixed number of times before training.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple, final

import numpy as np
import torch

from lightning_app.data.batching import EpochSampler, Item
from lightning_app.data.prepare import PreparedCorpus, share
from lightning_app.data.tokenizer import EOS
from lightning_app.models.encoder_heads import NEXT, RANDOM
from lightning_app.tasks.labelled import MarkedRows, Texts, cut_lengths
from lightning_app.tasks.masking import FIXED_SEED, MaskedBatch, MaskedSplit

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
