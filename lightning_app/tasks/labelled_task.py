"""What the fine-tuning tasks share: batches of labelled rows, each scored once."""

from typing import Any

from jaxtyping import Bool, Int
from torch import Tensor

from lightning_app.objectives.base import ObjectiveConfig
from lightning_app.tasks.base import Task
from lightning_app.tasks.labelled_rows import LabelledBatch, longest_row, real_tokens


class LabelledTask(Task):
    """A task with `LabelledBatch`es, whose scores need all rows of an evaluation.

    `sums` puts what `scores` needs of each row into `last`, where no gradient is computed.

    Attributes:
        last: By row of the split, of the batch that was evaluated last.
        scored: The same of all batches of this evaluation, on this rank.
    """

    def __init__(self, config: ObjectiveConfig) -> None:
        super().__init__(config)
        self.last: dict[int, Any] = {}
        self.scored: dict[int, Any] = {}

    def start_decoding(self) -> None:
        """Forget the evaluation before."""
        self.scored = {}

    def decode(self, model: Any, batch: LabelledBatch, stage: str) -> None:
        """Keep what `sums` found in the batch that was evaluated last, which is this one."""
        self.scored |= self.last

    def rows_of(self, batch: LabelledBatch) -> Int[Tensor, " token"]:
        """Return the row of each label, -1 for a blank row."""
        return batch.index

    def real_tokens(self, batch: LabelledBatch) -> dict[str, Bool[Tensor, "row token"]]:
        """Return every token but padding and blank rows."""
        return {"encoder": real_tokens(batch)}

    def longest(self, batch: LabelledBatch) -> LabelledBatch:
        """Return the first row with the most tokens."""
        return longest_row(batch)

    def texts(self, batch: LabelledBatch) -> tuple[Int[Tensor, "row token"], ...]:
        """Return the rows."""
        return (batch.tokens,)
