"""The curves of a run, from the `metrics.csv` in its folder."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from lightning_app.analysis.grid_results import CellResult
from lightning_app.run_folder import METRICS
from lightning_app.tables import Curve, column_names
from lightning_app.task_facts import LOSS

TRAIN, VALID = "train/nll", LOSS
SECONDS = "train/seconds"


@dataclass(frozen=True)
class Log:
    """The logged values of a run, by tag; only finite values, in the order of the steps."""

    curves: Mapping[str, Curve]

    def __getitem__(self, tag: str) -> Curve:
        """The curve, empty if the run has not logged it."""
        return self.curves.get(tag, {})


def read_log(cell: CellResult, wanted: Callable[[str], bool]) -> Log:
    """Read the columns of `metrics.csv` whose tag is `wanted`."""
    return Log(finite_curves(cell, wanted))


def logs(cell: CellResult, start: str) -> bool:
    """Whether the run has logged a value under a tag with this start."""
    return any(tag.startswith(start) for tag in column_names(cell.folder / METRICS))


def finite_curves(cell: CellResult, wanted: Callable[[str], bool]) -> dict[str, Curve]:
    """The finite values of the `wanted` columns; none if the file is damaged."""
    curves = cell.curves(wanted).items()
    return {
        name: {step: value for step, value in curve.items() if step > 0 and math.isfinite(value)}
        for name, curve in curves
    }
