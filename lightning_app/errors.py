"""The one exception for a user's mistake, and the hint that goes with it."""

import difflib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


class UserError(Exception):
    """A mistake of the user, described in one line: file, field, value, and what is right.

    The command line prints it on standard error without a traceback and exits with code 2.
    """

    def __init__(self, message: str) -> None:
        line = " ".join(message.split())
        # Messages may show text from files, which must not control the terminal.
        super().__init__("".join(c if c.isprintable() else repr(c)[1:-1] for c in line))


@contextmanager
def named(source: str | Path) -> Iterator[None]:
    """Put the name of a file, or of another source, in front of the mistakes found inside."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{source}: {error}") from error


def nearest(word: str, known: Iterable[str]) -> str:
    """Return a hint that names the known spelling nearest to `word`, or an empty string.

    A number has none: 50 is no misspelt 0.
    """
    with suppress(ValueError):
        float(word)
        return ""
    matches = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f"; did you mean '{matches[0]}'?" if matches else ""
