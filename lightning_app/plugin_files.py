"""The files of plug-ins: which there are, their digest, and which files need none."""

import hashlib
import importlib.util
import os
import sys
import sysconfig
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from types import CodeType, ModuleType
from typing import NamedTuple

from lightning_app.errors import UserError, nearest


def files_below(folder: Path) -> list[Path]:
    """Return all files in a folder, also through links to folders, without compiled ones."""
    found, seen = [], set()
    for above, names, files in os.walk(folder, followlinks=True):
        real = os.path.realpath(above)
        names[:] = [] if real in seen else [name for name in names if name != "__pycache__"]
        if real not in seen:
            found += [path for name in files if (path := Path(above, name)).is_file()]
        seen.add(real)
    return sorted(found)


def sha256_of_file(path: str | Path) -> str:
    """Return the SHA-256 of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@cache
def _places() -> tuple[tuple[str, ...], str]:
    """Return the folders of the standard library, and that of this package."""
    names = ("stdlib", "platstdlib")
    library = {os.path.realpath(sysconfig.get_path(name)) + os.sep for name in names}
    return tuple(library), os.path.dirname(os.path.realpath(__file__)) + os.sep


@cache
def _recorded(folder: str) -> tuple[frozenset[str], tuple[str, ...]]:
    """Return the files that distributions have installed into a folder of `sys.path`.

    An editable installation has none there. Distributions of an operating system do not list
    their files: they own the modules of their names, which come second.
    """
    files: set[str] = set()
    owned: list[str] = []
    try:
        names = os.listdir(folder)
    except OSError:
        return frozenset(), ()
    for name in names:
        record = Path(folder, name, "RECORD")
        if name.endswith(".dist-info") and record.is_file():
            lines = record.read_text(encoding="utf-8", errors="replace").splitlines()
            files.update(line[: line.find(",")].strip('"') for line in lines)
        elif name.endswith(".egg-info") and folder.endswith(("site-packages", "dist-packages")):
            tops = Path(folder, name, "top_level.txt")
            if tops.is_file():
                owned += tops.read_text(encoding="utf-8", errors="replace").split()
    return frozenset(files), tuple(owned)


@cache
def is_known(path: str) -> bool:
    """Whether a real path is of Python, of this package or of an installed distribution."""
    library, ours = _places()
    if path.startswith(ours):
        return True
    apart = ("site-packages", "dist-packages")
    if path.startswith(library) and not any(f"{os.sep}{each}{os.sep}" in path for each in apart):
        return True
    if path.endswith(".pyc") and f"{os.sep}__pycache__{os.sep}" in path:
        path = importlib.util.source_from_cache(path)
    for entry in sys.path:
        folder = os.path.realpath(entry)
        if path.startswith(folder + os.sep):
            inner = path[len(folder) + 1 :]
            files, owned = _recorded(folder)
            if Path(inner).as_posix() in files:
                return True
            if inner.partition(os.sep)[0].removesuffix(".py") in owned:
                return True
    return False


def file_of(module: ModuleType) -> str | None:
    """Return the real path of a module's file, None of one without.

    A package may make modules whose files do not exist: those have the file of the package.
    """
    spec = getattr(module, "__spec__", None)
    origin = spec.origin if spec is not None and spec.has_location else None
    found = getattr(module, "__file__", None) or origin
    if not isinstance(found, str):
        return None
    path = os.path.realpath(found)
    package = os.path.join(os.path.dirname(path), "__init__.py")
    return path if os.path.exists(path) or not os.path.exists(package) else package


def compiled(content: bytes, path: Path) -> CodeType:
    """Compile a plug-in, before the slow imports of the tables."""
    try:
        return compile(content, str(path), "exec")
    except SyntaxError as error:
        raise UserError(f"{path}, line {error.lineno}: syntax error: {error.msg}") from error
    except ValueError as error:  # a null byte, in some versions of Python
        raise UserError(f"{path}: no source code: {error}") from error


def place_of(name: str) -> str | None:
    """Return the file or folder of a module that no installed distribution has; else None."""
    module = sys.modules.get(name)
    if module is not None and (path := file_of(module)) is not None:
        return None if is_known(path) else path
    try:
        spec = getattr(module, "__spec__", None) or importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None
    if spec is None:
        return None
    if spec.has_location and spec.origin is not None:
        path = os.path.realpath(spec.origin)
        return None if is_known(path) else path
    for each in spec.submodule_search_locations or ():  # a folder without __init__.py
        folder = os.path.realpath(each)
        if any(not is_known(str(path)) for path in files_below(Path(folder))):
            return folder
    return None


def package_files(package: str) -> list[Path]:
    """Return the files of a module that can be imported, or of a whole package.

    Raises:
        UserError: if there is no such module.
    """
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        spec = None
    if spec is None:
        hint = nearest(f"{package}.py", (path.name for path in Path.cwd().glob("*.py")))
        raise UserError(
            f"plug-in {package}: no module of this name can be imported, and a file's name ends in "
            f".py{hint}"
        )
    folders = [Path(each) for each in spec.submodule_search_locations or ()]
    found = [Path(spec.origin)] if spec.origin and not folders else []
    found += [path for folder in folders for path in files_below(folder)]
    if not found or not found[0].is_file():
        raise UserError(
            f"plug-in {package}: has no files that a digest could cover ({spec.origin}); unpack it"
        )
    return sorted(found)


def code_digest_of(files: Sequence[Path]) -> str:
    digest = hashlib.sha256()
    root = Path(os.path.commonpath([file.parent for file in files])) if files else Path()
    for file in files:
        name = file.relative_to(root).as_posix()
        digest.update(f"{name}\0{hashlib.sha256(file.read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()


class Need(NamedTuple):
    """A file, a folder or a variable of the environment that a plug-in reads."""

    name: str
    path: Path | None

    def files(self) -> dict[str, str]:
        """Return the digest of each file by real path."""
        if self.path is None:
            return {}
        found = files_below(self.path) if self.path.is_dir() else [self.path]
        return {os.path.realpath(each): sha256_of_file(each) for each in found}

    def line(self) -> str:
        """Return the line of the digest: a value of the environment is not shown by it."""
        if self.path is None:
            value = os.environ.get(self.name)
            return f"{self.name}={'unset' if value is None else repr(value)}\n"
        if not self.path.is_dir():
            return f"{self.name}\0{sha256_of_file(self.path)}\n"
        found = (
            (path.relative_to(self.path), sha256_of_file(path)) for path in files_below(self.path)
        )
        lines = [f"{name.as_posix()}\0{digest}" for name, digest in found]
        return "\n".join([f"{self.name}/", *lines, ""])


def with_needs(sha256: str, needs: Iterable[Need]) -> str:
    """Return the digest of code and of what it depends on; that of the code alone without."""
    lines = sorted(need.line() for need in needs)
    return hashlib.sha256("".join([sha256, *lines]).encode()).hexdigest() if lines else sha256
