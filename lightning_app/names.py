"""Refuse unknown keys and presets in a config, without importing Lightning."""

from collections.abc import Iterable, Mapping
from typing import Any

from lightning_app.errors import UserError, nearest
from lightning_app.identity.relevant import leaves
from lightning_app.trainer_arguments import trainer_arguments

SECTIONS = ("seed_everything", "trainer", "model", "data")


def check_names(tree: Mapping[str, Any], others: Iterable[str] = ()) -> None:
    """Refuse unknown keys, and a field that is set from another one which is not there.

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
        keys = [key for key, _ in leaves(tree)]
    except RecursionError as error:
        raise UserError("the config is nested too deeply") from error
    for key in keys:
        _check_key(key)
    if "data.next_sentence" in keys and "model.objective.next_sentence" not in keys:
        raise UserError(
            "data.next_sentence: set from model.objective.next_sentence, which is not there; set "
            "that instead"
        )


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
