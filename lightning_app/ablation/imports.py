"""A grid file holds data: nothing in it may have code imported that is not known."""

import re
from collections.abc import Mapping
from typing import Any

from lightning_app.errors import UserError

_DOTTED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")
_KNOWN = ("lightning_app.callbacks.", "lightning.pytorch.callbacks.", "lightning.pytorch.loggers.")
_CALLS = "LambdaCallback"  # calls whatever function it is given the name of


def check_imports(source: str, base_config: Mapping[str, Any], axes: Mapping[str, Any]) -> None:
    """Refuse what would import a module: the Trainer takes classes and functions by their names.

    Callbacks of this package and callbacks and loggers of Lightning are known.

    Raises:
        UserError: naming the field and the name.
    """
    _check(source, "trainer", base_config.get("trainer"))
    for axis, values in axes.items():
        if axis.partition(".")[0] == "trainer":
            _check(source, axis, values)


def _check(source: str, field: str, value: Any) -> None:
    if isinstance(value, Mapping):
        for key, part in value.items():
            _check(source, f"{field}.{key}", part)
    elif isinstance(value, list):
        for part in value:
            _check(source, field, part)
    elif isinstance(value, str) and _imports(value):
        raise UserError(
            f"{source}: {field}: a grid file may not name code to import, found '{value}'; known "
            f"are {', '.join(f'{name}*' for name in _KNOWN)}"
        )


def _imports(text: str) -> bool:
    if text.rpartition(".")[2] == _CALLS:
        return True
    return _DOTTED.fullmatch(text) is not None and not text.startswith(_KNOWN)
