"""WikiText-2: English articles, word level (Merity et al. 2017, 1609.07843)."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning_app.data.config import CORPORA, CorpusReader, DataConfig
from lightning_app.data.download import hub_name, load_from_hub, write_lines
from lightning_app.data.source import Source, split_sizes

_HUB = "Salesforce/wikitext"
_TITLE = re.compile("= (?!= ).*(?<! =) =")
_HEADING = re.compile("= .* =")
_LINES = {"train": 36_718, "valid": 3_760, "test": 4_358}


def articles(lines: Sequence[str]) -> list[int]:
    """Return the titles of the articles: ``= Title =`` between two blank lines."""

    def blank(place: int) -> bool:
        return not 0 <= place < len(lines) or not lines[place].strip()

    titles = [
        place
        for place, line in enumerate(lines)
        if _TITLE.fullmatch(line.strip()) and blank(place - 1) and blank(place + 1)
    ]
    return [0, *titles[1:]]  # the blank line before the first article is a part of it


def is_heading(line: str) -> bool:
    """Return whether a line is the title of an article or the heading of a section."""
    return _HEADING.fullmatch(line.strip()) is not None


@CORPORA.register("wikitext2")
class WikiText2(CorpusReader):
    """The word-level form, from local files or the hub; blank lines are kept in a running text."""

    pairs = False
    needs_root = False
    folder = "wikitext-2"
    base = "mlm.yaml"

    def file_names(self, config: DataConfig, stem: str) -> dict[str, tuple[str, ...]]:
        """Return the name of the published file."""
        return {"text": (f"wiki.{stem}.tokens",)}

    def download_name(self, config: DataConfig) -> str:
        """Return the name of the dataset on the hub."""
        return hub_name(config, _HUB)

    def download(self, config: DataConfig, folder: Path) -> None:
        """Write the files of the hub's dataset, which holds parquet files on its main branch."""
        splits: dict[str, Any] = load_from_hub(config, _HUB, "wikitext-2-v1", None)
        for split, rows in splits.items():
            write_lines(folder / f"wiki.{split}.tokens", (row["text"] for row in rows))

    def documents(self, config: DataConfig, lines: Sequence[str]) -> list[int]:
        """Return the titles of the articles."""
        return articles(lines)

    def left_out(self, config: DataConfig, line: str) -> bool:
        """Return whether a line is the title of an article or the heading of a section."""
        return is_heading(line)

    def protocol(
        self, source: Source, lines: dict[str, dict[str, list[str]]], counts: dict[str, int]
    ) -> str:
        """Return the number of lines, and whether it is that of the published splits."""
        expected = {split: _LINES[split] for split in counts}
        official = (
            "the official splits" if counts == expected else "not the official splits' counts"
        )
        sizes = f"{split_sizes(counts)} lines"
        return f"WikiText-2, word level with <unk>: {sizes}, {official}"
