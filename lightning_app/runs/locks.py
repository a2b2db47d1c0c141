"""Locks of runs and grids on a shared file system, and how a supervisor is stopped together with
all its children."""

import ctypes
import fcntl
import json
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import wait
from pathlib import Path

from filelock import FileLock, Timeout

from lightning_app.core.errors import UserError
from lightning_app.core.files import write_whole, writing_in
from lightning_app.runs.folder import GridFolder, RunFolder

# SLURM sends SIGUSR1 before the time limit of a job.
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


class Interrupted(Exception):
    """A signal from the user or the machine stopped the supervisor."""


class Stop:
    """The number of received signals. Handlers only count, so that no write is interrupted."""

    count = 0

    @property
    def requested(self) -> bool:
        return self.count > 0

    @contextmanager
    def listening(self) -> Iterator["Stop"]:
        """Count the signals that arrive."""

        def note(number: int, frame: object) -> None:
            self.count += 1

        before = {each: signal.signal(each, note) for each in _SIGNALS}
        try:
            yield self
        finally:
            for each, handler in before.items():
                signal.signal(each, handler)


_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Make the kernel kill this process when its parent thread ends. Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def bind_to_supervisor() -> None:
    """End this child of the fork server when the fork server or the supervisor ends.

    The kernel watches the fork server, which `fork_server` binds to the supervisor. On systems
    other than Linux a thread watches the supervisor.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)  # the fork server ignores both signals
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    parent = multiprocessing.parent_process()
    assert parent is not None
    sentinel = parent.sentinel

    def watch() -> None:
        wait([sentinel])
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True, name="lifeline").start()
    die_with_parent()
    server = sys.modules.get("lightning_app.grids.fork_server")
    if server is not None and os.getppid() != server.PID:  # it ended before the call above
        os.kill(os.getpid(), signal.SIGKILL)


_SAY_AFTER = 3.0  # seconds after which a message explains why a command waits


@contextmanager
def supervisor_lock(folder: GridFolder, several: bool = False) -> Iterator[bool]:
    """Lock a grid's folder, created if missing; yield whether no other supervisor has locked it.

    Without `several` the lock is exclusive; with `several` supervisors share it. Raises
    `UserError` if another supervisor holds the lock and does not share it, or if the folder cannot
    be written.
    """
    with writing_in(folder.path):
        folder.path.mkdir(parents=True, exist_ok=True)
        file = os.open(folder.supervisor_lock, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        alone = _flock(file, fcntl.LOCK_EX)
        if alone:
            mine = {"host": socket.gethostname(), "pid": os.getpid()}
            write_whole(folder.holder, json.dumps(mine))
        if (several and not _flock(file, fcntl.LOCK_SH)) or not (several or alone):
            host, pid = holder_of(folder.holder)
            raise UserError(f"{folder}: process {pid} on {host} is already running this grid")
        yield alone
    finally:
        os.close(file)


@contextmanager
def turn(lock: Path, stopping: Callable[[], bool], why: str) -> Iterator[None]:
    """Wait for a lock that others release soon, then hold it; print `why` if the wait is long.

    The folder of the lock is created if missing. Raises `Interrupted`.
    """
    held = FileLock(lock)
    said, since = False, time.monotonic()
    while True:
        try:
            with writing_in(lock.parent):
                lock.parent.mkdir(parents=True, exist_ok=True)
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


class Held(UserError):
    """Another process is training the run."""


@contextmanager
def run_lock(folder: RunFolder, patience: float = 0.0) -> Iterator[None]:
    """Hold the lock of a run's folder, created if missing, as the process that trains the run.

    Raises:
        Held: naming the process that is still training it after `patience` seconds.
    """
    with writing_in(folder.path):
        folder.path.mkdir(parents=True, exist_ok=True)
        held = FileLock(folder.lock)
        try:
            held.acquire(timeout=patience)
        except Timeout:
            (host, pid), until = holder_of(folder.holder), time.monotonic() + _SAY_AFTER
            while not pid and time.monotonic() < until:  # it may be about to write its name
                time.sleep(0.1)
                host, pid = holder_of(folder.holder)
            process = f"process {pid} on {host}" if pid else "another process"
            raise Held(f"{folder}: {process} is training this run") from None
    try:
        mine = {"host": socket.gethostname(), "pid": os.getpid()}
        write_whole(folder.holder, json.dumps(mine))
        yield
        folder.holder.unlink(missing_ok=True)
    finally:
        held.release()


@contextmanager
def if_free(lock: Path) -> Iterator[bool]:
    """Take a lock if it is free; yield whether it was. If not, others are doing the work."""
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


def is_held(lock: Path) -> bool:
    """Whether a living process holds a lock file, which is only read, never created or changed."""
    try:
        file = os.open(lock, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return False  # it is missing, or another user's and unreadable
    try:
        return not _flock(file, fcntl.LOCK_SH)
    finally:
        os.close(file)


def _flock(file: int, kind: int) -> bool:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def holder_of(record: Path) -> tuple[str, int]:
    """The host and the number of the process that holds a lock; 0 if its record is unreadable."""
    try:
        found = json.loads(record.read_text(encoding="utf-8"))
        return found["host"], found["pid"]
    except (OSError, ValueError, TypeError, LookupError):
        return "unknown", 0
