"""The imports, files and changes of a plug-in: its digest covers them, or they are refused.

A single hook sees every file opened while a plug-in is loaded, whether through an
import statement, `importlib`, `runpy`, `open` or an extension module. Modules already in
`sys.modules` are checked separately, since they no longer open anything.
"""

import ast
import builtins
import hashlib
import importlib.util
import inspect
import os
import sys
import sysconfig
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from threading import get_ident
from types import CodeType, FunctionType, ModuleType
from typing import Any, Literal, NamedTuple

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


def patchable() -> dict[tuple[str, ...], Any]:
    """Return the attributes of this package and of torch that affect numbers, by name."""
    attributes: dict[tuple[str, ...], Any] = {}
    for name, module in [*sys.modules.items()]:
        library = name.partition(".")[0] in _LIBRARIES
        if not _is_patchable(name) or (
            library and name not in _LIBRARIES and not name.startswith(_NUMERIC)
        ):
            continue
        for key, value in [*vars(module).items()]:
            attributes[name, key] = value
            if isinstance(value, dict) and key.startswith("_global_"):  # torch's hooks
                attributes[name, key, "[]"] = _Parts((*value, *value.values()))
            elif name.startswith(OURS) and _is_table(value):
                attributes |= {
                    (name, key, "[]", str(each)): of
                    for each, of in dict(value).items()
                    if not isinstance(of, type | FunctionType) or _is_patchable(of.__module__)
                }
            elif isinstance(value, FunctionType):
                _add_code(attributes, (name, key), value)
            elif isinstance(value, type) and value.__module__ == name:
                for each, of in [*vars(value).items()]:
                    attributes[name, key, each] = of
                    _add_code(attributes, (name, key, each), of)
    if (torch := sys.modules.get("torch")) is not None:
        for name in ("get_default_dtype", "get_float32_matmul_precision", "is_grad_enabled"):
            attributes["torch", f"{name}()"] = _Parts((getattr(torch, name)(),))
    return attributes


def _is_table(value: object) -> bool:
    """Whether a value is a dictionary or a table of parts, whose entries are to be kept."""
    return type(value) is dict or (
        isinstance(value, Mapping) and type(value).__module__.startswith(OURS)
    )


def _is_patchable(module: str) -> bool:
    return module.partition(".")[0] in PATCHABLE


def _add_code(attributes: dict[tuple[str, ...], Any], key: tuple[str, ...], value: object) -> None:
    if isinstance(value, FunctionType):
        parts = (value.__code__, value.__defaults__, value.__kwdefaults__)
        attributes[*key, "()"] = _Parts(parts)


@dataclass(frozen=True, eq=False)
class _Parts:
    """The components of a function or container, each of which must stay the same object."""

    values: tuple[Any, ...]

    def differs(self, other: "_Parts") -> bool:
        if len(self.values) != len(other.values):
            return True
        pairs = zip(self.values, other.values, strict=True)
        return any(a is not b and not (type(a) is type(b) is str and a == b) for a, b in pairs)


def _differs(value: Any, other: Any) -> bool:
    if isinstance(value, _Parts) and isinstance(other, _Parts):
        return value.differs(other)
    return value is not other


def steady() -> dict[tuple[str, ...], Any]:
    """Return the attributes; `_VARIES` replaces those that are new objects on each access."""
    first, second = patchable(), patchable()
    return {k: _VARIES if _differs(of, second.get(k)) else of for k, of in first.items()}


def changed(before: Mapping[tuple[str, ...], Any]) -> str:
    """Return the first attribute that has changed; empty if all are unchanged.

    Importing a module adds its name to the package around it, which changes nothing.
    """
    now = patchable()
    for key, value in before.items():
        other = now.get(key)
        if key[-1] in _BOOKKEEPING or key[:2] in _CHANGED:
            continue
        if value is not _VARIES and _differs(value, other):
            return ".".join(key)
    modules = {key[0] for key in before}
    for key in now.keys() - before.keys():
        shadows = len(key) == 2 and hasattr(builtins, key[1])
        inside = len(key) == 3 and key[:2] in before
        if key[0] in modules and (shadows or inside) and key[-1] not in _BOOKKEEPING:
            return ".".join(key)
    return ""


_VARIES = object()

_CHANGED = (("torch", "compile"), ("torch", "manual_seed"), (f"{OURS}.plugins", "_LOADED"))
"""The attributes that Lightning replaces when imported, and that this package changes while a
plug-in is loaded."""

