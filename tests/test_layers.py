"""Imports run one way, from folder to folder and from file to file."""

import ast
import graphlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

PACKAGE = "lightning_app"
ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / PACKAGE).rglob("*.py"))

# The folders from the ground up: each may import from those before it only.
ORDER = (
    *("version", "core", "plugins", "scores", "blocks", "models", "catalogue", "runs", "data"),
    *("tasks", "config", "report", "probes", "training", "grids", "api", "testing"),
    *("commands", "cli", "__main__"),
)
# What some folders may not import although it stands below them.
APART = {
    "version": set(ORDER),
    "scores": {"plugins", "version"},
    "blocks": {"plugins", "scores", "version"},
    "models": {"plugins", "version"},
    "catalogue": {"plugins", "scores", "version"},
    "runs": {"blocks", "catalogue", "models", "plugins"},
    "data": {"blocks", "catalogue", "models", "version"},
    "tasks": {"catalogue", "plugins", "runs", "version"},
    "config": {"catalogue", "tasks"},
    "report": {"blocks", "catalogue", "data", "models", "plugins", "tasks"},
    "probes": {"catalogue", "config", "data", "plugins", "scores", "version"},
    "testing": {"api", "data", "grids", "report", "runs", "tasks", "training"},
}


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


NAMES = {module_name(path) for path in FILES}


def part_of(module: str) -> str:
    """Return the folder or file directly inside the package that holds `module`."""
    return module.partition(".")[2].partition(".")[0]


def imports(path: Path) -> Iterator[str]:
    """Yield the full name of everything that `path` imports, anywhere in it."""
    package = module_name(path).split(".")
    if path.name != "__init__.py":
        package = package[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                name = f"{base}.{alias.name}"
                # `from package import module` names a module, otherwise something inside one.
                yield name if name in NAMES else base


@cache
def ours(path: Path) -> set[str]:
    return {name for name in imports(path) if name.partition(".")[0] == PACKAGE}


def test_imports_point_down_and_foreign_ones_are_right() -> None:
    """The face of the package may name anything; it imports at the first use of a name.

    Annotations stay what they say, for the shape checks; Lightning has one name.
    """
    wrong = []
    for path in FILES:
        names = set(imports(path))
        assert "__future__" not in names, path
        assert "pytorch_lightning" not in {name.partition(".")[0] for name in names}, path
        part = part_of(module_name(path))
        if not part:
            continue
        assert part in ORDER, f"say in {Path(__file__).name} what '{part}' may import"
        allowed = {"", part, *ORDER[: ORDER.index(part)]} - APART.get(part, set())
        found = sorted(name for name in ours(path) if part_of(name) not in allowed)
        wrong += [f"{module_name(path)} imports {name}" for name in found]
    assert wrong == []


def test_modules_have_no_cycle() -> None:
    graph = {module_name(path): ours(path) - {module_name(path)} for path in FILES}
    graphlib.TopologicalSorter(graph).prepare()
    # The reading itself: a known edge, and a relative import resolved.
    assert "lightning_app.models.stack" in ours(ROOT / PACKAGE / "models" / "heads.py")
    assert {module_name(path) for path in FILES} >= {PACKAGE, "lightning_app.blocks.block"}


@pytest.mark.parametrize(
    ("place", "foreign"),
    [
        *(
            (part, {"lightning", "jsonargparse", "optuna"})
            for part in ("blocks", "models", "tasks")
        ),
        *((part, {"lightning", "torch"}) for part in ("core/schema.py", "config/trainer.py")),
        *((part, {"lightning", "torch"}) for part in ("config/sources.py", "report")),
    ],
)
def test_some_parts_do_without_heavy_libraries(place: str, foreign: set[str]) -> None:
    files = [path for path in FILES if path.is_relative_to(ROOT / PACKAGE / place)]
    assert files
    assert not foreign & {name.partition(".")[0] for path in files for name in imports(path)}


def test_reference_shares_nothing_with_the_package() -> None:
    for name in ("reference.py", "reference_auxiliary.py"):
        names = set(imports(ROOT / "tests" / name)) - {"tests.reference"}
        assert {name.partition(".")[0] for name in names} <= {
            *("collections", "dataclasses", "fractions", "math", "numpy", "typing")
        }
