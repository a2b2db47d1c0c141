"""One name, one meaning: classes and public functions of the package, and the length of modules."""

import ast
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "lightning_app"
FILES = sorted(PACKAGE.rglob("*.py"))
MOST_LINES = 900

PROTOCOL = "what the grid runner asks of a program, and the function that does it"
PYTHON = "what the interface from Python offers under the name that its user expects"
SHARED: dict[str, str] = {
    "read": "the one reader of what a user writes, and that of a corpus",
    **dict.fromkeys(("Block", "run_grid"), PYTHON),
    **dict.fromkeys(("count_devices", "prepare", "run_cell"), PROTOCOL),
}
"""Names that several modules define, each with a reason."""


def definitions(path: Path) -> Iterator[tuple[str, ast.ClassDef | ast.FunctionDef]]:
    """Yield the classes and functions of a module; of its methods none."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            yield node.name, node


def places(kind: type[ast.ClassDef | ast.FunctionDef]) -> dict[str, list[str]]:
    """Return the modules that define each name; a private class counts without its underscore."""
    found: dict[str, list[str]] = {}
    for path in FILES:
        for name, node in definitions(path):
            if isinstance(node, kind):
                spelling = name.lstrip("_") if kind is ast.ClassDef else name
                found.setdefault(spelling, []).append(path.relative_to(PACKAGE).as_posix())
    return found


def repeated(kind: type[ast.ClassDef | ast.FunctionDef]) -> dict[str, list[str]]:
    return {
        name: modules
        for name, modules in places(kind).items()
        if len(modules) > 1 and not name.startswith("_")
    }


def test_each_exception_still_applies() -> None:
    assert set(SHARED) <= {*repeated(ast.ClassDef), *repeated(ast.FunctionDef)}


def test_a_class_has_a_name_of_its_own() -> None:
    assert {n: m for n, m in repeated(ast.ClassDef).items() if n not in SHARED} == {}


def test_a_public_function_has_a_name_of_its_own() -> None:
    assert {n: m for n, m in repeated(ast.FunctionDef).items() if n not in SHARED} == {}


def test_modules_are_short() -> None:
    lines = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in FILES}
    assert {str(path): count for path, count in lines.items() if count > MOST_LINES} == {}
