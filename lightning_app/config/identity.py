"""The identity of an experiment: the fields that can change its result, `identity.json`, and the
plug-ins that its run needs."""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cache
from importlib.resources import files
from itertools import chain
from pathlib import Path
from typing import Any

from lightning_app.config.tree import lookup, replaced
from lightning_app.core.errors import UserError
from lightning_app.core.files import write_whole
from lightning_app.core.project import PROJECT
from lightning_app.core.registry import makers, owners
from lightning_app.plugins import KEY, digests_of, loaded
from lightning_app.runs.folder import IDENTITY, RunFolder

Tree = Mapping[str, Any]


_IRRELEVANT = (
    *("trainer.accelerator", "trainer.devices", "trainer.num_nodes", "trainer.logger"),
    *("trainer.log_every_n_steps", "trainer.profiler", "trainer.barebones"),
    *("trainer.enable_checkpointing", "trainer.enable_progress_bar"),
    *("trainer.enable_model_summary", "trainer.enable_autolog_hparams"),
    *("trainer.default_root_dir", "trainer.model_registry", "trainer.limit_predict_batches"),
    *("model.compile", "data.root", "data.tokenizer_file", "data.cache", "data.num_workers"),
)
"""Where, on what and how verbosely a run is executed, including everything inside these fields.

`data.root`, `data.tokenizer_file` and `data.cache` say where files lie; they count by content.
"""

_HARMLESS: Mapping[str, tuple[str, ...]] = {
    "trainer.callbacks": (
        *("DeviceStatsMonitor", "LearningRateMonitor", "ModelCheckpoint", "ModelSummary"),
        *("RichModelSummary", "RichProgressBar", "TQDMProgressBar", "ThroughputMonitor"),
        *("GainLogger", "Pictures", "Progress", "SignalProbe", "Throughput"),
        "UpdateProbe",
    ),
    "trainer.plugins": (
        *("AsyncCheckpointIO", "TorchCheckpointIO", "WholeCheckpoints"),
        *("LightningEnvironment", "SLURMEnvironment", "TorchElasticEnvironment"),
    ),
    "trainer.strategy": (
        *("auto", "ddp", "ddp_spawn", "ddp_fork", "ddp_notebook", "fsdp"),
        *("ddp_find_unused_parameters_false", "ddp_find_unused_parameters_true"),
    ),
}
"""The callbacks, plugins and strategies that only watch, store or distribute the same work."""

_OURS = ("lightning.pytorch.", "lightning.fabric.", "lightning_app.")
"""The packages to which the class names above refer."""


@cache
def pins() -> Mapping[str, Mapping[str, Any]]:
    """Return the pinned defaults: `config` and `blocks` by dotted key, and later additions.

    An id holds only what differs from them, so that a new field at its default changes no id.
    `added` holds the config fields added after schema 2 was fixed, `added_blocks` those
    of a stack. A pin never changes, even if the default does.
    """
    return json.loads(files("lightning_app.config").joinpath("pins.json").read_text("utf-8"))


