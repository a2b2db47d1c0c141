"""Plug-ins: the user's files and modules that register parts. Fast to import: without torch.

A plug-in is loaded only if the user of this machine asks for it: with ``--plugin``, in
``ablate.yaml`` of the working folder, or by installing a package with an entry point.
"""

import importlib
import importlib.metadata
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from lightning_app.core.code import joint_digest, syntax_digest
from lightning_app.core.errors import UserError, named
from lightning_app.core.project import PROJECT, check_own, read_project
from lightning_app.core.registry import Registry, parts_by, registering, remove_parts
from lightning_app.plugins.files import (
    MODULES,
    TAKEN,
    Covered,
    Finder,
    Place,
    TakenLoader,
    file_of,
    files_below,
    is_installed,
    names_in,
    own_places,
    parts_at,
    reached,
    taken,
)

ENTRY_POINTS = "lightning_app.plugins"
"""The group of the entry points of installed packages; each names a module."""

CALLBACKS: Registry[type] = Registry("trainer.callbacks")
"""The callbacks that plug-ins register, which a grid file may name in ``trainer.callbacks``."""

__all__ = ["CALLBACKS", "depends_on", "load", "loaded"]

KEY = "plugins"
"""The part of a record that holds the digests of the plug-ins that a run uses, by name."""

_TABLES = "blocks.presets blocks.feed_forward blocks.norm blocks.residual models.positions "
_TABLES += "models.optim data.corpora scores.task_facts tasks.base"  # which register our parts


@dataclass(frozen=True, kw_only=True)
class Plugin:
    """A loaded plug-in."""

    name: str  # of its module; for a file, its name without ".py"
    source: str  # the path of the file, or the name of the module
    content: bytes | None  # of a file
    own: Sequence[Place]  # its file, or the folders of its package
    others: Sequence[Place]  # the modules of no distribution that it imports, what it declares
    parts: frozenset[Covered]  # the files and variables in its digest, as they were when loaded
    modules: Mapping[str, Path]  # the files of its module, of those in its package and in `others`
    code: Mapping[str, bytes]  # in all of them, by real path
    names: Set[str]  # the modules and texts that its code names

    @property
    def sha256(self) -> str:
        return joint_digest((each.name, each.digest) for each in self.parts)

    @property
    def package(self) -> str:
        return self.name.partition(".")[0]


_LOADED: dict[str, Plugin] = {}
_LOADING: list[str] = []
_DECLARED: dict[str, dict[Place, None]] = {}  # by the module that called `depends_on`, in order


def loaded() -> Mapping[str, Plugin]:
    """Return the plug-ins of this process by name."""
    return _LOADED


def digests() -> dict[str, str]:
    """Return the digest of each plug-in of this process by name."""
    return {name: plugin.sha256 for name, plugin in _LOADED.items()}


def load_given(plugins: Iterable[Plugin]) -> None:
    """Load the plug-ins of the parent process as it has taken them, whatever their files hold."""
    for each in plugins:
        TAKEN.update(each.code)
        at = each.modules.items()
        MODULES.update((name, file) for name, file in at if os.path.realpath(file) in each.code)
    for each in plugins:
        _loaded(each.name, each.source, each.own, each)


def edited() -> list[str]:
    """Return the names of the files whose code is no longer that which this process has taken."""
    now = {part for each in _LOADED.values() for part in parts_at((*each.own, *each.others))}
    return sorted({p.name for e in _LOADED.values() for p in e.parts - now if p.path in TAKEN})


def load_all(sources: Sequence[str], folder: Path | None = None) -> None:
    """Load the plug-ins of ``--plugin``, then others of the project, and of installed packages."""
    for each in sources:
        load(each)
    names = {_name(each) for each in sources}
    project = read_project(folder)
    for each in project.plugins:  # paths are relative to the project's folder
        if _name(each) not in names:
            source = str(project.path.parent / each) if _is_file(each) else each
            with named(PROJECT):
                own = [("", Path(source))] if _is_file(each) else own_places(each.partition(".")[0])
                for file in filter(Path.exists, _files(own)):  # otherwise `load` reports it
                    check_own(file)
                load(source)
    for point in importlib.metadata.entry_points(group=ENTRY_POINTS):
        load(point.module)


