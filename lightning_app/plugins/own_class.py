"""A LightningModule or a LightningDataModule of a plug-in, which a config names by its class."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightning_app.core.errors import UserError, nearest
from lightning_app.plugins import loaded

CLASS_FIELDS = ("class_path", "init_args")
"""The fields of a section that say which class is made of it."""

OWN_CLASS = "model.class_path"
"""The field that names a LightningModule of a plug-in."""


@dataclass(frozen=True, kw_only=True)
class OwnClass:
    """The class that is made of the section `model` or `data`.

    It extends `TransformerModule` or `TextDataModule`, whose arguments are the other fields of the
    section, and passes them on: ``def __init__(self, mine: float = 0.5, **others)``.
    """

    class_path: str | None = None
    """The class of a plug-in, such as my_module.Mine; null for the class of the package."""
    init_args: dict[str, Any] | None = None
    """The arguments of that class which the class of the package does not have."""


def named_class(section: str, fields: Mapping[str, Any], base: type) -> Any:
    """Return the class that the fields of a section name; `base` if they name none.

    Only a plug-in that is loaded is looked into: nothing is imported because a config names it.

    Raises:
        UserError: if no loaded plug-in has that class, or it does not extend `base`.
    """
    path = fields.get("class_path")
    if path is None:
        return base
    require_plugin(section, path)
    said = f"{section}.class_path: '{path}'"
    module, _, name = path.rpartition(".")
    package = module.partition(".")[0]
    found = vars(sys.modules[module]).get(name) if module in sys.modules else None
    if not isinstance(found, type):
        known = [
            key for key, value in vars(sys.modules[package]).items() if isinstance(value, type)
        ]
        raise UserError(f"{said} is not in the plug-in '{package}'{nearest(name, known)}")
    if not issubclass(found, base):
        raise UserError(
            f"{said} does not extend {base.__module__}.{base.__name__}, from which loss, metrics "
            "and checkpoints come"
        )
    return found


def require_plugin(section: str, path: str) -> None:
    """Refuse a class that is in no loaded plug-in: no digest would say what it does.

    Raises:
        UserError: naming the class.
    """
    if path.partition(".")[0] not in {plugin.package for plugin in loaded().values()}:
        raise UserError(
            f"{section}.class_path: '{path}' is in no plug-in that is loaded; name its file with "
            "--plugin FILE, or in ablate.yaml"
        )
