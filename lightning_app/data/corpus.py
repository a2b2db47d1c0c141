"""The digest of the corpus of a config. Fast to import: without torch and NumPy."""

from collections.abc import Mapping
from dataclasses import fields, replace
from functools import lru_cache
from typing import Any

from lightning_app.data.config import DataConfig, Splits
from lightning_app.data.sources import corpus_digest, corpus_stamp


def corpus_of(section: Mapping[str, Any], fetch: bool = True) -> str | None:
    """Return `known_digest` of a resolved `data` section."""
    return known_digest(resolved_data(section), fetch)


def known_digest(config: DataConfig, fetch: bool = True) -> str | None:
    """Return the digest of the corpus of `config`, whose files are read once.

    None if it would have to be downloaded and `fetch` is false. Files are read again if their size
    or time has changed.

    Raises:
        UserError: if a folder or file is missing.
    """
    stamp = corpus_stamp(config, fetch)
    # One seed for all, so that the cells of a grid share the digest.
    return None if stamp is None else _digest(replace(config, seed=1), stamp)


def resolved_data(section: Mapping[str, Any]) -> DataConfig:
    """Return the `data` section of a resolved and checked config as an object."""
    names = {field.name for field in fields(DataConfig)}
    known = {name: value for name, value in section.items() if name in names}
    return DataConfig(**{**known, "splits": Splits(**known["splits"])})


@lru_cache(maxsize=256)
def _digest(config: DataConfig, stamp: tuple[Any, ...]) -> str | None:
    return corpus_digest(config)
