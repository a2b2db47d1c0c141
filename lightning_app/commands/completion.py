"""`ablate completion SHELL`: a script that completes commands, options, grids, presets and runs."""

import argparse
import ast
import shlex
from collections.abc import Callable, Iterable, Mapping
from importlib.resources import files
from typing import Any

import shtab

from lightning_app.commands.options import Parser
from lightning_app.config.trainer import TrainerConfig
from lightning_app.core.project import shipped_folder
from lightning_app.core.schema import hints_of

SHELLS = ("bash", "zsh", "fish")
_Words = dict[str, Any]  # a CompleteType in shtab
_RUN_FOLDERS = (
    "find experiments -mindepth 3 -maxdepth 3 -path '*/runs/*' -type d "
    "! -path '*[!A-Za-z0-9_./,=+@-]*' 2>/dev/null"
)
"""Not a shell pattern: one that matches nothing is an error in zsh and fish. Names of runs consist
of these characters; others, from foreign folders, could be special to a shell."""


def add_completion(parser: Parser) -> None:
    parser.add("shell", "the shell that reads the script", choices=SHELLS)
    parser.set_defaults(call=completion_command)


def completion_command(shell: str, parser: Parser) -> int:
    """Print the script for `shell`, which runs no Python during completion.

    Args:
        shell: One of `SHELLS`.
        parser: The parser of `ablate`, which gets the fields of a config as options.
    """
    for command in parser.commands.values():
        if not command.add_help:  # its words are fields of a config
            _add_options_of_lightning(command)
    for _, action in parser.all_arguments():
        complete = _complete(action)
        if complete is not None:
            action.complete = complete  # pyright: ignore[reportAttributeAccessIssue]
    script = shtab.complete(parser, shell=shell)
    # shtab 1.13 has zsh complete only the first of several grids: "(*):" is one argument there.
    print(script.replace('"(*):', '"*:') if shell == "zsh" else script)
    return 0


def preset_names() -> list[str]:
    """Return the names of the presets, read from their source, since importing it takes seconds."""
    names = []
    for file in files("lightning_app").joinpath("blocks", "presets").iterdir():
        if file.name.endswith(".py"):
            parts = ast.parse(file.read_text(encoding="utf-8")).body
            functions = [part for part in parts if isinstance(part, ast.FunctionDef)]
            names += [each.name for each in functions if any(map(_registers, each.decorator_list))]
    return sorted(names)


def _registers(decorator: ast.expr) -> bool:
    made_by = decorator.func if isinstance(decorator, ast.Call) else None
    return isinstance(made_by, ast.Name) and made_by.id == "preset"


def _add_options_of_lightning(parser: Parser) -> None:
    parser.add("--config FILE", "a config; later ones change it", action="append")
    parser.add("--print_config", "print the whole config and end")
    parser.add("--ckpt_path best|last|FILE", "a checkpoint")
    parser.add("--seed_everything N", "the seed")
    for name in hints_of(TrainerConfig):
        parser.add(f"--trainer.{name} VALUE", f"{name} of Lightning's Trainer")


def _complete(action: argparse.Action) -> _Words | None:
    """Return how shtab completes the values of an argument, None for any text."""
    make = _BY_NAME.get(action.dest)
    if make is None or action.metavar != "NAME":
        make = _BY_METAVAR.get(str(action.metavar))
    return make() if make is not None else None


def _listed(name: str, command: str, also: _Words | None = None) -> _Words:
    """Return the words that a command of the shell prints, and files or folders in addition.

    `shtab.cmd` is not enough: in zsh it caches the first words, and it does not complete files.
    """
    # compgen -W would expand the words: a command in a folder's name would run.
    loop = 'while IFS= read -r word; do [[ $word == "$1"* ]] && printf \'%s\\n\' "$word"; done'
    bash = f"local word; {loop} < <({command})"
    zsh = f'compadd "$@" -- ${{(f)"$({command})"}}'
    fish = f"({command})"
    if also is not None:
        bash, zsh = f'{bash}; {also["bash"]} "$1"', f'{zsh}; {also["zsh"]} "$@"'
        fish = f"{fish} {also['fish']}"
    # shtab's script has bash treat the words of a function with `_file` in its name as files.
    function = f"_ablate_{name}" + ("" if also is None else "_or_files")
    return {
        "bash": function,
        "zsh": function,
        "fish": fish,
        "preamble": {
            "bash": f"{function}() {{ {bash}; }}",
            "zsh": f"{function}() {{ {zsh}; }}",
        },
    }


def _printed(words: Iterable[str]) -> str:
    return f"printf '%s\\n' {' '.join(map(shlex.quote, words))}"


def _grids() -> _Words:
    names = sorted(path.stem for path in shipped_folder().glob("*.yaml"))
    return _listed("grids", _printed(names), shtab.FILE)


def _corpora() -> _Words:
    from lightning_app.data.config import CORPORA

    return _listed("corpora", _printed(sorted(CORPORA)))


_BY_NAME: Mapping[str, Callable[[], _Words]] = {
    "name": lambda: _listed("presets", _printed(preset_names())),
    "presets": lambda: _listed("presets", _printed(preset_names())),
    "data": _corpora,
}
"""Arguments with the metavar NAME; there is no list for others, such as a partition."""

_BY_METAVAR: Mapping[str, Callable[[], _Words]] = {
    "FILE": lambda: shtab.FILE,
    "DIR": lambda: shtab.DIRECTORY,
    "GRID": _grids,
    "RUN": lambda: _listed("runs", _RUN_FOLDERS, shtab.DIRECTORY),
    "best|last|FILE": lambda: _listed("checkpoints", _printed(("best", "last")), shtab.FILE),
}
