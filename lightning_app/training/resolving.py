"""Configs of grids, and of commands that train nothing.

Resolve the config of a cell like that of `ablate fit`, importing only listed classes.

Read the config of a command line: a file, and overrides after it.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lightning_app.config.allowlist import check_config, only_known_packages
from lightning_app.config.precheck import written_values
from lightning_app.config.run_plugins import require
from lightning_app.core.errors import named
from lightning_app.training.config import check, parse, resolve
from lightning_app.training.parser import config_parser, dump, keep_numbers

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


def read_config(path: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """Return the complete config of a file with overrides, read like `ablate fit`.

    Raises:
        UserError: for a mistake in either.
    """
    require(path.parent)  # of the config of a run
    words = ["--config", str(path), *overrides]
    written = written_values(words)
    parser = config_parser()
    with named(path):
        tree = dump(parser, parser.parse_args(words))
        keep_numbers(written, tree)
        check(tree)
        return tree
