"""The names of all settings, and the arguments of Lightning's Trainer.

The arguments of Lightning's Trainer, read from its source, since its import takes seconds.

Refuse unknown keys and presets in a config, without importing Lightning.
"""

import ast
import importlib.util
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from lightning_app.config.identity import leaves
from lightning_app.core.errors import UserError, nearest
from lightning_app.scores.task_facts import glue_task_of

TRAINER_DEFAULTS = {
    "max_steps": 20000,
    "precision": "32-true",
    "log_every_n_steps": 50,
    "val_check_interval": 1000,
    "check_val_every_n_epoch": None,  # count validations in steps, across epochs
    "num_sanity_val_steps": 0,
    "use_distributed_sampler": False,  # our samplers share batches out themselves
}
"""Where a run's defaults are not those of Lightning."""


@dataclass(frozen=True)
class Argument:
    """An argument as written in the signature.

    `kinds` are the members of its type, such as ``int``, ``None`` or ``list[int]``, as written;
    `default` is None without a default.
    """

    kinds: frozenset[str]
    default: Any


@cache
def trainer_arguments(method: str = "__init__") -> Mapping[str, Argument] | None:
    """Return the arguments of a method of the Trainer, in their order.

    None if the source does not have the expected form: then Lightning must be imported.
    """
    package = importlib.util.find_spec("lightning")  # does not import it
    if package is None or not package.submodule_search_locations:
        return None
    path = Path(package.submodule_search_locations[0], "pytorch", "trainer", "trainer.py")
    if not path.is_file():
        return None
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef) and node.name == "Trainer":
            for part in node.body:
                if isinstance(part, ast.FunctionDef) and part.name == method:
                    return _arguments(part.args)
    return None


def _arguments(signature: ast.arguments) -> dict[str, Argument] | None:
    if signature.vararg or signature.kwarg:
        return None
    plain = [*signature.posonlyargs, *signature.args]
    defaults = [None] * (len(plain) - len(signature.defaults)) + list(signature.defaults)
    pairs = [*zip(plain, defaults, strict=True)]
    pairs += zip(signature.kwonlyargs, signature.kw_defaults, strict=True)
    found = {}
    for argument, default in pairs:
        if argument.arg == "self":
            continue
        try:
            value = None if default is None else ast.literal_eval(default)
        except ValueError:
            return None
        found[argument.arg] = Argument(frozenset(_kinds(argument.annotation)), value)
    return found


def _kinds(annotation: ast.expr | None) -> Iterator[str]:
    """Yield the members of a type: of ``Optional[X]``, ``Union[X, Y]`` and ``X | Y`` each part."""
    match annotation:
        case None:
            return
        case ast.Subscript(value=ast.Name(id="Optional"), slice=inner):
            yield from _kinds(inner)
            yield "None"
        case ast.Subscript(value=ast.Name(id="Union"), slice=ast.Tuple(elts=parts)):
            for part in parts:
                yield from _kinds(part)
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            yield from _kinds(left)
            yield from _kinds(right)
        case _:
            yield ast.unparse(annotation)


SECTIONS = ("seed_everything", "trainer", "model", "data")
LINKED: Mapping[str, tuple[str, Callable[[Any], Any]]] = {
    "data.next_sentence": ("model.objective.next_sentence", lambda given: given),
    "data.init_from": ("model.init_from", lambda given: given),
    "model.objective.glue": ("data.name", lambda name: glue_task_of(str(name))),
}
"""Fields that the parser sets from another one, and how; another value would be replaced."""


def check_names(tree: Mapping[str, Any], others: Iterable[str] = ()) -> None:
    """Refuse unknown keys, and a field that is set from another one where they do not fit.

    The parser checks values that are not mappings, and the keys of classes that a value names.

    Args:
        tree: A config as a user wrote it.
        others: Further keys that are allowed at the top level.

    Raises:
        UserError: naming the key, and the nearest known one.
    """
    known = (*SECTIONS, *others)
    for key in tree:
        # The parser checks dotted keys.
        if isinstance(key, str) and key.partition(".")[0] not in known:
            raise UserError(_unknown(key, known))
    try:
        written = dict(leaves(tree))
    except RecursionError as error:
        raise UserError("the config is nested too deeply") from error
    for key in written:
        _check_key(key)
    for key, (source, linked) in LINKED.items():
        if key not in written:
            continue
        if source not in written:
            raise UserError(f"{key}: set from {source}, which is not there; set that instead")
        if written[key] != (expected := linked(written[source])):
            raise UserError(
                f"{key}: set from {source}, so it is {expected} and not {written[key]}; leave it "
                "out"
            )


def check_once(tree: Mapping[str, Any]) -> None:
    """Refuse a dotted key that says again what another one, or a nested mapping, says.

    Raises:
        UserError: naming the key.
    """
    names = (str(name) for name, _ in leaves(tree))
    before = ""
    for name in sorted(names, key=lambda name: name.split(".")):
        if before and f"{name}.".startswith(f"{before}."):
            again = f", as {name}" if name != before else ""
            raise UserError(f"key '{before}' is given twice, dotted and nested{again}; keep one")
        before = name


def _check_key(key: str) -> None:
    """Refuse an unknown dotted key of a known section, such as ``trainer.max_stepz``."""
    section, *rest = key.split(".")
    if not rest or "help" in rest:
        return
    if section == "trainer":
        arguments = trainer_arguments()
        if arguments is not None and rest[0] not in arguments:
            raise UserError(_unknown(f"trainer.{rest[0]}", arguments))
        return
    from lightning_app.config.sections import PARTS, hints_of, part_of

    kind = PARTS.get(section)
    for place, name in enumerate(rest):
        if kind is None:
            return
        hints = hints_of(kind)
        if name not in hints:
            raise UserError(_unknown(".".join((section, *rest[: place + 1])), hints))
        kind = part_of(hints[name])


def _unknown(key: str, known: Iterable[str]) -> str:
    # Suggest only keys of the same section: a similar key of another section would mislead.
    return f"unknown key '{key}'{nearest(key.rpartition('.')[2], known)}"
