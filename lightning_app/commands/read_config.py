"""Read the config of a command line: a file, and overrides after it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning_app.config.config import load_config
from lightning_app.config.sources import Written


def read_config(path: Path, overrides: Sequence[str], *, imports: bool = True) -> dict[str, Any]:
    """Return the complete config of a file with overrides, read like `ablate fit`.

    Raises:
        UserError: for a mistake in either.
    """
    return load_config(Written(["--config", str(path), *overrides]), imports=imports)
