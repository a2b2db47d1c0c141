"""`--json`: print one document on standard output, and everything else on standard error."""

import json
import math
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

SCHEMA = 1  # increases when a key changes its meaning or is removed


@contextmanager
def document(command: str, as_json: bool) -> Iterator[dict[str, Any]]:
    """Yield a mapping for the caller to fill, and print it at the end if `as_json`.

    After a `UserError` no document is printed: its message goes to standard error, as without JSON.
    """
    tree: dict[str, Any] = {"schema": SCHEMA, "command": command}
    if not as_json:
        yield tree
        return
    with redirect_stdout(sys.stderr):
        yield tree
    print(json.dumps(_plain(tree), indent=1, allow_nan=False), flush=True)


def _plain(value: Any) -> Any:
    """The value as JSON has it: numbers that are not finite are null, paths are strings."""
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return str(value) if isinstance(value, Path) else value
