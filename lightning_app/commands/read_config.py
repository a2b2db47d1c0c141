"""Read the config of a command line: a file, and overrides after it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning_app.config import check
from lightning_app.errors import named
from lightning_app.parser import config_parser, dump, keep_numbers
from lightning_app.plugin_copies import require
from lightning_app.precheck import written_values


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
