"""Identify the experiment of a config, with its blocks resolved and its corpus read."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from functools import lru_cache
from typing import Any

from lightning_app.data.corpus import corpus_of
from lightning_app.identity.ids import Identity, identify
from lightning_app.identity.relevant import completed, relevant_blocks
from lightning_app.parent import with_parent
from lightning_app.sections import ModelConfig, arguments, hints_of

Tree = Mapping[str, Any]


def identity_of(config: Tree, fetch: bool = True) -> Identity:
    """Return the identity of a resolved config.

    Args:
        config: The config of a run, with every default.
        fetch: Whether to download a corpus that is not on this machine. If not, the identity then
            has no corpus, and its id is not the id of any run.

    Raises:
        UserError: if files of the corpus are missing.
    """
    blocks = _blocks(_wiring(config))
    return identify(with_parent(config), blocks=blocks, corpus=corpus_of(config["data"], fetch))


def cell_id(config: Tree) -> str:
    """Return the id of a resolved config: 16 hexadecimal digits of what can change its result."""
    return identity_of(config).id


def stacks_of(config: Tree) -> dict[str, Any]:
    """Return the resolved specification of each stack, as plain values."""
    return _stacks(_wiring(config))


def _wiring(config: Tree) -> str:
    """The part of a config that sets the wiring, as text: many cells share one."""
    model = completed(config)["model"]  # the config may come from an earlier version
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
