"""Signals of position and step, added to the stream before each step of a shared block."""

from typing import final

from jaxtyping import Float
from torch import Tensor, nn

from lightning_app.blocks.stack import StepSignal
from lightning_app.models.positions.base import Places, Positions
from lightning_app.models.positions.learned import LearnedTable
from lightning_app.models.positions.sinusoidal import Sinusoids


@final
class StepSignals(nn.Module):
    """``PE(i) + S(n)`` at position i before step n (Dehghani et al. 2019, 1807.03819, section 2.1).

    PE is the table of the positions, nothing where they enter attention. S(n) is the row of the
    sinusoids at n, from 1, or a learned vector of step n. No embedding adds PE beside them.
    """

    def __init__(self, kind: StepSignal, steps: int, dim: int, positions: Positions | None) -> None:
        super().__init__()
        self.position_table = None if positions is None else positions.table()
        self.step_table = LearnedTable(steps, dim) if kind == "learned" else Sinusoids(dim)

    def forward(
        self, x: Float[Tensor, "batch token model"], places: Places, step: int
    ) -> Float[Tensor, "batch token model"]:
        """Return `x` with the signals of `step`, counted from 1, at the newest of `places`."""
        row = step - 1 if isinstance(self.step_table, LearnedTable) else step
        signal = self.step_table(row, row + 1, x.device)
        if self.position_table is not None:
            end = places.start + len(places.newest)
            table = self.position_table(places.start, end, x.device)
            if places.in_document is not None:
                table = nn.functional.embedding(places.in_document, table)
            signal = signal + table
        return x + signal.to(x.dtype)
