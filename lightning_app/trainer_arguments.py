"""The arguments of Lightning's Trainer, read from its source, since its import takes seconds."""

import ast
import importlib.util
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

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