def load(source: str | Path) -> Plugin:
    """Load a plug-in, once: a file ending in ``.py``, or an importable module.

    Raises:
        UserError: naming the file and the line where it fails.
    """
    source, content = str(source), None
    if _is_file(source):
        path = Path(source).expanduser().resolve()
        source, name = str(path), path.stem
        try:
            content = path.read_bytes()
        except OSError as error:
            raise UserError(f"{path}: the plug-in cannot be read: {error.strerror}") from error
        if path.suffix != ".py" or not name.isidentifier():
            raise UserError(f"{path}: a plug-in is NAME.py with letters, digits and '_' in NAME")
        own: list[Place] = [(path.name, path)]
    else:
        name, own = source, own_places(source.partition(".")[0])
    if (known := _LOADED.get(name)) is None:
        _check_free(name, source, content)
        for file in filter(_is_taken, _files(own)):
            TAKEN.pop(os.path.realpath(file), None)  # it may have been edited since
            taken(file)
        return _loaded(name, source, own)
    now = {(each.name, each.digest) for each in parts_at((*own, *known.others))}
    if joint_digest(now) != known.sha256:
        if known.source == source:
            raise UserError(f"{source}: has changed since it was loaded; start a new process")
        raise UserError(
            f"{source}: another plug-in has the name '{name}' already: {known.source} (sha256 "
            f"{known.sha256}); name one of the two"
        )
    return known


def unload(name: str) -> None:
    """Remove a plug-in, the parts it registered, and modules that no other plug-in imports."""
    plugin = _LOADED.pop(name)
    remove_parts(name)
    _forget(plugin.package, plugin.modules)


def _forget(package: str, modules: Iterable[str] = ()) -> None:
    kept = {module for each in _LOADED.values() for module in (each.package, *each.modules)}
    for name in {*sys.modules, *_DECLARED, *MODULES}:
        if name.partition(".")[0] in {package} - kept or name in {*modules} - kept:
            TAKEN.pop(str(file_of(name)), None)
            MODULES.pop(name, None)
            sys.modules.pop(name, None)
            _DECLARED.pop(name, None)


def depends_on(*files: str | Path, environment: Iterable[str] = ()) -> None:
    """Declare what a plug-in reads at any time: the content becomes part of the plug-in's digest.

    Call it outside functions. Nothing else that a plug-in reads is part of an id.

    Args:
        files: Files and folders, relative to the calling file.
        environment: Names of environment variables.

    Raises:
        UserError: if there is no such file, or the plug-in is already loaded.
    """
    space = inspect.stack(0)[1].frame.f_globals
    module = str(space.get("__name__"))
    known = {covered for each in _LOADED.values() for covered in (each.package, *each.modules)}
    if not _LOADING and not known.isdisjoint((module, module.partition(".")[0])):
        raise UserError("depends_on: only while the plug-in is loaded, outside of functions")
    folder = Path(str(space.get("__file__") or "")).parent
    declared = _DECLARED.setdefault(module, {})
    for each in files:
        path = folder / each
        if not path.exists():
            raise UserError(f"depends_on: there is no file {path}")
        # The location of the plug-in does not count.
        name = os.path.relpath(path, folder)
        declared[path.name if name.startswith("..") else Path(name).as_posix(), path] = None
    for name in [environment] if isinstance(environment, str) else environment:
        declared[name, None] = None


def _is_file(source: str) -> bool:
    return source.endswith(".py") or "/" in source or os.sep in source


def _name(source: str) -> str:
    return Path(source).stem if _is_file(source) else source


def _files(places: Iterable[Place]) -> Iterator[Path]:
    return (file for _, path in places if path is not None for file in files_below(path))


def _check_free(name: str, source: str, content: bytes | None) -> None:
    """Refuse a plug-in whose module is imported already, or would shadow another."""
    imported = name in sys.modules or (content is None and name in ("lightning", "torch"))
    if imported and (content is None or str(file_of(name)) == source):
        raise UserError(
            f"plug-in {name}: the module is imported already, so its parts cannot be attributed to "
            "it; name another module, or name it before those that import it"
        )
    spec = None if imported or content is None else importlib.util.find_spec(name)
    if imported or (spec and str(Path(spec.origin or "").resolve()) != source):
        raise UserError(
            f"{source}: a module '{name}' exists already; give the plug-in's file another name"
        )


