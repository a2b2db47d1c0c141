"""Plug-ins: the user's files and modules that register parts. Fast to import: without torch.

A plug-in is loaded only if the user of this machine asks for it: with ``--plugin``, in
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
from dataclasses import replace
from itertools import chain
from pathlib import Path
from threading import get_ident
from typing import Any, NamedTuple

from lightning_app.core.errors import UserError, named
from lightning_app.core.project import PROJECT, check_own, read_project
from lightning_app.core.registry import (
    Registry,
    lookups,
    owners,
    parts_by,
    registering,
    remove_parts,
    strays,
)
from lightning_app.plugins.files import (
    changed,
    code_digest_of,
    compiled,
    package_files,
    patchable,
    planted,
    sha256_of_file,
    with_needs,
)
from lightning_app.plugins.imports import (
    WATCH,
    Plugin,
    check_unchanged,
    depends_on,
    mentions_of,
    origins_of,
    window,
)

ENTRY_POINTS = "lightning_app.plugins"
"""The group of the entry points of installed packages; each names a module."""

CALLBACKS: Registry[type] = Registry("trainer.callbacks")
"""The callbacks of plug-ins; `CALLBACKS.register` is the decorator that adds a class.

A grid file may name them in ``trainer.callbacks``, as ``class_path: my_blocks.MyCallback``.
"""

__all__ = ["CALLBACKS", "depends_on", "load", "loaded"]

KEY = "plugins"
"""The part of a record that holds the digests of the plug-ins that a run uses, by name."""


_TABLES = (
    *("lightning_app.blocks.presets", "lightning_app.blocks.feed_forward"),
    *("lightning_app.blocks.norm", "lightning_app.blocks.residual"),
    *("lightning_app.models.positions", "lightning_app.models.optim"),
    *("lightning_app.data.corpora", "lightning_app.scores.task_facts", "lightning_app.tasks.base"),
)
"""The modules that register this package's parts."""


class Given(NamedTuple):
    """A plug-in as a child process receives it: its location and the digest of what was loaded."""

    source: str
    sha256: str


