"""What the corpus of a run's config holds, as one digest. Light: no torch, no NumPy."""

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

from lightning_app.data.config import DataConfig, Splits
from lightning_app.data.sources import corpus_digest, corpus_stamp


def corpus_of(section: Mapping[str, Any], fetch: bool = True) -> str | None:
    """Return the digest of what the corpus of a resolved `data` section holds.

    None where it would have to be downloaded and `fetch` is false. Files are read again where
    their size or time has changed.

    Raises:
        UserError: where a folder or file is missing.
    """
    # One seed for all, so that the cells of a grid share what was read.
    config = replace(resolved_data(section), seed=1)
    stamp = corpus_stamp(config, fetch)
    return None if stamp is None else _corpus(config, stamp)


def resolved_data(section: Mapping[str, Any]) -> DataConfig:
    """Return what a resolved `data` section says."""
    return DataConfig(**{**section, "splits": Splits(**section["splits"])})


@lru_cache(maxsize=256)
def _corpus(config: DataConfig, stamp: tuple[Any, ...]) -> str | None:
    return corpus_digest(config)
