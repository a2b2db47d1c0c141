"""Who may work in a grid's folder: file locks, on a file system that all hosts share."""

import fcntl
import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from lightning_app.errors import UserError
from lightning_app.files import write_whole, writing_in

HOLDER = ".supervisor.json"  # the file that says who holds a grid's folder, or did last

START = ".start.lock"
"""Held while a supervisor starts, and while the queue is mended."""

REPORT = ".report.lock"
"""Held while the report or the index is written."""

_SAY_AFTER = 3.0  # seconds of waiting that need an explanation


@dataclass(frozen=True)
class Holder:
    """A supervisor that works in a grid's folder, and the storage of its queue as shown."""

    host: str
    pid: int
    storage: str


class Interrupted(Exception):
    """The user, or the machine, asked the supervisor to stop."""


@contextmanager
def supervisor_lock(directory: Path, storage: str = "", several: bool = False) -> Iterator[bool]:
    """Hold a grid's folder, which is made if need be; yield whether nobody else holds it.

    One supervisor holds it alone; with `several` all those that use the same `storage` hold it
    together. Raises `UserError` where another holds it otherwise, or where it cannot be written.
    """
    with writing_in(directory):
        directory.mkdir(parents=True, exist_ok=True)
        file = os.open(directory / ".supervisor.lock", os.O_RDWR | os.O_CREAT, 0o666)
    record = directory / HOLDER
    try:
        alone = _flock(file, fcntl.LOCK_EX)
        if alone:
            with writing_in(directory):
                mine = {"host": socket.gethostname(), "pid": os.getpid(), "storage": storage}
                write_whole(record, json.dumps(mine))
        if not alone or several:
            holder = _holder(record)
            if not several or not _flock(file, fcntl.LOCK_SH):
                raise UserError(
                    f"{directory}: process {holder.pid} on {holder.host} is already running this "
                    "grid"
                )
            if holder.storage != storage:
                raise UserError(
                    f"--storage: {storage} is not the {holder.storage} of process {holder.pid} on "
                    f"{holder.host}, which runs this grid"
                )
        yield alone
    finally:
        os.close(file)


def is_supervised(directory: Path) -> bool:
    """Whether some supervisor works in a grid's folder now."""
    lock = directory / ".supervisor.lock"
    if not lock.is_file():
        return False
    file = os.open(lock, os.O_RDONLY)
    try:
        return not _flock(file, fcntl.LOCK_SH) or not _flock(file, fcntl.LOCK_EX)
    finally:
        os.close(file)


@contextmanager
def turn(lock: Path, stopping: Callable[[], bool], why: str) -> Iterator[None]:
    """Hold a lock that others give back soon; say `why` it takes time. Raises `Interrupted`."""
    held = FileLock(lock)
    said, since = False, time.monotonic()
    while True:
        try:
            with writing_in(lock.parent):
                held.acquire(timeout=0.2)
            break
        except Timeout:
            if stopping():
                raise Interrupted from None
            if not said and time.monotonic() - since > _SAY_AFTER:
                print(why, flush=True)
                said = True
    try:
        yield
    finally:
        held.release()


@contextmanager
def if_free(lock: Path) -> Iterator[bool]:
    """Hold a lock if nobody else does, and yield whether it is held: others do the work then."""
    held = FileLock(lock)
    try:
        with writing_in(lock.parent):
            held.acquire(timeout=0)
    except Timeout:
        yield False
        return
    try:
        yield True
    finally:
        held.release()


def _flock(file: int, kind: int) -> bool:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _holder(record: Path) -> Holder:
    try:
        return Holder(**json.loads(record.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return Holder("unknown", 0, "unknown")
