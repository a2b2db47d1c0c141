"""`ablate storage serve`: a PostgreSQL database for the queue of several hosts."""

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from urllib.parse import quote

from filelock import FileLock, Timeout

from lightning_app.ablation.queue.postgres import (
    DATABASE,
    USER,
    Cluster,
    free_port,
    is_loopback,
    reachable_name,
)
from lightning_app.ablation.queue.storages import VARIABLE, bracketed
from lightning_app.atomic_write import write_whole, writing_in
from lightning_app.errors import UserError


def serve_command(folder: Path, host: str = "127.0.0.1", port: int = 5433) -> int:
    """`ablate storage serve`: serve the PostgreSQL database in `folder` until a signal ends it.

    The folder is made if it is missing; a later call serves its data with the same password. Port 0
    takes a free one. Returns 0 after SIGINT or SIGTERM, 1 if the server ended by itself.

    Raises:
        UserError: for an address on which no server can listen, and for a folder in use.
    """
    with writing_in(folder):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with _only_server(folder), _Shutdown() as stop:
        port = free_port(host, port)
        cluster = Cluster(folder)
        cluster.prepare()
        process = cluster.start(host, port)
        stop.pass_on_to(process)
        try:
            cluster.wait_until_ready(process)
            _announce(cluster, host, port)
            process.wait()
        except UserError:
            if not stop.asked:
                raise
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
                process.wait()
        if not stop.asked:
            print(f"ablate: PostgreSQL ended by itself; see {folder / 'postgres.log'}", flush=True)
            return 1
    print("stopped; the data is kept", flush=True)
    return 0


class _Shutdown:
    """Count SIGINT and SIGTERM, and shut PostgreSQL down, also if it starts after the signal."""

    def __init__(self) -> None:
        self.asked = 0
        self._server: subprocess.Popen[bytes] | None = None
        self._before: dict[int, object] = {}

    def __enter__(self) -> "_Shutdown":
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # pyright: ignore[reportArgumentType]

    def pass_on_to(self, server: "subprocess.Popen[bytes]") -> None:
        """Shut the server down at the first signal, past or future; at once at the second."""
        self._server = server
        if self.asked:
            self._shut_down()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.asked += 1
        self._shut_down()

    def _shut_down(self) -> None:
        if self._server is not None:
            self._server.send_signal(signal.SIGINT if self.asked == 1 else signal.SIGQUIT)


@contextmanager
def _only_server(folder: Path) -> Iterator[None]:
    """Lock the folder: one command at a time may serve it."""
    holder = folder / "serve.pid"
    lock = FileLock(folder / ".serve.lock", timeout=0)
    with writing_in(folder):
        try:
            lock.acquire()
        except Timeout as error:
            pid = holder.read_text().strip() if holder.is_file() else "unknown"
            raise UserError(f"{folder}: process {pid} is serving this folder") from error
    try:
        write_whole(holder, f"{os.getpid()}\n")
        yield
    finally:
        lock.release()


def _announce(cluster: Cluster, host: str, port: int) -> None:
    where = f"{bracketed(reachable_name(host))}:{port}"
    url = f"postgresql://{USER}@{where}/{DATABASE}?passfile={quote(str(cluster.passfile))}"
    print(f"storage: {url}")
    print(f"use: ablate run GRID --storage '{url}'")
    print(f"or once: export {VARIABLE}='{url}'")
    if is_loopback(host):
        print("only this machine can reach it; --host 0.0.0.0 opens it to others")
    else:
        print(f"a host without access to {cluster.passfile} needs a copy of it, with mode 600")
    print("Ctrl-C stops it and keeps the data", flush=True)
