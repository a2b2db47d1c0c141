"""Keep foreign modules from being imported while a config is parsed."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

# Of jsonargparse, which reads signatures of classes with them.
_HELPERS = ("docstring_parser", "typeshed_client")


class _Refuse(MetaPathFinder):
    def __init__(self) -> None:
        loaded = {name.partition(".")[0] for name in sys.modules}
        self._known = loaded | sys.stdlib_module_names | {*_HELPERS}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.partition(".")[0] not in self._known:
            raise ImportError(f"module '{fullname}' is not one that a grid may import")
        return None  # the other finders look for it


_ASKED: ContextVar[bool] = ContextVar("only_known_packages", default=False)


@contextmanager
def only_known_packages() -> Iterator[None]:
    """Have every config that is parsed meanwhile import no foreign package.

    The parser reads a text such as `ddp` as a config where a file of that name lies in the working
    folder, and imports the classes that the file names.
    """
    token = _ASKED.set(True)
    try:
        yield
    finally:
        _ASKED.reset(token)


@contextmanager
def no_foreign_imports() -> Iterator[None]:
    """Refuse the import of a package that is neither loaded nor Python's own, if that is asked."""
    if not _ASKED.get():
        yield
        return
    guard = _Refuse()
    sys.meta_path.insert(0, guard)
    try:
        yield
    finally:
        sys.meta_path.remove(guard)
