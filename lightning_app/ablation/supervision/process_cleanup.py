"""End all processes of an attempt, also those that outlived it or left its process group."""

import os
import signal
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import psutil

MARK = "ABLATE_ATTEMPT"
"""The environment variable that names the attempt to all programs that it executes."""


def mark(record: Path) -> None:
    """Mark this process's future children as an attempt's. `record`: the attempt's folder."""
    os.environ[MARK] = str(record.resolve())


def end_tree(pids: Iterable[int]) -> None:
    """Kill processes, their groups, and all of their descendants."""
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            for child in psutil.Process(pid).children(recursive=True):
                _kill(child)
        with suppress(ProcessLookupError):  # it has ended, or does not lead a group yet
            os.killpg(pid, signal.SIGKILL)


def end_marked(records: Iterable[Path]) -> None:
    """Kill processes that finished attempts left on this host, such as a launcher's orphans."""
    names = {str(record.resolve()) for record in records}
    for process in psutil.process_iter() if names else ():
        with suppress(psutil.Error):
            if process.environ().get(MARK) in names:
                _kill(process)


def _kill(process: psutil.Process) -> None:
    with suppress(psutil.NoSuchProcess):
        process.kill()
