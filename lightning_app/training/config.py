"""A config: completed with defaults, and checked.

Complete a config of plain values as LightningCLI's parser does, without importing it.

Nothing is guessed: every value whose meaning depends on the parser is left to it. So are all
mistakes, since the parser's message says what would be right.

Complete and check the config of one run. Lightning is imported only if the parser is needed.
"""

import json
import math
import re
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import MISSING, asdict, fields, is_dataclass
from functools import cache
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from lightning_app.config.bounds import check_accumulation, check_bounds
from lightning_app.config.identity import without_removed
from lightning_app.config.names import (
    SECTIONS,
    TRAINER_DEFAULTS,
    Argument,
    check_names,
    check_once,
    trainer_arguments,
)
from lightning_app.config.parents import check_parent
from lightning_app.config.sections import (
    PARTS,
    DataSection,
    arguments,
    hints_of,
    kinds_of,
    model_config,
    part_of,
)
from lightning_app.core.errors import UserError, named
from lightning_app.data.config import DataConfig
from lightning_app.data.prepare import PreparedCorpus, find, resolved_data
from lightning_app.data.sources import require_test
from lightning_app.plugins.own_class import CLASS_FIELDS
from lightning_app.scores.task_facts import TASKS, fill_by_task, glue_task_of

# Text that is no number, no YAML keyword and no path in a home folder; or a line of dashes.
_PLAIN = re.compile(r"(\.{0,2}/)*[A-Za-z_][\w./-]*|-{4,}")
_WORDS = {"null", "none", "true", "false", "yes", "no", "on", "off", "nan", "inf", "infinity"}


class _Unclear(Exception):
    """The parser must complete this config."""


