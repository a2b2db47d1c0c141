"""Identify the experiment of a config, after resolving its blocks and reading its corpus.

An id covers what a config contains; `effect_of` covers only what a run reads from it: two
configs whose differences are never read have different ids and the same effect.
"""

import hashlib
import json
import math
import struct
from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from functools import lru_cache
from typing import Any

import torch
from torch import nn

from lightning_app.blocks.feed_forward import ACTIVATIONS
from lightning_app.blocks.stack import StackSpec
from lightning_app.config.config import model_config, resolve
from lightning_app.config.identity import (
    Identity,
    identify,
    is_irrelevant,
    pins,
    read_record,
    relevant,
    relevant_blocks,
)
from lightning_app.config.rulers import EVALUATION
from lightning_app.config.trainer import OWN_DEFAULTS
from lightning_app.config.tree import canonical, replaced
from lightning_app.core.errors import UserError
from lightning_app.core.schema import read
from lightning_app.data.sources import corpus_of
from lightning_app.models.heads import ArchitectureConfig
from lightning_app.models.loss import ObjectiveConfig
from lightning_app.models.optim import OptimizerConfig, ScheduleConfig, build_optimizer
from lightning_app.plugins import KEY, digests, used_by, with_plugins
from lightning_app.runs.parent import FIELD, find_parent, with_parent
from lightning_app.scores.task_facts import TASKS

Tree = Mapping[str, Any]
NO_EFFECT = "no effect, since the run would train the same with the default"
_DENSE = 20_000
"""The first steps, all of whose rates are compared; about as many later ones are, evenly spaced."""
_PRECISIONS = {"16": "16-mixed", "bf16": "bf16-mixed", "32": "32-true", "64": "64-true"}
"""The short names that Lightning accepts for a precision."""


def identity_of(config: Tree, fetch: bool = True) -> Identity:
    """Return the identity of a resolved config.

    Args:
        config: The config of a run, with every default.
        fetch: Whether to download a corpus that is not on this machine. Otherwise the identity then
            has no corpus, and its id matches no run.

    Raises:
        UserError: if files of the corpus are missing.
    """
    blocks = _blocks(_wiring(config))
    found = identify(
        named_by_content(config), blocks=blocks, corpus=corpus_of(config["data"], fetch)
    )
    return replace(found, effect=effect_of(config))


def named_by_content(config: Tree) -> dict[str, Any]:
    """Return a config in which its parent and its plug-ins are named by content.

    A changed checkpoint or plug-in therefore makes another experiment; a moved one does not.

    Raises:
        UserError: if there is no such parent, or a plug-in of both has changed since.
    """
    stacks = stacks_of(config)
    _check_parts_of_parent(config, stacks)
    return with_plugins(with_parent(config), stacks)


def _check_parts_of_parent(config: Tree, stacks: Tree) -> None:
    """Refuse a parent with another version of a plug-in: its block may differ."""
    given = config["model"]["init_from"]
    if given is None:
        return
    folder = find_parent(given).config.parent
    record = read_record(folder)
    known = {} if record is None else record.config
    for name, digest in used_by(config, stacks).items():
        there = known.get(f"{KEY}.{name}", digest)
        if there != digest:
            raise UserError(
                f"{FIELD}: {folder}: its plug-in {name} has the sha256 {there[:16]} there and "
                f"{digest[:16]} here; the version of the parent is needed"
            )


def cell_id(config: Tree) -> str:
    """Return the id of a resolved config: 16 hexadecimal digits over what can change its result."""
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


def effect_of(config: Tree) -> tuple[str, str]:
    """Return what a run reads from its resolved config: equal for configs that train the same.

    The optimizer is included as its whole section, because `optimizer_effect` is slow.

    The effect consists of what is built, not of the fields that it is built from: the resolved
    blocks, the arguments of the optimizer, the rate at every step, and the data settings that the
    task reads. A part of a plug-in contributes all fields that it could read.
    """
    model, trainer = config["model"], config["trainer"]
    apart = ("block", "architecture", "objective", "optimizer", "schedule", "compile")
    task = model["objective"]["kind"]
    facts = TASKS[task]
    own = model["class_path"] is not None or config["data"]["class_path"] is not None
    known = not facts.module and not own  # a plug-in's class may read any field
    length = config["data"]["window"] + 2 if known and not facts.pairs else None  # with marks
    architecture = dict(model["architecture"])
    if known and facts.labelled:  # no scores over the vocabulary
        architecture |= {"logit_cap": None, "tie_embeddings": None}
    wiring = json.dumps([architecture, model["block"], length, digests()], sort_keys=True)
    steps, ends = trainer["max_steps"], json.dumps(trainer["max_epochs"])
    # Without the usual values, as in records from before these fields.
    usual = {"power": 1.0, "batch_warmup_steps": 0, "batch_start": 0.0}
    schedule = {
        key: value for key, value in model["schedule"].items() if value != usual.get(key, ...)
    }
    parts = (
        json.dumps(config["seed_everything"]),
        canonical({key: value for key, value in model.items() if key not in apart}),
        _wired(wiring),
        _scheduled(canonical(schedule), steps, ends),
        _aimed(canonical(model["objective"]), known),
        _fed(canonical(config["data"]), known),
        _trained(canonical(trainer)),
    )
    optimizer = dict(model["optimizer"])
    for name, usual in (("arguments", None), ("block_rate", 1.0)):
        if optimizer[name] == usual:  # as in records from before the field
            del optimizer[name]
    return "\n".join(parts), canonical(optimizer)


