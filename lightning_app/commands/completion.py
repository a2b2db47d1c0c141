"""`ablate completion SHELL`: a script that completes commands, options, grids, presets and runs."""

import argparse

import shtab

from lightning_app.commands.argument_parser import Parser
from lightning_app.shipped import shipped_folder

_GRIDS = ("grid", "grids")
_FILES = ("input", "config", "svg", "checkpoint")
_FOLDERS = ("root", "experiments", "svg_dir", "publish", "out", "dir")
_RUNS = ("run", "runs")
_RUN_FOLDERS = "ls -d experiments/*/runs/* 2>/dev/null"


def completion_script(parser: Parser, shell: str) -> str:
    """Return the script for `shell`, made from the parser; it runs no Python when it completes."""
    for _, action in parser.all_arguments():
        complete = _complete(action)
        if complete is not None:
            action.complete = complete  # pyright: ignore[reportAttributeAccessIssue]
    return shtab.complete(parser, shell=shell)


def _complete(action: argparse.Action) -> shtab.CompleteType | None:
    """Return how shtab completes the values of an argument, None for any text."""
    if action.dest in _GRIDS:
        names = sorted(path.stem for path in shipped_folder().glob("*.yaml"))
        return shtab.cmd(f"printf '%s\\n' {' '.join(names)}; ls -d *.yaml 2>/dev/null")
    if action.dest in _RUNS:
        return shtab.cmd(_RUN_FOLDERS)
    if action.dest == "name":
        return shtab.cmd(f"printf '%s\\n' {' '.join(_presets())}")
    if action.dest in _FOLDERS:
        return shtab.DIRECTORY
    return shtab.FILE if action.dest in _FILES else None


def _presets() -> list[str]:
    from lightning_app.blocks.presets import PRESETS

    return list(PRESETS)
