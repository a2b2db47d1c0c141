"""The values from the files and the command line of a call, each with its source.

Fast to import: without torch, so that most mistakes are reported at once.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Any, get_origin

from yaml import YAMLError

from lightning_app.config.identity import leaves, require
from lightning_app.config.trainer import TrainerConfig
from lightning_app.config.tree import SECTIONS, WARMUP, check_seed, lookup, replaced, same
from lightning_app.core import strict_yaml
from lightning_app.core.errors import UserError, meant, named, nearest
from lightning_app.core.schema import OTHER_NAMES, check_keys, hint_at, kinds_of, part_of, read
from lightning_app.scores.task_facts import glue_task_of

COMMAND_LINE = "command line"
CHECKPOINT = "ckpt_path"
FIELDS_OF: Mapping[str, tuple[str, ...]] = {
    "fit": (CHECKPOINT, "weights_only"),
    "validate": (CHECKPOINT, "verbose", "weights_only"),
    "test": (CHECKPOINT, "verbose", "weights_only"),
    "predict": ("return_predictions", CHECKPOINT, "weights_only"),
}
"""The keys that each Lightning command takes besides the sections. Only plain values are read from
a checkpoint, whatever `weights_only` is."""

_OPTIONS = ("config", "help", "print_config")  # every command that reads a config has these
_FIELD = re.compile(rf"(?:unknown key ')?((?:{'|'.join(SECTIONS)})(?:\.\w+)*)\b")
COMMON = (
    *("model.optimizer.lr", "model.schedule.warmup_steps", "model.block.preset"),
    *("model.architecture.dropout", "data.tokens_per_batch", "trainer.max_steps"),
)
"""Keys that users write without their section; the hint needs no import of the model's parts."""

_FREE = ("init_args", "dict_kwargs")
"""Fields that hold the arguments of a class, whose keys may contain dots."""

_LINKS = {
    "data.seed": ("seed_everything", lambda given: given),
    "data.task": ("model.objective.kind", lambda given: given),
    "data.next_sentence": ("model.objective.next_sentence", lambda given: given),
    "data.init_from": ("model.init_from", lambda given: given),
    "model.objective.glue": ("data.name", lambda name: glue_task_of(str(name))),
}
"""Derived fields and how they are set; any other value would be replaced silently."""


class Written:
    """The values from files and a command line; later sources override earlier ones.

    Args:
        words: The options of the call: ``--config FILE``, ``--a.b VALUE``, ``--a '{...}'``.
        fields: The keys that may be passed besides the sections of a config, such as ``ckpt_path``.

    Attributes:
        tree: The sections of the config.
        fields: The values of those other keys.
        asked: ``help`` or ``print_config`` if the call asks for them, with their values.

    Raises:
        UserError: for a file that cannot be read, an unknown key of a section, and a wrong value in
            the section `trainer`.
    """

    def __init__(self, words: Sequence[str], fields: Sequence[str] = ()) -> None:
        self.tree: dict[str, Any] = {}
        self.fields: dict[str, Any] = {}
        self.asked: dict[str, str | None] = {}
        self._known = (*SECTIONS, *fields)
        self._texts: dict[str, str] = {}
        self._sources: list[tuple[str, list[str]]] = []
        for name, value in options_of(words):
            self._take(name, value)
        self._check()

    @classmethod
    def of(cls, tree: Mapping[str, Any], source: str, fields: Sequence[str] = ()) -> "Written":
        """Return a view of a tree that is not in a file."""
        written = cls((), fields)
        written._add(source, tree)
        written._check()
        return written

    def typed(self, kind: type) -> dict[str, Any]:
        """Return the tree, in which values of the command line are texts where a field is one."""
        tree = self.tree
        for name, text in self._texts.items():
            hint = hint_at(kind, name.split("."))
            value = _value(name, text)
            if str in kinds_of(hint) and not _may_be(hint, value) and lookup(tree, name) == value:
                tree = merged(tree, nested({name: text}))
        return tree

    @contextmanager
    def located(self) -> Iterator[None]:
        """Prefix mistakes raised inside with the source of the value."""
        try:
            yield
        except UserError as error:
            raise UserError(f"{self.source_of(str(error))}: {error}") from error

    def source_of(self, mistake: str) -> str:
        """Return where the field at the beginning of a message is set.

        For a value it is the last source that sets it, for a mapping every source that sets a part
        of it. For a whole section it is every source of a field that the message names. Without a
        field, or if no source sets it, it is all files or the command line.
        """
        files = dict.fromkeys(source for source, _ in self._sources if source != COMMAND_LINE)
        everything = ", ".join(files) or COMMAND_LINE
        match = _FIELD.match(mistake)
        if match is None:
            return everything
        field = match[1]
        # A part of a config raises "model.optimizer: lr -1.0: ...".
        part = re.match(r": (\w+)", mistake[match.end() :])
        written = [(source, name) for source, names in self._sources for name in names]
        for key in ([f"{field}.{part[1]}"] if part else []) + [field]:
            holding = [source for source, name in written if f"{key}.".startswith(f"{name}.")]
            if holding:
                return holding[-1]
        inside = [(source, name) for source, name in written if name.startswith(f"{field}.")]
        if "." in field:
            sources = [source for source, _ in inside]
        else:  # "model" alone begins messages about several fields, which the message names
            words = set(re.findall(r"\w+", mistake))
            last = {name: of for of, name in inside if name.rpartition(".")[2] in words}
            sources = [source for source, _ in self._sources if source in last.values()]
        return ", ".join(dict.fromkeys(sources)) or everything

    def _take(self, name: str, text: str | None) -> None:
        """Read an option of the command line."""
        if name in ("help", "print_config"):
            self.asked[name] = text
            return
        if name.endswith("+"):
            raise UserError(f"{COMMAND_LINE}: --{name}: appends nothing; give the whole list")
        top = name.partition(".")[0]
        if top not in self._known and name != "config":
            raise UserError(f"{COMMAND_LINE}: {_unknown(name, (*self._known, *_OPTIONS))}")
        if text is None:
            raise UserError(f"{COMMAND_LINE}: --{name}: expected a value")
        if name == "config":
            self._add(text, read_tree(text))
            return
        with named(COMMAND_LINE), named(f"--{name}"):
            value = _value(name, text)
        if name in SECTIONS and isinstance(value, str) and Path(value).is_file():
            self._add(value, {name: read_tree(value)})
            return
        self._add(COMMAND_LINE, {name: value})
        if name == CHECKPOINT and value is not None:
            self.fields[name] = text
        elif not isinstance(value, str):
            self._texts[name] = text

    def _add(self, source: str, tree: Mapping[str, Any]) -> None:
        with named(source):
            for key in tree:
                top = str(key).partition(".")[0]
                if top not in self._known:
                    raise UserError(_unknown(str(key), self._known))
            config = without_derived(nested(tree))
        for key in [name for name in config if name not in SECTIONS]:
            self.fields[key] = config.pop(key)
        self.tree = merged(self.tree, config)
        self._sources.append((source, [name for name, _ in leaves(config)]))

    def _check(self) -> None:
        """Make the checks that need no torch."""
        for name, value in self.fields.items():
            kinds = (str, NoneType) if name == CHECKPOINT else (bool, NoneType)
            if not isinstance(value, kinds):
                wanted = "a text" if name == CHECKPOINT else "true or false"
                raise UserError(f"{name}: expected {wanted}, found {value!r}")
        with self.located():
            trainer = self.typed(_Early).get("trainer", {})
            if isinstance(trainer, Mapping):
                check_keys(TrainerConfig, trainer, "trainer")
            read(TrainerConfig, trainer, at="trainer")
            if "seed_everything" in self.tree:
                check_seed(self.tree["seed_everything"])


