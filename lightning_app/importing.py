"""Refuse imports of unknown modules while a config is parsed."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

# Packages with which jsonargparse reads signatures of classes.
_HELPERS = ("docstring_parser", "typeshed_client")


class _Refuse(MetaPathFinder):
    def __init__(self) -> None:
        loaded = {name.partition(".")[0] for name in sys.modules}
        self._known = loaded | sys.stdlib_module_names | {*_HELPERS}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.partition(".")[0] not in self._known:
            raise ImportError(f"a grid may not import the module '{fullname}'")
        return None  # the other finders look for it


_ASKED: ContextVar[bool] = ContextVar("only_known_packages", default=False)


@contextmanager
def only_known_packages() -> Iterator[None]:
    """Let configs that are parsed in this context import only known packages.

    If the working folder has a file named like a text such as `ddp`, the parser reads it as a
    config, and imports the classes that the file names.
    """
    token = _ASKED.set(True)
    try:
        yield
    finally:
        _ASKED.reset(token)


@contextmanager
def no_foreign_imports() -> Iterator[None]:
    """Inside `only_known_packages`, refuse packages neither loaded nor of Python's library."""
    if not _ASKED.get():
        yield
        return
    guard = _Refuse()
    sys.meta_path.insert(0, guard)
    try:
        yield
    finally:
        sys.meta_path.remove(guard)
