"""Code shared by commands: the parser, common options, and messages that name options.

Fast to import.
"""

import argparse
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightning_app.core.errors import UserError

GRID = "a YAML file, or the name of a shipped ablation"
RUN = "the folder of a run, or GRID/NAME for experiments/GRID/runs/NAME"
EXPERIMENTS = Path("experiments")
VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
"""Read by torch when it is imported, and by the processes that train the cells of a grid."""
_TYPES = {"N": int, "X": float, "P": float, "SECONDS": float, "FILE": Path, "DIR": Path}
"""The types of values by metavar; others are strings."""


class Parser(argparse.ArgumentParser):
    """An argparse parser that raises `UserError` and knows its arguments and commands."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.arguments: list[argparse.Action] = []
        self.commands: Mapping[str, Parser] = {}
        super().__init__(*args, **kwargs)

    @property
    def command(self) -> str:
        """The name of the command; empty for the parser of all commands."""
        return self.prog.partition(" ")[2]

    def error(self, message: str) -> None:  # type: ignore[override]
        raise UserError(f"{self.command}: {message}" if self.command else message)

    def add_argument(self, *args: Any, **kwargs: Any) -> argparse.Action:
        action = super().add_argument(*args, **kwargs)
        self.arguments.append(action)
        return action

    def add(self, spelling: str, text: str, **more: Any) -> None:
        """Add an argument as spelled in a call: ``--flag``, ``--name METAVAR``, ``name NAME``.

        The metavar determines the type. `text` is the help; `more` is for `add_argument`.
        """
        name, _, metavar = spelling.partition(" ")
        if metavar:
            more = {"metavar": metavar, "type": _TYPES.get(metavar), **more}
        elif name.startswith("--") and "choices" not in more:
            more = {"action": "store_true", **more}
        self.add_argument(name, help=text, **more)

    def all_arguments(self, name: str = "ablate") -> Iterator[tuple[str, argparse.Action]]:
        """Yield the arguments of this parser and of its commands, each with the command's name."""
        yield from ((name, argument) for argument in self.arguments)
        for command, parser in self.commands.items():
            yield from parser.all_arguments(f"{name} {command}")


def add_checkpoint(parser: Parser, default: str | None = "best", shown: str = "best") -> None:
    text = f"a checkpoint of the run, or a file (default: {shown})"
    parser.add("--checkpoint best|last|FILE", text, default=default)


def add_threads(parser: Parser, whose: str = "of torch") -> None:
    text = f"threads {whose}, like OMP_NUM_THREADS (default: its value, or all cores)"
    parser.add("--threads N", text)


def add_grid(parser: Parser) -> None:
    parser.add("grid GRID", GRID)
    add_experiments(parser)


def add_experiments(parser: Parser) -> None:
    text = "the folder that holds the grid's folder (default: experiments)"
    parser.add("--experiments DIR", text, default=EXPERIMENTS)


def add_json(parser: Parser) -> None:
    text = "one JSON document on standard output, the rest on standard error"
    parser.add("--json", text, dest="as_json")


def use_threads(count: int | None) -> None:
    """Let this process and its children use `count` threads, at least 1; None changes nothing."""
    if count is None:
        return
    if count < 1:
        raise UserError(f"--threads {count}: expected at least 1")
    os.environ.update(dict.fromkeys(VARIABLES, str(count)))
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(count)


@contextmanager
def as_options(command: str, *names: str) -> Iterator[None]:
    """Prefix a mistake with `command`; an argument in `names` is shown as an option."""
    try:
        yield
    except UserError as error:
        name, _, rest = str(error).partition(" ")
        if name in names:
            name = f"--{name.replace('_', '-')}"
        raise UserError(f"{command}: {name} {rest}") from error


@contextmanager
def as_checkpoint() -> Iterator[None]:
    """Name the option of ``--run`` in mistakes: --checkpoint is passed as --ckpt_path."""
    try:
        yield
    except UserError as error:
        raise UserError(str(error).replace("--ckpt_path", "--checkpoint")) from error
