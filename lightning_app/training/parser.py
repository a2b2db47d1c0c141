"""The parser of a run's config, that of LightningCLI. Slow to import: it imports Lightning."""

import logging
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from copy import deepcopy
from functools import cache, partial
from itertools import product
from pydoc import locate
from typing import Any, NoReturn, get_type_hints

import lightning.pytorch as pl
from jsonargparse import Namespace, get_loader, set_dumper, set_loader, set_parsing_settings
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from yaml import YAMLError

from lightning_app.config.allowlist import no_foreign_imports
from lightning_app.config.bounds import check_seed
from lightning_app.config.identity import leaves, without_removed
from lightning_app.config.names import SECTIONS, TRAINER_DEFAULTS
from lightning_app.config.sections import (
    arguments,
    as_written,
    mapping_name,
    model_config,
    type_name,
)
from lightning_app.config.tree import lookup
from lightning_app.core import strict_yaml
from lightning_app.core.errors import UserError, nearest
from lightning_app.data.prepare import resolved_data
from lightning_app.plugins.own_class import CLASS_FIELDS, named_class
from lightning_app.scores.task_facts import fill_by_task, glue_task_of
from lightning_app.training.datamodule import TextDataModule
from lightning_app.training.module import TransformerModule

# Warnings of Lightning and torch that do not apply to this program.
NEEDLESS = (
    ".*does not have many workers",  # batches come from memory-mapped ids: workers do not help
    ".*smaller than the logging interval",  # we log by optimizer step, across epochs
    "Experiment logs directory .* is not empty",  # it belongs to the same attempt
    "Checkpoint directory .* exists and is not empty",  # it belongs to the same run
    ".*srun. command is available on your system but is not used",  # the supervisor uses it
    ".*recommended to use `self.log.*sync_dist=True",  # metrics are equal on every rank before
    ".*is deprecated, use `isinstance.treespec",  # Lightning's own call of torch
    "You're using the WeightAveraging callback, but loading",  # the averaged weights are evaluated
    # RMSNorm under autocast has a weight of 32 bits, so torch uses its exact, unfused form.
    "Mismatch dtype between input and weight.*Cannot dispatch to fused implementation",
)


class _Advertisement(logging.Filter):
    """Leave out Lightning's tips, which recommend other products of its makers."""

    def filter(self, record: logging.LogRecord) -> bool:
        return "Tip: " not in record.getMessage()


_NO_TIPS = _Advertisement()

_MODE = "yaml_1_2"


def _load(text: str) -> Any:
    """Return a value or a config of YAML 1.2; text such as `{a}` and `a:` stays text, as usual."""
    value = strict_yaml.load_yaml_value(text)
    if isinstance(value, dict) and not any(each is not None for each in value.values()):
        usual = get_loader("yaml")(text)
        return usual if isinstance(usual, str) else value
    return without_removed(value) if isinstance(value, dict) else value


set_loader(_MODE, _load, (YAMLError,))
set_dumper(_MODE, partial(strict_yaml.dump_yaml, allow_unicode=True))
# The help of a field is its docstring in the dataclass.
set_parsing_settings(docstring_parse_attribute_docstrings=True)


class ConfigParser(LightningArgumentParser):
    """A parser whose error messages are `UserError`s of one line."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # A later version may have an option of which this one is a prefix.
        super().__init__(*args, **{"allow_abbrev": False, "parser_mode": _MODE, **kwargs})

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        raise UserError(explain(message, self)) from ex

    def parse_args(self, *args: Any, **kwargs: Any) -> Namespace:
        with _bearable():
            return super().parse_args(*args, **kwargs)

    def parse_object(self, *args: Any, **kwargs: Any) -> Namespace:
        with _bearable():
            return super().parse_object(*args, **kwargs)


@contextmanager
def _bearable() -> Iterator[None]:
    """Raise `UserError` for configs that exceed the parser's limits."""
    try:
        yield
    except RecursionError as error:
        raise UserError("the config is nested too deeply") from error
    except OverflowError as error:
        raise UserError(f"a number in the config is too large: {error}") from error


