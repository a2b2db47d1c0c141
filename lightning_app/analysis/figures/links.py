"""Marks of a figure link to the folder of their run, and show a text on hovering."""

import os
import re
from pathlib import Path
from urllib.parse import quote
from xml.sax.saxutils import escape

from lightning_app.analysis.grid_results import CellResult
from lightning_app.grid_axes import label

MOST = 3000  # marks of one figure with links: each takes three nodes of the page
_OPENING = re.compile(r'<a xlink:href="mark:(\d+)"[^>]*>')


class Links:
    """The links of the marks of one figure. With more than `most` marks, none has a link.

    matplotlib writes the address of a mark but no text. So a mark is written with a number as its
    address, and `into` replaces it by address and text.
    """

    def __init__(self, marks: int, most: int | None = None) -> None:
        self.on = marks <= (MOST if most is None else most)
        self._marks: list[tuple[CellResult | None, str]] = []

    def to(self, cell: CellResult, words: str) -> str | None:
        """The address to give to the mark of a run, or None."""
        words_of_run = [cell.variant]
        words_of_run += [] if cell.warmup is None else [f"warm-up {cell.warmup:,}"]
        words_of_run += [] if cell.lr is None else [f"lr {label(cell.lr)}"]
        words_of_run += [] if cell.seed is None else [f"seed {cell.seed}"]
        ended = "" if cell.outcome in (None, "trained") else f", {cell.word}"
        return self._add(cell, f"{', '.join(words_of_run)}: {words}{ended}")

    def about(self, words: str) -> str | None:
        """The same for a mark of several runs, which has a text but no link."""
        return self._add(None, words)

    def into(self, svg: str, folder: Path) -> str:
        """The SVG with addresses and texts, to be written into `folder`."""
        return _OPENING.sub(lambda found: self._opening(int(found[1]), folder), svg)

    def _add(self, cell: CellResult | None, words: str) -> str | None:
        if not self.on:
            return None
        self._marks.append((cell, words))
        return f"mark:{len(self._marks) - 1}"

    def _opening(self, number: int, folder: Path) -> str:
        cell, words = self._marks[number]
        title = f"<title>{escape(words)}</title>"
        if cell is None:
            return f"<a>{title}"
        there = os.path.relpath(cell.folder.resolve(), folder.resolve())
        return f'<a xlink:href="{quote(Path(there).as_posix())}/">{title}'