_BOOKKEEPING = (
    *("__warningregistry__", "__annotations__", "__annotations_cache__", "__annotate__"),
    *("__abstractmethods__", "__slotnames__", "_abc_impl"),
)


def planted(files: Container[str], packages: Container[str]) -> str:
    """Return an attribute of this package, torch or Lightning that is a plug-in's code, or ''."""
    for key, value in patchable().items():
        if "[]" in key:  # a table, to which plug-ins add
            continue
        if isinstance(value, property):
            value = value.fget
        inner = value.__func__ if isinstance(value, staticmethod | classmethod) else value
        code = inner.values[0] if isinstance(inner, _Parts) and inner.values else None
        if isinstance(code, CodeType) and _real(code.co_filename) in files:
            return ".".join(key[:-1])
        made_in = inner.__module__ if isinstance(inner, type | FunctionType) else ""
        if str(made_in).partition(".")[0] in packages:
            return ".".join(key)
    return ""


@cache
def _real(path: str) -> str:
    return os.path.realpath(path)


OURS = __name__.partition(".")[0]

_SYSTEM = ("/proc/", "/sys/", "/dev/", "/etc/", "/usr/")
"""The folders of the operating system. Their code still counts; their data do not."""

_CODE = (".py", ".pyc", ".pyw", ".so", ".pyd", ".zip", ".egg")

_EVENTS = ("open", "import", "ctypes.dlopen", "sqlite3.connect")

_WHAT_TO_DO = (
    "put it into a package that --plugin names before this one, or install it (not as editable)"
)


@dataclass(frozen=True, kw_only=True)
class Mentions:
    """The names in Python files.

    Attributes:
        imports: The first names of the modules that they import, also inside functions.
        words: The texts in them.
        patches: The attributes of imported modules or classes that they set, as written.
    """

    imports: frozenset[str] = frozenset()
    words: frozenset[str] = frozenset()
    patches: frozenset[str] = frozenset()


def mentions_of(files: Iterable[bytes]) -> Mentions:
    """Return the names in Python files; a file that does not parse is skipped."""
    imports: set[str] = set()
    words: set[str] = set()
    patches: set[str] = set()
    for content in files:
        try:
            nodes = list(ast.walk(ast.parse(content)))
        except (SyntaxError, ValueError):
            continue  # a file that is not imported
        bound: dict[str, str] = {}  # the module of each name that an import binds
        for node in nodes:
            if isinstance(node, ast.Import):
                for each in node.names:
                    imports.add(root := each.name.partition(".")[0])
                    bound[each.asname or root] = root
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                imports.add(root := node.module.partition(".")[0])
                bound |= {each.asname or each.name: root for each in node.names}
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                words.add(node.value)
        theirs = {name for name, root in bound.items() if root in PATCHABLE}
        for node in nodes:
            if isinstance(node, ast.Assign) and _start_of(node.value) in theirs:
                theirs |= {each.id for each in node.targets if isinstance(each, ast.Name)}
        for node in nodes:
            if (target := _set_attribute(node)) and _start_of(target) in theirs:
                patches.add(ast.unparse(target))
    return Mentions(
        imports=frozenset(imports),
        words=frozenset(words),
        patches=frozenset(patches),
    )


def _only_writes(flags: int) -> bool:
    """Whether opening a file with these flags hides its old content; mode `a+` can read it."""
    return flags & (os.O_WRONLY | os.O_RDWR) == os.O_WRONLY or bool(flags & os.O_TRUNC)


def _start_of(node: ast.expr) -> str:
    """Return the name with which ``a`` or ``a.b.c`` begins; empty for another expression."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def _set_attribute(node: ast.AST) -> ast.expr | None:
    """Return the attribute that a node sets or deletes, or whose owner is passed to `setattr`."""
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del):
        return node
    match node:
        case ast.Call(func=ast.Name(id="setattr" | "delattr"), args=[target, *_]):
            return target
        case ast.Call(func=ast.Name(id="vars"), args=[target]):  # its entries may be set
            return target
        case ast.Attribute(attr="__dict__", value=target):
            return target
        case _:
            return None


def origins_of(namespace: Mapping[str, Any]) -> set[str]:
    """Return the first names of the modules that a module's values come from."""
    named = (
        getattr(value, "__module__", None) or getattr(value, "__name__", None)
        for value in namespace.values()
    )
    return {name.partition(".")[0] for name in named if isinstance(name, str) and name}


