"""A table of parts that a config can name; a decorator adds parts, also from other packages."""

from collections.abc import Callable, Iterator, Mapping
from typing import Generic, TypeVar

from lightning_app.errors import UserError, nearest

Part = TypeVar("Part")
Given = TypeVar("Given")


class Registry(Mapping[str, Part], Generic[Part]):
    """The parts that a field of the config may name, in the order of their registration.

    Args:
        field: The field, such as ``model.optimizer.kind``; error messages begin with it.
    """

    def __init__(self, field: str) -> None:
        self.field = field
        self._parts: dict[str, Part] = {}

    def register(self, name: str) -> Callable[[Given], Given]:
        """Return a decorator that adds a class or a function under `name` and returns it."""

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
            raise ValueError(f"{self.field}: '{name}' is already registered")
        self._parts[name] = part

    def __getitem__(self, name: str) -> Part:
        """Return the part of that name.

        Raises:
            UserError: naming the field, the known names and the nearest of them.
        """
        if name not in self._parts:
            known = ", ".join(map(repr, self._parts))
            raise UserError(
                f"{self.field}: expected one of {known}, found {name!r}{nearest(name, self._parts)}"
            )
        return self._parts[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)

    def __contains__(self, name: object) -> bool:
        return name in self._parts