@dataclass
class _Early:
    """The only section that needs no torch."""

    trainer: TrainerConfig


def options_of(words: Sequence[str]) -> Iterator[tuple[str, str | None]]:
    """Yield each option and its value, None if it appears to have none; -c is short for --config.

    Raises:
        UserError: for a word that is neither.
    """
    words = list(words)
    while words:
        word = words.pop(0)
        follows = bool(words) and not words[0].startswith("--")
        if word in ("-h", "--help"):
            yield "help", words.pop(0) if follows else None
        elif word.startswith("-c"):
            inside = word.removeprefix("-c").removeprefix("=")
            yield "config", inside or (words.pop(0) if follows else None)
        elif word.startswith("--") and word != "--":
            name, equals, value = word.removeprefix("--").partition("=")
            takes = follows and not equals and name != "print_config"
            yield name, words.pop(0) if takes else value if equals else None
        else:
            raise UserError(f"{COMMAND_LINE}: unexpected {word!r}; expected --NAME VALUE")


def read_tree(file: str | Path) -> dict[str, Any]:
    """Return the mapping in a config file, and the plug-ins of a run next to it."""
    require(Path(file).parent)
    tree, _ = strict_yaml.read_yaml_file(Path(file))
    if not isinstance(tree, dict | None):
        raise UserError(f"{file}: expected a mapping of sections, found {tree!r}")
    with named(file):
        return without_derived(tree or {})


