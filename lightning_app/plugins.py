"""Plug-ins: files and modules of a user that register parts. Fast to import: without torch.

A plug-in is loaded only where the user of this machine asks for it: by ``--plugin``, in
``ablate.yaml`` of the working folder, or by installing a package with an entry point.
"""

import hashlib
import importlib
import importlib.metadata
import importlib.util
import os
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple

from lightning_app.errors import UserError, named, nearest
from lightning_app.plugin_imports import check_neighbours, imports_of, origins_of
from lightning_app.project import PROJECT, check_own, read_project
from lightning_app.registry import Registry, owners, registering, remove_parts, strays

ENTRY_POINTS = "lightning_app.plugins"
"""The group of the entry points of installed packages; each names a module."""

CALLBACKS: Registry[type] = Registry("trainer.callbacks")
"""The callbacks of plug-ins; `CALLBACKS.register` is the decorator that adds a class.

A grid file may name them in ``trainer.callbacks``, as ``class_path: my_blocks.MyCallback``.
"""

KEY = "plugins"
"""The part of a record that holds the digests of the plug-ins that a run uses, by name."""


_TABLES = (
    *("lightning_app.blocks.presets", "lightning_app.blocks.feed_forward"),
    *("lightning_app.blocks.norm", "lightning_app.blocks.residual"),
    *("lightning_app.models.positions", "lightning_app.optim"),
    *("lightning_app.data.corpora", "lightning_app.task_facts", "lightning_app.tasks.base"),
)
"""The modules that register the parts of this package."""


@dataclass(frozen=True, kw_only=True)
class Plugin:
    """A loaded plug-in.

    Attributes:
        name: The name of its module; of a file, that of the file without ``.py``.
        source: The path of the file, or the name of the module.
        sha256: The digest of the file, or of all files of the module's package.
        content: What a file holds, None for a module.
        imports: The first names of the modules that its files import.
    """

    name: str
    source: str
    sha256: str
    content: bytes | None = None
    imports: frozenset[str] = frozenset()

    @property
    def shown(self) -> str:
        """The name in messages: that of a file, or of a module."""
        return self.name if self.content is None else f"{self.name}.py"

    @property
    def package(self) -> str:
        """The first part of the name of its module."""
        return self.name.partition(".")[0]


class Given(NamedTuple):
    """A plug-in as a child process receives it: where it is, and the digest that was loaded."""

    source: str
    sha256: str


_LOADED: dict[str, Plugin] = {}


def loaded() -> Mapping[str, Plugin]:
    """Return the plug-ins of this process by name."""
    return _LOADED


def digests() -> dict[str, str]:
    """Return the digest of each plug-in of this process by name."""
    return {name: plugin.sha256 for name, plugin in _LOADED.items()}


def given() -> tuple[Given, ...]:
    """Return the plug-ins of this process, for its children."""
    return tuple(Given(plugin.source, plugin.sha256) for plugin in _LOADED.values())


def load_given(plugins: Iterable[Given]) -> None:
    """Load the plug-ins of the parent process.

    Raises:
        UserError: if one has changed since the parent has loaded it.
    """
    for each in plugins:
        plugin = load(each.source)
        if plugin.sha256 != each.sha256:
            raise UserError(
                f"{each.source}: the plug-in has changed since the command started (sha256 "
                f"{each.sha256}, now {plugin.sha256}); start it again"
            )


def load_all(asked: Sequence[str], folder: Path | None = None) -> None:
    """Load the plug-ins of a command: of ``--plugin``, of the project, of installed packages.

    A plug-in of ``--plugin`` takes the place of one with the same name in the project's file.

    Raises:
        UserError: for one that cannot be loaded, naming file and line.
    """
    for each in asked:
        load(each)
    names = {_name(each) for each in asked}
    for each in _of_project(folder):
        if _name(each) not in names:
            with named(PROJECT):
                for file in [Path(each)] if _is_file(each) else _files_of(each.partition(".")[0]):
                    if file.exists():  # else `load` says so
                        check_own(file)
                load(each)
    for point in importlib.metadata.entry_points(group=ENTRY_POINTS):
        load(point.module)


