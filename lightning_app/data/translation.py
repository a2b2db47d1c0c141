"""Pairs of sentences as padded batches."""

from typing import final

import numpy as np
import torch

from lightning_app.data.batching import EpochSampler, Item, TranslationBatch, gather
from lightning_app.data.cutting import global_batches, share
from lightning_app.data.prepare import PreparedCorpus
from lightning_app.data.tokenizer import BOS, EOS, PAD


@final
class TranslationRows:
    """A split of pairs: (epoch, rows of a global batch) -> this rank's `TranslationBatch`."""

    def __init__(self, corpus: PreparedCorpus, split: str, rank: int, world_size: int) -> None:
        self._source = corpus.ids(split, "source"), np.array(corpus.offsets(split, "source"))
        self._target = corpus.ids(split, "target"), np.array(corpus.offsets(split, "target"))
        self._rank = rank
        self._world_size = world_size

    def __len__(self) -> int:
        return len(self._source[1]) - 1

    def __getitem__(self, item: Item) -> TranslationBatch:
        _, rows = item
        offsets = self._target[1]
        # BOS is not predicted, every id after it is
        predicted = int((offsets[rows + 1] - offsets[rows]).sum())
        normalizer = torch.tensor(predicted / self._world_size, dtype=torch.float32)
        mine = share(rows, self._rank, self._world_size)
        if len(mine) == 0:
            return TranslationBatch(
                source=torch.full((1, 1), EOS),
                target=torch.full((1, 2), PAD),
                index=torch.full((1,), -1),
                normalizer=normalizer,
            )
        return TranslationBatch(
            source=gather(*self._source, mine, fill=PAD),
            target=gather(*self._target, mine, fill=PAD, bos=BOS),
            index=torch.from_numpy(mine.astype(np.int64)),
            normalizer=normalizer,
        )


def translation_sampler(
    corpus: PreparedCorpus, split: str, tokens_per_batch: int, seed: int | None
) -> EpochSampler:
    """Return the batches of a split; `seed` None keeps them in the order of length."""
    source, target = corpus.lengths(split, "source"), corpus.lengths(split, "target")
    return EpochSampler(
        lambda epoch: global_batches(
            source, target, tokens_per_batch, None if seed is None else (seed, epoch)
        )
    )
