"""Text files of the user."""

from lightning_app.data.config import CORPORA, CorpusReader, DataConfig


@CORPORA.register("text")
class Text(CorpusReader):
    """Files of lines in `data.root`, of one language or of two."""

    tokenized = False

    def file_names(self, config: DataConfig, stem: str) -> dict[str, tuple[str, ...]]:
        """Return column -> names; a file of one language may also end in .txt."""
        names = super().file_names(config, stem)
        return names if config.pairs else {"text": (*names["text"], f"{stem}.txt")}
