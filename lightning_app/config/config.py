"""The config of one run as objects: read, completed and checked. Without Lightning."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from lightning_app.blocks.config import BlockConfig
from lightning_app.config.classes import (
    CLASS_FIELDS,
    OwnClass,
    check_callback,
    check_parts,
    classes_of,
    complete_classes,
    entries,
    made_object,
    own_arguments,
)
from lightning_app.config.parents import check_parent
from lightning_app.config.rules import RUN_RULES, RunSubject, check_rules, check_traits, declared
from lightning_app.config.sources import AUTO, Written, automatic_warmup, nested, without_derived
from lightning_app.config.trainer import TrainerConfig
from lightning_app.config.tree import check_numbers, check_seed
from lightning_app.core.errors import UserError, named
from lightning_app.core.schema import as_plain, check_keys, read
from lightning_app.data.config import DataConfig
from lightning_app.data.prepare import PreparedCorpus, find
from lightning_app.data.sources import require_test, resolved_data
from lightning_app.models.heads import ArchitectureConfig
from lightning_app.models.loss import ObjectiveConfig
from lightning_app.models.optim import OptimizerConfig, ScheduleConfig
from lightning_app.runs.folder import NAMED
from lightning_app.scores.task_facts import TASKS, Monitored, fill_by_task, glue_task_of


@lru_cache(maxsize=64)  # cells of a grid share them
def _check_callbacks(given: str, monitored: Monitored, steps: int) -> None:
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import ModelCheckpoint

    ours = {
        ModelCheckpoint(monitor=monitored.metric, mode=monitored.mode).state_key: "best",
        ModelCheckpoint().state_key: "last",
    }
    seen: set[str] = set()
    for entry in json.loads(given):
        name = str(entry["class_path"]).rpartition(".")[2]
        # A class outside the tables was imported when the config was completed.
        callback = made_object("trainer.callbacks", entry, imports=True)
        check_callback(name, (kind.__name__ for kind in type(callback).__mro__))
        if steps > 0 and hasattr(callback, "check_steps"):
            callback.check_steps(steps)
        if type(callback).state_dict is pl.Callback.state_dict:
            continue
        if isinstance(callback, ModelCheckpoint):
            _check_own_checkpoints(name, entry.get("init_args") or {}, ours.get(callback.state_key))
        if callback.state_key in seen:
            raise UserError(
                f"trainer.callbacks: {name}: two of the same settings, of which Lightning stores "
                "one in a checkpoint; remove one"
            )
        seen.add(callback.state_key)


def _check_own_checkpoints(name: str, given: dict[str, Any], same: str | None) -> None:
    """Refuse a ModelCheckpoint that duplicates `same`, one of ours, or writes one of its files."""
    if same is not None:
        which = f"monitor: {given.get('monitor') or 'null'}, mode: {given.get('mode')}"
        raise UserError(
            f"trainer.callbacks: {name} with {which} and no every_n_train_steps is the callback "
            f"that already keeps checkpoints/{same}.ckpt of each run; remove it, or give it "
            "every_n_train_steps or another monitor"
        )
    if given.get("dirpath") is None and (given.get("filename") in NAMED or given.get("save_last")):
        field = "save_last" if given.get("save_last") else f"filename: {given['filename']}"
        raise UserError(
            f"trainer.callbacks: {name} with {field} would write checkpoints/best.ckpt or "
            "last.ckpt, which each run keeps already; remove it, or give it another filename"
        )


@dataclass(frozen=True, kw_only=True)
class ModelConfig(OwnClass):
    """The `model` section of a run: the arguments of `TransformerModule`, documented there."""

    block: BlockConfig = BlockConfig()
    architecture: ArchitectureConfig = ArchitectureConfig()
    objective: ObjectiveConfig = ObjectiveConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    compile: Literal["none", "blocks"] = "none"
    pack: int = 1
    init_from: str | None = None


@dataclass(frozen=True, kw_only=True)
class DataSection(DataConfig, OwnClass):
    """The `data` section of a run: the arguments of `TextDataModule`."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """The config of a run."""

    seed_everything: int = 1
    """The seed of initial values, batches and dropout."""
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    """The arguments of Lightning's Trainer."""
    model: ModelConfig = ModelConfig()
    """The model, its optimisation and its task."""
    data: DataSection = field(default_factory=DataSection)
    """The corpus and its batches."""


