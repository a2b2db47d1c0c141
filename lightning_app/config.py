"""Complete and check the config of one run. Lightning is imported only if the parser is needed."""

import math
from collections.abc import Mapping
from typing import Any

from lightning_app.bounds import check_accumulation, check_bounds
from lightning_app.completion import complete_plain
from lightning_app.data.config import DataConfig
from lightning_app.data.corpus import resolved_data
from lightning_app.data.prepare import PreparedCorpus, find
from lightning_app.data.sources import require_test
from lightning_app.errors import UserError, named
from lightning_app.identity.relevant import without_removed
from lightning_app.names import check_names, check_once
from lightning_app.own_class import CLASS_FIELDS
from lightning_app.parent_weights import check_parent
from lightning_app.sections import PARTS, DataSection, arguments, hints_of, model_config
from lightning_app.task_facts import TASKS, fill_by_task


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
            from lightning_app.parser import parse_config

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
        from lightning_app.parser import check_classes

        check_classes(tree)
    if tree["trainer"]["callbacks"]:
        from lightning_app.callbacks.averaging import check_callbacks

        check_callbacks(tree)
