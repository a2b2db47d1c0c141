"""Start Python processes fast: fork a process that has imported torch, Lightning and the package.

A cold start of the program takes seconds, which tests need not spend if they only want a process to
kill or to read its output. `start` and `run` take the arguments of `python`, `-m MODULE ...`,
`-c CODE ...` or `FILE ...`, and make a process with its own session, folder and environment. A fork
server of multiprocessing that it starts is forked, too. Tests of the imports at the start, or of
the installed command, use `subprocess` instead.
"""

import atexit
import ctypes
import fcntl
import functools
import gc
import hashlib
import importlib
import json
import multiprocessing.util
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
import warnings
import weakref
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import yaml

from tests import last

ROOT = Path(__file__).parents[1]
BASE = ROOT / "ablations" / "base" / "synthetic.yaml"
cold_spawn = multiprocessing.util.spawnv_passfds
MODULES = (
    *("sacrebleu", "datasets", "lightning_app.config.config", "lightning_app.tasks.translation"),
    *("lightning_app.core.schema", "lightning_app.training.run", "lightning_app.commands.grid"),
    *("lightning_app.grids.supervisor", "lightning_app.report.write"),
    *("lightning_app.report.figures.sheet", "lightning_app.cli", "scipy.special"),
)
WITHOUT_TORCH = ("lightning_app.commands.grid", "lightning_app.grids.supervisor")
"""What a supervisor imports: its forks need a third of the memory, which takes time to copy."""
SIZE = 1 << 20  # the maximum of bytes of a request
ROOM = 1 << 15  # bytes for the environment of a process
SERVER = "import tests.last; from tests.warm import main; main()"


