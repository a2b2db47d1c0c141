"""Identify the experiment of a config, after resolving its blocks and reading its corpus."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from functools import lru_cache
from typing import Any

from lightning_app.config.config import model_config
from lightning_app.config.identity import (
    Identity,
    experiment_id,
    read_record,
    relevant,
    relevant_blocks,
    used_by,
)
from lightning_app.core.errors import UserError
from lightning_app.data.sources import corpus_of
from lightning_app.plugins import KEY, digests
from lightning_app.runs.parent import FIELD, find_parent, with_parent

Tree = Mapping[str, Any]


def identity_of(config: Tree, fetch: bool = True) -> Identity:
    """Return the identity of a resolved config.

    Args:
        config: The config of a run, with every default.
        fetch: Whether to download a corpus that is not on this machine. Otherwise the identity then
            has no corpus, and its id matches no run.

    Raises:
        UserError: if files of the corpus are missing.
    """
    blocks, corpus = _blocks(_wiring(config)), corpus_of(config["data"], fetch)
    fields = relevant(named_by_content(config))
    return Identity(id=experiment_id(fields, blocks, corpus), corpus=corpus)


def named_by_content(config: Tree) -> dict[str, Any]:
    """Return a config in which its parent and its plug-ins are named by content.

    A changed checkpoint or plug-in therefore makes another experiment; a moved one does not.

    Raises:
        UserError: if there is no such parent, or a plug-in of both has changed since.
    """
    stacks = stacks_of(config)
    _check_parts_of_parent(config, stacks)
    named, used = with_parent(config), used_by(config, stacks)
    return {**named, KEY: used} if used else named


def _check_parts_of_parent(config: Tree, stacks: Tree) -> None:
    """Refuse a parent with another version of a plug-in: its block may differ."""
    given = config["model"]["init_from"]
    if given is None:
        return
    folder = find_parent(given).config.parent
    record = read_record(folder)
    stored = {} if record is None else record.config
    for name, digest in used_by(config, stacks).items():
        theirs = stored.get(f"{KEY}.{name}", digest)
        if theirs != digest:
            raise UserError(
                f"{FIELD}: {folder}: its plug-in {name} has the sha256 {theirs[:16]} there and "
                f"{digest[:16]} here; the version of the parent is needed"
            )


def cell_id(config: Tree) -> str:
    """Return the id of a resolved config: 16 hexadecimal digits over all that affects it."""
    return identity_of(config).id


def stacks_of(config: Tree) -> dict[str, Any]:
    """Return the resolved specification of each stack, as plain values."""
    return _stacks(_wiring(config))


def _wiring(config: Tree) -> str:
    """The settings of the wiring, as text: config fields and plug-ins; many cells share them."""
    parts = {name: config["model"][name] for name in ("architecture", "block")}
    return json.dumps([parts, digests()], sort_keys=True)


@lru_cache(maxsize=1024)
def _blocks(text: str) -> dict[str, Any]:
    return relevant_blocks(_stacks(text))


@lru_cache(maxsize=1024)
def _stacks(text: str) -> dict[str, Any]:
    parts, _ = json.loads(text)
    model = model_config(parts)
    stacks = model.architecture.stacks(model.block)
    return {side: asdict(spec) for side, spec in stacks.items()}
