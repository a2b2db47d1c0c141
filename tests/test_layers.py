"""Imports run one way: blocks <- models <- objectives <- module <- ablation <- cli."""

import ast
import graphlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

PACKAGE = "lightning_app"
ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / PACKAGE).rglob("*.py"))

MODEL = {"blocks", "models", "objectives", "optim"}
RUN = {*MODEL, "data", "tasks", "datamodule", "probes", "callbacks", "module"}
IDENTITY = {"identity", "experiment"}
FOLDERS = {"grid_axes", "grid_folder", "records", "run_folder", "run_state", "tables"}
CONFIG = {
    f"config.{name}" for name in ("classes", "config", "schema", "sources", "trainer", "callbacks")
}
ORIGIN = {"provenance", "hardware", "mixtures"}
# What each part may import besides itself; all but the blocks may import `errors`.
ALLOWED: dict[str, set[str]] = {
    "": {"api", "trained", "version"},
    "version": set(),
    "errors": set(),
    "atomic_write": set(),
    "registry": set(),
    "strict_yaml": {"bounds"},
    "project": {"strict_yaml"},
    "plugin_files": set(),
    "plugin_patches": set(),
    "plugin_imports": {"plugin_files", "plugin_patches"},
    "plugins": {"plugin_files", "plugin_imports", "plugin_patches", "project", "registry"},
    "plugin_copies": {"atomic_write", "identity", "plugins", "run_folder"},
    "task_facts": {"registry", "scores"},
    "records": {"archive", "run_folder", "strict_yaml", "task_facts", "version"},
    "tables": {"records", "run_folder"},
    "grid_axes": set(),
    "rulers": {"grid_axes", "task_facts"},
    "run_folder": set(),
    "parent": {"records", "run_folder"},
    "parent_weights": {"identity", "parent", "records", "saved"},
    "run_state": {"records", "run_folder", "strict_yaml"},
    "grid_folder": {"run_folder"},
    "out_of_memory": set(),
    "provenance": {"version"},
    "hardware": {"blocks", "provenance"},
    "mixtures": {"records"},
    "bounds": set(),
    "scores": set(),
    "blocks": {"registry"},
    "models": {"blocks", "registry"},
    "data": {"atomic_write", "parent", "plugins", "registry", "scores", "task_facts"},
    "objectives": {"blocks", "models", "task_facts"},
    "tasks": {"blocks", "models", "objectives", "data", "scores", "task_facts"},
    "trainer_limits": set(),
    "datamodule": {"data", "tasks", "trainer_limits"},
    "optim": {"blocks", "models", "registry"},
    "logging_steps": set(),
    "archive": set(),
    "saved": {"archive", "run_folder"},
    "module": {
        *MODEL,
        "bounds",
        "config.schema",
        "hardware",
        "tasks",
        "parent_weights",
        "saved",
        "logging_steps",
        "trainer_limits",
    },
    "probes": {*MODEL, "tasks", "atomic_write", "tables", "analysis"},
    "theory": {*MODEL, "probes", "atomic_write", "analysis"},
    "callbacks": {
        *MODEL,
        "bounds",
        "config.classes",
        "tasks",
        "logging_steps",
        "probes",
        "atomic_write",
        "catalogue",
        "hardware",
        "saved",
        "task_facts",
        "run_folder",
    },
    "config": set(),
    "config.schema": set(),
    "config.trainer": set(),
    "config.arguments": {"config.schema"},
    "config.classes": {"bounds", "config.arguments", "config.trainer", "plugins"},
    "config.callbacks": {"bounds", "config.classes", "run_folder", "task_facts"},
    "config.sources": {
        *("bounds", "config.schema", "config.trainer", "grid_axes", "identity"),
        *("plugin_copies", "strict_yaml", "task_facts"),
    },
    "config.config": {
        *MODEL,
        *(f"config.{name}" for name in ("callbacks", "classes", "schema", "sources", "trainer")),
        *("bounds", "data", "identity", "parent_weights", "task_facts"),
    },
    "launcher": set(),
    "catalogue": {"blocks", "models", "atomic_write"},
    "shipped": set(),
    "identity": {"atomic_write", "config.trainer", "run_folder", "version"},
    "experiment": {
        *MODEL,
        *("data", "identity", "parent", "plugins", "task_facts"),
        *("config.config", "config.schema", "config.trainer"),
    },
    "analysis": {
        *("task_facts", "scores", "atomic_write", "identity", "mixtures", "rulers", "shipped"),
        *("version", *FOLDERS),
    },
    "ablation": {
        *RUN,
        *IDENTITY,
        *ORIGIN,
        "archive",
        "bounds",
        *CONFIG,
        "atomic_write",
        "out_of_memory",
        "parent",
        "parent_weights",
        "plugin_copies",
        "plugin_imports",
        "plugins",
        "project",
        "rulers",
        *FOLDERS,
        "saved",
        "shipped",
        "strict_yaml",
        "task_facts",
        "trainer_limits",
        "analysis",
    },
    "bench": {
        *MODEL,
        "data",
        "tasks",
        "task_facts",
        "probes",
        "atomic_write",
        "analysis",
        "ablation",
    },
    "trained": {"blocks", "models", "data", "tasks", "datamodule", "module", "records"}
    | {"config.classes", "plugin_copies", "run_folder", "saved", "task_facts"},
    "api": {
        *("blocks", "models", *CONFIG),
        *("ablation", "analysis", "grid_axes", "launcher", "plugins", "run_folder"),
        *("strict_yaml", "trained"),
    },
    "commands": {
        *("api", "launcher", "trained", *CONFIG),
        *RUN,
        *IDENTITY,
        *FOLDERS,
        *("ablation", "analysis", "atomic_write", "bench", "catalogue"),
        *("plugin_copies", "plugins", "project", "rulers", "saved"),
        *("mixtures", "shipped", "strict_yaml"),
        *("task_facts", "theory", "version"),
    },
    "cli": {"commands", "plugins"},
    "testing": {"blocks", "models", "plugins"},
    "__main__": {"cli"},
}


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