def leaves(tree: Tree, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) of every leaf; an empty mapping is a leaf."""
    for key, value in tree.items():
        dotted = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{dotted}.")
        else:
            yield dotted, value


def relevant(config: Tree) -> dict[str, Any]:
    """Return the fields of a resolved config that can change a result and differ from their pins.

    Limits of the test split count where the run evaluates it.
    """
    trainer = dict(config["trainer"])
    if not config["model"]["objective"]["evaluate_test"]:
        trainer["limit_test_batches"] = None
    return unusual({**config, "trainer": trainer})


def unusual(config: Tree) -> dict[str, Any]:
    """Return the same of a config that may lack sections."""
    usual = {**pins()["config"], **pins()["added"]}
    kept = {key: value for key, value in config.items() if key != "trainer"}
    if "trainer" in config:
        given = config["trainer"].items()
        kept["trainer"] = {key: _harmful(f"trainer.{key}", value) for key, value in given}
    differing = _differing(kept, usual)
    return {key: value for key, value in differing.items() if not is_irrelevant(key)}


def relevant_blocks(stacks: Tree) -> dict[str, Any]:
    """Return the differences from the pins in the specification of each stack, by layer."""
    plain = json.loads(json.dumps(stacks))
    usual = {**pins()["blocks"], **pins()["added_blocks"]}
    by_layer: dict[str, Any] = {}
    for side, stack in plain.items():
        around = {key: value for key, value in stack.items() if key != "blocks"}
        by_layer[side] = _differing(around, usual)
        for layer, block in enumerate(stack["blocks"]):
            by_layer[f"{side}.{layer}"] = _differing(block, usual, "blocks.")
    return by_layer


def completed(config: Tree) -> dict[str, Any]:
    """Return a config of an earlier version with today's fields."""
    tree = dict(config)
    for key, value in pins()["added"].items():
        section, _, name = key.rpartition(".")
        part = lookup(tree, section)
        if isinstance(part, Mapping) and name not in part:
            tree = replaced(tree, key, value)
    return tree


def without_evaluation_limits(config: Tree) -> dict[str, Any]:
    """Return a config that evaluates whole splits, since limits do not identify a run."""
    names = ("limit_val_batches", "limit_test_batches", "limit_predict_batches")
    return {**config, "trainer": {**config["trainer"], **dict.fromkeys(names)}}


