"""Resolve the config of a cell like that of `ablate fit`, importing only listed classes."""

from collections.abc import Callable
from typing import Any

from lightning_app.ablation.import_allowlist import check_config
from lightning_app.config import parse, resolve
from lightning_app.errors import named
from lightning_app.importing import only_known_packages

Tree = dict[str, Any]


def resolve_cell(tree: Tree, source: str) -> Tree:
    """Return the complete config of a cell, which may name only listed classes.

    Raises:
        UserError: for what `resolve` refuses, and for classes that are not listed.
    """
    return _safely(resolve, tree, source)


def parse_cell(tree: Tree, source: str) -> Tree:
    """Return the config of `resolve_cell`, made by LightningCLI's parser alone, for training."""
    return _safely(parse, tree, source)


def _safely(complete: Callable[[Tree, str], Tree], tree: Tree, source: str) -> Tree:
    """Check a config before parsing, since parsing imports code, and after completion.

    Text may also name a file, which the parser would read.
    """
    with named(source):
        check_config(tree)
    with only_known_packages():
        found = complete(tree, source)
    with named(source):
        check_config(found)
    return found
