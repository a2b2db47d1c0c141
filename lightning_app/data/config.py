"""What a user may say about the data of a run; every default of it stands here and nowhere else."""

from dataclasses import dataclass
from typing import Literal

from lightning_app.errors import UserError

CorpusName = Literal["iwslt14", "wikitext2", "text", "synthetic"]
Task = Literal["translation", "masked_lm"]
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
    """The `data` section of a run; the fields are explained one by one in `TextDataModule`.

    Raises:
        UserError: a value that has no meaning, or two that do not go together.
    """

    name: CorpusName = "synthetic"
    root: str | None = None
    cache: str | None = None
    task: Task = "translation"
    tokens_per_batch: int = 4096
    tokenizer: TokenizerKind = "bpe"
    vocab_size: int | None = 10000
    window: int = 128
    mask_probability: float = 0.15
    max_length: int = 175
    source_language: str = "de"
    target_language: str = "en"
    splits: Splits = DEFAULT_SPLITS
    num_workers: int = 0
    seed: int = 1

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
        if self.name == "wikitext2" and self.task == "translation":
            raise UserError(
                "data.name 'wikitext2' has one language: data.task 'masked_lm' needed, "
                "not 'translation'"
            )
        if self.name == "text" and self.root is None:
            raise UserError("data.root is null: data.name 'text' needs the folder of its files")
        if self.task == "translation" and self.source_language == self.target_language:
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