class Process:
    """A process that was started warm; `returncode` is None while it runs."""

    def __init__(
        self,
        arguments: Sequence[str],
        folder: Path | None,
        environment: Mapping[str, str] | None,
        modules: tuple[str, ...],
        root: Path,
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
        files = [self._out, self._err, status]
        socket.send_fds(_server(modules, root), [json.dumps(request).encode()], files)
        os.close(status)
        self.pid = int(_line(self._status))

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

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def __del__(self) -> None:
        """Kill the process, also if the test has failed."""
        self.kill()

    def _look(self, timeout: float | None) -> int | None:
        if self.returncode is None and select.select([self._status], [], [], timeout)[0]:
            code, seconds = _line(self._status).split()
            self.returncode = int(code)
            _ended.append(float(seconds))
            os.close(self._status)
        return self.returncode


_ended: list[float] = []
_cached: list[Any] = []


def ended_seconds() -> float:
    """The processor seconds of the processes that have ended, and of those they waited for."""
    return sum(_ended)


def _line(pipe: int) -> str:
    text = b""
    while not text.endswith(b"\n"):
        read = os.read(pipe, 1)
        if not read:
            raise EOFError("the process that forks has ended")
        text += read
    return text.decode()


def _unnamed_file() -> int:
    file, path = tempfile.mkstemp()
    os.unlink(path)
    return file


def start(
    arguments: Sequence[str],
    *,
    folder: Path | None = None,
    environment: Mapping[str, str] | None = None,
    modules: tuple[str, ...] = MODULES,
    root: Path = ROOT,
) -> Process:
    """Start a process in `folder`, by default this one, as the leader of its own session.

    The process has imported `modules` from the checkout `root`.
    """
    return Process(arguments, folder, environment, modules, root)


def run(
    arguments: Sequence[str],
    *,
    folder: Path | None = None,
    environment: Mapping[str, str] | None = None,
    timeout: float = 300.0,
    root: Path = ROOT,
) -> subprocess.CompletedProcess[str]:
    """Run a process to its end; kill it if it takes longer than `timeout` seconds."""
    process = start(arguments, folder=folder, environment=environment, root=root)
    try:
        out, err = process.communicate(timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    return subprocess.CompletedProcess(process.args, process.wait(), out, err)


def run_ranks(arguments: Sequence[str], ranks: int) -> subprocess.CompletedProcess[str]:
    """Run the ranks of a command as `torchrun` does; return what the first one did.

    Lightning would start all others cold, which takes seconds for each.
    """
    if ranks == 1:
        return run(arguments)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "tests"}
    shared |= {"GROUP_RANK": 0, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    processes = []
    for rank in range(ranks):
        variables = {**shared, "RANK": rank, "LOCAL_RANK": rank}.items()
        environment = {**os.environ, **{key: str(value) for key, value in variables}}
        processes.append(start(arguments, environment=environment))
    try:
        out, err = processes[0].communicate(300.0)
        for other in processes[1:]:
            assert other.wait(300.0) == processes[0].returncode, other.printed(errors=True)
    finally:
        for process in processes:
            process.kill()
    return subprocess.CompletedProcess(processes[0].args, processes[0].wait(), out, err)


@cache
def _server(modules: tuple[str, ...], root: Path) -> socket.socket:
    """Connect to the process to fork; the first test process of a run that needs it starts it.

    It ends when all of them have ended.
    """
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID", str(os.getpid()))
    kind = hashlib.sha256(repr((modules, root)).encode()).hexdigest()[:8]
    path = os.path.join(tempfile.gettempdir(), f"warm-{run}-{kind}")
    ours = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SIZE)
    with open(f"{path}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            ours.connect(path)
        except OSError:
            server = _start_server(path, modules, root)
            ours.connect(path)
            atexit.register(server.wait)
    atexit.register(ours.close)
    return ours


def _start_server(path: str, modules: tuple[str, ...], root: Path) -> subprocess.Popen[bytes]:
    with suppress(FileNotFoundError):
        os.unlink(path)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(path)
        listener.listen()
        return subprocess.Popen(
            [sys.executable, "-c", SERVER, str(listener.fileno()), *modules],
            cwd=root,
            env={
                **os.environ,
                **{"OMP_NUM_THREADS": "1", "PYTHONPATH": str(root), "ROOM": " " * ROOM},
            },
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=[listener.fileno()],
            start_new_session=True,
        )


def serve(listener: socket.socket, modules: Iterable[str]) -> None:
    """Fork once for each request until the test processes have ended."""
    path = listener.getsockname()
    gc.disable()  # no module is garbage
    for module in modules:
        importlib.import_module(module)
    # What takes each fork seconds, and is the same in all: the digest of the code, and what
    # pydantic makes of the types of a config.
    provenance: Any = importlib.import_module("lightning_app.runs.provenance")
    provenance.software()
    if "lightning_app.config.config" in sys.modules:
        config: Any = sys.modules["lightning_app.config.config"]
        config.resolve(yaml.safe_load(BASE.read_text()), str(BASE))
    if "lightning_app.report.figures.sheet" in sys.modules:
        sheet: Any = sys.modules["lightning_app.report.figures.sheet"]
        sheet.STYLE["pdf.fonttype"] = 3  # fonts take most of the time of a report; see its tests
    # `isinstance` would ask objects for their `__class__`, and those of torch may warn.
    for each in gc.get_objects():
        if type(each) is weakref.finalize:
            each.atexit = False  # torch's libraries, which take as long as the rest of the exit
        elif type(each) is functools.cached_property and hasattr(each, "lock"):
            _cached.append(each)
    gc.freeze()
    gc.set_threshold(5_000, 20, 50)  # as in the tests
    gc.enable()

    forks = dict[int, int]()  # pid: the pipe on which to report its exit

    def reap(*_: object) -> None:
        """Send the exit codes and processor seconds of forks that have ended."""
        with suppress(ChildProcessError):
            while (ended := os.wait4(-1, os.WNOHANG))[0]:
                pid, code, used = ended
                seconds = used.ru_utime + used.ru_stime
                line = f"{os.waitstatus_to_exitcode(code)} {seconds:.2f}\n"
                with suppress(BrokenPipeError):  # nobody waits
                    os.write(forks[pid], line.encode())
                os.close(forks.pop(pid))

    signal.signal(signal.SIGCHLD, reap)
    # A shell starts its background jobs, and so these tests, with the signal ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    channels = [listener.accept()[0]]
    while channels:
        for channel in select.select([listener, *channels], [], [])[0]:
            if channel is listener:
                channels.append(listener.accept()[0])
                continue
            request, handles, *_ = socket.recv_fds(channel, SIZE, 3)
            if not request:
                channels.remove(channel)
                channel.close()
                continue
            out, err, status = handles
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
            pid = os.fork()
            if pid == 0:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
                for each in (listener, *channels):
                    each.close()
                for handle in (status, *forks.values()):
                    os.close(handle)
                become(json.loads(request), out, err)
            forks[pid] = status
            os.close(out)
            os.close(err)
            with suppress(BrokenPipeError):
                os.write(status, f"{pid}\n".encode())
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
    for name in (path, f"{path}.lock"):
        with suppress(FileNotFoundError):
            os.unlink(name)


def become(request: dict, out: int, err: int) -> NoReturn:
    """Run like a process that `python` started, up to and including its exit functions."""
    os.setsid()
    os.dup2(out, 1)
    os.dup2(err, 2)
    os.close(out)
    os.close(err)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    show_environment()
    multiprocessing.util.spawnv_passfds = spawn
    words = request["arguments"]
    if words[:2] == ["-W", "error"]:
        words = words[2:]
        warnings.simplefilter("error")
    file = words[0] not in ("-m", "-c")
    how, what, *words = ["", *words] if file else words
    folder = os.path.dirname(what) if file else request["folder"]
    added = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:1] = [folder, *(path for path in added if path and path not in sys.path)]
    sys.argv = ["-c" if how == "-c" else what, *words]
    try:
        if file:
            runpy.run_path(what, run_name="__main__")
        elif how == "-m":
            runpy.run_module(what, run_name="__main__", alter_sys=True)
        else:
            exec(compile(what, "<string>", "exec"), {"__name__": "__main__"})
        sys.exit(0)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            last.code = (end.code or 0) & 0xFF
        raise


def show_environment() -> None:
    """Let the kernel show the environment of this process, not that of the warm one (Linux)."""
    if sys.platform != "linux":
        return
    start, end = map(int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[47:49])
    text = b"".join(os.fsencode(f"{key}={value}\0") for key, value in os.environ.items())
    assert len(text) <= end - start, "the environment needs more room"
    ctypes.memset(start, 0, end - start)
    ctypes.memmove(start, text, len(text))


def spawn(program: Any, arguments: Sequence[Any], kept: Sequence[int]) -> int:
    """Fork where multiprocessing starts its fork server; the fork has imported all modules.

    Takes the place of `multiprocessing.util.spawnv_passfds`, and returns the pid.
    """
    code = arguments[-1]
    if not code.startswith("from multiprocessing.forkserver import main"):
        return cold_spawn(program, arguments, kept)
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid > 0:
        return pid
    failed = 1
    try:
        for number in signal.valid_signals():
            if callable(signal.getsignal(number)):
                signal.signal(number, signal.SIG_DFL)
        empty = os.open(os.devnull, os.O_RDWR)
        others = set(map(int, os.listdir("/dev/fd"))).difference((0, 1, 2, empty, *kept))
        for handle in others:
            os.dup2(empty, handle)  # not closed: an object of the parent may close it later
        # The call that starts the server holds a lock in one of them.
        for module in ("multiprocessing.forkserver", "multiprocessing.popen_forkserver"):
            sys.modules.pop(module, None)
        # A thread, as that of a study, may hold the lock of a cached property (before Python 3.12).
        for part in _cached:
            part.lock = threading.RLock()
        # The program has loaded its plug-ins already; a server that is started cold has not.
        if (plugins := sys.modules.get("lightning_app.plugins")) is not None:
            for name in list(plugins.loaded()):
                plugins.unload(name)
        exec(code, {"__name__": "__main__"})
    except SystemExit:
        failed = 0
    except BaseException:
        traceback.print_exc()
    os._exit(failed)


def main() -> None:
    serve(socket.socket(fileno=int(sys.argv[1])), sys.argv[2:])