def complete_plain(tree: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return `tree` with every default filled in, or None if the parser is needed."""
    try:
        if not set(tree) <= set(SECTIONS):
            raise _Unclear
        seed = tree.get("seed_everything", 1)
        if type(seed) is not int:
            raise _Unclear
        sections = {name: _section(kind, tree.get(name, {})) for name, kind in PARTS.items()}
        trainer = _trainer(tree.get("trainer", {}))
    except _Unclear:
        return None
    # The parser links these fields.
    objective = sections["model"]["objective"]
    sections["data"] |= {"task": objective["kind"], "next_sentence": objective["next_sentence"]}
    sections["data"] |= {"seed": seed, "init_from": sections["model"]["init_from"]}
    sections["model"] |= {
        "objective": {**objective, "glue": glue_task_of(sections["data"]["name"])}
    }
    # A copy, since the next config uses the same defaults.
    return deepcopy({"seed_everything": seed, "trainer": trainer, **sections})


def _section(kind: type, value: Any) -> dict[str, Any]:
    """Return a section or a part of one, complete."""
    if not isinstance(value, dict):
        raise _Unclear
    hints, defaults = hints_of(kind), _defaults(kind)
    if not set(value) <= set(hints) <= set(value) | set(defaults):
        raise _Unclear
    return {
        name: _value(hint, value[name], defaults.get(name)) if name in value else defaults[name]
        for name, hint in hints.items()
    }


@cache
def _defaults(kind: type) -> dict[str, Any]:
    """Return the plain defaults of the fields of a dataclass that have one."""
    found: dict[str, Any] = {}
    for field in fields(kind):
        if field.default_factory is not MISSING:
            found[field.name] = _plain(field.default_factory())
        elif field.default is not MISSING:
            found[field.name] = _plain(field.default)
    return found


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    if isinstance(value, dict):
        return {key: _plain(part) for key, part in value.items()}
    return list(value) if isinstance(value, tuple) else value


def _value(hint: Any, value: Any, default: Any) -> Any:
    kinds = kinds_of(hint)
    if value is None:
        if NoneType in kinds:
            return None
        raise _Unclear
    if part := part_of(hint):
        # A missing field of a part has its own default or that of the section around it.
        if default not in (None, _defaults(part)):
            raise _Unclear
        return _section(part, value)
    (kind, *others) = [each for each in kinds if each is not NoneType]
    if others:
        raise _Unclear
    if get_origin(kind) is Literal:
        if isinstance(value, str) and value in get_args(kind):
            return value
    elif get_origin(kind) is tuple:
        if type(value) is list and len(value) == len(get_args(kind)):
            return [
                _value(part, each, None) for part, each in zip(get_args(kind), value, strict=True)
            ]
    elif kind is float and _is_number(value):
        return float(value)
    elif type(value) is kind and kind in (int, bool, str) and (kind is not str or _is_plain(value)):
        return value
    raise _Unclear


def _is_number(value: Any) -> bool:
    exact = type(value) is int and abs(value) < 1 << 53
    return exact or (type(value) is float and math.isfinite(value))


def _is_plain(text: str) -> bool:
    return _PLAIN.fullmatch(text) is not None and text.lower() not in _WORDS


def _trainer(section: Any) -> dict[str, Any]:
    """Return the complete section `trainer`; the parser completes what is not plain, once."""
    known = trainer_arguments()
    if known is not None and isinstance(section, dict) and set(section) <= set(known):
        defaults = {name: argument.default for name, argument in known.items()}
        if all(_is_clear(known[name], value) for name, value in section.items()):
            return defaults | TRAINER_DEFAULTS | section
    try:
        text = json.dumps(section)
    except (TypeError, ValueError, RecursionError) as error:
        raise _Unclear from error
    if json.loads(text) != section:
        raise _Unclear
    return json.loads(_parsed(text))


def _is_clear(argument: Argument, value: Any) -> bool:
    """Whether the parser keeps a value as written, for every type that the argument allows."""
    kinds = argument.kinds
    if value is None:
        return "None" in kinds
    if type(value) is bool:
        return "bool" in kinds and not kinds & {"int", "float"}
    if type(value) is str:
        # If the argument may be an object, the parser reads a file of that name.
        return "str" in kinds and _is_plain(value) and not Path(value).exists()
    if type(value) is float:
        return "float" in kinds and math.isfinite(value)
    if type(value) is int and "float" in kinds and not _is_number(value):
        return False  # the parser turns it into the nearest float
    return type(value) is int and "int" in kinds and "bool" not in kinds


@cache
def _parsed(text: str) -> str:
    """Return a section `trainer`, given as JSON, completed by the parser."""
    from lightning_app.training.parser import parse_config

    return json.dumps(parse_config({"trainer": json.loads(text)})["trainer"])


def resolve(tree: dict[str, Any], source: str) -> dict[str, Any]:
    """Return the complete config of a run: every default filled in, every pair checked.

    Plain values are completed here. LightningCLI's parser, which takes seconds to import, is used
    only if another value occurs. `parse` always uses it, and must give the same result.

    Args:
        tree: The config as a user wrote it.
        source: The name of the config in error messages: the file, and the cell of a grid.

    Raises:
        UserError: for an unknown key, a wrong type, or an impossible pair.
    """
    return _checked(tree, source, by_parser=False)


def parse(tree: dict[str, Any], source: str) -> dict[str, Any]:
    """Return the same as `resolve`, always by LightningCLI's parser, which defines each value.

    A run is trained from this config, not from the planned one.
    """
    return _checked(tree, source, by_parser=True)


def _checked(tree: dict[str, Any], source: str, *, by_parser: bool) -> dict[str, Any]:
    if not isinstance(tree, dict):
        raise UserError(f"{source}: expected a mapping of sections, found {tree!r}")
    with named(source):
        tree = without_removed(tree)
        check_names(tree)
        check_once(tree)
        complete = None if by_parser else complete_plain(tree)
        if complete is None:
            from lightning_app.training.parser import parse_config

            complete = parse_config(tree)
        fill_by_task(complete["model"]["objective"])
        check(complete)
        return complete


def check(tree: dict[str, Any], *, trains: bool = True) -> None:
    """Refuse a complete config whose parts do not go together, before anything is loaded.

    Without `trains` its schedule may be one that an earlier version took.
    """
    model = model_config(tree["model"])
    data_arguments = arguments("data", hints_of(DataSection), tree["data"])
    check_bounds(tree)
    _check_classes(tree)
    try:
        stacks = model.architecture.stacks(model.block)
        model.architecture.sizes()
    except ValueError as error:
        raise UserError(f"model: {error}") from error
    objective, kind = tree["model"]["objective"]["kind"], tree["model"]["architecture"]["kind"]
    task = TASKS[objective]
    if task.architecture != kind:
        raise UserError(
            f"model.architecture.kind: '{kind}' cannot serve model.objective.kind '{objective}'; "
            f"use '{task.architecture}'"
        )
    trainer = tree["trainer"]
    if trainer["val_check_interval"] == 0:
        raise UserError("trainer.val_check_interval: 0 is no interval; at least 1 step")
    interval = trainer["val_check_interval"]
    if isinstance(interval, float) and trainer["check_val_every_n_epoch"] is None:
        raise UserError(
            f"trainer.val_check_interval: expected a whole number of steps, found {interval}; a "
            "share of an epoch needs trainer.check_val_every_n_epoch"
        )
    if trainer["max_steps"] == -1 and not (trainer["max_epochs"] or trainer["max_time"]):
        raise UserError("trainer.max_steps: -1 never ends; set it, max_epochs or max_time")
    if trainer["use_distributed_sampler"]:
        raise UserError("trainer.use_distributed_sampler: must be false; our samplers share out")
    check_accumulation(trainer["accumulate_grad_batches"])
    if model.schedule.ends and trainer["max_steps"] < 1:
        raise UserError(
            f"trainer.max_steps: the {model.schedule.kind} schedule needs a number of steps"
        )
    if trains:
        model.schedule.check(trainer["max_steps"])
    bounded = max(trainer["max_steps"], trainer["max_epochs"] or 0) >= 1
    predicting = model.architecture.predicting
    model.objective.auxiliary().check(predicting, stacks[predicting], bounded=bounded)
    architecture, length = model.architecture, tree["data"][task.length]
    if architecture.order().longest < (needed := length + task.marks):
        raise UserError(
            f"model.architecture.max_positions: {architecture.max_positions} "
            f"{architecture.positions} positions are too few for data.{task.length} {length}; "
            f"at least {needed}"
        )
    corpus = DataConfig(**{k: v for k, v in data_arguments.items() if k not in CLASS_FIELDS})
    if corpus.intra_document_masking:
        try:
            for spec in stacks.values():
                spec.check_documents()
        except ValueError as error:
            raise UserError(f"data.{error}") from error
    if stacks[predicting].memory is not None and corpus.order != "streams":
        raise UserError(
            f"data.order: '{corpus.order}' with model.block.memory, which needs the segments of a "
            "text one after another; use 'streams'"
        )
    check_parent(tree)
    if tree["model"]["objective"]["evaluate_test"]:
        require_test(corpus)


def check_rows(tree: Mapping[str, Any], corpus: PreparedCorpus | None = None) -> None:
    """Refuse a complete config whose positions end before a row of any split does.

    `check` compares them with the length of windows and training sentences. Of pairs, no row of
    valid and test is left out or cut.

    Args:
        tree: The config.
        corpus: Its corpus; None to look for it, and to check nothing where it is not prepared.

    Raises:
        UserError: naming the field, the row and both numbers.
    """
    architecture = model_config(tree["model"]).architecture
    longest = architecture.order().longest
    if longest == math.inf or not TASKS[tree["model"]["objective"]["kind"]].pairs:
        return
    corpus = corpus or find(resolved_data(tree["data"]))
    if corpus is None:
        return
    for split in corpus.meta["sizes"]:
        for column in corpus.meta["tokens"][split]:
            lengths = corpus.lengths(split, column)
            if (needed := int(lengths.max())) > longest:
                raise UserError(
                    f"model.architecture.max_positions: {architecture.max_positions} "
                    f"{architecture.positions} positions are too few for row "
                    f"{int(lengths.argmax()) + 1} of the {split} split, whose {column} has "
                    f"{needed} tokens; at least {needed}"
                )


def _check_classes(tree: dict[str, Any]) -> None:
    """Check the classes that a config names; Lightning is imported only if it names one."""
    if any(tree[section][field] is not None for section in PARTS for field in CLASS_FIELDS):
        from lightning_app.training.parser import check_classes

        check_classes(tree)
    if tree["trainer"]["callbacks"]:
        from lightning_app.training.callbacks.safety import check_callbacks

        check_callbacks(tree)