_LINKED = {"data": ("task", "next_sentence", "init_from", "seed"), "objective": ("glue",)}
"""The fields derived from others; they come last in their sections of `config.yaml`."""


def load_config(written: Written, *, imports: bool = True, trains: bool = True) -> dict[str, Any]:
    """Return the complete config of files and overrides, like `resolve`.

    Args:
        written: The content of the files and the command line.
        trains: Whether the run is trained; if not, its schedule may be one of an earlier version.
        imports: Whether it may name classes outside the tables, which are then imported.

    Raises:
        UserError: naming the file, the field, the expected and the actual value.
    """
    with written.located():
        return _complete(written.typed(Config), imports=imports, trains=trains)


def resolve(tree: Mapping[str, Any], source: str, *, imports: bool = False) -> dict[str, Any]:
    """Return the complete config of a run: every default filled in, every pair of values checked.

    Args:
        tree: The config as a user wrote it.
        source: The name of the config in error messages: its file and, in a grid, the cell.
        imports: Whether it may name classes outside the tables, which are then imported.

    Raises:
        UserError: for an unknown key, a wrong type, or an impossible pair.
    """
    if not isinstance(tree, dict):
        raise UserError(f"{source}: expected a mapping of sections, found {tree!r}")
    with named(source):
        tree = without_derived(nested(tree))
        return _complete(tree, imports=imports)


def _complete(tree: dict[str, Any], *, imports: bool, trains: bool = True) -> dict[str, Any]:
    check_numbers(tree)
    if "seed_everything" in tree:
        check_seed(tree["seed_everything"])
    config = _sections(linked(tree))
    full_tree = tree_of(config, imports=imports)
    check(full_tree, config, trains=trains)
    return full_tree


def _sections(tree: Mapping[str, Any]) -> Config:
    """Read the sections in order, so that the first mistake is the one reported."""
    check_keys(Config, tree)
    kinds = {"trainer": TrainerConfig, "model": ModelConfig, "data": DataSection}
    parts: dict[str, Any] = {
        name: read(kind, tree.get(name, {}), at=name) for name, kind in kinds.items()
    }
    return Config(seed_everything=tree.get("seed_everything", Config.seed_everything), **parts)


