"""What a user may say about the data of a run, with every default."""

from dataclasses import dataclass
from typing import Literal

from lightning_app.errors import UserError
from lightning_app.task_facts import DEFAULT_TASK, TASKS

CorpusName = Literal["iwslt14", "wikitext2", "text", "synthetic"]
TokenizerKind = Literal["bpe", "word"]


@dataclass(frozen=True, kw_only=True)
class Splits:
    """File stem of each split, for local files."""

    train: str = "train"
    """stem of the training files"""
    valid: str = "valid"
    """stem of the validation files"""
    test: str = "test"
    """stem of the test files"""

    def items(self) -> list[tuple[str, str]]:
        """Return (split, stem) in the order train, valid, test."""
        return [("train", self.train), ("valid", self.valid), ("test", self.test)]


DEFAULT_SPLITS = Splits()


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The `data` section of a run.

    Raises:
        UserError: a value that has no meaning, or two that do not go together.
    """

    name: CorpusName = "synthetic"
    """The corpus: iwslt14 (German-English talks), wikitext2 (English articles), text (own files in
    `root`), synthetic (built-in German-English grammar, needs no download)."""
    root: str | None = None
    """Folder of the corpus. null: $LIGHTNING_APP_DATA/iwslt14_deen or .../wikitext-2 if that
    variable is set, else the corpus is downloaded once. ``hf://OWNER/NAME``: the parquet files of
    that dataset on the hub."""
    cache: str | None = None
    """Folder of prepared corpora and downloads. null: $LIGHTNING_APP_CACHE, else the user's
    cache."""
    task: str = DEFAULT_TASK
    """Set from model.objective.kind."""
    tokens_per_batch: int = 4096
    """Budget of the global batch of one step, whatever the number of devices: in tokens of the
    longer side, with padding."""
    tokenizer: TokenizerKind = "bpe"
    """bpe (SentencePiece byte-pair encoding) or word (text between spaces)."""
    vocab_size: int | None = 10000
    """Number of ids, shared by both languages; null for every word of the training split, for word
    only."""
    window: int = 128
    """Tokens in a window of packed text (masked_lm)."""
    mask_probability: float = 0.15
    """Share of a window that is predicted (masked_lm)."""
    max_length: int = 175
    """Longest training sentence in tokens; longer pairs are dropped (translation)."""
    source_language: str = "de"
    """Suffix of the source files (translation)."""
    target_language: str = "en"
    """Suffix of the target files; the one language of a corpus without pairs."""
    splits: Splits = DEFAULT_SPLITS
    """File stem of each split."""
    num_workers: int = 0
    """Processes that build batches; 0 builds them in the training process, which is fast enough."""
    seed: int = 1
    """Of the order of batches and of the masks; set from seed_everything."""

    @property
    def pairs(self) -> bool:
        """Whether the task trains on pairs of a source and a target line."""
        return TASKS[self.task].pairs

    def __post_init__(self) -> None:
        for field, least in _LEAST.items():
            if getattr(self, field) < least:
                raise UserError(f"data.{field} is {getattr(self, field)}: at least {least} needed")
        if not 0 < self.mask_probability < 1:
            raise UserError(
                f"data.mask_probability is {self.mask_probability}: a number between 0 and 1 needed"
            )
        if self.vocab_size is None and self.tokenizer != "word":
            raise UserError(
                f"data.vocab_size is null, which means every word and needs data.tokenizer 'word', "
                f"not '{self.tokenizer}'"
            )
        if self.vocab_size is not None and self.vocab_size < 6:
            raise UserError(f"data.vocab_size is {self.vocab_size}: at least 6 needed")
        if self.name == "wikitext2" and self.pairs:
            fitting = " or ".join(f"'{name}'" for name, task in TASKS.items() if not task.pairs)
            raise UserError(
                f"data.name 'wikitext2' has one language: data.task {fitting} needed, "
                f"not '{self.task}'"
            )
        if self.name == "text" and self.root is None:
            raise UserError("data.root is null: data.name 'text' needs the folder of its files")
        if self.pairs and self.source_language == self.target_language:
            raise UserError(
                f"data.source_language and data.target_language are both "
                f"'{self.source_language}': two languages needed"
            )
        pair = {"de", "en"}
        if self.name in ("iwslt14", "synthetic"):
            for field in ("source_language", "target_language"):
                if getattr(self, field) not in pair:
                    raise UserError(
                        f"data.{field} is '{getattr(self, field)}': "
                        f"data.name '{self.name}' has 'de' and 'en'"
                    )


_LEAST = {"tokens_per_batch": 1, "window": 2, "max_length": 1, "num_workers": 0, "seed": 0}
