"""The id of an experiment: of its config, its blocks and what its corpus holds."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightning_app.identity.relevant import Tree, relevant

SCHEMA = 2
"""Of ids."""


@dataclass(frozen=True, kw_only=True)
class Identity:
    """Which experiment a config is.

    `id`: 16 hexadecimal digits of what can change the result. `corpus`: the digest of what the
    corpus holds, None where its files are not on this machine. `effect`: what a run reads of the
    config, by `experiment.effect_of`; None where it was not asked for.
    """

    id: str
    corpus: str | None = None
    effect: tuple[str, str] | None = None


def identify(config: Tree, *, blocks: Tree, corpus: str | None) -> Identity:
    """Return the identity of a resolved config.

    Args:
        config: The config of a run, every default in it.
        blocks: What `relevant_blocks` returns of the resolved stacks.
        corpus: The digest of what the corpus holds.
    """
    identity = experiment_id(relevant(config), blocks, corpus)
    return Identity(id=identity, corpus=corpus)


def experiment_id(config: Mapping[str, Any], blocks: Mapping[str, Any], corpus: str | None) -> str:
    """Return the id made of the parts that can change a result."""
    return _digest({"schema": SCHEMA, "config": config, "blocks": blocks, "corpus": corpus})


def _digest(tree: Mapping[str, Any]) -> str:
    text = json.dumps(tree, sort_keys=True, ensure_ascii=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
