"""The sentences of a report by name: `messages.toml` has their texts, the callers their numbers."""

import tomllib
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any

from lightning_app.config.identity import leaves


class Message(str):
    """A sentence with its name and its values, by which programs and tests know it.

    Of a sentence that is made from others, the value `of` holds these.
    """

    __slots__ = ("name", "values")

    def __new__(cls, name: str, values: Mapping[str, Any]) -> "Message":
        """Raises `KeyError` for an unknown name, and for a value that is not passed."""
        message = super().__new__(cls, texts()[name].format_map(values))
        message.name, message.values = name, values
        return message


def say(name: str, /, **values: Any) -> Message:
    """The sentence of this name, as `limits.budget`."""
    return Message(name, values)


@cache
def texts() -> dict[str, str]:
    """Every text by its dotted name."""
    file = resources.files("lightning_app.report") / "messages.toml"
    return dict(leaves(tomllib.loads(file.read_text(encoding="utf-8"))))
