"""Windows of packed text: sentences follow each other, each ended by EOS."""

from collections.abc import Mapping

import numpy as np

from lightning_app.core.errors import UserError
from lightning_app.data.batching import EpochSampler
from lightning_app.data.prepare import PreparedCorpus, equal_batches


class Windows:
    """The windows of a split, in the order of the text; the last tokens that fill none are dropped.

    Args:
        corpus: A prepared corpus of one language.
        split: train, valid or test.
        window: Tokens in a window.
        seed: The seed of the order of windows; None for the order of the text.
        rank: The rank of this process.
        world_size: Number of processes.

    Attributes:
        ids: Every token of the split, int32.
        remainder: The number of tokens after the last window.
    """

    def __init__(
        self,
        corpus: PreparedCorpus,
        split: str,
        window: int,
        seed: int | None = None,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self.ids = corpus.ids(split, "text")
        count, self.remainder = divmod(len(self.ids), window)
        if count == 0:
            raise UserError(
                f"data.window is {window}, but the {split} split has {len(self.ids)} tokens in all"
            )
        self._windows = self.ids[: count * window].reshape(count, window)
        self.window = window
        self.seed = seed
        self.rank = rank
        self.world_size = world_size

    def __len__(self) -> int:
        return len(self._windows)

    def take(self, rows: np.ndarray) -> np.ndarray:
        """Return the tokens of windows, (rows, window) int64."""
        return self._windows[rows].astype(np.int64)

    def sampler(self, tokens_per_batch: int) -> EpochSampler:
        """Return the batches of an epoch, all with the same number of windows but the last."""
        count, per_batch = len(self), max(1, tokens_per_batch // self.window)
        seed = self.seed

        def batches(epoch: int) -> list[np.ndarray]:
            return equal_batches(count, per_batch, None if seed is None else (seed, epoch))

        return EpochSampler(batches)


def packed(rows: Mapping[str, Windows]) -> str:
    """Return the numbers of windows of the splits, for the description of the corpus."""
    splits = list(rows.values())
    counts = " / ".join(f"{len(of):,}" for of in splits)
    dropped = " / ".join(str(of.remainder) for of in splits)
    return (
        f"; packed into {counts} windows of {splits[0].window} tokens, the last {dropped} tokens "
        "left out"
    )
