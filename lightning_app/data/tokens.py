"""Finds files of token ids, which `prepare` reads."""

import re
from pathlib import Path

from lightning_app.core.errors import UserError
from lightning_app.data.config import CORPORA, CorpusReader, DataConfig, Source


@CORPORA.register("tokens")
class TokenFiles(CorpusReader):
    """Ids in `data.root`, in files whose names have the split as a word and end in .bin.

    The ids of `fineweb_train_000001.bin` precede those of `fineweb_train_000002.bin`, and `val`
    means valid. Without the header of llm.c an id has 16 bits.
    """

    pairs = False
    holds_ids = True

    def file_names(self, config: DataConfig, stem: str) -> dict[str, tuple[str, ...]]:
        return {"text": (f"{stem}.bin",)}

    def find(self, config: DataConfig, root: Path) -> Source:
        """Return the files of each split, each of which is a column.

        Raises:
            UserError: if no file trains or validates.
        """
        columns: dict[str, dict[str, Path]] = {}
        for split, stem in config.splits.items():
            words = {stem, "val", "validation"} if stem == "valid" else {stem}
            paths = [
                path
                for path in sorted(root.glob("*.bin"))
                if words.intersection((path.stem, *re.split("[^A-Za-z0-9]+", path.stem)))
            ]
            if paths:
                columns[split] = {f"text{place}": path for place, path in enumerate(paths)}
            elif split != "test":
                wanted = " or ".join(f"{word}.bin, {word}_1.bin" for word in sorted(words))
                raise UserError(f"data.root: {root} has no file such as {wanted}")
        return Source(columns=columns)