def load(source: str) -> Plugin:
    """Load a plug-in, once: a file that ends in ``.py``, or a module that can be imported.

    Raises:
        UserError: naming the file and the line where it fails.
    """
    return _load_file(Path(source)) if _is_file(source) else _load_module(source)


def unload(name: str) -> None:
    """Forget a plug-in and the parts that it has registered."""
    del _LOADED[name]
    remove_parts(name)
    sys.modules.pop(name, None)


def _is_file(source: str) -> bool:
    return source.endswith(".py") or "/" in source or os.sep in source


def _name(source: str) -> str:
    return Path(source).stem if _is_file(source) else source


def _load_file(path: Path) -> Plugin:
    path = path.expanduser().resolve()
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: the plug-in cannot be read: {error.strerror}") from error
    name = path.stem
    if path.suffix != ".py" or not name.isidentifier():
        raise UserError(f"{path}: a plug-in is a file NAME.py with letters, digits and '_' in NAME")
    plugin = Plugin(
        name=name,
        source=str(path),
        sha256=hashlib.sha256(content).hexdigest(),
        content=content,
        imports=imports_of([content]),
    )
    if (known := _known(plugin)) is not None:
        return known
    _check_free(path)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    code = _compiled(content, path)
    sys.modules[name] = module
    with _loading(plugin, path):
        # What is executed is what was read, also if the file changes now.
        exec(code, vars(module))
        check_neighbours(path, plugin.imports | origins_of(vars(module)))
    return plugin


def _compiled(content: bytes, path: Path) -> CodeType:
    """Compile a plug-in, before the slow imports of the tables."""
    try:
        return compile(content, str(path), "exec")
    except SyntaxError as error:
        raise UserError(f"{path}, line {error.lineno}: syntax error: {error.msg}") from error
    except ValueError as error:  # a null byte, in some versions of Python
        raise UserError(f"{path}: no source code: {error}") from error


def _load_module(name: str) -> Plugin:
    package = name.partition(".")[0]
    if name in _LOADED:
        known = _LOADED[name]
        files = None if known.content is not None else _files_of(package)
        return _same(known, Plugin(name=name, source=name, sha256=_digest(files or [])))
    if name in sys.modules or package in ("lightning_app", "lightning", "torch"):
        raise UserError(
            f"plug-in {name}: the module is imported already, so that nothing says "
            "which parts are its own; name another module"
        )
    files = _files_of(package)
    code = imports_of(file.read_bytes() for file in files if file.suffix == ".py")
    plugin = Plugin(name=name, source=name, sha256=_digest(files), imports=code)
    with _loading(plugin, files[0].parent):
        importlib.import_module(name)
    return plugin


@contextmanager
def _loading(plugin: Plugin, place: Path) -> Iterator[None]:
    """Register the parts of a plug-in as its own, and say where it fails, in one line."""
    for module in _TABLES:  # else a plug-in would own the parts of a table that it imports first
        importlib.import_module(module)
    try:
        with registering(plugin.name):
            yield
    except SyntaxError as error:
        sys.modules.pop(plugin.name, None)
        file = error.filename or place
        raise UserError(f"{file}, line {error.lineno}: syntax error: {error.msg}") from error
    except (Exception, SystemExit) as error:
        sys.modules.pop(plugin.name, None)
        where = str(place)
        frames = traceback.extract_tb(error.__traceback__)
        for frame in reversed(frames):
            if Path(frame.filename).is_relative_to(place):
                where = f"{frame.filename}, line {frame.lineno}"
                break
        raise UserError(f"{where}: {type(error).__name__}: {error}") from error
    _LOADED[plugin.name] = plugin


def _known(plugin: Plugin) -> Plugin | None:
    """Return the loaded plug-in of that name, if there is one; refuse another of the same name."""
    return _same(_LOADED[plugin.name], plugin) if plugin.name in _LOADED else None


