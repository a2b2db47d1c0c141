"""Rows of measurements: collected over batches, written as CSV and read back."""

import csv
import io
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_app.runs.records import Place, probed_values

QUANTILES = {"p5": 0.05, "p25": 0.25, "p50": 0.5, "p75": 0.75, "p95": 0.95}
"""The quantiles of a distribution, for a box with whiskers."""

MODEL = "model"
"""The name in column `stack` for quantities of the whole model."""

NO_RANK = 1 << 30  # sorts values of a whole stack, or of all heads, last


class Row(NamedTuple):
    """One number at one step of one run."""

    step: int
    stack: str
    layer: int | None
    quantity: str
    head: int | None
    value: float

    @property
    def place(self) -> Place:
        return Place(self.quantity, self.stack, self.layer, self.head)


class RunningStats:
    """Means, maxima and quantiles over the items of several batches, kept on their device.

    Nothing is copied from a device before `rows`.
    """

    def __init__(self) -> None:
        self._sums: dict[Place, Tensor] = {}
        self._counts: dict[Place, int] = {}
        self._largest: dict[Place, Tensor] = {}
        self._samples: dict[Place, list[Tensor]] = {}

    def mean(self, place: Place, values: Tensor) -> None:
        """Add `values`, of any shape, to the mean at `place`."""
        total = values.detach().sum()
        self._sums[place] = self._sums[place] + total if place in self._sums else total
        self._counts[place] = self._counts.get(place, 0) + values.numel()

    def largest(self, place: Place, values: Tensor) -> None:
        """Raise the maximum at `place` to that of `values`."""
        if values.numel():
            top = values.detach().amax()
            old = self._largest.get(place)
            self._largest[place] = top if old is None else torch.maximum(old, top)

    def sample(self, place: Place, values: Tensor) -> None:
        """Add `values` to the distribution at `place`, whose quantiles are kept."""
        self._samples.setdefault(place, []).append(values.detach().flatten())

    def rows(self, step: int) -> list[Row]:
        """Return one row per number, in the order of `ordered`, without empty entries."""
        values: dict[Place, Tensor] = dict(self._largest)
        for place, total in self._sums.items():
            if self._counts[place]:
                values[place] = total / self._counts[place]
        for place, parts in self._samples.items():
            whole = torch.cat(parts)
            if whole.numel():
                points = whole.new_tensor(list(QUANTILES.values()))
                for name, value in zip(QUANTILES, quantiles(whole, points), strict=True):
                    values[place._replace(quantity=f"{place.quantity}_{name}")] = value
        if not values:
            return []
        numbers = torch.stack([value.to(torch.float64).cpu() for value in values.values()]).tolist()
        return ordered(
            Row(step, p.stack, p.layer, p.quantity, p.head, number)
            for p, number in zip(values, numbers, strict=True)
        )


def quantiles(values: Tensor, points: Tensor) -> Tensor:
    """Return the quantiles at `points`, interpolated linearly. `torch.quantile` has a limit
    of 2^24 values; sorting has no such limit."""
    ranked = values.sort().values
    places = points * (len(ranked) - 1)
    low, high = places.floor().long(), places.ceil().long()
    return torch.lerp(ranked[low], ranked[high], places - low)


def ordered(rows: Iterable[Row]) -> list[Row]:
    """Return `rows` by step, stack, quantity, layer, head; the model as a whole comes last."""

    def rank(row: Row) -> tuple[int, int, str, int, int]:
        stacks = ("encoder", "decoder")
        stack = stacks.index(row.stack) if row.stack in stacks else len(stacks)
        layer = NO_RANK if row.layer is None else row.layer
        head = -1 if row.head is None else row.head
        return row.step, stack, row.quantity, layer, head

    return sorted(rows, key=rank)


HEADER = ("step", "stack", "layer", "quantity", "head", "value")


def to_csv(rows: Sequence[Row]) -> str:
    """Return `rows` as one CSV table; empty cells are missing values."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(HEADER)
    writer.writerows(cells(row) for row in rows)
    return text.getvalue()


def cells(row: Row) -> list[str]:
    """Return a row as text, in the order of `HEADER`."""
    return [*("" if cell is None else str(cell) for cell in row[:-1]), f"{row.value:.9g}"]


def from_csv(path: Path) -> list[Row]:
    """Read a table that `to_csv` wrote."""
    return [
        Row(step, place.stack, place.layer, place.quantity, place.head, value)
        for step, place, value in probed_values(path)
    ]


class Probed(NamedTuple):
    """The rows of one variant, and its name in tables and figures."""

    name: str
    rows: list[Row]

    def values(self, quantity: str, stack: str, head: int | None = None) -> dict[int, float]:
        """Return the value of each layer at the last measured step."""
        last = max((row.step for row in self.rows), default=0)
        return {
            row.layer: row.value
            for row in self.rows
            if row.step == last
            and (row.quantity, row.stack, row.head) == (quantity, stack, head)
            and row.layer is not None
        }

    def number(self, quantity: str, stack: str = MODEL) -> float:
        """Return a value of the whole stack or model, NaN if it is missing."""
        last = max((row.step for row in self.rows), default=0)
        for row in self.rows:
            if row.step == last and (row.quantity, row.stack) == (quantity, stack):
                return row.value
        return math.nan
