"""The config of a cell: resolved as that of `ablate fit`, while nothing foreign is imported."""

from collections.abc import Callable
from typing import Any

from lightning_app.ablation.import_allowlist import check_config
from lightning_app.config import parse, resolve
from lightning_app.importing import only_known_packages

Tree = dict[str, Any]


def resolve_cell(tree: Tree, source: str) -> Tree:
    """Return the complete config of a cell; a grid file names no code but what is listed.

    Raises:
        UserError: for what `resolve` refuses, and for what is not listed.
    """
    return _safely(resolve, tree, source)


def parse_cell(tree: Tree, source: str) -> Tree:
    """Return what `resolve_cell` does, by LightningCLI's parser alone: a run is trained from it."""
    return _safely(parse, tree, source)


def _safely(complete: Callable[[Tree, str], Tree], tree: Tree, source: str) -> Tree:
    """Check a config as written, since parsing imports, and as completed.

    A text may be the name of a file that the parser reads.
    """
    check_config(source, tree)
    with only_known_packages():
        found = complete(tree, source)
    check_config(source, found)
    return found
