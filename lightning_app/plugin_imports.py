"""What the files of a plug-in import: their digests cover it, or it is refused."""

import ast
import importlib.util
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


def imports_of(files: Iterable[bytes]) -> frozenset[str]:
    """Return the first names of the modules that Python files import, also inside of functions."""
    found: set[str] = set()
    for content in files:
        try:
            nodes = list(ast.walk(ast.parse(content)))
        except (SyntaxError, ValueError):
            continue  # of a file that is not imported
        for node in nodes:
            if isinstance(node, ast.Import):
                found |= {each.name.partition(".")[0] for each in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                found.add(node.module.partition(".")[0])
    return frozenset(found)


def origins_of(namespace: Mapping[str, Any]) -> set[str]:
    """Return the first names of the modules from which the values of a module come."""
    named = (
        getattr(value, "__module__", None) or getattr(value, "__name__", None)
        for value in namespace.values()
    )
    return {name.partition(".")[0] for name in named if isinstance(name, str) and name}


def check_neighbours(path: Path, names: Iterable[str]) -> None:
    """Refuse a file that imports a module beside it, which its digest would not cover.

    Raises:
        ImportError: naming the module.
    """
    for name in sorted({*names} - {path.stem, "lightning_app"}):
        try:
            spec = getattr(sys.modules.get(name), "__spec__", None) or importlib.util.find_spec(
                name
            )
        except (ImportError, ValueError):
            continue
        if spec is None:
            continue
        places = [*(spec.submodule_search_locations or ())]
        places += [spec.origin] if spec.origin and spec.has_location else []
        if any(Path(each).resolve().parent == path.parent for each in places):
            raise ImportError(
                f"it imports '{name}' from its own folder, which its digest does not cover; put "
                "both into one file or into a package"
            )
