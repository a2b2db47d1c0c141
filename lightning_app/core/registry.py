"""A table of parts that a config can name; a decorator adds parts, also from other packages."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Generic, TypeVar

from lightning_app.core.errors import UserError, nearest

Part = TypeVar("Part")
Given = TypeVar("Given")

OWN = " (one of your own needs --plugin FILE or ablate.yaml)"
"""The end of messages about unknown parts: a plug-in that is not loaded is a frequent cause."""

_TABLES: list["Registry[Any]"] = []
_REGISTERING: ContextVar[str | None] = ContextVar("registering", default=None)


class Registry(Mapping[str, Part], Generic[Part]):
    """The parts that a field of the config may name, in order of registration.

    A table remembers the plug-in that registered a part, which identifies the cells that use it.

    Args:
        field: The field, such as ``model.optimizer.kind``; error messages begin with it.
        slots: The last words of the fields that name a part, also in a resolved block, if other
            fields than `field` do so.
        resolved: Whether an id contains what a part builds, so that its code need not be known.
    """

    def __init__(self, field: str, slots: tuple[str, ...] = (), *, resolved: bool = False) -> None:
        self.field = field
        self._slots = slots
        self._resolved = resolved
        self._parts: dict[str, Part] = {}
        self._owners: dict[str, str] = {}
        self._makers: dict[str, str] = {}
        _TABLES.append(self)

    def register(self, name: str) -> Callable[[Given], Given]:
        """Return a decorator that adds a class or a function under `name` and returns it.

        Raises:
            TypeError: if it is used without a name and would therefore add nothing.
        """
        if not isinstance(name, str):
            raise TypeError(f"{self.field}: register needs a name: @register('{name.__name__}')")

        def add(part: Given) -> Given:
            self.add(name, part)  # pyright: ignore[reportArgumentType]
            return part

        return add

    def add(self, name: str, part: Part) -> None:
        """Add a part.

        Raises:
            ValueError: if another part has this name.
        """
        if name in self._parts:
            raise ValueError(
                f"{self.field}: '{name}' is already registered; give the new part another name"
            )
        self._parts[name] = part
        if (owner := _REGISTERING.get()) is not None:
            self._owners[name] = owner
        if (module := _registering_module()) is not None:
            self._makers[name] = module

    def remove_of(self, owner: str) -> None:
        """Remove the parts that a plug-in has registered."""
        for name in self.parts_by(owner):
            del self._parts[name], self._owners[name]
            self._makers.pop(name, None)

    def owner(self, name: object) -> str | None:
        """Return the plug-in that registered a part; None for a part of this package."""
        return self._owners.get(name) if isinstance(name, str) else None

    def maker(self, name: object) -> str | None:
        """Return the module outside this package whose code a part is, unless an id contains it."""
        counts = self.owner(name) or (name in self._parts and not self._resolved)
        return self._makers.get(str(name)) if counts else None

    def serves(self, key: str) -> bool:
        """Whether a dotted key of a config or of a resolved block names a part of this table."""
        return key == self.field or key.rpartition(".")[2] in self._slots

    def require(self, name: str, field: str) -> Part:
        """Return the part that another field names.

        Raises:
            UserError: naming that field, the known names and the nearest of them.
        """
        if name not in self._parts:
            hint = nearest(name, self._parts)
            known = hint or f"; expected one of {', '.join(map(repr, self._parts))}"
            raise UserError(f"{field}: unknown name {name!r}{known}{OWN}")
        return self._parts[name]

    def parts_by(self, owner: str) -> set[str]:
        """Return the names of the parts that a plug-in has registered."""
        return {name for name, by in self._owners.items() if by == owner}

    def __getitem__(self, name: str) -> Part:
        """Return the part with that name.

        Raises:
            UserError: naming the field, the known names and the nearest of them.
        """
        return self.require(name, self.field)

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)

    def __contains__(self, name: object) -> bool:
        return name in self._parts


@contextmanager
def registering(plugin: str) -> Iterator[None]:
    """Record a plug-in as the owner of every part registered in this context.

    If it fails, the parts it registered are removed again.
    """
    token = _REGISTERING.set(plugin)
    try:
        yield
    except BaseException:
        remove_parts(plugin)
        raise
    finally:
        _REGISTERING.reset(token)


def remove_parts(plugin: str) -> None:
    for table in _TABLES:
        table.remove_of(plugin)


def parts_by(plugin: str) -> set[str]:
    """Return the names of a plug-in's parts in all tables."""
    return {name for table in _TABLES for name in table.parts_by(plugin)}


def require_known(key: str, name: str) -> None:
    """Refuse a text in a field of a table if the table has no part with that name.

    Raises:
        UserError: naming the field, the known names and the nearest of them.
    """
    for table in _TABLES:
        if table.serves(key):
            table.require(name, key)


def owners(key: str, value: object) -> set[str]:
    """Return the plug-ins that registered the parts named by a field of a config or block."""
    found = {table.owner(value) for table in _TABLES if table.serves(key)}
    return {owner for owner in found if owner is not None}


def makers(key: str, value: object) -> set[tuple[str, str | None]]:
    """Return the modules whose code such parts are, each with the plug-in that registered it."""
    tables = [table for table in _TABLES if table.serves(key)]
    return {(made, table.owner(value)) for table in tables if (made := table.maker(value))}


def _registering_module() -> str | None:
    """Return the calling module outside this package; None while a module of it is loading.

    In a plug-in that is the module being executed, whatever function it calls.
    """
    outside = None
    frame = inspect.currentframe()
    while frame is not None:
        module = str(frame.f_globals.get("__name__"))
        ours = module.partition(".")[0] == __name__.partition(".")[0]
        if frame.f_code.co_name == "<module>":
            executed = module if _REGISTERING.get() else outside or module
            return None if ours else executed
        if outside is None and not ours:
            outside = module
        frame = frame.f_back
    return outside