def linked(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config with its derived fields, before anything is checked."""
    config = dict(tree)
    model = _section(config, "model")
    data = _section(config, "data")
    objective = None if model is None else _section(model, "objective")
    schedule = None if model is None else _section(model, "schedule")
    if model is not None and schedule is not None and schedule.get("warmup_steps") == AUTO:
        schedule["warmup_steps"] = automatic_warmup(model.get("optimizer"))
    if model is None or data is None or objective is None:
        return config
    # A default is a class attribute of a dataclass.
    kind = objective.setdefault("kind", ObjectiveConfig.kind)
    data["task"], data["init_from"] = kind, model.get("init_from")
    data["next_sentence"] = objective.get("next_sentence", False)
    data["seed"] = config.get("seed_everything", Config.seed_everything)
    name = data.get("name", DataSection.name)
    objective["glue"] = glue_task_of(name) if isinstance(name, str) else None
    objective.setdefault("label_smoothing", None)
    if isinstance(kind, str):
        fill_by_task(objective)
    return config


def _section(tree: dict[str, Any], name: str) -> dict[str, Any] | None:
    part = tree.get(name, {})
    if not isinstance(part, dict):
        return None
    tree[name] = dict(part)
    return tree[name]


def tree_of(config: Config, *, imports: bool = False) -> dict[str, Any]:
    """Return a config as `config.yaml` holds it: plain values, every default."""
    model, data = as_plain(config.model), as_plain(config.data)
    model["objective"] = _last(model["objective"], _LINKED["objective"])
    return {
        "seed_everything": config.seed_everything,
        "trainer": as_plain(complete_classes(config.trainer, imports=imports)),
        "model": _last(model, CLASS_FIELDS),
        "data": _last(data, _LINKED["data"]),
    }


def _last(tree: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    rest = {name: value for name, value in tree.items() if name not in names}
    return {**rest, **{name: tree[name] for name in names}}


def model_config(section: Mapping[str, Any]) -> ModelConfig:
    """Return a complete `model` section as an object. Raises `UserError`."""
    return read(ModelConfig, section, at="model")


def check(tree: dict[str, Any], config: Config, *, trains: bool) -> None:
    """Refuse a complete config whose parts are incompatible, before anything is loaded.

    Without `trains` its schedule may be one that an earlier version accepted.
    """
    model, trainer = config.model, tree["trainer"]
    check_numbers(tree)
    check_parts(trainer)
    for section in ("model", "data"):
        if any(tree[section][name] is not None for name in CLASS_FIELDS):
            own_arguments(section, tree[section])
    if trainer["callbacks"]:  # Lightning is imported only if a config names some
        monitored = TASKS[tree["model"]["objective"]["kind"]].monitored
        _check_callbacks(json.dumps(entries(trainer["callbacks"])), monitored, trainer["max_steps"])
    try:
        stacks = model.architecture.stacks(model.block)
        model.architecture.sizes()
        if config.data.intra_document_masking:
            for spec in stacks.values():
                spec.check_documents()
    except ValueError as error:
        raise UserError(f"model: {error}") from error
    predicting = model.architecture.predicting
    predicts = stacks[predicting]
    check_traits(_traits(tree, model, [b for spec in stacks.values() for b in spec.blocks]))
    task = TASKS[tree["model"]["objective"]["kind"]]
    check_rules(RUN_RULES, RunSubject(tree, model, task, predicts.memory, trains))
    if trains:
        model.schedule.check(trainer["max_steps"])
    if model.schedule.warmup_of == "output" and not _has_output(model):
        model.schedule.check_roles(("embeddings", "matrices", "gains"))
    bounded = max(trainer["max_steps"], trainer["max_epochs"] or 0) >= 1
    model.objective.auxiliary().check(predicting, predicts, bounded=bounded)
    check_parent(tree)
    if tree["model"]["objective"]["evaluate_test"]:
        require_test(config.data)


_UNBIASED = ("sinusoidal", "sinusoidal_fairseq", "learned", "rope")
"""Other positions, those of a plug-in too, may add terms to logits that do not shrink with them."""


def _traits(
    tree: Mapping[str, Any], model: ModelConfig, blocks: list[Any]
) -> Iterator[tuple[str, str]]:
    callbacks = [path.rpartition(".")[2] for path, _ in classes_of(tree["trainer"]["callbacks"])]
    parts = (*blocks, model.optimizer, model.schedule)
    yield from declared(parts, callbacks, tree["trainer"]["strategy"])
    if model.architecture.positions not in _UNBIASED:
        yield "other_logits", f"model.architecture.positions: {model.architecture.positions}"
    if model.pack > 1:
        yield "packed", f"model.pack: {model.pack}"
    if model.compile != "none":
        yield "other_logits", f"model.compile: {model.compile}"


def _has_output(model: ModelConfig) -> bool:
    """Whether matrices follow the blocks; the class of a plug-in may have some."""
    auxiliary, architecture = model.objective.auxiliary(), model.architecture
    tables = auxiliary.second_target or auxiliary.own_tables
    untied = architecture.tie_embeddings is False
    return bool(untied or tables or architecture.kind == "encoder" or model.class_path)


def check_rows(tree: Mapping[str, Any], corpus: PreparedCorpus | None = None) -> None:
    """Refuse a complete config with fewer positions than the longest row of any split.

    `check` compares them with the length of windows and training sentences. No pair of
    valid and test is dropped or cut.

    Args:
        tree: The config.
        corpus: Its corpus; None to look it up, checking nothing if it is not prepared.

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


def transformer_module(section: Mapping[str, Any]) -> Any:
    """Return the module of a complete `model` section, with its model not yet built."""
    kind, extra = own_arguments("model", section)
    return kind(**vars(model_config(section)), **extra)


def data_module(section: Mapping[str, Any]) -> Any:
    """Return the data module of a complete `data` section."""
    kind, extra = own_arguments("data", section)
    named = {name: section.get(name) for name in CLASS_FIELDS}
    return kind(**vars(resolved_data(section)), **named, **extra)


def read_config(path: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """Return the complete config of a file with overrides, read like `ablate fit`.

    Raises:
        UserError: for a mistake in either.
    """
    return load_config(Written(["--config", str(path), *overrides]))
