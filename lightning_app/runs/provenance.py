"""The provenance of a result: version of the code, libraries, command line, processor.

This module is fast to import, for `ablate plan`. The part that needs torch is in `hardware`.
"""

import ast
import copy
import hashlib
import importlib.metadata
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from lightning_app.version import __version__

PACKAGES = (
    "torch",
    "lightning",
    "torchmetrics",
    "sentencepiece",
    "sacrebleu",
    "datasets",
    "optuna",
)

APART = (
    *("api", "catalogue", "commands", "grids", "plugins", "report", "testing"),
    *("__init__.py", "__main__.py", "cli.py", "version.py"),
    *("core/errors.py", "core/files.py", "core/project.py"),
    *("core/strict_yaml.py", "runs"),
    *("config/__init__.py", "config/rules.py", "config/experiment.py", "config/grid.py"),
    *("config/identity.py", "config/rulers.py", "core/schema.py"),
    *("config/sources.py", "config/tree.py", "probes/figures.py", "training/launcher.py"),
)
"""Folders and files of the package that cannot change a number of a run. All others count, so
a new file counts until it is listed here."""

_SECONDS = 10.0  # time limit of a git call
_PASSWORDS = (re.compile(r"(://[^/\s:@]*:)[^/\s]*(@)"), re.compile(r"(password=)[^&\s]*()"))


FOREIGN = ("MASTER_", "TORCHELASTIC_", "SLURM_", "SRUN_", "PMI_", "PMIX_", "OMPI_")
"""The beginnings of the variables by which launchers, MPI among them, tell a process its rank."""


def is_launched(environment: Mapping[str, str]) -> bool:
    """Whether a launcher other than Lightning may have started this process."""
    return any(name.startswith((*FOREIGN, "LSB_")) for name in environment)


@cache
def software() -> dict[str, Any]:
    """The software of this process: `package`, `commit` and `dirty`, `code`, `libraries`.

    It is read once, when the modules are imported: later changes of files do not affect the
    process. Forked children inherit it together with the modules.
    """
    package = Path(str(files("lightning_app")))
    libraries = {name: importlib.metadata.version(name) for name in (*PACKAGES, "numpy")}
    return {
        "package": __version__,
        **checkout(package),
        "code": code_digest(package),
        "libraries": {"python": platform.python_version(), **libraries},
    }


def code_digest(package: Path) -> str:
    """Return the digest of all definitions in a package's folder that can change numbers.

    Comments, docstrings and layout do not count, nor do the version of Python and the file of a
    definition, so that a definition may move. A definition's imports from the package
    count only if several definitions have the same name.
    """
    paths = [path for path in package.rglob("*.py") if counts(path.relative_to(package).as_posix())]
    trees = {path: _parsed(path) for path in sorted(paths)}

    @cache
    def definitions(path: Path) -> list[tuple[str, str]]:
        return list(_definitions(trees.get(path) or _parsed(path)))

    found: dict[str, list[str]] = {}
    for path in trees:
        for name, text in definitions(path):
            found.setdefault(name, []).append(text)
    entries = [f"{name}\n{text}\n" for name, texts in found.items() for text in texts]
    for path, tree in trees.items():
        entries += _ambiguous(path, tree, package, found, definitions)
    return hashlib.sha256("".join(sorted(entries)).encode()).hexdigest()[:16]


def _parsed(path: Path) -> ast.Module | str:
    """The syntax of a file, or the digest of its bytes if it does not parse."""
    data = path.read_bytes()
    try:
        return ast.parse(data)
    except (SyntaxError, ValueError):  # for a newer Python, or half written
        return hashlib.sha256(data).hexdigest()


def _definitions(tree: ast.Module | str) -> Iterator[tuple[str, str]]:
    """Yield the names and the meanings of a module's statements other than imports.

    A meaning includes the origin of each imported name that the statement uses.
    """
    if isinstance(tree, str):
        yield "", tree
        return
    given: dict[str, str] = {}  # the origin of each import; within the package only its name
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            own = isinstance(node, ast.ImportFrom) and _is_own(node)
            module = "" if own else getattr(node, "module", "") or ""
            for alias in node.names:
                given[alias.asname or alias.name.partition(".")[0]] = f"{module}:{alias.name}"
    for node in tree.body:
        if not isinstance(node, ast.Import | ast.ImportFrom) and not _is_idle(node):
            parts = list(ast.walk(node))
            used = {name.id for name in parts if isinstance(name, ast.Name)}
            if any(isinstance(part, ast.ImportFrom) and _is_own(part) for part in parts):
                node = _WithoutOwn().visit(copy.deepcopy(node))  # a copy takes most of the time
            text = _canonical(node)
            yield (
                getattr(node, "name", ""),
                f"{text} {sorted(used & given.keys())} "
                + " ".join(given[name] for name in sorted(used & given.keys())),
            )


class _WithoutOwn(ast.NodeTransformer):
    """Removes imports from the package inside definitions, since their modules may move."""

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.AST | None:
        return None if _is_own(node) else node


def _is_own(node: ast.ImportFrom) -> bool:
    return (node.module or "").partition(".")[0] == "lightning_app"


def _ambiguous(
    path: Path,
    tree: ast.Module | str,
    package: Path,
    found: Mapping[str, Sequence[str]],
    definitions: Callable[[Path], list[tuple[str, str]]],
) -> Iterator[str]:
    """Yield, for each ambiguous name that a file imports, which definition it means."""
    if isinstance(tree, str):
        return
    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom) or not _is_own(node):
            continue
        file = package.parent.joinpath(*(node.module or "").split(".")).with_suffix(".py")
        for alias in node.names:
            if len(found.get(alias.name, ())) > 1 and file.is_file():
                texts = [text for name, text in definitions(file) if name == alias.name]
                users = sorted(name for name, _ in definitions(path))
                yield f"{users}: {alias.name} {texts}\n"


