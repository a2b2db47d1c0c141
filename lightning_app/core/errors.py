"""The one exception for a user's mistake, text for a terminal, and the memory of a process."""

import difflib
import re
import resource
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO


class UserError(Exception):
    """A mistake of the user, described in one line: file, field, value, and what would be right.

    The command line prints it on standard error without a traceback and exits with code 2.
    """

    def __init__(self, message: str) -> None:
        line = " ".join(message.split())
        # Messages may show text from files, which must not control the terminal.
        super().__init__("".join(c if c.isprintable() else repr(c)[1:-1] for c in line))


@contextmanager
def named(source: str | Path) -> Iterator[None]:
    """Prefix mistakes raised inside with the name of a file or another source."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{source}: {error}") from error


def nearest(word: str, spellings: Iterable[str]) -> str:
    """Return a hint that names the known spelling nearest to `word`, or an empty string.

    Names that `word` begins come first. A number has no hint: 50 is not a misspelt 0.
    """
    with suppress(ValueError):
        float(word)
        return ""
    names = list(spellings)
    longer = [name for name in names if name.startswith(f"{word}_")][:3]
    return meant(longer or difflib.get_close_matches(word, names, n=1, cutoff=0.5))


def meant(names: Iterable[str]) -> str:
    """Return the hint that names these spellings, an empty string for an empty list."""
    words = " or ".join(f"'{name}'" for name in names)
    return f"; did you mean {words}?" if words else ""


def absent(path: Path) -> str:
    """Return the line for a path that is no file, with the nearest name in its folder."""
    if path.is_dir():
        return "is a folder; expected a file"
    beside: list[str] = []
    with suppress(OSError):  # no such folder, or an unreadable one
        beside = [each.name for each in path.parent.iterdir()]
    return f"there is no such file{nearest(path.name, beside)}"


_CONTROL = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)


def printable(text: str) -> str:
    """Return text with control characters and marks of direction as escapes, except \\n and tabs.

    Names, labels and error lines may come from files, which must not control a terminal.
    """
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


class PrintableStream:
    """A stream that writes only `printable` text; the rest is that of `stream`."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        self.stream.write(printable(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


@contextmanager
def printable_output(*, only_terminals: bool = False) -> Iterator[None]:
    """Make everything written to standard output and standard error `printable`.

    Args:
        only_terminals: Whether files and pipes receive the text unchanged, since it is data.
    """
    streams = sys.stdout, sys.stderr
    kept = (only_terminals and not each.isatty() for each in streams)
    sys.stdout, sys.stderr = (  # type: ignore[assignment]
        each if keep else PrintableStream(each) for each, keep in zip(streams, kept, strict=True)
    )
    try:
        yield
    finally:
        sys.stdout, sys.stderr = streams


_SAID = (
    "out of memory",  # CUDA and cuBLAS: "CUDA out of memory", "CUDA error: out of memory"
    "can't allocate memory",  # torch on a CPU: "DefaultCPUAllocator: can't allocate memory"
    "CUBLAS_STATUS_ALLOC_FAILED",
    "Cannot allocate memory",  # the system itself, as in fork
)


def peak_resident_bytes() -> int:
    """The peak resident memory of this process, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and those behind it, each once."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__ or link.__context__


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a lack of memory, on the host or on a device, caused `error`.

    It is recognized by class and message, so that torch need not be imported.
    """
    return any(
        isinstance(link, MemoryError)
        or type(link).__name__ == "OutOfMemoryError"
        or (isinstance(link, RuntimeError | OSError) and any(each in str(link) for each in _SAID))
        for link in causes(error)
    )