def _differing(tree: Tree, usual: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The leaves that are not as pinned. A mapping whose pin is null counts as present."""
    differing: dict[str, Any] = {}
    for key, value in leaves(tree):
        pinned = f"{prefix}{key}"
        at = key.find(".")
        while at > 0:
            if usual.get(f"{prefix}{key[:at]}", {}) is None:
                differing[key[:at]] = {}
            at = key.find(".", at + 1)
        is_default = _same(value, usual[pinned]) if pinned in usual else _is_new_slot(pinned, value)
        if not is_default:
            differing[key] = value
    return differing


def _is_new_slot(key: str, value: Any) -> bool:
    """Whether a block field added after the pins is unused: null, false or none.

    A new block field thus leaves the ids of all blocks that do not use it unchanged.
    """
    if not key.startswith("blocks.") or value not in (None, False, "none"):
        return False
    siblings = key.rpartition(".")[0] + "."
    return any(pinned.startswith(siblings) for pinned in pins()["blocks"])


def _same(left: Any, right: Any) -> bool:
    """Whether two values are equal, also in type: 1 and 1.0 batches differ in meaning."""
    if isinstance(left, str | int | float | None):
        return type(left) is type(right) and left == right
    return json.dumps(left, sort_keys=True) == json.dumps(right, sort_keys=True)


def is_irrelevant(key: str) -> bool:
    """Whether a config field only sets where, on what or how verbosely a run is executed."""
    return any(key == name or key.startswith(f"{name}.") for name in _IRRELEVANT)


def _harmful(field: str, value: Any) -> Any:
    """The part of the Trainer's callbacks, plugins or strategy that is not known to be harmless."""
    if field not in _HARMLESS or value is None:
        return value
    entries = value if isinstance(value, list) else [value]
    harmful = [entry for entry in entries if not _is_harmless(field, entry)]
    if field == "trainer.strategy":
        return harmful[0] if harmful else "auto"
    return harmful or None


def _is_harmless(field: str, entry: Any) -> bool:
    names = _HARMLESS[field]
    if isinstance(entry, str):
        return entry in names or (entry.startswith(_OURS) and entry.rpartition(".")[2] in names)
    path = entry.get("class_path", "") if isinstance(entry, Mapping) else ""
    if field == "trainer.strategy":
        return False  # its arguments may change how gradients are exchanged
    return path.startswith(_OURS) and path.rpartition(".")[2] in names


SCHEMA = 2
"""The version of the id schema."""


@dataclass(frozen=True, kw_only=True)
class Identity:
    """Which experiment a config is.

    `id`: 16 hexadecimal digits over what can change the result. `corpus`: the digest of the
    corpus's content, None if its files are not on this machine.
    """

    id: str
    corpus: str | None = None


def experiment_id(config: Mapping[str, Any], blocks: Mapping[str, Any], corpus: str | None) -> str:
    """Return the id computed from the parts that can change a result."""
    tree = {"schema": SCHEMA, "config": config, "blocks": blocks, "corpus": corpus}
    text = json.dumps(tree, sort_keys=True, ensure_ascii=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


CONTINUED = "continued_from"
"""The field of a record for the checkpoints of other experiments from which the run continued."""


@dataclass(frozen=True, kw_only=True)
class Record:
    """Everything that can change the result of a run.

    `config` and `blocks` hold the fields that differ from the pinned defaults, `corpus` is the
    digest of the corpus's content.
    """

    config: Mapping[str, Any]
    blocks: Mapping[str, Any]
    corpus: str | None

    @classmethod
    def of(cls, config: Tree, stacks: Tree, corpus: str | None) -> "Record":
        """Return the record of a resolved config and its resolved blocks."""
        return cls(config=relevant(config), blocks=relevant_blocks(stacks), corpus=corpus)

    @property
    def id(self) -> str:
        """The id of the experiment: 16 hexadecimal digits."""
        return experiment_id(self.config, self.blocks, self.corpus)

    def with_config(self, fields: Mapping[str, Any]) -> "Record":
        """Return the record with other values of some fields of the config."""
        return replace(self, config={**self.config, **fields})

    def apart(self) -> "Record":
        """Return the record without the checkpoints that the run started from."""
        rest = {key: value for key, value in self.config.items() if key != CONTINUED}
        return replace(self, config=rest)

    def going_on(self, origin: "Record | None", checkpoint: str) -> "Record":
        """Return the record of a run that continues from a checkpoint.

        It is a different experiment from a run from step 0, unless the checkpoint is its own: of a
        run with the same record, in the same folder.

        Args:
            origin: The record of the run in whose folder the checkpoint lies, if any.
            checkpoint: The digest of the checkpoint.
        """
        before = [] if origin is None else list(origin.config.get(CONTINUED, ()))
        is_own = origin is not None and origin.apart().id == self.id
        begun = before if is_own else [*before, checkpoint]
        return self.with_config({CONTINUED: begun}) if begun else self

    def difference(self, other: "Record") -> str:
        """Describe how two records differ, with the first config field that does."""
        usual = {**pins()["config"], **pins()["added"]}
        for key in sorted({*self.config, *other.config}):
            mine, theirs = (record.config.get(key, usual.get(key)) for record in (self, other))
            if mine != theirs:
                return f"{key} is {json.dumps(mine)} there and {json.dumps(theirs)} here"
        if self.corpus != other.corpus:
            return "it was trained on other files of the corpus"
        return "its blocks are defined otherwise"


def write_record(folder: Path, record: Record) -> None:
    """Write `identity.json` into a run's folder."""
    tree = {"schema": SCHEMA, "id": record.id, **asdict(record)}
    write_whole(folder / IDENTITY, json.dumps(tree, indent=1))


def read_record(folder: Path) -> Record | None:
    """Read `identity.json` of a run's folder, None if it does not exist.

    Raises:
        UserError: if it is damaged.
    """
    path = folder / IDENTITY
    if not path.is_file():
        return None
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
        return Record(config=tree["config"], blocks=tree["blocks"], corpus=tree["corpus"])
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: damaged; move the run's folder away") from error


def keep_copies(folder: RunFolder, used: Mapping[str, str]) -> None:
    """Write the plug-ins of a run into its folder: `plugins.json`, and a copy of each file."""
    if not used:
        return
    plugins: dict[str, Any] = {}
    for name in used:
        plugin = loaded()[name]
        plugins[name] = {"source": plugin.source, "sha256": plugin.sha256}
        if plugin.content is not None:
            folder.plugin_copies.mkdir(exist_ok=True)
            (folder.plugin_copies / f"{name}.py").write_bytes(plugin.content)
    write_whole(folder.plugins, json.dumps(plugins, indent=1))


def needed_by(folder: Path) -> dict[str, str]:
    """Return the digest of each plug-in that the run in a folder needs, by name."""
    record = read_record(folder)
    config = {} if record is None else record.config
    start = f"{KEY}."
    return {key.removeprefix(start): config[key] for key in config if key.startswith(start)}


def missing(folder: Path) -> str:
    """Name a plug-in of a run that is not loaded or has changed; empty otherwise."""
    for name, digest in needed_by(folder).items():
        copy = RunFolder(folder).plugin_copies / f"{name}.py"
        shown = copy.name if copy.is_file() else name
        plugin = loaded().get(name)
        if plugin is not None and plugin.sha256 == digest:
            continue
        other = "" if plugin is None else f"; {plugin.source} has sha256 {plugin.sha256}"
        kept = f", such as its copy {copy} if you trust it" if copy.is_file() else ""
        option = "--plugin FILE" if copy.is_file() else "--plugin MODULE"
        return (
            f"run {folder} needs the plug-in {shown} (sha256 {digest}): pass {option}{kept}{other}"
        )
    return ""


def require(folder: Path) -> None:
    """Refuse a run whose plug-ins are not loaded or have changed. None of its code is executed.

    Raises:
        UserError: naming the plug-in, its digest and what to do.
    """
    if message := missing(folder):
        raise UserError(message)


def require_of(checkpoint: Path) -> None:
    """Do the same for the run of a checkpoint inside or next to its folder."""
    parent = checkpoint.parent
    require(parent.parent if parent.name == "checkpoints" else parent)


@contextmanager
def hinting(folders: Iterable[Path]) -> Iterator[None]:
    """Add to a mistake that runs in these folders need a plug-in that is not loaded."""
    try:
        yield
    except UserError as error:
        absent = (missing(path) for path in folders if needed_by(path).keys() - loaded().keys())
        hint = next(absent, "")
        raise UserError(f"{error}; {hint}" if hint else str(error)) from error


def used_by(config: Mapping[str, Any], stacks: Mapping[str, Any]) -> dict[str, str]:
    """Return by name the digest of each plug-in whose parts a config or its blocks use.

    Args:
        config: A resolved config.
        stacks: The resolved specification of each stack.

    Raises:
        UserError: for a part registered by a module that was not loaded as a plug-in.
    """
    names: set[str] = set()
    texts = dict.fromkeys(chain(_texts(config), _texts(stacks)))  # most blocks are alike
    for key, value in texts:
        modules = makers(key, value)
        for module, owner in modules:
            if owner is None:
                raise UserError(
                    f"{key}: {value!r} was registered by '{module}', which is no plug-in, so that "
                    "no id would tell its versions apart; put it into a file and load that with "
                    f"--plugin FILE, {PROJECT} or lightning_app.plugins.load"
                )
        names |= owners(key, value)
        for name, plugin in loaded().items():
            # Several plug-ins may import the module that registers a part.
            shares = any(module in plugin.modules for module, _ in modules)
            if shares or (_names_code(key, value) and value.partition(".")[0] == plugin.package):
                names.add(name)
    return digests_of(names)


def _names_code(key: str, value: str) -> bool:
    """Whether a text in a config names a class, or may name a function, by its import path."""
    *above, last = key.split(".")
    return last == "class_path" or ("init_args" in (*above, last) and "." in value)


def _texts(tree: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Yield the dotted key of every text; entries of a list have the list's key.

    Only texts name parts and code.
    """
    if isinstance(tree, Mapping):
        for name, value in tree.items():
            yield from _texts(value, f"{key}.{name}" if key else name)
    elif isinstance(tree, list | tuple):
        for value in tree:
            yield from _texts(value, key)
    elif isinstance(tree, str):
        yield key, tree