def foreign_classes(tree: Any, apart: Iterable[str] = ()) -> dict[str, str | None]:
    """The digest of the file of every config class from outside the package and Lightning.

    Only that file counts, not its imports. None if a class is not in a file. Classes of the
    plug-ins `apart` are omitted: they have their own digests.
    """
    known = {"lightning_app", "lightning", *(name.partition(".")[0] for name in apart)}
    found: dict[str, str | None] = {}
    for name in sorted(set(_class_paths(tree))):
        if name.partition(".")[0] not in known:
            file = _file_of(name)
            text = "" if file is None else _meaning(file)
            found[name] = None if file is None else hashlib.sha256(text.encode()).hexdigest()[:16]
    return found


def checkout(package: Path) -> dict[str, Any]:
    """`commit` of the git checkout with the package, and whether the package is `dirty`.

    Both are None outside a checkout and without git.
    """
    unknown = {"commit": None, "dirty": None}
    # A folder that merely happens to be in a checkout, such as .venv, is not part of it.
    if not _git(package, "ls-files", "--", "__init__.py"):
        return unknown
    commit = _git(package, "rev-parse", "HEAD")
    changed = _git(package, "status", "--porcelain", "--", ".")
    if commit is None or changed is None:
        return unknown
    return {"commit": commit, "dirty": bool(changed)}


def command_line(words: Sequence[str] | None = None) -> list[str]:
    """A command line (by default this process's) as typed, without passwords and the folders
    of the program."""
    if words is None:
        program = Path(sys.argv[0])
        name = program.parent.name if program.name == "__main__.py" else program.name
        words = [name, *sys.argv[1:]]
    return [without_password(word) for word in words]


def without_password(text: str) -> str:
    """A text with the passwords in its URLs replaced by stars."""
    for pattern in _PASSWORDS:
        text = pattern.sub(r"\1***\2", text)
    return text


@cache
def cpu_model() -> str:
    """The name of this machine's processor."""
    information = Path("/proc/cpuinfo")
    if information.is_file():
        text = information.read_text(encoding="utf-8", errors="replace")
        if match := re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE):
            return " ".join(match[1].split())
    if sys.platform == "darwin":
        name = _output("sysctl", "-n", "machdep.cpu.brand_string")
        if name:
            return name
    return platform.processor() or platform.machine() or "unknown"


def counts(name: str) -> bool:
    """Whether a file, relative to the package's folder, can change a number of a run."""
    return not any(name == each or name.startswith(f"{each}/") for each in APART)


def _meaning(path: Path) -> str:
    """The syntax of a Python file, equal under all versions of Python; other files unchanged."""
    data = path.read_bytes()
    if path.suffix != ".py":
        return hashlib.sha256(data).hexdigest()
    try:
        return _canonical(ast.parse(data))
    except (SyntaxError, ValueError):  # for a newer Python, or half written
        return hashlib.sha256(data).hexdigest()


def _canonical(node: Any) -> str:
    """A syntax tree as text: without positions, docstrings and empty fields.

    `ast.dump` and `ast.unparse` differ between versions of Python.
    """
    if isinstance(node, ast.Constant):
        return f"Constant({node.value!a})"  # repr depends on the Unicode version
    if isinstance(node, ast.JoinedStr):
        return f"JoinedStr({','.join(_canonical(each) for each in node.values if _says(each))})"
    if isinstance(node, ast.AST):
        fields = (
            f"{name}={_canonical(value)}"
            for name, value in ast.iter_fields(node)
            if value is not None and value != [] and name != "ctx"
        )
        return f"{type(node).__name__}({','.join(fields)})"
    if isinstance(node, list):
        return f"[{','.join(_canonical(each) for each in node if not _is_idle(each))}]"
    return ascii(node)


def _says(part: ast.expr) -> bool:
    """Whether a part of an f-string is not the empty text that Python 3.12 puts between parts."""
    return not (isinstance(part, ast.Constant) and part.value == "")


def _is_idle(node: Any) -> bool:
    """Whether a statement has no effect, such as a docstring."""
    is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return is_text or isinstance(node, ast.Pass)


def _class_paths(tree: Any) -> Iterator[str]:
    if isinstance(tree, Mapping):
        path = tree.get("class_path")
        if isinstance(path, str):
            yield path
        for value in tree.values():
            yield from _class_paths(value)
    elif isinstance(tree, list):
        for value in tree:
            yield from _class_paths(value)


def _file_of(class_path: str) -> Path | None:
    """The file of the imported module that contains a class."""
    module = class_path
    while "." in module:
        module = module.rpartition(".")[0]
        if module in sys.modules:
            file = getattr(sys.modules[module], "__file__", None)
            return None if file is None else Path(file)
    return None


def _git(folder: Path, *words: str) -> str | None:
    """The output of git, or None on failure. Nothing in the checkout is executed or written."""
    options = ("--no-optional-locks", "-c", "core.fsmonitor=false", "-C", str(folder))
    return _output("git", *options, *words)


def _output(*command: str) -> str | None:
    # A git hook or editor that started us may point to another repository.
    environment = {name: value for name, value in os.environ.items() if name[:4] != "GIT_"}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_SECONDS, check=True, env=environment
        )
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return None
    return done.stdout.strip()
