"""`ablate schema`: the JSON Schema of configs or grid files, by which an editor completes keys."""

import json
from typing import Any

from lightning_app.config.config import Config
from lightning_app.config.grid import GridFile
from lightning_app.core.schema import adapter, docs_of, parts_of


def schema_command(kind: str) -> int:
    """Print the JSON Schema of a config, or of a grid file."""
    print(json.dumps(json_schema(kind), indent=1))
    return 0


def json_schema(kind: str) -> dict[str, Any]:
    """Return the JSON Schema of a ``config`` or of a ``grid`` file, with the text of each field."""
    config = _described(Config)
    if kind == "config":
        return config
    grid = _described(GridFile)
    grid["properties"]["base_config"] = {"$ref": "#/$defs/Config"}
    parts = config.pop("$defs")
    return {**grid, "$defs": {**grid.get("$defs", {}), **parts, "Config": config}}


def _described(kind: Any) -> dict[str, Any]:
    tree = adapter(kind).json_schema()
    for part in parts_of(kind):
        found = tree if part is kind else tree["$defs"][part.__name__]
        for name, text in docs_of(part).items():
            found["properties"].get(name, {})["description"] = text
    return tree