_LOADED: dict[str, Plugin] = {}
_LEFT: list[str] = []  # what plug-ins that failed to load have replaced


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
        UserError: if one has changed since the parent loaded it.
    """
    for each in plugins:
        plugin = load(each.source)
        if plugin.sha256 != each.sha256:
            raise UserError(
                f"{each.source}: the plug-in has changed since the command started (sha256 "
                f"{each.sha256}, now {plugin.sha256}); start it again"
            )


def load_all(sources: Sequence[str], folder: Path | None = None) -> None:
    """Load the plug-ins of a command: from ``--plugin``, the project and installed packages.

    A plug-in from ``--plugin`` replaces one with the same name in the project's file.

    Raises:
        UserError: for a plug-in that cannot be loaded, naming file and line.
    """
    for each in sources:
        load(each)
    names = {_name(each) for each in sources}
    for each in _of_project(folder):
        if _name(each) not in names:
            with named(PROJECT):
                for file in (
                    [Path(each)] if _is_file(each) else package_files(each.partition(".")[0])
                ):
                    if file.exists():  # otherwise `load` reports it
                        check_own(file)
                load(each)
    for point in importlib.metadata.entry_points(group=ENTRY_POINTS):
        load(point.module)


def load(source: str | Path) -> Plugin:
    """Load a plug-in, once: a file ending in ``.py``, or an importable module.

    Raises:
        UserError: naming the file and the line where it fails.
    """
    source = str(source)
    return _load_file(Path(source)) if _is_file(source) else _load_module(source)


def unload(name: str) -> None:
    """Remove a plug-in and the parts it registered."""
    package = _LOADED.pop(name).package
    remove_parts(name)
    WATCH.packages = {each.package for each in _LOADED.values()}
    WATCH.files = {path: sha for each in _LOADED.values() for path, sha in each.files.items()}
    for module in [*sys.modules]:
        if module.partition(".")[0] == package and package not in WATCH.packages:
            del sys.modules[module]


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
    sha256 = hashlib.sha256(content).hexdigest()
    plugin = Plugin(
        name=name,
        source=str(path),
        sha256=sha256,
        content=content,
        files={str(path): sha256},
        mentions=mentions_of([content]),
    )
    if name in _LOADED:
        return _same(_LOADED[name], plugin)
    _check_free(path)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    code = compiled(content, path)
    sys.modules[name] = module
    with _loading(plugin, path):
        # Execute exactly what was read, even if the file changes now.
        exec(code, vars(module))
    return _LOADED[name]


def _load_module(name: str) -> Plugin:
    package = name.partition(".")[0]
    if name in _LOADED:
        loaded = _LOADED[name]
        files = None if loaded.content is not None else package_files(package)
        return _same(loaded, Plugin(name=name, source=name, sha256=code_digest_of(files or [])))
    if name in sys.modules or package in ("lightning_app", "lightning", "torch"):
        raise UserError(
            f"plug-in {name}: the module is imported already, so that nothing says "
            "which parts are its own; name another module, or name it before those that import it"
        )
    files = package_files(package)
    plugin = Plugin(
        name=name,
        source=name,
        sha256=code_digest_of(files),
        files={os.path.realpath(file): sha256_of_file(file) for file in files},
        mentions=mentions_of(file.read_bytes() for file in files if file.suffix == ".py"),
    )
    with _loading(plugin, files[0].parent):
        importlib.import_module(name)
    return _LOADED[name]


@contextmanager
def _loading(plugin: Plugin, place: Path) -> Iterator[None]:
    """Register the parts of a plug-in as its own; report in one line where it fails."""
    for module in _TABLES:  # or a plug-in would own the parts of tables that it imports first
        importlib.import_module(module)
    WATCH.begin()
    _LOADED[plugin.name], WATCH.needs = plugin, []
    WATCH.loading = get_ident(), plugin.package
    WATCH.packages.add(plugin.package)
    WATCH.files |= plugin.files
    before, refused = patchable(), len(WATCH.refused)
    try:
        with registering(plugin.name):
            with window("load"):
                yield
            imports = plugin.mentions.imports | origins_of(vars(sys.modules[plugin.name]))
            WATCH.check_names(plugin.shown, imports)
            WATCH.check()
        needs, now = tuple(WATCH.needs), patchable()
        _LOADED[plugin.name] = replace(
            plugin,
            sha256=with_needs(plugin.sha256, needs),
            mentions=replace(plugin.mentions, imports=imports),
            files={**plugin.files, **{k: v for need in needs for k, v in need.files().items()}},
            needs=needs,
            needed=with_needs("", needs),
            patches=min(plugin.mentions.patches, default="")
            or changed(before, now)
            or planted(now, WATCH.files, WATCH.packages),
        )
    except BaseException as error:
        unload(plugin.name)
        del WATCH.refused[refused:]  # it is loaded no more
        if left := changed(before, patchable()):
            _LEFT.append(f"{left}: plug-in {plugin.shown} replaced it and then failed to load")
        if isinstance(error, UserError) or not isinstance(error, Exception | SystemExit):
            raise
        if isinstance(error, SyntaxError):
            file = error.filename or place
            raise UserError(f"{file}, line {error.lineno}: syntax error: {error.msg}") from error
        where = str(place)
        frames = traceback.extract_tb(error.__traceback__)
        for frame in reversed(frames):
            if Path(frame.filename).is_relative_to(place):
                where = f"{frame.filename}, line {frame.lineno}"
                break
        raise UserError(f"{where}: {type(error).__name__}: {error}") from error
    finally:
        WATCH.needs, WATCH.loading = None, (0, "")


def _same(loaded: Plugin, plugin: Plugin) -> Plugin:
    """Return the loaded plug-in; refuse a different one with the same name."""
    plugin = replace(plugin, sha256=with_needs(plugin.sha256, loaded.needs))
    if loaded.sha256 != plugin.sha256 or (loaded.content is None) != (plugin.content is None):
        raise UserError(
            f"{plugin.source}: another plug-in has the name '{loaded.name}' already: "
            f"{loaded.source} (sha256 {loaded.sha256}); name one of the two"
        )
    return loaded


def _check_free(path: Path) -> None:
    """Refuse a file that would shadow a module of the same name."""
    spec = None
    if path.stem not in sys.modules:
        spec = importlib.util.find_spec(path.stem)
        if spec is None or (spec.origin and Path(spec.origin).resolve() == path):
            return
    raise UserError(
        f"{path}: a module '{path.stem}' exists already; give the plug-in's file another name"
    )


def _of_project(folder: Path | None) -> list[str]:
    """Return the plug-ins that the project's file lists: paths are relative to its folder."""
    project = read_project(folder)
    paths = project.path.parent
    return [str(paths / each) if _is_file(each) else each for each in project.plugins]


