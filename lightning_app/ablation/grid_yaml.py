"""The YAML of a grid file, read strictly: no duplicate keys, no dates, no endless anchors."""

import re
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from lightning_app.bounds import check_size
from lightning_app.errors import UserError, named

_LEVELS = 20  # of nesting, far more than a config has
_VALUES = 1_000_000  # in a file with its anchors written out


class _Loader(yaml.SafeLoader):
    """Safe YAML without duplicate keys and dates, where 5e-4 is a number as in YAML 1.2."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            if key.value in seen:
                problem = f"key '{key.value}' is given twice"
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        value = super().construct_yaml_int(node)
        try:
            check_size("a value", value)
        except UserError as error:
            mark = node.start_mark
            raise yaml.constructor.ConstructorError(None, None, str(error), mark) from error
        return value


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)
_Loader.yaml_implicit_resolvers = {
    letter: [entry for entry in entries if entry[0] != "tag:yaml.org,2002:timestamp"]
    for letter, entries in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?[0-9][0-9_]*[eE][-+]?[0-9]+$"),
    list("-+0123456789"),
)


def read_grid_yaml(path: Path) -> tuple[Any, str]:
    """What a file holds, and its text. Raises `UserError` naming file and line."""
    with named(path):
        try:
            text = path.read_text(encoding="utf-8")
            tree = yaml.load(text, Loader=_Loader)
            _check_extent(tree)
        except UnicodeDecodeError as error:
            raise UserError(f"invalid UTF-8 at byte {error.start}") from error
        except OSError as error:
            raise UserError(f"cannot be read: {error.strerror}") from error
        except RecursionError as error:
            raise UserError("nested too deeply") from error
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            line = f"line {mark.line + 1}: " if mark else ""
            raise UserError(f"{line}{error.problem or error.context}") from error
        except (yaml.YAMLError, ValueError) as error:
            raise UserError(f"not valid YAML: {error}") from error
        return tree, text


def _check_extent(tree: Any) -> None:
    """Refuse a file whose anchors write it out endlessly, or beyond what can be handled."""
    extents: dict[int, tuple[int, int] | None] = {}

    def extent(value: Any) -> tuple[int, int]:
        """Values written out, and levels."""
        if not isinstance(value, dict | list):
            return 1, 0
        if id(value) not in extents:
            extents[id(value)] = None
            parts = [
                extent(part) for part in (value.values() if isinstance(value, dict) else value)
            ]
            size = 1 + sum(size for size, _ in parts)
            extents[id(value)] = size, 1 + max((levels for _, levels in parts), default=0)
        known = extents[id(value)]
        if known is None:
            raise UserError("a value contains itself by its anchor")
        return known

    size, levels = extent(tree)
    if levels > _LEVELS:
        raise UserError(f"nested {levels} levels deep; at most {_LEVELS}")
    if size > _VALUES:
        raise UserError(f"comes to {size:,} values by its anchors; at most {_VALUES:,}")
