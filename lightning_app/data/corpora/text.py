"""Text files of the user."""

import re
from collections.abc import Sequence

from lightning_app.data.config import CORPORA, CorpusReader, DataConfig

_HEADING = re.compile("#{1,6} ")  # of Markdown


@CORPORA.register("text")
class Text(CorpusReader):
    """Files of lines in `data.root`, of one language or of two."""

    tokenized = False
    separated = True

    def file_names(self, config: DataConfig, stem: str) -> dict[str, tuple[str, ...]]:
        """Return column -> names; a file of one language may also end in .txt."""
        names = super().file_names(config, stem)
        return names if config.pairs else {"text": (*names["text"], f"{stem}.txt")}

    def documents(self, config: DataConfig, lines: Sequence[str]) -> list[int]:
        """Return the first line, and each after a separator, which is the last of its document."""
        separates = [line.strip() == config.document_separator.strip() for line in lines]
        begins = [
            place
            for place, apart in enumerate(separates)
            if not apart and (place == 0 or separates[place - 1])
        ]
        return [0, *begins[1:]]  # separators before the first document are a part of it

    def left_out(self, config: DataConfig, line: str) -> bool:
        """Return whether a line is a separator, or a heading of Markdown."""
        separates = line.strip() == config.document_separator.strip()
        return separates or _HEADING.match(line.strip()) is not None
