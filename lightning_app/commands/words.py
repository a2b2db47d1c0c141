"""Words of a command line: their parser, and how a call is written as options.

The parser of the command line. Fast to import.

``--threads``: the number of threads of each process. Fast to import.

Messages about arguments of a function as messages about the options that set them.
"""

import argparse
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from lightning_app.core.errors import UserError


class Parser(argparse.ArgumentParser):
    """argparse whose mistakes are `UserError`s, and which knows its arguments and its commands."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.arguments: list[argparse.Action] = []
        self.commands: Mapping[str, Parser] = {}
        super().__init__(*args, **kwargs)

    def error(self, message: str) -> None:  # type: ignore[override]
        command = self.prog.partition(" ")[2]
        raise UserError(f"{command}: {message}" if command else message)

    def add_argument(self, *args: Any, **kwargs: Any) -> argparse.Action:
        action = super().add_argument(*args, **kwargs)
        self.arguments.append(action)
        return action

    def add_subparsers(self, **kwargs: Any) -> Any:
        group = super().add_subparsers(**kwargs)
        self.commands = group.choices
        return group

    def all_arguments(self, name: str = "ablate") -> Iterator[tuple[str, argparse.Action]]:
        """Yield the arguments of this parser and of its commands, each with the command's name."""
        yield from ((name, argument) for argument in self.arguments)
        for command, parser in self.commands.items():
            yield from parser.all_arguments(f"{name} {command}")


VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
"""Read by torch when it is imported, and by the processes that train the cells of a grid."""


def use_threads(count: int | None) -> None:
    """Let this process and its children use `count` threads; None leaves the environment alone.

    Raises:
        UserError: for a number below 1.
    """
    if count is None:
        return
    if count < 1:
        raise UserError(f"--threads {count}: expected at least 1")
    os.environ.update(dict.fromkeys(VARIABLES, str(count)))
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(count)


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
