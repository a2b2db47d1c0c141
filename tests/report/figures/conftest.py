"""Figures of grid folders written by hand, with what they were drawn from."""

import csv
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from lightning_app.report import write
from lightning_app.report.figures.sheet import FigureFiles
from lightning_app.report.results import read_results
from lightning_app.report.write import FigureKind


class Drawn:
    """The figures of one grid by the stem of their files."""

    def __init__(self, folder: Path, out: Path, kinds: Collection[str]) -> None:
        """Draw the figures of these kinds, or all."""
        self.out, drawing = out, write._draw
        assert {*kinds} <= {kind.name for kind in write.KINDS}

        def draw(kind: FigureKind, *of: Any) -> list[FigureFiles]:
            return drawing(kind, *of) if kind.name in kinds or not kinds else []

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(write, "_draw", draw)
            self.list = write.write_figures(read_results(folder), out)
        self.by_name: dict[str, FigureFiles] = {drawing.path.stem: drawing for drawing in self.list}

    @property
    def names(self) -> list[str]:
        return [drawing.path.stem for drawing in self.list]

    def svg(self, name: str) -> str:
        return self.by_name[name].path.read_text(encoding="utf-8")

    def table(self, name: str) -> pd.DataFrame:
        return pd.read_csv(self.by_name[name].path.with_suffix(".csv"))


@pytest.fixture
def draw(tmp_path: Path) -> Callable[..., Drawn]:
    """`draw(folder, KIND, ...)` draws the grid in `folder`, all of its figures if no kind is given;
    `out` names another folder for them."""
    return lambda folder, *kinds, out="figures": Drawn(folder, tmp_path / out, kinds)


def write_csv(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write a table; missing values of a row are empty."""
    rows = list(rows)
    names = list(dict.fromkeys(name for row in rows for name in row))
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(rows)


@pytest.fixture
def table() -> Callable[[Path, Iterable[Mapping[str, Any]]], None]:
    """`table(path, rows)` writes a CSV file."""
    return write_csv