NAMES = {module_name(path) for path in FILES}


def part_of(module: str) -> str:
    """Return the folder or file directly inside the package that holds `module`.

    Each module of `config` is a part: some are below the models, and some above them.
    """
    inside = module.partition(".")[2]
    return inside if inside.startswith("config.") else inside.partition(".")[0]


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


def test_imports_point_down() -> None:
    wrong = []
    for path in FILES:
        part = part_of(module_name(path))
        assert part in ALLOWED, f"say in {Path(__file__).name} what '{part}' may import"
        allowed = {"", part, *ALLOWED[part]} | (set() if part == "blocks" else {"errors"})
        found = sorted(name for name in ours(path) if part_of(name) not in allowed)
        wrong += [f"{module_name(path)} imports {name}" for name in found]
    assert wrong == []


def test_allowed_imports_have_no_cycle() -> None:
    graphlib.TopologicalSorter(ALLOWED).prepare()


def test_modules_have_no_cycle() -> None:
    graph = {module_name(path): ours(path) - {module_name(path)} for path in FILES}
    graphlib.TopologicalSorter(graph).prepare()


def test_foreign_imports_are_the_right_ones() -> None:
    """Annotations stay what they say, for the shape checks; Lightning has one name."""
    for path in FILES:
        names = set(imports(path))
        assert "__future__" not in names, path
        assert "pytorch_lightning" not in {name.partition(".")[0] for name in names}, path


@pytest.mark.parametrize("part", ["blocks", "models", "objectives", "tasks"])
def test_plain_parts_do_not_know_lightning(part: str) -> None:
    files = [path for path in FILES if part_of(module_name(path)) == part]
    assert files
    known = {name.partition(".")[0] for path in files for name in imports(path)}
    assert not known & {"lightning", "jsonargparse", "optuna"}


@pytest.mark.parametrize("part", ["schema", "trainer", "sources"])
def test_light_parts_do_not_import_lightning(part: str) -> None:
    known = {name.partition(".")[0] for name in imports(ROOT / PACKAGE / f"config/{part}.py")}
    assert not known & {"lightning", "torch"}


def test_analysis_needs_no_torch() -> None:
    files = [path for path in FILES if part_of(module_name(path)) == "analysis"]
    known = {name.partition(".")[0] for path in files for name in imports(path)}
    assert not known & {"torch", "lightning"}


def test_reference_shares_nothing_with_the_package() -> None:
    for name in ("reference.py", "reference_auxiliary.py"):
        names = set(imports(ROOT / "tests" / name)) - {"tests.reference"}
        assert {name.partition(".")[0] for name in names} <= {
            "collections",
            "dataclasses",
            "fractions",
            "math",
            "numpy",
            "typing",
        }


def test_this_test_sees_the_imports() -> None:
    """The reading itself: a known edge, and a relative import resolved."""
    heads = ROOT / PACKAGE / "models" / "heads.py"
    assert "lightning_app.models.transformer" in ours(heads)
    assert {module_name(path) for path in FILES} >= {PACKAGE, "lightning_app.blocks.block"}
