"""One name, one meaning: classes and public functions of the package, and the length of modules."""

import ast
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


def repeated(kind: type[ast.ClassDef | ast.FunctionDef]) -> dict[str, list[str]]:
    """The modules that define a name twice; a private class counts without its underscore."""
    found: dict[str, list[str]] = {}
    for path in FILES:
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, kind):
                name = node.name.lstrip("_") if kind is ast.ClassDef else node.name
                found.setdefault(name, []).append(path.relative_to(PACKAGE).as_posix())
    return {n: m for n, m in found.items() if len(m) > 1 and not n.startswith("_")}


def test_classes_and_public_functions_have_names_of_their_own() -> None:
    found = repeated(ast.ClassDef) | repeated(ast.FunctionDef)
    assert {name: found[name] for name in found.keys() ^ SHARED.keys()} == {}


def test_modules_are_short() -> None:
    lines = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in FILES}
    assert {str(path): count for path, count in lines.items() if count > MOST_LINES} == {}
