"""Which experiment a run's config is, with its blocks resolved and its corpus read."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from functools import lru_cache
from typing import Any

from lightning_app.data.corpus import corpus_of
from lightning_app.identity.ids import Identity, identify
from lightning_app.identity.relevant import completed, relevant_blocks
from lightning_app.sections import ModelConfig, arguments, hints_of

Tree = Mapping[str, Any]


def identity_of(config: Tree, fetch: bool = True) -> Identity:
    """Return the identity of a resolved config.

    Args:
        config: The config of a run, every default in it.
        fetch: Whether to download a corpus that is not on this machine. Without it the identity
            has no corpus then, and its id is that of no run.

    Raises:
        UserError: where the files of the corpus are missing.
    """
    blocks = _blocks(_wiring(config))
    return identify(config, blocks=blocks, corpus=corpus_of(config["data"], fetch))


def cell_id(config: Tree) -> str:
    """Return the id of a resolved config: 16 hexadecimal digits of what can change its result."""
    return identity_of(config).id


def stacks_of(config: Tree) -> dict[str, Any]:
    """Return the resolved specification of each stack, as plain values."""
    return _stacks(_wiring(config))


def _wiring(config: Tree) -> str:
    """The part of a config that says how blocks are wired, as text: many cells share one."""
    model = completed(config)["model"]  # a config that an earlier version has left is one too
    return json.dumps({name: model[name] for name in ("architecture", "block")}, sort_keys=True)


@lru_cache(maxsize=1024)
def _blocks(text: str) -> dict[str, Any]:
    return relevant_blocks(_stacks(text))


@lru_cache(maxsize=1024)
def _stacks(text: str) -> dict[str, Any]:
    parts = json.loads(text)
    hints = {name: hints_of(ModelConfig)[name] for name in parts}
    model = ModelConfig(**arguments("model", hints, parts))
    stacks = model.architecture.stacks(model.block)
    return {side: asdict(spec) for side, spec in stacks.items()}
