"""The contents of a plug-in: its files, what it opens, and what it replaces in the package.

Lists the files of plug-ins, their digests, and the files that need none. A plug-in that changes
anything outside itself counts for every run.
"""

import builtins
import hashlib
import importlib.util
import os
import sys
import sysconfig
from collections.abc import Container, Iterable, Mapping, Sequence
from functools import cache
from itertools import chain
from operator import eq, is_, ne
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

from lightning_app.core.errors import UserError, nearest


def files_below(folder: Path) -> list[Path]:
    """Return all files in a folder, following links to folders, without compiled ones."""
    paths, seen = [], set()
    for above, names, files in os.walk(folder, followlinks=True):
        real = os.path.realpath(above)
        names[:] = [] if real in seen else [name for name in names if name != "__pycache__"]
        if real not in seen:
            paths += [path for name in files if (path := Path(above, name)).is_file()]
        seen.add(real)
    return sorted(paths)


def sha256_of_file(path: str | Path) -> str:
    """Return the SHA-256 of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@cache
def _places() -> tuple[tuple[str, ...], str]:
    """Return the folders of the standard library and of this package."""
    names = ("stdlib", "platstdlib")
    library = {os.path.realpath(sysconfig.get_path(name)) + os.sep for name in names}
    package = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
    return tuple(library), package + os.sep


@cache
def _recorded(folder: str) -> tuple[frozenset[str], tuple[str, ...]]:
    """Return the files that distributions installed into a folder of `sys.path`.

    An editable installation has none there. Distributions from an operating system do not list
    their files: they own the modules with their names, returned second.
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
    """Whether a real path belongs to Python, this package or an installed distribution."""
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
    """Return the real path of a module's file; None without a file.

    A package may create modules whose files do not exist; they count as the package's file.
    """
    spec = getattr(module, "__spec__", None)
    origin = spec.origin if spec is not None and spec.has_location else None
    file = getattr(module, "__file__", None) or origin
    if not isinstance(file, str):
        return None
    path = os.path.realpath(file)
    package = os.path.join(os.path.dirname(path), "__init__.py")
    return path if os.path.exists(path) or not os.path.exists(package) else package


def compiled(content: bytes, path: Path) -> CodeType:
    """Compile a plug-in before the slow imports of the tables."""
    try:
        return compile(content, str(path), "exec")
    except SyntaxError as error:
        raise UserError(f"{path}, line {error.lineno}: syntax error: {error.msg}") from error
    except ValueError as error:  # for a null byte, in some versions of Python
        raise UserError(f"{path}: no source code: {error}") from error


