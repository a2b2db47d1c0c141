"""The parser of the command line. Fast to import."""

import argparse
from collections.abc import Iterator, Mapping
from typing import Any

from lightning_app.errors import UserError


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
