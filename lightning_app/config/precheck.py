"""Find mistakes in the files and names of a call before Lightning is imported."""

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

from yaml import YAMLError

from lightning_app.config.identity import leaves, without_removed
from lightning_app.config.names import SECTIONS, check_names, check_once, trainer_arguments
from lightning_app.config.run_plugins import require
from lightning_app.core import strict_yaml
from lightning_app.core.errors import UserError, named

_OPTIONS = ("config", "help", "print_config")  # every command of LightningCLI has these
_FIELD = re.compile(rf"(?:unknown key ')?((?:{'|'.join(SECTIONS)})(?:\.\w+)*)\b")
COMMAND_LINE = "command line"


_RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "SLURM_PROCID", "JSM_NAMESPACE_RANK")
"""Where Lightning reads which process of a run this one is."""

_LAUNCHERS = (
    ("TORCHELASTIC_RUN_ID", "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    ("KUBERNETES_PORT", "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    ("LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),  # Lightning's own
    ("SLURM_PROCID", "SLURM_JOB_ID", "SLURM_NTASKS"),
    ("JSM_NAMESPACE_RANK", "LSB_JOBID"),
)
"""What each launcher of processes sets: torchrun, Kubeflow, Lightning, SLURM, LSF."""

LAUNCH = {"LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
"""What Lightning sets when it starts the processes of a run."""


def check_launcher(environment: Mapping[str, str]) -> None:
    """Refuse a rank in the environment that no launcher of processes has set.

    Such a process would train as one of several, and keep no result.

    Raises:
        UserError: naming the variable.
    """
    given = [name for name in _RANKS if name in environment]
    for name in given:
        if not environment[name].isdecimal():
            raise UserError(f"{name}: expected a whole number, found {environment[name]!r}")
    if given and not any(all(name in environment for name in each) for each in _LAUNCHERS):
        raise UserError(
            f"{given[0]}={environment[given[0]]} is set, but no launcher of processes such as "
            f"torchrun or srun: unset {' '.join(given)}"
        )


def precheck(files: Sequence[str | Path], words: Sequence[str], command: str = "") -> None:
    """Refuse clear mistakes in a call; Lightning's parser checks the rest.

    Args:
        files: The configs, in their order.
        words: The options of the call, after those files.
        command: The command of LightningCLI; empty if its arguments are checked elsewhere.

    Raises:
        UserError: for a file that cannot be read, an unknown key or preset, or a
            checkpoint that is missing.
    """
    if command:
        check_launcher(os.environ)
    trees = {str(file): read_tree(file) for file in files}
    for file in files:
        require(Path(file).parent)  # of the config of a run
    options = dict(options_of(words))
    known = trainer_arguments(command) if command else {}
    if known is None:
        return
    for file, tree in trees.items():
        with named(file):
            check_names(tree, known)
            check_once(tree)
    with named(COMMAND_LINE):
        check_names(dict.fromkeys(options), (*known, *_OPTIONS))
        for name, value in options.items():
            with named(f"--{name}"), suppress(YAMLError):  # the parser knows what else it may be
                strict_yaml.load_yaml_value(value or "")
    with located(files, words):
        _check_preset(trees.values(), options)
    if "ckpt_path" in known:
        _check_checkpoint(command, trees.values(), options)


@contextmanager
def located(files: Sequence[str | Path], words: Sequence[str]) -> Iterator[None]:
    """Put the source of the value in front of mistakes found inside: a file or the command line."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{source_of(str(error), files, words)}: {error}") from error


def source_of(mistake: str, files: Sequence[str | Path], words: Sequence[str]) -> str:
    """Return where the field that a message begins with is set.

    For a value it is the last source that sets it, for a mapping every source that sets a part of
    it. Without a field, or if no source sets it, it is all files, or the command line without one.
    """
    everything = ", ".join(map(str, files)) or COMMAND_LINE
    match = _FIELD.match(mistake)
    if match is None:
        return everything
    field = match[1]
    sources = list(_sources(files, words))
    # A part of a config says "model.optimizer: lr -1.0: ...".
    part = re.match(r": (\w+)", mistake[match.end() :])
    named_part = f"{field}.{part[1]}" if part else field
    for each in (named_part, field):
        holding = [source for source, names in sources if _holds(names, each)]
        if holding:
            return holding[-1]
    # "model" alone begins messages about several fields.
    inside = dict.fromkeys(source for source, names in sources if _holds_part(names, field))
    return ", ".join(inside) if inside and "." in field else everything


def _sources(files: Sequence[str | Path], words: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield what sets values, in the order in which later ones win, with the fields that it sets.

    A file that an option names for its section is a source of its own.
    """
    options = list(options_of(words))
    given = [value for name, value in options if name == "config"]
    for file in files:
        if str(file) not in given:
            yield str(file), _fields(read_tree(file))
    for name, value in options:
        if name == "config" and value is not None and value in map(str, files):
            yield value, _fields(read_tree(value))
        elif name in SECTIONS and value is not None and Path(value).is_file():
            yield value, [f"{name}.{field}" for field in _fields(read_tree(value))]
        else:
            yield COMMAND_LINE, [name]


def _holds(names: Iterable[str], field: str) -> bool:
    return any(f"{field}.".startswith(f"{name}.") for name in names)


def _holds_part(names: Iterable[str], field: str) -> bool:
    return any(name.startswith(f"{field}.") for name in names)


def _fields(tree: Mapping[str, Any]) -> list[str]:
    return [name for name, _ in leaves(tree)]


def read_tree(file: str | Path) -> dict[str, Any]:
    """Return the mapping in a config file."""
    tree, _ = strict_yaml.read_yaml_file(Path(file))
    if not isinstance(tree, dict | None):
        raise UserError(f"{file}: expected a mapping of sections, found {tree!r}")
    with named(file):
        return without_removed(tree or {})


def options_of(words: Sequence[str]) -> Iterator[tuple[str, str | None]]:
    """Yield each option and its value, None if it seems to have none; -c is short for --config."""
    for word, after in pairwise([*words, ""]):
        if word == "--":
            return
        if word.startswith("-c"):
            yield "config", word.removeprefix("-c").removeprefix("=") or after or None
        if word.startswith("--"):
            name, equals, value = word.removeprefix("--").partition("=")
            follows = after if after and not after.startswith("--") else None
            yield name.rstrip("+"), value if equals else follows


def written_values(words: Sequence[str]) -> dict[str, Any]:
    """Return the values by dotted key as the files and options of a call write them.

    Raises:
        UserError: for a file that cannot be read.
    """
    found: dict[str, Any] = {}
    for name, value in options_of(words):
        if value is None:
            continue
        if name == "config":
            found |= leaves(read_tree(value))
        elif name.partition(".")[0] in SECTIONS:
            with suppress(UserError):  # the parser says what is wrong with it
                found[name] = strict_yaml.load_yaml(value)
    return found


def _check_preset(trees: Iterable[Mapping[str, Any]], options: Mapping[str, str | None]) -> None:
    """Refuse an unknown preset of the options or, without one there, of the last file with one."""
    if {"model", "model.block"} & options.keys():
        return
    found = [options.get("model.block.preset")]
    for tree in trees:
        model = tree.get("model")
        block = model.get("block") if isinstance(model, dict) else None
        found.insert(1, block.get("preset") if isinstance(block, dict) else None)
    preset = next((each for each in found if each is not None), None)
    if isinstance(preset, str):
        from lightning_app.blocks.presets import PRESETS

        _ = PRESETS[preset]


def _check_checkpoint(
    command: str, trees: Iterable[Mapping[str, Any]], options: Mapping[str, str | None]
) -> None:
    """Refuse a checkpoint that the call does not name or that does not exist, as the run would."""
    if options.keys() & {"help", "print_config"}:
        return
    given = options.get("ckpt_path")
    if command != "fit" and "ckpt_path" not in options and not any("ckpt_path" in t for t in trees):
        raise UserError(f"{command}: --ckpt_path is needed: a file, 'last' or 'best'")
    if given is not None and given not in ("last", "best", "null") and not Path(given).is_file():
        raise UserError(f"--ckpt_path {given}: there is no file {given}")