def place_of(name: str) -> str | None:
    """Return the file or folder of a module outside all installed distributions, otherwise None."""
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
    """Return the files of an importable module or a whole package.

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
    paths = [Path(spec.origin)] if spec.origin and not folders else []
    paths += [path for folder in folders for path in files_below(folder)]
    if not paths or not paths[0].is_file():
        raise UserError(
            f"plug-in {package}: has no files that a digest could cover ({spec.origin}); unpack it"
        )
    return sorted(paths)


def code_digest_of(files: Sequence[Path]) -> str:
    digest = hashlib.sha256()
    root = Path(os.path.commonpath([file.parent for file in files])) if files else Path()
    for file in files:
        name = file.relative_to(root).as_posix()
        digest.update(f"{name}\0{hashlib.sha256(file.read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()


class Need(NamedTuple):
    """A file, folder or environment variable that a plug-in reads."""

    name: str
    path: Path | None

    def files(self) -> dict[str, str]:
        """Return the digest of each file by real path."""
        if self.path is None:
            return {}
        paths = files_below(self.path) if self.path.is_dir() else [self.path]
        return {os.path.realpath(each): sha256_of_file(each) for each in paths}

    def line(self) -> str:
        """Return the line of the digest: the value of a variable cannot be read from it."""
        if self.path is None:
            value = os.environ.get(self.name)
            return f"{self.name}={'unset' if value is None else repr(value)}\n"
        if not self.path.is_dir():
            return f"{self.name}\0{sha256_of_file(self.path)}\n"
        digests = (
            (path.relative_to(self.path), sha256_of_file(path)) for path in files_below(self.path)
        )
        lines = [f"{name.as_posix()}\0{digest}" for name, digest in digests]
        return "\n".join([f"{self.name}/", *lines, ""])


def with_needs(sha256: str, needs: Iterable[Need]) -> str:
    """Return the digest of code and its dependencies; only of the code if there are no others."""
    lines = sorted(need.line() for need in needs)
    return hashlib.sha256("".join([sha256, *lines]).encode()).hexdigest() if lines else sha256


OURS = __name__.partition(".")[0]

_LIBRARIES = ("torch", "numpy", "math", "random", "builtins")

PATCHABLE = (OURS, "lightning", "torchmetrics", "sacrebleu", "sentencepiece", *_LIBRARIES)
"""The packages whose functions, classes and constants a plug-in could replace for every run."""

_NUMERIC = ("torch.nn", "torch.optim", "torch.autograd", "torch.functional", "torch._tensor")
_NUMERIC += ("torch.utils.data", "torch.utils.checkpoint", "torch.amp", "torch.random", "torch.fft")
"""The parts of torch whose attributes are compared."""


_MADE, _WRAPPERS = (type, FunctionType), (staticmethod, classmethod)

Attributes = dict[tuple[str, ...], dict[str, Any]]
"""The attributes of each module, class and table, and the code of their functions, by name."""


def patchable() -> Attributes:
    """Return the attributes of this package and of torch that affect numbers."""
    found: Attributes = {}
    for name, module in [*sys.modules.items()]:
        library = name.partition(".")[0] in _LIBRARIES
        if not _is_patchable(name) or (
            library and name not in _LIBRARIES and not name.startswith(_NUMERIC)
        ):
            continue
        attributes = _add(found, (name,), vars(module))
        for key, value in attributes.items():
            if isinstance(value, type):
                if value.__module__ == name:
                    _add(found, (name, key), vars(value))
            elif isinstance(value, dict) and key.startswith("_global_"):  # torch's hooks
                found[name, key] = {"[]": _Parts((*value, *value.values()))}
            elif name.startswith(OURS) and _is_table(value):
                found[name, key, "[]"] = {
                    str(each): of
                    for each, of in dict(value).items()
                    if not isinstance(of, _MADE) or _is_patchable(of.__module__)
                }
    if (torch := sys.modules.get("torch")) is not None:
        for name in ("get_default_dtype", "get_float32_matmul_precision", "is_grad_enabled"):
            found["torch",][f"{name}()"] = _Parts((getattr(torch, name)(),))
    return found


def _add(found: Attributes, owner: tuple[str, ...], attributes: Mapping[str, Any]) -> Any:
    """Add the attributes of a module or class, and the components of its functions."""
    copied = found[owner] = dict(attributes)
    found[*owner, "()"] = {
        name: _Parts((value.__code__, value.__defaults__, value.__kwdefaults__))
        for name, value in copied.items()
        if type(value) is FunctionType
    }
    return copied


def _is_table(value: object) -> bool:
    """Whether a value is a dictionary or a table of parts, whose entries are to be kept."""
    return type(value) is dict or (
        isinstance(value, Mapping) and type(value).__module__.startswith(OURS)
    )


def _is_patchable(module: str) -> bool:
    return module.partition(".")[0] in PATCHABLE


class _Parts(tuple[Any, ...]):
    """The components of a function or container, each of which must stay the same object."""

    def differs(self, other: "_Parts") -> bool:
        if len(self) != len(other):
            return True
        pairs = zip(self, other, strict=True)
        return any(a is not b and not (type(a) is type(b) is str and a == b) for a, b in pairs)


def _differs(value: Any, other: Any) -> bool:
    if isinstance(value, _Parts) and isinstance(other, _Parts):
        return value.differs(other)
    return value is not other


def changed(before: Attributes, now: Attributes) -> str:
    """Return the first attribute that has changed; empty if all are unchanged.

    Importing a module adds its name to the package around it, which changes nothing.
    """
    differing = [o for o, found in before.items() if not _are_same(found, now.get(o, {}))]
    for owner in differing:
        for key, value in before[owner].items():
            name = (*owner[:-1], key, "()") if owner[-1] == "()" else (*owner, key)
            if _differs(value, now.get(owner, {}).get(key)) and not (
                key in _BOOKKEEPING or name[:2] in (*_BY_LIGHTNING, *_OWN)
            ):
                return ".".join(name)
    for owner in (*differing, *(now.keys() - before.keys())):
        for key in now.get(owner, {}).keys() - before.get(owner, {}).keys() - _BOOKKEEPING:
            shadows = owner in before and len(owner) == 1 and hasattr(builtins, key)
            inside = len(owner) == 2 and owner[1] in before.get(owner[:1], ())
            if shadows or inside:
                return ".".join((*owner, key))
    return ""


def _are_same(attributes: Mapping[str, Any], others: Mapping[str, Any]) -> bool:
    """Whether all are the same objects, for most modules and classes: much faster than each."""
    if len(attributes) != len(others) or not all(map(eq, attributes, others)):
        return False
    values = (attributes.values(), others.values())
    if type(next(iter(attributes.values()), None)) is _Parts:
        if any(map(ne, *(map(len, each) for each in values))):
            return False
        values = tuple(map(chain.from_iterable, values))
    return all(map(is_, *values))


_BY_LIGHTNING = (("torch", "compile"), ("torch", "manual_seed"))
"""The attributes that Lightning replaces when imported."""

_OWN = ((f"{OURS}.plugins", "_LOADED"),)
"""The attribute that this package changes while a plug-in is loaded."""

_BOOKKEEPING = {
    *("__warningregistry__", "__annotations__", "__annotations_cache__", "__annotate__"),
    *("__abstractmethods__", "__slotnames__", "_abc_impl"),
}


def planted(now: Attributes, files: Container[str], packages: Container[str]) -> str:
    """Return an attribute of this package, torch or Lightning that is a plug-in's code, or ''."""
    for owner, attributes in now.items():
        if owner[-1] == "[]":  # a table, to which plug-ins add
            continue
        for key, value in attributes.items():
            if owner[-1] == "()":
                if _real(value[0].co_filename) in files:
                    return ".".join((*owner[:-1], key))
                continue
            if isinstance(value, property):
                value = value.fget
            elif isinstance(value, _WRAPPERS):
                value = value.__func__
            if isinstance(value, _MADE) and str(value.__module__).partition(".")[0] in packages:
                return ".".join((*owner, key))
    return ""


@cache
def _real(path: str) -> str:
    return os.path.realpath(path)