def nested(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config with dotted keys expanded into mappings.

    Raises:
        UserError: if a key occurs twice, dotted and nested.
    """
    config: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping) and key not in _FREE:
            value = nested(value)
        _insert(config, str(key), value)
    return config


def _insert(tree: dict[str, Any], key: str, value: Any) -> None:
    name, _, rest = key.partition(".")
    if rest:
        part = tree.setdefault(name, {})
        if not isinstance(part, dict):
            raise UserError(f"key '{name}' is given twice, dotted and nested, as {key}; keep one")
        _insert(part, rest, value)
    elif name in tree:
        if not (isinstance(value, Mapping) and isinstance(tree[name], dict)):
            raise UserError(f"key '{name}' is given twice, dotted and nested; keep one")
        for inner, part in value.items():
            if inner in tree[name] and not isinstance(part, Mapping):
                raise UserError(f"key '{name}.{inner}' is given twice, dotted and nested; keep one")
            _insert(tree[name], inner, part)
    else:
        tree[name] = value


def merged(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Merge one tree over another; a different class takes none of the arguments of a class.

    The other keys stay: `model` and `data` have fields of their own beside `class_path`.
    """
    tree = dict(under)
    for key, value in over.items():
        below = tree.get(key)
        if isinstance(below, Mapping) and isinstance(value, Mapping):
            kind = below.get("class_path")
            if kind is not None and value.get("class_path", kind) != kind:
                below = {name: part for name, part in below.items() if name not in _FREE}
            value = merged(below, value)
        tree[key] = value
    return tree


def without_derived(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config of one source without the fields that are derived from others.

    They are in the `config.yaml` of a run; without them a later source may change what they are
    derived from.

    Raises:
        UserError: for one that contradicts its source, or has none here; the message names both.
    """
    tree = nested(config)
    written = dict(leaves(tree))
    derived = [key for key in _LINKS if key in written]
    for key in derived:
        source, linked = _LINKS[key]
        if source not in written:
            raise UserError(f"{key}: set from {source}, which is not there; set that instead")
        if not same(written[key], wanted := linked(written[source])):
            raise UserError(
                f"{key}: set from {source}, so it is {wanted} and not {written[key]}; leave it out"
            )
    if not derived:
        return dict(config)
    for key in derived:
        section, _, name = key.rpartition(".")
        part = lookup(tree, section)
        tree = replaced(tree, section, {field: part[field] for field in part if field != name})
    return tree


AUTO = "auto"
"""The value of `model.schedule.warmup_steps` that means ``2 / (1 - beta_2)`` steps."""
_SECOND_MOMENT = ("adam", "adamw", "radam", "lamb", "stable_adamw", "rotational_adamw")


def automatic_warmup(optimizer: Any) -> int:
    """Return the warm-up that AUTO means with a section `optimizer` as a user wrote it.

    Raises:
        UserError: for a kind without Adam's second moment, or a wrong beta.
    """
    given = optimizer if isinstance(optimizer, Mapping) else {}
    kind, betas = given.get("kind", "adam"), given.get("betas", (0.9, 0.98))
    if kind not in _SECOND_MOMENT:
        raise UserError(
            f"model.schedule.warmup_steps: {AUTO} is 2 / (1 - beta_2) steps, for kinds "
            f"{', '.join(_SECOND_MOMENT)}; kind {kind} takes a number"
        )
    beta = betas[-1] if isinstance(betas, list | tuple) and len(betas) == 2 else None
    if isinstance(beta, bool) or not isinstance(beta, int | float) or not 0.0 <= beta < 1.0:
        raise UserError(f"model.optimizer.betas: expected two numbers from 0 to 1, found {betas!r}")
    return round(2.0 / (1.0 - beta))


def with_warmup(base: Any, axes: Mapping[str, list[Any]]) -> Any:
    """Return the base config of a grid with the number that AUTO means, as in every cell.

    Raises:
        UserError: for an axis that is AUTO, or on which it depends.
    """
    for axis, values in axes.items():
        rest = WARMUP.removeprefix(f"{axis}.")
        if f"{WARMUP}.".startswith(f"{axis}.") and any(
            (value if axis == WARMUP else lookup(value, rest)) == AUTO for value in values
        ):
            raise UserError(f"axes: {axis}: {AUTO} is for a base config; list numbers of steps")
    tree = nested(base) if isinstance(base, Mapping) else {}
    if lookup(tree, WARMUP) != AUTO:
        return base
    for axis in () if any(f"{WARMUP}.".startswith(f"{other}.") for other in axes) else axes:
        if "model.optimizer.betas.".startswith(f"{axis}.") or axis == "model.optimizer.kind":
            raise UserError(
                f"axes: {axis}: with {WARMUP} {AUTO}, which depends on it; give it as a number, or "
                "as an axis of numbers"
            )
    return replaced(tree, WARMUP, automatic_warmup(lookup(tree, "model.optimizer")))


def _value(name: str, text: str) -> Any:
    """Return a value of the command line, as YAML; text such as `{a}` and `a:` stays text."""
    try:
        value = strict_yaml.load_yaml_value(text)
    except YAMLError:
        return text
    if isinstance(value, dict) and not any(item is not None for item in value.values()):
        return value if value == {} else text
    return value


def _may_be(hint: Any, value: Any) -> bool:
    """Whether a value of the command line fits a type that a text fits, too."""
    kinds = kinds_of(hint)
    if isinstance(value, Mapping):
        return part_of(hint) is not None or any(get_origin(kind) is dict for kind in kinds)
    if isinstance(value, list):
        return any(get_origin(kind) in (list, tuple) for kind in kinds)
    if isinstance(value, int) and not isinstance(value, bool):
        return int in kinds or float in kinds
    return (NoneType if value is None else type(value)) in kinds


def _unknown(name: str, names: Sequence[str]) -> str:
    elsewhere = [key for key in COMMON if key.rpartition(".")[2] == OTHER_NAMES.get(name, name)]
    return f"unknown key '{name}'{meant(elsewhere) or nearest(name, names)}"
