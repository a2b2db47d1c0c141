"""Messages about arguments of a function as messages about the options that set them."""

from collections.abc import Iterator
from contextlib import contextmanager

from lightning_app.errors import UserError


@contextmanager
def as_options(command: str, *names: str) -> Iterator[None]:
    """Put `command` in front of a mistake; an argument of `names` is shown as an option."""
    try:
        yield
    except UserError as error:
        name, _, rest = str(error).partition(" ")
        if name in names:
            name = f"--{name.replace('_', '-')}"
        raise UserError(f"{command}: {name} {rest}") from error
