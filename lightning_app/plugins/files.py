"""What the digest of a plug-in covers: its files, what they import, and what it declares."""

import ast
import hashlib
import importlib.util
import linecache
import os
import sys
import sysconfig
from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from importlib.machinery import PathFinder, SourceFileLoader
from itertools import accumulate
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple

from lightning_app.core.code import syntax_digest
from lightning_app.core.errors import UserError, nearest

Place = tuple[str, Path | None]
"""A file or folder by a name that stays when the plug-in moves, or an environment variable."""


class Covered(NamedTuple):
    """A file or variable in a digest; the path is real, and empty for a variable."""

    name: str
    digest: str
    path: str


TAKEN: dict[str, bytes] = {}
"""The code of plug-ins as this process, or its parent, read it first, by real path. It is what is
executed, digested and shown in tracebacks, whatever becomes of the files."""
MODULES: dict[str, Path] = {}
"""The files of the modules that the parent has imported for its plug-ins."""


def taken(path: Path) -> bytes:
    """Return the code in a file; the same at each later call."""
    if (real := os.path.realpath(path)) not in TAKEN:
        TAKEN[real] = path.read_bytes()
    lines = TAKEN[real].decode(errors="replace").splitlines(keepends=True)
    linecache.cache[str(path)] = (len(TAKEN[real]), None, lines, str(path))
    return TAKEN[real]


class TakenLoader(SourceFileLoader):
    """Executes the code that was taken; a compiled file may be of other code."""

    def get_code(self, fullname: str) -> CodeType:
        return self.source_to_code(taken(Path(self.path)), self.path)


class Finder:
    """Finds the modules of plug-ins; with `all` also others that are of no distribution."""

    all = False

    @classmethod
    def find_spec(cls, name: str, path: Any = None, target: Any = None) -> Any:
        known = MODULES.get(name)
        spec = None if known else PathFinder.find_spec(name, path, target)
        file = known or Path(getattr(spec, "origin", None) or "")
        real = Path(os.path.realpath(file))
        code = known or isinstance(getattr(spec, "loader", None), SourceFileLoader)
        if not code or (str(real) not in TAKEN and (not cls.all or is_installed(real))):
            return None
        loader = TakenLoader(name, str(file))
        return importlib.util.spec_from_file_location(name, file, loader=loader)


def parts_at(places: Iterable[Place], *, copies: bool = False) -> frozenset[Covered]:
    """Return all files and variables; a file that is missing is left out. `copies`: as taken."""
    found: set[Covered] = set()
    for name, place in places:
        if place is None:  # the value of a variable cannot be read from its digest
            value = repr(os.environ.get(name)).encode()
            found.add(Covered(f"${name}", hashlib.sha256(value).hexdigest(), ""))
        for path in [] if place is None else files_below(place):
            with suppress(OSError):
                shown, real = Path(name, path.relative_to(place or "")), os.path.realpath(path)
                data = TAKEN[real] if copies and real in TAKEN else path.read_bytes()
                found.add(Covered(shown.as_posix(), syntax_digest(path.name, data), real))
    return frozenset(found)


def files_below(place: Path) -> list[Path]:
    """Return the file, or all files of a folder, following links, without compiled ones."""
    paths, seen = [] if place.is_dir() else [place], set()
    for above, names, files in os.walk(place, followlinks=True):
        real = os.path.realpath(above)
        names[:] = [] if real in seen else [name for name in names if name != "__pycache__"]
        paths += [Path(above, name) for name in files if real not in seen]
        seen.add(real)
    return sorted(paths)


def own_places(package: str) -> list[Place]:
    """Return the file of an importable module, or the folders of a package."""
    spec = None
    with suppress(ImportError, ValueError):
        spec = importlib.util.find_spec(package)
    if spec is None:
        hint = nearest(f"{package}.py", (path.name for path in Path.cwd().glob("*.py")))
        wrong = "no module of this name can be imported, and a file's name ends in .py"
        raise UserError(f"plug-in {package}: {wrong}{hint}")
    folders: list[Place] = [(package, Path(each)) for each in spec.submodule_search_locations or ()]
    places = folders or [(f"{package}.py", Path(spec.origin or ""))]
    if not parts_at(places):
        wrong = f"has no files that a digest could cover ({spec.origin}); unpack it"
        raise UserError(f"plug-in {package}: {wrong}")
    return places


def names_in(data: bytes, package: str = "", *, late: bool) -> tuple[set[str], set[str]]:
    """Return the modules that code imports, also in functions if `late`, and the texts in it."""
    imports, texts, nodes = set[str](), set[str](), list[ast.AST]()
    with suppress(SyntaxError, ValueError):
        nodes.append(ast.parse(data))
    while nodes:
        match node := nodes.pop():
            case ast.Import(names=names):
                imports.update(each.name for each in names)
            case ast.ImportFrom(module=module, level=level, names=names):
                with suppress(ImportError):
                    base = importlib.util.resolve_name("." * level + (module or ""), package)
                    imports |= {base, *(f"{base}.{each.name}" for each in names)}
            case ast.Constant(value=str(text)):
                texts.add(text)
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.Lambda() if not late:
                continue
            case ast.If(test=test) if ast.unparse(test).removeprefix("typing.") == "TYPE_CHECKING":
                node = ast.Module(node.orelse, [])
        nodes += ast.iter_child_nodes(node)
    return imports, texts


def file_of(module: str) -> Path | None:
    """Return the file of an imported module; None without one."""
    file = getattr(sys.modules.get(module), "__file__", None)
    return Path(os.path.realpath(file)) if isinstance(file, str) else None


@cache
def is_installed(file: Path) -> bool:
    """Whether a file belongs to Python, to this package or, not editable, to a distribution."""
    library = [os.path.realpath(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")]
    inside = any(map(file.is_relative_to, (*library, Path(os.path.realpath(__file__)).parents[1])))
    return inside or not {"site-packages", "dist-packages"}.isdisjoint(file.parts)


def reached(plugin: str, *, late: bool = False) -> dict[str, Path]:
    """Return by name the files of a plug-in's module and of those that it and they import.

    They are looked up among the imported modules, so that the order of plug-ins does not matter.
    Those of installed distributions are left out; imports inside functions count with `late`.
    """
    package, names, found = plugin.partition(".")[0], [plugin], dict[str, Path]()
    while names:
        for name in accumulate(names.pop().split("."), "{}.{}".format):
            top, path = name.partition(".")[0], file_of(name)
            if path is None or name in found or name == "__main__":
                continue
            if top != package and is_installed(file_of(top) or path):
                continue
            if not path.is_file() and str(path) not in TAKEN:
                raise UserError(f"plug-in {plugin}: imports '{name}' from {path}; unpack it")
            found[name] = path
            within = getattr(sys.modules[name], "__package__", "")
            names += names_in(TAKEN.get(str(path)) or path.read_bytes(), within, late=late)[0]
    return found