@dataclass(frozen=True, kw_only=True)
class Plugin:
    """A loaded plug-in.

    Attributes:
        name: The name of its module; for a file, its name without ``.py``.
        source: The path of the file, or the name of the module.
        sha256: The digest of the file, or of all files of the module's package, and of what it
            depends on.
        content: The content of a file; None for a module.
        files: The digest of each of its files by real path.
        mentions: The names in its files.
        needs: The files and variables that it depends on, as passed to `depends_on`.
        needed: The digest of `needs`.
        patches: An attribute of this package or of torch that it changes; empty if it changes none.
    """

    name: str
    source: str
    sha256: str
    content: bytes | None = None
    files: Mapping[str, str] = field(default_factory=dict)
    mentions: Mentions = field(default_factory=Mentions)
    needs: tuple[Need, ...] = ()
    needed: str = ""
    patches: str = ""

    @property
    def shown(self) -> str:
        """The name in messages: the file's or the module's."""
        return self.name if self.content is None else f"{self.name}.py"

    @property
    def package(self) -> str:
        """The first part of the name of its module."""
        return self.name.partition(".")[0]


@dataclass
class Watch:
    """Watches what plug-ins import and open, starting with the first one.

    Attributes:
        files: The digest of each file of the plug-ins and of their dependencies.
        packages: The first names of their modules.
        before: The modules loaded before the first plug-in.
        window: Whether data count too: while a plug-in is loaded and while a run trains.
        read: Folders whose data a run may read, such as its corpus.
        needs: The dependencies declared by the plug-in being loaded; None otherwise.
        loading: The thread that loads a plug-in and the first name of its module.
        written: Files that plug-ins created or emptied first, so that their content comes from
            code.
        refused: Everything refused, even if a plug-in continues after the error.
    """

    files: dict[str, str] = field(default_factory=dict)
    packages: set[str] = field(default_factory=set)
    before: set[str] = field(default_factory=set)
    window: Literal["", "load", "run"] = ""
    read: tuple[str, ...] = ()
    written: set[str] = field(default_factory=set)
    refused: list[str] = field(default_factory=list)
    needs: list[Need] | None = None
    loading: tuple[int, str] = (0, "")
    hooked: bool = False

    def begin(self) -> None:
        """Start watching. The hook cannot be removed; without a plug-in it does nothing."""
        if not self.packages:
            self.before, self.refused = set(sys.modules), []
        if not self.hooked:
            self.hooked = True
            sys.addaudithook(self.hear)

    def hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Refuse a file opened for a plug-in that no digest covers."""
        if not self.packages or event not in _EVENTS:
            return
        flags = arguments[2] if event == "open" and isinstance(arguments[2], int) else 0
        target = arguments[1] if event == "import" else arguments[0]
        target = os.fsdecode(target) if isinstance(target, bytes) else target
        if not isinstance(target, str) or (plugin := self._plugin_that_calls()) is None:
            return
        path = os.path.realpath(target)
        if flags & os.O_TRUNC or (flags & os.O_CREAT and not os.path.exists(path)):
            self.written.add(path)
        if _only_writes(flags):
            return
        if os.path.isfile(path) and not is_known(path):
            self._judge(plugin, path)

    def _judge(self, plugin: str, path: str) -> None:
        compiled = path.endswith(".pyc") and Path(path).parent.name == "__pycache__"
        source = importlib.util.source_from_cache(path) if compiled else path
        if source in self.files:
            if compiled:  # may be outdated; Python then reads the source
                raise OSError(f"{path}: the source is read")
            if path.endswith(".py") and sha256_of_file(path) != self.files[path]:
                self._refuse(f"plug-in {plugin}: {path} has changed since it was loaded")
        elif path.endswith(_CODE):
            self._refuse(f"plug-in {plugin}: no digest covers the code {source}; {_WHAT_TO_DO}")
        elif (
            self.window
            and path not in self.written
            and not path.startswith((*_SYSTEM, *self.read))
            and os.path.getsize(path)  # empty, like a new temporary file or a lock file
        ):
            self._refuse(
                f"plug-in {plugin}: no digest covers the file {path}, which it opens; declare it "
                "in the plug-in: lightning_app.plugins.depends_on(FILE)"
            )

    def _refuse(self, message: str) -> None:
        self.refused.append(message)
        raise UserError(message)

    def _plugin_that_calls(self) -> str | None:
        """Return the plug-in on whose behalf a file is being opened.

        Files that this package opens in a run, or another package while it is imported, are
        not the plug-in's, even if the plug-in is further up the stack.
        """
        frame = inspect.currentframe()
        while frame is not None:
            name = str(frame.f_globals.get("__name__") or "")
            package = name.partition(".")[0]
            if package in self.packages:
                return package
            if name in (
                "warnings",
                "traceback",
                sha256_of_file.__module__,
            ):  # they display lines of code
                return None
            if package == OURS and name != __name__ and self.window != "load":
                return None
            module = sys.modules.get(name) if frame.f_code.co_name == "<module>" else None
            if module is not None and vars(module) is frame.f_globals:
                return None
            frame = frame.f_back
        # A thread started while a plug-in is being loaded.
        return self.loading[1] if self.loading[0] not in (0, get_ident()) else None

    def check_names(self, plugin: str, names: Iterable[str]) -> None:
        """Refuse modules that a plug-in names, even if it has not imported them yet.

        Raises:
            UserError: naming the module and its file.
        """
        for name in sorted({*names} - self.packages - {OURS, "__main__"}):
            path = place_of(name)
            if path is not None and path not in self.files:
                raise UserError(
                    f"plug-in {plugin}: no digest covers '{name}' ({path}), which it imports; "
                    f"{_WHAT_TO_DO}"
                )

    def check(self) -> None:
        """Repeat earlier refusals, and refuse loaded modules without a digest.

        Raises:
            UserError: naming the module or the file.
        """
        if self.refused:
            raise UserError(self.refused[0])
        for name in sorted({*sys.modules} - self.before):
            path = file_of(sys.modules[name]) if name in sys.modules else None
            if path is None or path in self.files or is_known(path):
                continue
            if name in ("__main__", "__mp_main__"):
                continue
            raise UserError(
                f"no digest of a plug-in covers '{name}' ({path}), which was imported since they "
                f"were loaded; {_WHAT_TO_DO}"
            )


WATCH = Watch()


def depends_on(*files: str | Path, environment: Iterable[str] = ()) -> None:
    """Declare what a plug-in reads at any time: the content becomes part of the plug-in's digest.

    ::

        from lightning_app.plugins import depends_on

        depends_on("gain.json", environment=["MY_GAIN"])

    Call it at module level, outside functions. Nothing else that a plug-in reads
    from outside its own files is part of an id.

    Args:
        files: Files and folders, relative to the calling file.
        environment: Names of environment variables.

    Raises:
        UserError: if there is no such file, or the plug-in is already loaded.
    """
    caller = inspect.currentframe()
    caller = None if caller is None else caller.f_back
    space: Mapping[str, Any] = {} if caller is None else caller.f_globals
    if WATCH.needs is None:
        if str(space.get("__name__")).partition(".")[0] in WATCH.packages:
            raise UserError("depends_on: only while the plug-in is loaded, outside of functions")
        return
    folder = Path(str(space.get("__file__") or "")).parent
    for each in files:
        path = folder / each
        if not path.exists():
            raise UserError(f"depends_on: there is no file {path}")
        # The location of the plug-in does not count.
        name = os.path.relpath(path, folder)
        need = Need(path.name if name.startswith("..") else Path(name).as_posix(), path)
        WATCH.needs.append(need)
        WATCH.files |= need.files()
    for name in [environment] if isinstance(environment, str) else environment:
        WATCH.needs.append(Need(name, None))


@contextmanager
def window(kind: Literal["load", "run"], read: Sequence[str | Path] = ()) -> Iterator[None]:
    """Count data that plug-ins open in this context, except below these folders."""
    before = WATCH.window, WATCH.read
    WATCH.window = kind
    WATCH.read = tuple(os.path.realpath(each) + os.sep for each in read)
    try:
        yield
    finally:
        WATCH.window, WATCH.read = before


def check_unchanged(plugin: Plugin) -> None:
    """Refuse a plug-in with a file or variable that has changed since it was loaded.

    Raises:
        UserError: naming it.
    """
    for path, digest in plugin.files.items():
        if not os.path.isfile(path) or sha256_of_file(path) != digest:
            raise UserError(
                f"plug-in {plugin.name}: {path} has changed since it was loaded; put it back, or "
                "start the command again"
            )
    if with_needs("", plugin.needs) != plugin.needed:
        names = ", ".join(need.name for need in plugin.needs)
        raise UserError(
            f"plug-in {plugin.name}: what it depends on ({names}) has changed since it was loaded; "
            "put it back, or start the command again"
        )
