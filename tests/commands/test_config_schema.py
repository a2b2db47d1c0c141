"""`ablate schema` and `ablate fit --help`: what a config may hold, from its dataclasses."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from lightning_app.config.trainer import TrainerConfig
from lightning_app.core.schema import hints_of
from lightning_app.core.strict_yaml import read_yaml_file

FILES = [*Path("ablations").glob("*.yaml"), *Path("ablations/base").glob("*.yaml")]


def follow(schema: dict[str, Any], whole: dict[str, Any]) -> dict[str, Any]:
    """The object of a schema, which may be named elsewhere, or beside null."""
    for each in schema.get("anyOf", []):
        if each.get("type") != "null":
            schema = each
    name = schema.get("$ref", "").rpartition("/")[2]
    return whole["$defs"][name] if name else schema


def check(tree: dict[str, Any], schema: dict[str, Any], whole: dict[str, Any]) -> None:
    """Every key of a file is known to the schema, and has a text for an editor."""
    for key, value in tree.items():
        known = schema["properties"][key]
        if isinstance(value, dict) and (inner := follow(known, whole)).get("properties"):
            check(value, inner, whole)


@pytest.mark.parametrize("kind", ["config", "grid"])
def test_the_schema_knows_every_key_of_the_shipped_files(kind: str, printed) -> None:
    written = printed("schema", kind)
    made = Path(f"ablations/schema/{kind}.json").resolve()
    # Made again by `ablate schema KIND > ablations/schema/KIND.json`.
    assert made.read_text(encoding="utf-8") == written
    whole = json.loads(written)
    assert whole["additionalProperties"] is False
    assert all("description" in each or "$ref" in each for each in whole["properties"].values())
    for path in FILES:
        if (path.parent.name == "base") == (kind == "config"):
            tree, text = read_yaml_file(path)
            check(tree, whole, whole)
            (named,) = re.findall(r"^# yaml-language-server: \$schema=(.*)$", text, re.MULTILINE)
            assert (path.parent / named).resolve() == made


def test_the_help_of_fit_is_short_and_leads_to_the_sections(printed, refused) -> None:
    assert len(printed("fit", "--help").splitlines()) <= 60
    shown = printed("fit", "--help", "trainer")
    assert all(f"--trainer.{name} " in shown for name in hints_of(TrainerConfig))
    assert "--model.block.ff_skip.value " in printed("validate", "--help", "model.block.ff_skip")
    refused("did you mean 'model'?", "fit", "--help", "modl")
