"""The imports, files and changes of a plug-in: its digest covers them, or they are refused.

A single hook sees every file opened while a plug-in is loaded, whether through an
import statement, `importlib`, `runpy`, `open` or an extension module. Modules already in
`sys.modules` are checked separately, since they no longer open anything.
"""

import ast
import importlib.util
import inspect
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import get_ident
from typing import Any, Literal

from lightning_app.core.errors import UserError
from lightning_app.plugins.files import (
    PATCHABLE,
    Need,
    file_of,
    is_known,
    place_of,
    sha256_of_file,
    with_needs,
)

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
            reader = name.startswith(f"{OURS}.core.")  # which a plug-in may call itself
            if package == OURS and name != __name__ and not reader and self.window != "load":
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