class RunCLI(LightningCLI):
    """LightningCLI over our one module and one data module, with the defaults above."""

    def __init__(self, args: Any = None, **kwargs: Any) -> None:
        for message in NEEDLESS:
            warnings.filterwarnings("ignore", message=message)
        logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(_NO_TIPS)
        # Before all checks have passed, print only errors.
        self._set_chatter(logging.WARNING)
        super().__init__(
            TransformerModule,
            TextDataModule,
            args=args,
            save_config_callback=None,
            seed_everything_default=1,
            trainer_defaults=TRAINER_DEFAULTS,
            parser_class=ConfigParser,
            auto_configure_optimizers=False,
            **kwargs,
        )

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.link_arguments("model.objective.kind", "data.task")
        parser.link_arguments("model.objective.next_sentence", "data.next_sentence")
        parser.link_arguments("data.name", "model.objective.glue", compute_fn=glue_task_of)
        parser.link_arguments("model.init_from", "data.init_from")
        parser.link_arguments("seed_everything", "data.seed", compute_fn=int)

    def before_instantiate_classes(self) -> None:
        self.tree = self.dump()
        # LightningCLI takes a section with these fields for a class and nothing else.
        for section, field in product(BASES, CLASS_FIELDS):
            del self._get(self.config, section)[field]

    def after_instantiate_classes(self) -> None:
        """Take the classes that the config names; LightningCLI has made those of the package."""
        self._set_chatter(logging.INFO)
        if self.tree["model"]["class_path"] is not None:
            self.model: Any = transformer_module(self.tree["model"])
        if self.tree["data"]["class_path"] is not None:
            self.datamodule: Any = data_module(self.tree["data"])

    def _set_chatter(self, level: int) -> None:
        for name in ("lightning.pytorch", "lightning.fabric"):
            logging.getLogger(name).setLevel(level)

    def _parse_ckpt_path(self) -> None:
        """Keep the config as the user wrote it; Lightning would use the model of the checkpoint."""

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        is_tree = isinstance(args, dict)
        self.config = (
            parser.parse_object(without_removed(args)) if is_tree else parser.parse_args(args)
        )
        command = self.config.get("subcommand")
        section = self.config[command] if command else self.config
        # Checked here, since Lightning later replaces true by a random number.
        check_seed(section["seed_everything"])
        fill_by_task(section["model"]["objective"])

    def dump(self) -> dict[str, Any]:
        """Return the parsed config, with every default, as a tree of plain values."""
        return dump(self.parser, self.config, self.subcommand)


class _ParserOnly(RunCLI):
    """Build the parser and stop before anything is parsed."""

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> NoReturn:
        raise StopIteration


@cache
def config_parser() -> LightningArgumentParser:
    """Return the parser of a whole run, made once."""
    cli = _ParserOnly.__new__(_ParserOnly)
    with suppress(StopIteration):
        cli.__init__(args={}, run=False)
    return cli.parser


def dump(
    parser: LightningArgumentParser, config: Namespace, subcommand: str | None = None
) -> dict[str, Any]:
    """Return `config` as a tree of plain values. Raises `UserError`."""
    try:
        text = parser.dump(config, skip_link_targets=False, skip_unset=False, format=_MODE)
    except ValueError as error:
        what = re.search(r"cannot represent an object', (.*)\)", str(error))
        raise UserError(
            f"trainer: {what[1] if what else error} cannot be written to config.yaml, which holds "
            f"only text, numbers, lists and mappings"
        ) from error
    tree = strict_yaml.load_yaml(text, bounded=False)
    tree = tree[subcommand] if subcommand else tree
    arguments(
        "trainer", get_type_hints(pl.Trainer.__init__), tree["trainer"]
    )  # refuses a wrong null
    # Arguments of the subcommand, such as ckpt_path, are not part of the run.
    return {section: tree[section] for section in SECTIONS}


def parse_config(tree: dict[str, Any]) -> dict[str, Any]:
    """Return the complete config of a tree as a user wrote it.

    Raises:
        UserError: for an unknown key or a wrong type.
    """
    parser = config_parser()
    with no_foreign_imports():
        # A copy, since the parser inserts its own objects into lists of callbacks.
        complete = dump(parser, parser.parse_object(deepcopy(tree)))
    keep_numbers(dict(leaves(tree)), complete)
    return complete


def keep_numbers(written: Mapping[str, Any], complete: dict[str, Any]) -> None:
    """Give each number of the Trainer the type in which it was written, and refuse text as one.

    For some of its fields an integer is a count and a float is a share. The order of the two in
    such a union depends on earlier imports, and without this function the id would too.

    Args:
        written: The values as they are written, by dotted key.
        complete: The complete config.

    Raises:
        UserError: for a text that the parser has read as a number of YAML 1.1.
    """
    for key, value in written.items():
        _check_text(key, value, lookup(complete, key))
        section, _, name = key.partition(".")
        known = complete["trainer"].get(name) if section == "trainer" else None
        if type(value) in (int, float) and known == value:
            complete["trainer"][name] = value


def _check_text(key: str, written: Any, found: Any) -> None:
    """Refuse a text such as 1:30, 1_000 or yes where a number or a truth value was made of it.

    jsonargparse reads a text in the place of one by YAML 1.1, whatever its loader.
    """
    if isinstance(written, str):
        if found is not None and not isinstance(found, bool | int | float):
            return
        if _only_in_yaml_1_1(written):
            raise UserError(
                f"{key}: expected a number, true or false, found the text {written!r} "
                "(YAML 1.2 has no underscores, times or yes and no)"
            )
    elif isinstance(written, Mapping):
        for name, value in written.items():
            part = found.get(name) if isinstance(found, Mapping) else None
            _check_text(f"{key}.{name}", value, part)
    elif isinstance(written, list) and isinstance(found, list) and len(written) == len(found):
        for value, part in zip(written, found, strict=True):
            _check_text(key, value, part)


def _only_in_yaml_1_1(text: str) -> bool:
    """Whether a text is text in YAML 1.2, and a number or a truth value in YAML 1.1."""
    try:
        if not isinstance(strict_yaml.load_yaml(text), str):
            return False
        return isinstance(get_loader("yaml")(text), bool | int | float)
    except (UserError, ValueError, YAMLError):
        return False