def unread(config: Tree) -> dict[str, Any]:
    """Return the settings of a resolved config with whose defaults the run would train the same.

    Left out are settings whose default is refused beside the others, and those of the evaluation
    and of the Trainer.
    """

    def trained(tree: Tree) -> tuple[str, str]:
        effect, optimizer = effect_of(tree)
        return effect, optimizer_effect(optimizer)

    defaults, own, found = {**pins()["config"], **pins()["added"]}, trained(config), {}
    for key, value in relevant(config).items():
        if not key.startswith(("model.", "data.")) or key in EVALUATION or key not in defaults:
            continue
        try:
            if trained(resolve(replaced(config, key, defaults[key]), key)) == own:
                found[key] = value
        except UserError:  # the default is refused, so the setting matters
            continue
    return found


@lru_cache(maxsize=1024)
def _wired(text: str) -> str:
    """What the sections `architecture` and `block` build.

    With `length`, the tokens of the longest text, spans that hide no key count as absent.
    """
    architecture, block, length, plugins = json.loads(text)
    parts = {"architecture": architecture, "block": block}
    model = model_config(parts)
    sizes, order = asdict(model.architecture.sizes()), model.architecture.order()
    if not _reads_slope(model.architecture):
        sizes["activation_slope"] = None
    positions = asdict(order)
    if type(order).__module__.startswith("lightning_app.") and order.longest == math.inf:
        del positions["max_positions"]
    stacks = model.architecture.stacks(model.block)
    cross = model.architecture.kind == "encoder_decoder"
    built = {
        side: _built(spec, cross=cross and side == "decoder", causal=side == "decoder", to=length)
        for side, spec in stacks.items()
    }
    around = [sizes, type(order).__qualname__, positions, model.architecture.embedding_norm]
    output = {
        "logit_cap": model.architecture.logit_cap,
        "untied": model.architecture.tie_embeddings is False or None,
        "seeding": None if model.architecture.seeding == "order" else model.architecture.seeding,
    }
    # Without the usual values, so that effects are those of records from before the fields.
    around += [[name, value] for name, value in output.items() if value is not None]
    return json.dumps([built, around, plugins], sort_keys=True)


def _reads_slope(architecture: ArchitectureConfig) -> bool:
    sample = torch.linspace(-3.0, 3.0, 13)
    function = ACTIVATIONS[architecture.activation].function
    return not torch.equal(function(sample, 0.25), function(sample, 0.5))


def _built(spec: StackSpec, *, cross: bool, causal: bool, to: int | None) -> dict[str, Any]:
    """A stack without the fields that its blocks do not use."""
    plain = asdict(spec)
    if spec.memory is not None:
        plain["memory"]["evaluation_length"] = spec.memory.lengths[1]
    if len(spec.blocks) == 1:  # no other layer shares its parameters or receives its scores
        del plain["share"]
        for kind in ("self_attention", "cross_attention"):
            plain["blocks"][0][kind].pop("carry", None)
    for block, found in zip(spec.blocks, plain["blocks"], strict=True):
        found["around_ff"] = asdict(block.built_around_ff)
        if block.layout == "parallel":
            del found["around_self"]["skip"]
        if block.share_branch_gain:
            del found["around_ff"]["branch"]
        if not cross:
            del found["around_cross"], found["cross_attention"]
        attention, kept = block.self_attention, found["self_attention"]
        for part in ("value", "output"):
            if not getattr(attention, part).endswith("_plus"):
                del kept[f"{part}_gains"]
        if attention.shaping is not None and not attention.shaping.learned:
            del kept["shaping"]["per_head"]
        if attention.adaptive_span is not None:
            del kept["adaptive_span"]["trim"]  # same numbers, only faster
        span = attention.localised_span
        if span is None or to is None or spec.memory is not None:
            continue
        if span.window.hides_nothing(to, causal=causal):
            kept["localised_span"] = None
    return plain


