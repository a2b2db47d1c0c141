"""What the corpus of a run's config holds, as one digest. Light: no torch, no NumPy."""

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

from lightning_app.data.config import DataConfig, Splits
from lightning_app.data.sources import corpus_digest, corpus_stamp


def corpus_of(section: Mapping[str, Any], fetch: bool = True) -> str | None:
    """Return `known_digest` of a resolved `data` section."""
    return known_digest(resolved_data(section), fetch)


def known_digest(config: DataConfig, fetch: bool = True) -> str | None:
    """Return the digest of what the corpus of `config` holds; its files are read once.

    None where it would have to be downloaded and `fetch` is false. Files are read again where
    their size or time has changed.

    Raises:
        UserError: where a folder or file is missing.
    """
    stamp = corpus_stamp(config, fetch)
    # One seed for all, so that the cells of a grid share what was read.
    return None if stamp is None else _digest(replace(config, seed=1), stamp)


def resolved_data(section: Mapping[str, Any]) -> DataConfig:
    """Return what the `data` section of a resolved config, which is checked, says."""
    return DataConfig(**{**section, "splits": Splits(**section["splits"])})


@lru_cache(maxsize=256)
def _digest(config: DataConfig, stamp: tuple[Any, ...]) -> str | None:
    return corpus_digest(config)
