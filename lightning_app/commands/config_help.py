"""The fields of configs, from their dataclasses: `ablate fit --help`, and `ablate schema`."""

import inspect
import json
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields, is_dataclass
from textwrap import wrap
from typing import Any

from lightning_app.commands.options import Parser
from lightning_app.config.sources import FIELDS_OF
from lightning_app.config.trainer import TrainerConfig
from lightning_app.config.tree import SECTIONS
from lightning_app.core.errors import UserError, nearest
from lightning_app.core.schema import (
    adapter,
    as_plain,
    as_written,
    docs_of,
    expected,
    hint_at,
    hints_of,
    part_of,
    parts_of,
)

_WIDTH = 88
_OVERVIEW = """
config:
  -c, --config FILE     a config in YAML; several are merged, later ones over earlier ones
  --a.b VALUE           a field, as YAML: files first, overrides last
  --a '{b: 1, c: 2}'    several fields at once
  --print_config        print the whole config, with every default, and end
  --help SECTION        the fields of a section, such as trainer, model.block or data

sections:
  seed_everything       the seed of initial values, batches and dropout
  trainer               every argument of Lightning's Trainer, by its name
  model                 what is trained: model.block (the wiring), model.architecture (sizes),
                        model.objective (the task), model.optimizer, model.schedule
  data                  the corpus and its batches
"""


def config_help(command: str, usage: str, section: str | None) -> str:
    """Return the help of a command besides its options in `usage`, or of a dotted section.

    Raises:
        UserError: if there is no such section.
    """
    if section is None:
        others = ", ".join(f"--{name}" for name in FIELDS_OF[command])
        return f"{usage}{_OVERVIEW}\nbeside the sections: {others}"
    kind: Any = TrainerConfig
    if section != "trainer":  # the others need torch
        from lightning_app.config.config import Config

        kind = part_of(hint_at(Config, section.split(".")))
    if kind is None:
        raise UserError(f"--help {section}: no section of a config{nearest(section, SECTIONS)}")
    return "\n".join(_lines(kind, section))


def _lines(kind: type, section: str) -> Iterator[str]:
    docs, hints = docs_of(kind), hints_of(kind)
    yield f"{section}:"
    yield from (inspect.getdoc(kind) or "").splitlines()
    for field in fields(kind):
        name, part = f"{section}.{field.name}", part_of(hints[field.name])
        yield ""
        yield f"  --{name}  {expected(hints[field.name])}{_default(field)}"
        yield from wrap(
            docs.get(field.name, ""), _WIDTH, initial_indent="      ", subsequent_indent="      "
        )
        if is_dataclass(part) and part.__name__ != "ClassSpec":  # pyright: ignore[reportAttributeAccessIssue]
            yield f"      fields: --help {name}"


def _default(field: "Field[Any]") -> str:
    if field.default is MISSING or is_dataclass(field.default):
        return ""
    return f" (default: {as_written(as_plain(field.default))})"


def add_schema(parser: Parser) -> None:
    parser.add("kind", "the kind of file", choices=("config", "grid"))
    parser.set_defaults(call=schema_command)


def schema_command(kind: str) -> int:
    """Print the JSON Schema of a ``config`` or of a ``grid`` file, with the text of every field."""
    from lightning_app.config.config import Config
    from lightning_app.config.grid import GridFile

    tree = config = _described(Config)
    if kind == "grid":
        tree = _described(GridFile)
        tree["properties"]["base_config"] = {"$ref": "#/$defs/Config"}
        parts = config.pop("$defs")
        tree["$defs"] = {**tree.get("$defs", {}), **parts, "Config": config}
    print(json.dumps(tree, indent=1))
    return 0


def _described(kind: Any) -> dict[str, Any]:
    tree = adapter(kind).json_schema()
    for part in parts_of(kind):
        schema = tree if part is kind else tree["$defs"][part.__name__]
        for name, text in docs_of(part).items():
            schema["properties"].get(name, {})["description"] = text
    return tree