# Uses of a plug-in


def with_plugins(config: Mapping[str, Any], stacks: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config with the digests of the plug-ins that it uses; unchanged if it uses none.

    Args:
        config: A resolved config.
        stacks: The resolved specification of each stack.
    """
    used = used_by(config, stacks)
    return {**config, KEY: used} if used else dict(config)


def used_by(config: Mapping[str, Any], stacks: Mapping[str, Any]) -> dict[str, str]:
    """Return by name the digest of each plug-in whose parts a config or its blocks use.

    Raises:
        UserError: for a part registered by a module that was not loaded as a plug-in.
    """
    names = {name for name, each in _LOADED.items() if each.patches}
    texts = dict.fromkeys(chain(_texts(config), _texts(stacks)))  # most blocks are alike
    for key, value in texts:
        names |= owners(key, value)
        for module in strays(key, value):
            raise UserError(
                f"{key}: {value!r} was registered by '{module}', which is no plug-in, so that no "
                "id would tell its versions apart; put it into a file and load that with "
                f"--plugin FILE, {PROJECT} or lightning_app.plugins.load"
            )
        if _names_code(key, value):
            package = value.partition(".")[0]
            names |= {name for name, each in _LOADED.items() if each.package == package}
    return digests_of(names)


def digests_of(names: Iterable[str]) -> dict[str, str]:
    """Return by name the digests of these plug-ins and of those that their code uses."""
    used: set[str] = set()
    more = {*names}
    while more:
        used |= more
        users = [*map(_LOADED.__getitem__, more)]
        more = {n for n, each in _LOADED.items() if any(_uses(user, each) for user in users)}
        more -= used
    return {name: _LOADED[name].sha256 for name in sorted(used)}


def _uses(user: Plugin, plugin: Plugin) -> bool:
    """Whether the code of a plug-in names another's module or a part of it."""
    mentions, package = user.mentions, plugin.package
    if user.package != package and package in mentions.imports:
        return True
    named = {word.partition(".")[0] for word in mentions.words}  # as for `import_module`
    return package in named or not mentions.words.isdisjoint(parts_by(plugin.name))


def check_used(used: Mapping[str, str]) -> None:
    """Refuse a run whose plug-ins do not, or no longer, match its id.

    Raises:
        UserError: naming code that no digest covers, that has changed, or that changes the package.
    """
    if _LEFT:
        raise UserError(f"{_LEFT[0]}, so that no id says so; start Python again")
    if not _LOADED:
        return
    WATCH.check()
    for name in used:
        check_unchanged(_LOADED[name])
    changes = planted(patchable(), WATCH.files, WATCH.packages)
    if changes and not any(each.patches for each in _LOADED.values()):
        raise UserError(
            f"{changes}: a plug-in has replaced it after it was loaded, so that no id says so; "
            "replace it where the file of the plug-in is read"
        )
    for caller, owner, part in lookups():
        package = caller.partition(".")[0]
        if package in WATCH.packages and owner in digests().keys() - used:
            raise UserError(
                f"plug-in {package}: uses the part '{part}' of the plug-in {owner}, which its code "
                "does not name; write its name as a text, so that the id holds both"
            )


def _names_code(key: str, value: str) -> bool:
    """Whether a text in a config names a class, or may name a function, by its import path."""
    *above, last = key.split(".")
    return last == "class_path" or ("init_args" in (*above, last) and "." in value)


def _texts(tree: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Yield the dotted key of every text; entries of a list have the list's key.

    Only texts name parts and code.
    """
    if isinstance(tree, Mapping):
        for name, value in tree.items():
            yield from _texts(value, f"{key}.{name}" if key else name)
    elif isinstance(tree, list | tuple):
        for value in tree:
            yield from _texts(value, key)
    elif isinstance(tree, str):
        yield key, tree
