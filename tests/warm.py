"""Start Python processes fast: fork a process that has imported torch, Lightning and the package.

A cold start of the program takes seconds, which tests need not spend if they only want a process to
kill or to read its output. `start` and `run` take the arguments of `python`, `-m MODULE ...` or
`-c CODE ...`, and make a process with its own session, folder and environment. Tests of the imports
at the start, or of the installed command, use `subprocess` instead.
"""

import atexit
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).parents[1]
MODULES = (
    "lightning_app.parser",
    "lightning_app.ablation.run_cell",
    "lightning_app.ablation.run_command",
    "lightning_app.analysis.report",
    "lightning_app.cli",
)
SIZE = 1 << 20  # the maximum of bytes of a request


class Process:
    """A process that was started warm; `returncode` is None while it runs."""

    def __init__(
        self, arguments: Sequence[str], folder: Path | None, environment: Mapping[str, str] | None
    ) -> None:
        self.args = [sys.executable, *arguments]
        self.returncode: int | None = None
        self._out, self._err = (_unnamed_file() for _ in range(2))
        for file in (self._out, self._err):
            weakref.finalize(self, os.close, file)
        self._status, status = os.pipe()
        request = {
            "arguments": list(arguments),
            "folder": str(folder or Path.cwd()),
            "environment": dict(os.environ if environment is None else environment),
        }
        socket.send_fds(_server(), [json.dumps(request).encode()], [self._out, self._err, status])
        os.close(status)
        self.pid = int(os.read(self._status, 16))

    def poll(self) -> int | None:
        return self._look(0.0)

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code, negative for a signal. Raises `subprocess.TimeoutExpired`."""
        code = self._look(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return code

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Wait for the end and return the text of both outputs."""
        self.wait(timeout)
        return self.printed(), self.printed(errors=True)

    def printed(self, errors: bool = False) -> str:
        """Return the text so far of standard output, or of standard error."""
        file = self._err if errors else self._out
        return os.pread(file, os.fstat(file).st_size, 0).decode()

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)

    def __del__(self) -> None:
        """Kill the process, also if the test has failed."""
        self.kill()

    def _look(self, timeout: float | None) -> int | None:
        if self.returncode is None and select.select([self._status], [], [], timeout)[0]:
            self.returncode = int(os.read(self._status, 16))
            os.close(self._status)
        return self.returncode


def _unnamed_file() -> int:
    file, path = tempfile.mkstemp()
    os.unlink(path)
    return file


def start(
    arguments: Sequence[str],
    *,
    folder: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> Process:
    """Start a process in `folder`, by default this one, as the leader of its own session."""
    return Process(arguments, folder, environment)


def run(
    arguments: Sequence[str],
    *,
    folder: Path | None = None,
    environment: Mapping[str, str] | None = None,
    timeout: float = 300.0,
) -> subprocess.CompletedProcess[str]:
    """Run a process to its end; kill it if it takes longer than `timeout` seconds."""
    process = start(arguments, folder=folder, environment=environment)
    try:
        out, err = process.communicate(timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    return subprocess.CompletedProcess(process.args, process.wait(), out, err)


@cache
def _server() -> socket.socket:
    """Start the process to fork, once for each test process; it ends together with this one."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SIZE)
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.warm", str(theirs.fileno())],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        pass_fds=[theirs.fileno()],
        start_new_session=True,
    )
    theirs.close()

    def stop() -> None:
        ours.close()
        server.wait()

    atexit.register(stop)
    return ours


def serve(channel: socket.socket) -> None:
    """Fork once for each request until the tests end."""
    for module in MODULES:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # attending forks are not waited for
    while True:
        request, handles, *_ = socket.recv_fds(channel, SIZE, 3)
        if not request:
            return
        if os.fork() == 0:
            channel.close()
            attend(json.loads(request), *handles)
        for handle in handles:
            os.close(handle)


def attend(request: dict, out: int, err: int, status: int) -> None:
    """Fork for a request; send the pid and later the exit code. Returns only in the fork."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    pid = os.fork()
    if pid == 0:
        os.close(status)
        become(request, out, err)
    os.close(out)
    os.close(err)
    os.write(status, f"{pid}\n".encode())
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    os.write(status, f"{code}\n".encode())
    os._exit(0)


def become(request: dict, out: int, err: int) -> NoReturn:
    """Run like a process that `python` started, including the end of the interpreter."""
    os.setsid()
    os.dup2(out, 1)
    os.dup2(err, 2)
    os.close(out)
    os.close(err)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    added = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:1] = [request["folder"], *(path for path in added if path and path not in sys.path)]
    how, what, *words = request["arguments"]
    if how == "-m":
        sys.argv = [what, *words]
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    else:
        sys.argv = ["-c", *words]
        exec(compile(what, "<string>", "exec"), {"__name__": "__main__"})
    sys.exit(0)


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
