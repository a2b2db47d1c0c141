"""Start a model from the weights of another run: `model.init_from`.

The parent's embedding and stack are copied whole, and its pooler if both have one; its heads are
left out. Parts that the parent lacks start as in a run from step 0, except that a new table of
segments is zero, so that the encoder computes what it did in the parent.
"""

import hashlib
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from lightning_app.config.identity import completed, leaves
from lightning_app.core.errors import UserError, named
from lightning_app.runs.parent import (
    FIELD,
    Parent,
    data_state,
    find_parent,
    is_finite,
    read_checkpoint,
)
from lightning_app.runs.records import Unsound, read_yaml

_OF_HEADS = ("transform.", "norm.", "output_bias", "output.", "auxiliary.", "next_sentence.output.")
_OF_HEADS += ("embedding.output.", "embedding.logit_scale.")
_POOLER = "pooler."
_FREE = {
    "block": frozenset(),
    "architecture": frozenset({"dropout", "attention_dropout", "seeding"}),
}
"""The parts of a model that must match the parent's, except in these fields, which have no
weights"""
_MAY_BE = {("block", "residual_attention"): "none"}
"""Fields that may have this value whatever the parent's is: carried scores have no weights either,
and RealFormer was also fine-tuned without them (He et al. 2020, 2012.11747)."""


class NothingToFineTune(Exception):
    """The parent ended non-finite, so it has no usable weights. This is a result."""


def check_parent(tree: Mapping[str, Any]) -> None:
    """Refuse a config whose parent has another vocabulary, block or architecture, or diverged.

    Raises:
        UserError: naming the parent, and the first field that differs.
    """
    given = tree["model"]["init_from"]
    if given is None:
        return
    parent = find_parent(given)
    if parent.non_finite:
        return  # it provides no weights and may have no checkpoint
    stored = _stored_at(parent.checkpoint, parent.digest)
    for part, free in _FREE.items():
        theirs, ours = stored[part], dict(_leaves(tree["model"][part]))
        for key in sorted((theirs.keys() | ours.keys()) - free):
            parents = theirs.get(key)
            if ours.get(key) not in (parents, _MAY_BE.get((part, key), parents)):
                raise UserError(
                    f"{FIELD}: {parent.checkpoint}: model.{part}.{key} is {parents} there "
                    f"and {ours.get(key)} in the config; the block and the sizes of the parent "
                    "are needed"
                )
    if not stored["finite"]:
        raise UserError(
            f"{FIELD}: {parent.checkpoint}: holds weights that are not finite: its run diverged; "
            "a checkpoint with finite weights is needed"
        )
    if parent.steps not in (None, stored["step"]):
        raise UserError(
            f"{FIELD}: {parent.checkpoint}: is of step {stored['step']}, but its run ended at step "
            f"{parent.steps}; the checkpoint of the end is needed, or name this file itself"
        )
    section = _data_of(parent.config)
    for field in ("tokenizer", "vocab_size"):
        theirs, ours = section[field], tree["data"][field]
        if theirs != ours:
            raise UserError(
                f"{FIELD}: {parent.config}: data.{field} is {theirs} there and {ours} in the "
                "config; the vocabulary of the parent is needed"
            )
    digest = hashlib.sha256(parent.tokenizer.read_bytes()).hexdigest()
    if digest != stored["tokenizer_sha256"]:
        raise UserError(
            f"{FIELD}: {parent.tokenizer}: not the tokenizer of {parent.checkpoint.name}: its "
            f"SHA-256 is {digest[:16]}, that of the checkpoint {stored['tokenizer_sha256'][:16]}"
        )


def load_parent(model: Any, given: str, recorded: str | None = None) -> None:
    """Replace the initial values of `model` by the parent's weights.

    Args:
        model: The model of the child.
        given: `model.init_from`.
        recorded: The parent as recorded in the child's id (`Parent.name`); None for a model that is
            not part of a run.

    Raises:
        NothingToFineTune: if the parent ended non-finite.
        UserError: if an encoder weight is missing, left over or of another shape, or the parent
            is no longer `recorded`.
    """
    import torch

    parent = _unchanged(given, recorded)
    if parent.non_finite:
        raise NothingToFineTune(
            f"nothing to fine-tune: the parent {parent.config.parent} ended non-finite"
        )
    with named(FIELD):
        state = read_checkpoint(parent.checkpoint)["state_dict"]
    weights: dict[str, Any] = {}
    for key, value in state.items():  # others are sums of an evaluation
        name = key.removeprefix("model.").replace(f"next_sentence.{_POOLER}", _POOLER)
        if key.startswith("model.") and not name.startswith(_OF_HEADS):
            weights[name] = value
    target = model.state_dict()
    if not any(name.startswith(_POOLER) for name in target):
        weights = {name: value for name, value in weights.items() if not name.startswith(_POOLER)}
    fresh = {name for name in target if name.startswith("output.")}
    for optional in (_POOLER, "embedding.segments."):
        if not any(name.startswith(optional) for name in weights):
            fresh |= {name for name in target if name.startswith(optional)}
    expected = target.keys() - fresh
    for name in sorted(weights.keys() ^ expected):
        where = "the model" if name in weights else "the parent"
        raise UserError(f"{FIELD}: {parent.checkpoint}: {where} has no weight '{name}'")
    for name in sorted(expected):
        old, new = tuple(weights[name].shape), tuple(target[name].shape)
        if old != new:
            raise UserError(
                f"{FIELD}: {parent.checkpoint}: '{name}' has the shape {old} there and {new} "
                "in the model"
            )
    with torch.no_grad():
        for name in expected:
            target[name].copy_(weights[name])
        if any(name.startswith("embedding.segments.") for name in fresh):
            model.embedding.segments.weight.zero_()
    _unchanged(given, recorded)  # the file may have been replaced while it was read


def _unchanged(given: str, name: str | None) -> Parent:
    """Return the parent; refuse one that was retrained after the child's id was computed."""
    parent = find_parent(given)
    if name is not None and parent.name != name:
        raise UserError(
            f"{FIELD}: {parent.checkpoint}: has changed since this run began: its id says {name}, "
            f"but this is {parent.name}; start the run again"
        )
    return parent


def _data_of(config: Path) -> Mapping[str, Any]:
    try:
        section = read_yaml(config)["data"]
        return {field: section[field] for field in ("tokenizer", "vocab_size")}
    except (OSError, Unsound, KeyError, TypeError) as error:
        raise UserError(f"{FIELD}: {config}: damaged; it holds no section data") from error


@lru_cache(maxsize=1024)
def _stored_at(path: Path, digest: str) -> Mapping[str, Any]:
    """Return what a checkpoint records about its model, cached until the file changes."""
    with named(FIELD):
        checkpoint = read_checkpoint(path)
    parts = {part: checkpoint["hyper_parameters"][part] for part in _FREE}
    parameters = completed({"model": parts})["model"]  # an earlier version lacks later fields
    data = data_state(checkpoint) or {}
    return {
        **{part: dict(_leaves(parameters[part])) for part in _FREE},
        "tokenizer_sha256": data.get("tokenizer_sha256", "none"),
        "finite": is_finite(checkpoint["state_dict"]),
        "step": checkpoint["global_step"],
    }


def _leaves(tree: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Return dotted keys with plain values: a tuple in a checkpoint is a list in a config."""
    return [(k, list(v) if isinstance(v, tuple) else v) for k, v in leaves(tree)]
