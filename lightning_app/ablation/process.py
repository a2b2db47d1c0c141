"""What runs in the children of the fork server: one cell, or one question of the supervisor."""

import faulthandler
import importlib
import io
import os
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

import yaml
from filelock import FileLock

from lightning_app.ablation.grid import Grid
from lightning_app.ablation.lifeline import bind_to_supervisor
from lightning_app.ablation.plan import Plan, expand
from lightning_app.ablation.runs import LOCK
from lightning_app.errors import UserError
from lightning_app.files import is_disk_full, write_whole

FAILED = 3  # exit code: the attempt left an error.txt
DISK_FULL = 4  # exit code: the attempt is void

_OLD_WORKER_GONE = 60.0  # seconds that a killed supervisor's worker may take to die


def run_attempt(
    program: str, folder: Path, attempt: int, tree: dict[str, Any], identity: str, threads: int
) -> None:
    """Run one attempt of a cell in this process, which then ends.

    `program` is a module with `resolve`, `cell_id` and `run_cell`; `tree` the cell's unresolved
    config and `identity` its planned id. Everything printed goes to `attempts/<attempt>/log.txt`.
    Exit code 0 with a result on disk, `FAILED` with `error.txt`, `DISK_FULL`, or a signal.
    """
    os.setsid()
    bind_to_supervisor()
    record = folder / "attempts" / str(attempt)
    try:
        record.mkdir(parents=True, exist_ok=True)
        _redirect_output(record / "log.txt")
        with FileLock(folder / LOCK, timeout=_OLD_WORKER_GONE):
            if not (folder / "result.json").is_file():
                _train(importlib.import_module(program), folder, attempt, tree, identity, threads)
    except BaseException as error:
        _end(record, error)


def answer(channel: Connection, function: Callable[..., Any], *arguments: Any) -> None:
    """Send what `function` returns, or the `UserError` or `OSError` that it raises."""
    os.setsid()
    bind_to_supervisor()
    try:
        reply = function(*arguments)
    except (UserError, OSError) as error:
        reply = error
    channel.send(reply)


def make_plan(program: str, grid: Grid) -> Plan:
    """The plan of a grid, resolved here because the parser is heavy to import."""
    module = importlib.import_module(program)
    return expand(grid, module.resolve, module.cell_id)[0]


def prepare_data(program: str, configs: tuple[Mapping[str, Any], ...]) -> None:
    """Have every corpus ready, so that cells only read."""
    module = importlib.import_module(program)
    for config in configs:
        module.prepare(config)


def _train(
    program: Any, folder: Path, attempt: int, tree: dict[str, Any], identity: str, threads: int
) -> None:
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(threads)
    config = program.resolve(tree, str(folder / "config.yaml"))
    if program.cell_id(config) != identity:
        raise RuntimeError(f"the config's id {program.cell_id(config)} is not the planned one")
    write_whole(folder / "config.yaml", yaml.safe_dump(config, sort_keys=False))
    program.run_cell(folder, attempt)
    if not (folder / "result.json").is_file():
        raise RuntimeError("the run ended without a result")


def _redirect_output(log: Path) -> None:
    with log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)
    faulthandler.enable()


def _end(record: Path, error: BaseException) -> NoReturn:
    """End this process in the way that tells the supervisor what happened."""
    if isinstance(error, KeyboardInterrupt) or type(error).__name__ == "SIGTERMException":
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # Lightning made the signal an exception
        os.kill(os.getpid(), signal.SIGTERM)
    if is_disk_full(error):
        sys.exit(DISK_FULL)
    text = "".join(traceback.format_exception(error))
    line = " ".join(f"{type(error).__name__}: {error}".split())
    try:
        print(text, file=sys.stderr)
        write_whole(record / "error.txt", f"{text.rstrip()}\n{line}\n")
    except OSError as refused:
        if is_disk_full(refused):
            sys.exit(DISK_FULL)
        raise
    sys.exit(FAILED)