def _same(known: Plugin, plugin: Plugin) -> Plugin:
    if known.sha256 != plugin.sha256 or (known.content is None) != (plugin.content is None):
        raise UserError(
            f"{plugin.source}: another plug-in has the name '{known.name}' already: "
            f"{known.source} (sha256 {known.sha256}); name one of the two"
        )
    return known


def _check_free(path: Path) -> None:
    """Refuse a file that would hide a module of the same name."""
    found = None
    if path.stem not in sys.modules:
        found = importlib.util.find_spec(path.stem)
        if found is None or (found.origin and Path(found.origin).resolve() == path):
            return
    raise UserError(
        f"{path}: a module '{path.stem}' exists already; give the plug-in's file another name"
    )


def _files_of(package: str) -> list[Path]:
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
    if not folders:
        return [Path(spec.origin)] if spec.origin else []
    found = (path for folder in folders for path in folder.rglob("*") if path.is_file())
    return sorted(path for path in found if "__pycache__" not in path.parts)


def _digest(files: Sequence[Path]) -> str:
    digest = hashlib.sha256()
    root = Path(os.path.commonpath([file.parent for file in files])) if files else Path()
    for file in files:
        name = file.relative_to(root).as_posix()
        digest.update(f"{name}\0{hashlib.sha256(file.read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()


def _of_project(folder: Path | None) -> list[str]:
    """Return the plug-ins that the project's file lists: paths are relative to its folder."""
    project = read_project(folder)
    paths = project.path.parent
    return [str(paths / each) if _is_file(each) else each for each in project.plugins]


# What uses a plug-in


def with_plugins(config: Mapping[str, Any], stacks: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config with the digests of the plug-ins that it uses; unchanged if it uses none.

    Args:
        config: A resolved config.
        stacks: The resolved specification of each stack.
    """
    used = used_by(config, stacks)
    return {**config, KEY: used} if used else dict(config)


def used_by(config: Mapping[str, Any], stacks: Mapping[str, Any]) -> dict[str, str]:
    """Return the digest of each plug-in of which a config or its blocks use a part, by name.

    Raises:
        UserError: for a part that a module has registered which was not loaded as a plug-in.
    """
    names: set[str] = set()
    for key, value in (*_leaves(config), *_leaves(stacks)):
        names |= owners(key, value)
        for module in strays(key, value):
            raise UserError(
                f"{key}: {value!r} was registered by '{module}', which is no plug-in, so that no "
                "id would tell its versions apart; put it into a file and load that with "
                f"--plugin FILE, {PROJECT} or lightning_app.plugins.load"
            )
        if isinstance(value, str) and _names_code(key, value):
            package = value.partition(".")[0]
            names |= {name for name, each in _LOADED.items() if each.package == package}
    return digests_of(names)


def digests_of(names: Iterable[str]) -> dict[str, str]:
    """Return the digest of some plug-ins, and of those whose code they import, by name."""
    found: set[str] = set()
    more = {*names}
    while more:
        found |= more
        wanted = {
            (each.package, name)
            for each in map(_LOADED.__getitem__, found)
            for name in each.imports
        }
        more = {
            name
            for name, each in _LOADED.items()
            if any(each.package == used != user for user, used in wanted)
        } - found
    return {name: _LOADED[name].sha256 for name in sorted(found)}


def _names_code(key: str, value: str) -> bool:
    """Whether a text of a config names a class, or may name a function, by its import path."""
    *above, last = key.split(".")
    return last == "class_path" or ("init_args" in (*above, last) and "." in value)


def _leaves(tree: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted key and the value of every leaf; entries of a list have the list's key."""
    if isinstance(tree, Mapping):
        for name, value in tree.items():
            yield from _leaves(value, f"{key}.{name}" if key else name)
    elif isinstance(tree, list | tuple):
        for value in tree:
            yield from _leaves(value, key)
    else:
        yield key, tree
