"""The LightningDataModule of every corpus and both tasks."""

from collections.abc import Mapping
from functools import cached_property
from typing import Any, Literal

import lightning.pytorch as pl
import torch

from lightning_app.data import moses
from lightning_app.data.batching import Batch, ResumableLoader
from lightning_app.data.config import (
    DEFAULT_SPLITS,
    CorpusName,
    DataConfig,
    Splits,
    Task,
    TokenizerKind,
)
from lightning_app.data.masked_lm import MaskedRows, masked_sampler
from lightning_app.data.prepare import PreparedCorpus, prepare
from lightning_app.data.tokenizer import EOS, Tokenizer, unigram_entropy
from lightning_app.data.translation import TranslationRows, translation_sampler
from lightning_app.errors import UserError

Split = Literal["train", "valid", "test"]


class TextDataModule(pl.LightningDataModule):
    """Text in, integer batches out.

    After `setup`: `vocab_size`, `tokenizer`, `unigram_entropy` (nats a validation target, EOS
    included; a masked validation token for masked_lm), and `description`, which belongs to every
    result.

    Args:
        name: corpus: `iwslt14` (German-English talks), `wikitext2` (English articles), `text` (own
            files in `root`), `synthetic` (built-in German-English grammar, needs no download).
        root: folder of the corpus. null: $LIGHTNING_APP_DATA/iwslt14_deen or .../wikitext-2 if that
            variable is set, else the corpus is downloaded once. `hf://OWNER/NAME`: the parquet
            files of that dataset on the hub.
        cache: folder for prepared corpora and downloads. null: $LIGHTNING_APP_CACHE, else the
            user's cache.
        task: `translation` or `masked_lm`; set from model.objective.kind.
        tokens_per_batch: budget of the global batch of one step, in tokens of the longer side with
            padding, whatever the number of devices.
        tokenizer: `bpe` (SentencePiece byte-pair encoding) or `word` (text between spaces).
        vocab_size: number of ids, shared by both languages; null for every word of the training
            split, for `word` only.
        window: tokens a packed window (masked_lm).
        mask_probability: share of a window that is predicted (masked_lm).
        max_length: longest training sentence in tokens; longer pairs are dropped (translation).
        source_language: suffix of the source files (translation).
        target_language: suffix of the target files; the one language of masked_lm.
        splits: file stem of each split.
        num_workers: processes that build batches; 0 builds them in the training process, which is
            fast enough.
        seed: of the order of batches and of the masks; set from seed_everything.
    """

    def __init__(
        self,
        name: CorpusName = DataConfig.name,
        root: str | None = DataConfig.root,
        cache: str | None = DataConfig.cache,
        task: Task = DataConfig.task,
        tokens_per_batch: int = DataConfig.tokens_per_batch,
        tokenizer: TokenizerKind = DataConfig.tokenizer,
        vocab_size: int | None = DataConfig.vocab_size,
        window: int = DataConfig.window,
        mask_probability: float = DataConfig.mask_probability,
        max_length: int = DataConfig.max_length,
        source_language: str = DataConfig.source_language,
        target_language: str = DataConfig.target_language,
        splits: Splits = DEFAULT_SPLITS,
        num_workers: int = DataConfig.num_workers,
        seed: int = DataConfig.seed,
    ) -> None:
        super().__init__()
        self.config = DataConfig(
            name=name,
            root=root,
            cache=cache,
            task=task,
            tokens_per_batch=tokens_per_batch,
            tokenizer=tokenizer,
            vocab_size=vocab_size,
            window=window,
            mask_probability=mask_probability,
            max_length=max_length,
            source_language=source_language,
            target_language=target_language,
            splits=splits,
            num_workers=num_workers,
            seed=seed,
        )
        self.tokenizer: Tokenizer
        self.vocab_size: int
        self.unigram_entropy: float
        self.description: dict[str, Any]

    @cached_property
    def corpus(self) -> PreparedCorpus:
        """The corpus, prepared and verified once, when it is wanted first."""
        return prepare(self.config)

    def prepare_data(self) -> None:
        """Read, tokenise and cache the corpus, unless that is done; verify it."""
        _ = self.corpus

    def setup(self, stage: str | None = None) -> None:
        """Open the cached corpus; after `prepare_data` nothing is made here."""
        meta = self.corpus.meta
        self.tokenizer = self.corpus.tokenizer
        self.vocab_size = meta["vocab_size"]
        protocol = meta["protocol"]
        if self.config.task == "translation":
            self.unigram_entropy = meta["unigram_entropy"]["valid"]
        else:
            rows = {split: self._masked_rows(split) for split in meta["sizes"]}
            self.unigram_entropy = unigram_entropy(rows["valid"].labels())
            counts = " / ".join(f"{len(of):,}" for of in rows.values())
            dropped = " / ".join(str(of.remainder) for of in rows.values())
            protocol += (
                f"; packed into {counts} windows of {self.config.window} tokens, the last "
                f"{dropped} tokens left out"
            )
        self.description = {
            "name": meta["name"],
            "protocol": protocol,
            "sizes": meta["sizes"],
            "vocab_size": meta["vocab_size"],
            "tokenizer_sha256": meta["tokenizer_sha256"],
            "checksum": meta["checksum"],
            "digest": self.corpus.digest,
        }

    def training_entropy(self) -> float:
        """Count the training targets: `unigram_entropy` of these, without regard to masks."""
        if self.config.task == "translation":
            return unigram_entropy(self.corpus.ids("train", "target"))
        ids = self.corpus.ids("train", "text")
        return unigram_entropy(ids[ids != EOS])  # which is never masked

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint remembers of its data."""
        tokenizer = self.corpus.meta["tokenizer_sha256"]
        return {"digest": self.corpus.digest, "tokenizer_sha256": tokenizer}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Refuse to go on with other data than those of the checkpoint.

        Raises:
            UserError: naming both digests.
        """
        there, here = state_dict["digest"], self.corpus.digest
        if there != here:
            raise UserError(
                f"is of other data: their digest is {there[:16]}, that of data.name "
                f"'{self.config.name}' is now {here[:16]}"
            )

    def references(self, split: Split) -> list[str]:
        """Return plain target lines of a split, cased where the corpus publishes them so."""
        return self.corpus.lines(split, "reference")

    def targets(self, split: Split) -> list[str]:
        """Return the target lines of a split as the corpus has them, tokenised if `tokenized`."""
        return self.corpus.lines(split, "target")

    @property
    def tokenized(self) -> bool:
        """Whether the corpus separates words and punctuation by spaces."""
        return self.corpus.meta["tokenized"]

    def detokenize(self, text: str) -> str:
        """Return target text of this corpus as plain text; `references` are in that form."""
        if not self.tokenized:
            return text
        return moses.detokenize(text, self.config.target_language)

    def train_dataloader(self) -> ResumableLoader:
        return self._loader("train", self.config.seed)

    def val_dataloader(self) -> ResumableLoader:
        return self._loader("valid", None)

    def test_dataloader(self) -> ResumableLoader:
        return self._loader("test", None)

    def predict_dataloader(self) -> ResumableLoader:
        return self._loader("test", None)

    def transfer_batch_to_device(
        self, batch: Batch, device: torch.device, dataloader_idx: int
    ) -> Any:
        """Move a batch; from pinned memory the copy to a GPU goes on while the host does."""
        non_blocking = device.type == "cuda"
        return batch._make(part.to(device, non_blocking=non_blocking) for part in batch)

    def _loader(self, split: Split, seed: int | None) -> ResumableLoader:
        config = self.config
        if split not in self.corpus.meta["sizes"]:
            raise UserError(f"data.splits.{split}: the corpus has no {split} split")
        if config.task == "translation":
            rows = TranslationRows(self.corpus, split, *self._ranks())
            sampler = translation_sampler(self.corpus, split, config.tokens_per_batch, seed)
        else:
            rows = self._masked_rows(split)
            sampler = masked_sampler(rows, config.tokens_per_batch, config.window, seed)
        return ResumableLoader(rows, sampler, config.num_workers, self._gpu())

    def _gpu(self) -> torch.device | None:
        device = None if self.trainer is None else self.trainer.strategy.root_device
        return device if device is not None and device.type == "cuda" else None

    def _masked_rows(self, split: Split) -> MaskedRows:
        rank, world_size = self._ranks()
        return MaskedRows(
            self.corpus,
            split,
            window=self.config.window,
            probability=self.config.mask_probability,
            seed=self.config.seed if split == "train" else None,
            rank=rank,
            world_size=world_size,
        )

    def _ranks(self) -> tuple[int, int]:
        if self.trainer is None:
            return 0, 1
        return self.trainer.global_rank, self.trainer.world_size
