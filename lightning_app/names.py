"""Refuse unknown keys and presets in a config, without importing Lightning."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from lightning_app.errors import UserError, nearest
from lightning_app.identity.relevant import leaves
from lightning_app.task_facts import glue_task_of
from lightning_app.trainer_arguments import trainer_arguments

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
    from lightning_app.sections import PARTS, hints_of, part_of

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