BASES = {"model": TransformerModule, "data": TextDataModule}
"""The class of a section that names none."""


def transformer_module(section: dict[str, Any]) -> TransformerModule:
    """Return the module of a complete `model` section, its model not yet built."""
    kind, own = _class_with_arguments("model", section)
    return kind(**vars(model_config(section)), **own)


def data_module(section: dict[str, Any]) -> TextDataModule:
    """Return the data module of a complete `data` section."""
    kind, own = _class_with_arguments("data", section)
    named = {name: section.get(name) for name in CLASS_FIELDS}
    return kind(**vars(resolved_data(section)), **named, **own)


def check_classes(tree: dict[str, Any]) -> None:
    """Refuse a complete config that names a class, or arguments of one, that cannot be used.

    Raises:
        UserError: naming the field, and what would be right.
    """
    for section in BASES:
        _class_with_arguments(section, tree[section])


def _class_with_arguments(section: str, fields: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return the class of a section, and the checked arguments of its own."""
    base, key, given = BASES[section], f"{section}.init_args", fields.get("init_args")
    kind = named_class(section, fields, base)
    if kind is base:
        if given is not None:
            raise UserError(f"{key}: needs {section}.class_path, which is null")
        return base, {}
    given = given or {}
    for name in given:
        if name in fields:
            raise UserError(f"{key}.{name}: belongs to {section}.{name}")
    parser = ConfigParser(exit_on_error=False)
    added = parser.add_class_arguments(kind, key, skip=set(fields), instantiate=False)
    if not added:
        if given:
            raise UserError(f"unknown key '{key}.{next(iter(given))}'; the class has no arguments")
        return kind, {}
    parsed = parser.parse_object({section: {"init_args": given}})
    _check_text(key, given, parsed[key].as_dict())
    return kind, vars(parser.instantiate_classes(parsed)[section]["init_args"])


def explain(message: str, parser: LightningArgumentParser) -> str:
    """Turn an error message of jsonargparse into one line: key, value, and what is expected."""
    message = " ".join(message.split())
    if match := re.search(r"Group '([\w.]+)' does not accept option '([\w.]+)'", message):
        return _unknown(f"{match[1]}.{match[2]}", parser)
    if match := re.search(r"Subcommand '\w+' does not accept option '([\w.]+)'", message):
        return _unknown(match[1], config_parser())
    if match := re.search(r"^Option '([\w.]+)' is not accepted", message):
        return _unknown(match[1], parser)
    if match := re.search(r"[Uu]nrecognized arguments: --([\w.]+)", message):
        return _unknown(match[1], parser)
    if match := re.search(r"arguments are required: ([\w., ]+)", message):
        return f"{match[1]}: no value is given, and there is no default"
    if match := re.search(r'Key "([\w.]+)" not found in namespace', message):
        *above, _ = match[1].split(".")
        names = " and ".join(f"'{'.'.join(above[: i + 1])}'" for i in range(len(above)))
        must = "must be mappings" if len(above) > 1 else "must be a mapping"
        return f"{match[1]}: not found; {names} {must}, not null"
    if match := re.search(r'^Parser key "([\w.]+)": Unable to load config \'(.*?)\'', message):
        return f"{match[1]}: expected a mapping, found {as_written(match[2])}"
    if match := re.search(r'Parser key "([\w.]+)": (.*)', message):
        return f"{match[1]}: {_wrong_value(match[2])}"
    return message


def _unknown(key: str, parser: LightningArgumentParser) -> str:
    # Suggest only keys of the same section: a similar key of another section would mislead.
    parent, _, last = key.rpartition(".")
    known = set()
    for name in parser.get_defaults().keys(branches=True):
        head, _, tail = name.rpartition(".")
        if head == parent:
            known.add(tail)
    match = nearest(last, known)
    return f"unknown key '{key}'{match}"


def _wrong_value(problem: str) -> str:
    """Name the value that was found and the types or words that were expected."""
    value = re.search(r"(?:Given value|Got value): (.*)$", problem)
    # Parts have a parser like ours, so their error messages are already in this form.
    inner = re.search(r"- (unknown key '.*?|[\w.]+: expected .*?) - Expected", problem)
    if inner:
        return inner[1]
    expected = re.findall(r"Expected an? (typing\.Literal\[[^\]]*\]|<class '[\w.]+'>)", problem)
    if not (value and expected):
        return problem
    names = [type_name(kind) for kind in expected]
    subtypes = re.search(r"Subtypes: \[(.*?)\] Errors", problem)
    for path in re.findall(r"<class '(lightning[\w.]+)'>", subtypes[1] if subtypes else ""):
        names.append(mapping_name(locate(path)))
    words = re.findall(r"'([^']*)'", " ".join(k for k in expected if "Literal" in k))
    hint = nearest(value[1], words) if words else ""
    return f"expected {' or '.join(dict.fromkeys(names))}, found {as_written(value[1])}{hint}"
