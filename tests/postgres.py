"""A real PostgreSQL for tests, started through the command line on a free port of loopback."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[1]
_START = 60.0  # seconds


class Command:
    """An `ablate storage` command in the background, after it has printed its address."""

    def __init__(self, *words: str, environment: dict[str, str] | None = None) -> None:
        self._words = list(words)
        self._environment = {**os.environ, "PYTHONPATH": str(ROOT), **(environment or {})}
        self.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def start(self) -> None:
        """Start it and wait for the line with its URL."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "lightning_app", "storage", *self._words],
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        # Ends the loop below if the command prints nothing.
        guard = threading.Timer(_START, self._process.kill)
        guard.start()
        self.output = ""
        assert self._process.stdout is not None
        while "storage: " not in self.output and (line := self._process.stdout.readline()):
            self.output += line
        guard.cancel()
        if "storage: " not in self.output:
            self.stop()
            raise AssertionError(f"did not start: {self.output}")
        self.url = self.output.rpartition("storage: ")[2].split()[0]
        self.port = int(self.url.partition("://")[2].partition("/")[0].rpartition(":")[2])

    def processes(self) -> list[psutil.Process]:
        """The command and all processes that it has started."""
        process = psutil.Process(self.pid)
        return [process, *process.children(recursive=True)]

    def stop(self, number: int = 15) -> int:
        """Send it a signal and return its exit code; `output` then has its whole output."""
        if self.running:
            self._process.send_signal(number)
        assert self._process.stdout is not None
        if not self._process.stdout.closed:
            guard = threading.Timer(_START, self._process.kill)
            guard.start()
            self.output += self._process.stdout.read()
            guard.cancel()
            self._process.stdout.close()
        return self._process.wait()


class Server(Command):
    """`ablate storage serve` on a folder. `url` names its password file, not its password."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        super().__init__("serve", "--dir", str(folder), "--port", "0")

    @property
    def password(self) -> str:
        return (self.folder / "pgpass").read_text().strip().rpartition(":")[2]

    @property
    def postmaster(self) -> psutil.Process:
        """The process that starts all others of the database."""
        lines = (self.folder / "data" / "postmaster.pid").read_text().splitlines()
        return psutil.Process(int(lines[0]))

    def restart(self, away: float = 0.0) -> None:
        """Stop the server and start it again, after `away` seconds, on the same port."""
        assert self.stop() == 0
        time.sleep(away)
        self.start_again()

    def kill(self) -> None:
        """Kill the command like `kill -9`, and check that the database ends with it."""
        database = self.processes()[1:]
        self.stop(9)
        _, alive = psutil.wait_procs(database, timeout=_START)
        assert not alive

    def start_again(self) -> None:
        """Start it on its former port."""
        self._words[-1] = str(self.port)
        self.start()


@contextmanager
def serve(folder: Path) -> Iterator[Server]:
    """Serve a database in `folder`, made if it is missing, on a free port of loopback."""
    server = Server(folder)
    try:
        yield server
    finally:
        server.stop()