def _is_taken(file: Path) -> bool:
    return file.suffix == ".py" and not is_installed(file.resolve())


def _loaded(name: str, source: str, own: Sequence[Place], given: Plugin | None = None) -> Plugin:
    """Execute a plug-in, its parts being its own; report in one line where it fails."""
    package, place = name.partition(".")[0], own[0][1] or Path()
    _LOADING.append(name)
    Finder.all = True
    if Finder not in sys.meta_path:
        sys.meta_path.insert(0, Finder)
    try:
        if _is_file(source):  # a syntax error is named before the slow imports
            compile(taken(place), source, "exec")
        for module in _TABLES.split():  # or it would own the parts of those that it imports first
            importlib.import_module(f"lightning_app.{module}")
        with registering(name):
            if _is_file(source):
                loader = TakenLoader(name, str(place))
                spec = importlib.util.spec_from_file_location(name, place, loader=loader)
                assert spec is not None
                sys.modules[name] = importlib.util.module_from_spec(spec)
                loader.exec_module(sys.modules[name])
            else:
                importlib.import_module(name)
            if given is not None:
                _LOADED[name] = given
                return given
            every = reached(name)
            for file in filter(_is_taken, every.values()):
                taken(file)  # if it was imported before
            files = {k: v for k, v in every.items() if k.partition(".")[0] != package}
            names = set[str]()
            for file in (*_files(own), *files.values()):
                if file.suffix == ".py":
                    names.update(*names_in(TAKEN.get(str(file)) or file.read_bytes(), late=True))
            declarers = [k for k in _DECLARED if k in files or k.partition(".")[0] == package]
            others = [*files.items(), *chain.from_iterable(map(_DECLARED.__getitem__, declarers))]
            parts = parts_at((*own, *others), copies=True)
            _LOADED[name] = Plugin(
                name=name,
                source=source,
                content=taken(place) if _is_file(source) else None,
                own=own,
                others=others,
                parts=parts,
                modules={name: place, **every},
                code={part.path: TAKEN[part.path] for part in parts if part.path in TAKEN},
                names=(names | {word.partition(".")[0] for word in names}) - {package},
            )
    except BaseException as error:
        _forget(package)
        if isinstance(error, UserError) or not isinstance(error, Exception | SystemExit):
            raise
        if isinstance(error, SyntaxError):
            file = error.filename or place
            raise UserError(f"{file}, line {error.lineno}: syntax error: {error.msg}") from error
        frames = traceback.extract_tb(error.__traceback__)
        within = [each for each in frames if Path(each.filename).is_relative_to(place)]
        where = f"{within[-1].filename}, line {within[-1].lineno}" if within else place
        raise UserError(f"{where}: {type(error).__name__}: {error}") from error
    finally:
        _LOADING.pop()
        Finder.all = bool(_LOADING)
    return _LOADED[name]


def digests_of(names: Iterable[str]) -> dict[str, str]:
    """Return by name the digests of these plug-ins and of those that their code uses.

    It uses one whose module it names, or a part of it.
    """
    used: set[str] = set()
    more = {*names}
    while more:
        used |= more
        named = {word for name in more for word in _LOADED[name].names}
        more = {n for n, each in _LOADED.items() if named & {each.package, *parts_by(n)}} - used
    return {name: _LOADED[name].sha256 for name in sorted(used)}


def check_used(used: Iterable[str]) -> None:
    """Refuse a run whose plug-ins do not, or no longer, match its id.

    Raises:
        UserError: naming a file that has changed, or a module that no digest covers.
    """
    plugins = [_LOADED[name] for name in used]
    covered = {part.path for each in plugins for part in each.parts}
    for each in plugins:
        for part in sorted(each.parts - parts_at((*each.own, *each.others))):
            code = TAKEN.get(part.path)
            if code is not None and syntax_digest(part.path, code) == part.digest:
                continue  # what was edited is not executed
            raise UserError(
                f"plug-in {each.name}: {part.name} has changed since it was loaded; put it back, "
                "or start the command again"
            )
        for module, path in reached(each.name, late=True).items():
            if str(path) not in covered:
                raise UserError(
                    f"plug-in {each.name}: no digest covers '{module}' ({path}), which a function "
                    "imports; import it outside of functions, or declare it in the plug-in: "
                    "lightning_app.plugins.depends_on(FILE)"
                )