@lru_cache(maxsize=1024)
def optimizer_effect(text: str) -> str:
    """Return the fields of a section `optimizer` that are read when it is built and at a step.

    This builds an optimizer; before the first one torch imports its compiler. All fields count as
    read for one that cannot take a step here.
    """
    config = read(OptimizerConfig, json.loads(text), at="model.optimizer")
    seen: set[str] = set()

    class Watched(OptimizerConfig):
        def __getattribute__(self, name: str) -> Any:
            seen.add(name)
            return super().__getattribute__(name)

    watched = Watched(**asdict(config))
    seen.clear()
    with torch.random.fork_rng(devices=[]):  # a caller may train afterwards
        model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
    model(torch.ones(1, 2)).square().sum().backward()
    try:
        optimizer = build_optimizer(watched, model, fused=False)
        optimizer.step()
    except Exception:  # of a plug-in or a library, which may need other shapes; a run will tell
        return text
    kept = {field.name: getattr(config, field.name) for field in fields(config)}
    if config.kind == "adamw" and not config.weight_decay:
        kept["kind"] = "adam"  # they differ only in what the decay is added to
    return canonical({name: value for name, value in kept.items() if name in seen | {"kind"}})


@lru_cache(maxsize=1024)
def _scheduled(text: str, steps: int, epochs: str) -> str:
    """The factor of the rate at every step, or the fields if the number of steps is unknown."""
    if steps < 1:
        return text
    config = ScheduleConfig(**json.loads(text))
    digest = hashlib.sha256(f"{epochs} {config.ends}".encode())
    sparse = range(_DENSE, steps + 1, max(1, steps // _DENSE))
    for step in (*range(1, min(_DENSE, steps + 1)), *sparse):
        digest.update(struct.pack("d", config.factor(step, steps)))
        if config.batch_warmup_steps:
            digest.update(f"batch {config.batch_share(step)}".encode())
        if config.warmup_of != "all" and config.warmup_steps:
            digest.update(f"{config.warmup_of} {config.of_others().factor(step, steps)}".encode())
    return digest.hexdigest()


@lru_cache(maxsize=1024)
def _aimed(text: str, known: bool) -> str:
    """The objective without the fields that its task ignores."""
    tree = json.loads(text)
    config = ObjectiveConfig(**tree)
    if not known:
        return text
    if not config.intermediate_weight:
        del tree["auxiliary_tables"]
    if not TASKS[config.kind].pairs:
        del tree["validation_bleu"]
    if not TASKS[config.kind].pairs or not config.evaluate_test:
        del tree["beam"], tree["length_penalty"]
    return canonical(tree)


@lru_cache(maxsize=1024)
def _fed(text: str, known: bool) -> str:
    """The data section without paths and without the fields that its task ignores."""
    tree = {k: v for k, v in json.loads(text).items() if not is_irrelevant(f"data.{k}")}
    # Only which files are read counts, not where they are.
    places = json.loads(text)
    tree["root"], tree["cache"] = places["root"], places["cache"]
    facts = TASKS[tree["task"]]
    if not known:
        return canonical(tree)
    reads = {
        "window": not facts.pairs,
        "max_length": facts.pairs,
        "source_language": facts.pairs,
        "context_stride": facts.labelled == "answers",
        "mask_probability": facts.masks,
        "whole_word": facts.masks,
        "evaluation_streams": tree["order"] == "streams",
        "document_separator": facts.running_text or tree["next_sentence"],
        "tokenizer": tree["init_from"] is None,
        "vocab_size": tree["init_from"] is None,
    }
    if facts.in_windows(tree["next_sentence"]):
        tree["tokens_per_batch"] -= tree["tokens_per_batch"] % tree["window"]
    if tree["evaluation_stride"] is None and facts.running_text:
        tree["evaluation_stride"] = tree["window"]
    return canonical({key: value for key, value in tree.items() if reads.get(key, True)})


@lru_cache(maxsize=1024)
def _trained(text: str) -> str:
    """The fields of the Trainer that can change a number."""
    tree = json.loads(text)
    if not tree["gradient_clip_val"]:  # neither null nor 0 clips
        del tree["gradient_clip_val"], tree["gradient_clip_algorithm"]
    precision = str(tree["precision"] or OWN_DEFAULTS["precision"])
    tree["precision"] = _PRECISIONS.get(precision, precision)
    for split in ("train", "val", "test"):  # null means all of it
        limit = f"limit_{split}_batches"
        tree[limit] = 1.0 if tree[limit] is None else tree[limit]
    for name in ("min_steps", "min_epochs", "detect_anomaly"):  # no run ends early anyway
        tree.pop(name, None)
    return canonical({k: v for k, v in tree.items() if not is_irrelevant(f"trainer.{k}")})
