"""The curves of a run, from the `metrics.csv` in its folder."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from lightning_app.analysis.runs import Cell
from lightning_app.tables import rows_of

TRAIN, VALID = "train/nll", "val/nll"
TOKENS, SECONDS = "train/tokens", "train/seconds"

Curve = dict[int, float]  # by optimizer step, from 1


@dataclass(frozen=True)
class Log:
    """What a run has logged, by tag; only finite values, in the order of the steps."""

    curves: Mapping[str, Curve]

    def __getitem__(self, tag: str) -> Curve:
        """The curve, empty where the run has not logged it."""
        return self.curves.get(tag, {})


def read_log(cell: Cell, wanted: Callable[[str], bool]) -> Log:
    """Read the columns of `metrics.csv` whose tag is `wanted`. Of a step logged twice, the last."""
    return Log(read_curves(cell, wanted))


def read_curves(cell: Cell, wanted: Callable[[str], bool]) -> dict[str, Curve]:
    """The same without the steps that no curve has; empty where the file is damaged."""
    path = cell.sound("metrics.csv")
    if path is None:
        return {}
    names, *rows = rows_of(path)
    columns = [(place, name) for place, name in enumerate(names) if wanted(name)]
    found: dict[str, Curve] = {name: {} for _, name in columns}
    at = names.index("step")
    for row in rows:
        for place, name in columns:
            if row[place]:
                found[name][int(float(row[at]))] = float(row[place])
    return {name: _sound(curve) for name, curve in found.items()}


def _sound(curve: Curve) -> Curve:
    return {s: curve[s] for s in sorted(curve) if s > 0 and math.isfinite(curve[s])}
