"""The corpus of the synthetic grammar: German-English pairs without a download."""

import hashlib

from lightning_app.data.config import CORPORA, DataConfig
from lightning_app.data.generated_corpus import GeneratedCorpus
from lightning_app.data.source import Source, split_sizes
from lightning_app.data.synthetic import sentences


@CORPORA.register("synthetic")
class Synthetic(GeneratedCorpus):
    """Pairs of `data.synthetic.sentences`."""

    languages = ("de", "en")
    base = "synthetic.yaml"

    def generate(self, config: DataConfig) -> dict[str, dict[str, list[str]]]:
        """Return the sides that the config names."""
        sides = {"de": 0, "en": 1}
        wanted = {"text": config.target_language}
        if config.pairs:
            wanted = {"source": config.source_language, "target": config.target_language}
        return {
            split: {c: [pair[sides[language]] for pair in of] for c, language in wanted.items()}
            for split, of in sentences.splits().items()
        }

    def digest(self, config: DataConfig) -> str:
        """Return a constant, since drawing the corpus would take too long."""
        return hashlib.sha256(f"synthetic-{sentences.SEED}".encode()).hexdigest()

    def protocol(
        self, source: Source, lines: dict[str, dict[str, list[str]]], counts: dict[str, int]
    ) -> str:
        """Return the seed and the number of pairs.

        Results record it: with another wording, equal data would have two protocols.
        """
        return (
            f"synthetic German-English grammar, seed {sentences.SEED}: {split_sizes(counts)} "
            f"distinct pairs; no sentence of either language stands in two splits"
        )
