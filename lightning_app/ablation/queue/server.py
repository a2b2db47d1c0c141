"""`ablate storage serve | proxy`: a database for several hosts, and its proxy."""

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
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
from lightning_app.ablation.queue.storages import (
    LOST_AFTER,
    VARIABLE,
    bracketed,
    extra_missing,
    is_outage,
    open_storage,
    storage_spec,
)
from lightning_app.errors import UserError
from lightning_app.files import write_whole, writing_in

_CONNECTIONS = 10  # of the proxy to its database, one a thread
_LAST_CALLS = 5.0  # seconds that calls under way may take when the proxy ends


def serve_command(folder: Path, host: str = "127.0.0.1", port: int = 5433) -> int:
    """`ablate storage serve`: serve the PostgreSQL database in `folder` until a signal ends it.

    The folder is made if need be; a later call goes on with its data and its password. Port 0
    takes a free one. Returns 0 after SIGINT or SIGTERM, 1 where the server ended by itself.

    Raises:
        UserError: for an address that cannot be listened on, and a folder that is in use.
    """
    with writing_in(folder):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with _only_server(folder), _Stop() as stop:
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


def proxy_command(
    storage: str | None, host: str = "127.0.0.1", port: int = 13000, lost_after: float = LOST_AFTER
) -> int:
    """`ablate storage proxy`: serve a PostgreSQL storage by gRPC until a signal ends it.

    `storage` is a URL, by default that of ABLATE_STORAGE; port 0 takes a free one. Supervisors
    have to count a trial as lost after the same `lost_after` seconds. Returns 0.

    Raises:
        UserError: for a storage or an address that cannot be used.
    """
    spec = storage_spec(storage, Path.cwd())
    if spec.kind != "postgresql":
        raise UserError(f"--storage: a proxy needs a postgresql:// storage, found {spec.shown}")
    try:
        from lightning_app.ablation.queue.proxy import HeartbeatServer, make_server
    except ImportError as error:
        raise extra_missing(spec) from error
    with _Stop() as stop:
        port = free_port(host, port)
        database = open_storage(spec, lost_after, connections=_CONNECTIONS, wrap=HeartbeatServer)
        server, port = make_server(database, host, port, is_outage)
        server.start()
        stop.call(lambda: server.stop(_LAST_CALLS))
        url = f"grpc://{bracketed(reachable_name(host))}:{port}"
        print(f"storage: {url}  (in front of {spec.shown})")
        if not is_loopback(host):
            print("everybody who reaches this address can read and change the storage")
        print(f"use: ablate run GRID --storage {url}", flush=True)
        server.wait_for_termination()
    return 0


class _Stop:
    """SIGINT and SIGTERM as a wish to end, also where they come before anything can end."""

    def __init__(self) -> None:
        self.asked = 0
        self._act: Callable[[], object] | None = None
        self._before: dict[int, object] = {}

    def __enter__(self) -> "_Stop":
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # pyright: ignore[reportArgumentType]

    def call(self, act: Callable[[], object]) -> None:
        """Call `act` at each wish, and now where one came already."""
        self._act = act
        if self.asked:
            act()

    def pass_on_to(self, process: "subprocess.Popen[bytes]") -> None:
        """Shut PostgreSQL down at the first wish, at once at the second."""
        self.call(lambda: process.send_signal(signal.SIGINT if self.asked == 1 else signal.SIGQUIT))

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.asked += 1
        if self._act is not None:
            self._act()


@contextmanager
def _only_server(folder: Path) -> Iterator[None]:
    """Hold the folder, which one command at a time may serve."""
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
        print("only this machine reaches it; --host 0.0.0.0 opens it to others")
    else:
        print(f"a host that does not see {cluster.passfile} needs a copy of it, with mode 600")
    print("Ctrl-C stops it and keeps the data", flush=True)
