"""Read the config of a command line: a file, and overrides after it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from lightning_app.config import check
from lightning_app.errors import named
from lightning_app.parser import config_parser, dump, keep_numbers
from lightning_app.precheck import options_of, read_tree


def read_config(path: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """Return the complete config of a file with overrides, read like `ablate fit`.

    Raises:
        UserError: for a mistake in either.
    """
    written = read_tree(path)
    parser = config_parser()
    with named(path):
        tree = dump(parser, parser.parse_args(["--config", str(path), *overrides]))
        keep_numbers(written, tree)
        keep_numbers({"trainer": trainer_options(overrides)}, tree)
        check(tree)
        return tree


def trainer_options(overrides: Sequence[str]) -> dict[str, Any]:
    """Return the overrides of the Trainer by field, as values of YAML."""
    given = {name: value for name, value in options_of(overrides) if value is not None}
    return {
        name.removeprefix("trainer."): yaml.safe_load(value)
        for name, value in given.items()
        if name.startswith("trainer.")
    }
