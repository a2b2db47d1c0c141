"""Hosts for `chaos.py`: network namespaces, or process groups where those are not allowed.

A host in a namespace has its own network, process numbers and host name, like a machine. In both
cases it has its own home and temporary folders. The hosts share the file system.
"""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import psutil

_NAMESPACES = ["--net", "--uts", "--pid", "--mount"]
_SUBNET = "10.77.0"
_BRIDGE = "hub"
_LISTENS = "0A"  # the state of a socket in /proc/net/tcp
# The first process of a namespace waits for orphans, like init; all others end with it.
_INIT = (
    "import signal, socket, sys; socket.sethostname(sys.argv[1]); "
    "signal.signal(signal.SIGCHLD, signal.SIG_IGN); print('ready', flush=True)\n"
    "while True: signal.pause()"
)


class Job:
    """A command that runs on a host, represented by its own process, not by its launcher."""

    def __init__(self, launched: subprocess.Popen[bytes], inside: bool) -> None:
        self._launched = launched
        self._inside = inside
        self._found: int | None = None if inside else launched.pid

    @property
    def pid(self) -> int | None:
        """The command's process, or None before it has started."""
        if self._found is None:
            with suppress(psutil.NoSuchProcess):
                children = psutil.Process(self._launched.pid).children()
                self._found = children[0].pid if children else None
        return self._found

    def poll(self) -> int | None:
        """The exit code, negative for a signal, or None while it runs."""
        return self._launched.poll()

    def wait(self, seconds: float) -> int:
        return self._launched.wait(seconds)

    def send(self, number: signal.Signals) -> None:
        """Send a signal only to the command."""
        pid = self.pid
        if pid is None or self.poll() is not None:
            return
        with suppress(ProcessLookupError):
            os.kill(pid, number)
            if self._inside and number in (signal.SIGCONT, signal.SIGKILL):
                self._launched.send_signal(signal.SIGCONT)  # nsenter stops with its command


class Host:
    """A host that runs commands and lists its processes."""

    def __init__(self, name: str, root: Path, init: int | None) -> None:
        self.name = name
        self.home = root / name / "home"
        self.temporary = root / name / "tmp"
        for folder in (self.home, self.temporary):
            folder.mkdir(parents=True)
        self._init = init
        self._namespace = "" if init is None else os.readlink(f"/proc/{init}/ns/pid")
        self._mark = uuid.uuid4().hex

    def start(self, command: list[str], log: Path, **environment: str) -> Job:
        """Start a command; its output is appended to `log`."""
        entry: list[str] = []
        if self._init is not None:
            entry = ["nsenter", "--target", str(self._init), *_NAMESPACES, "--"]
        own = {"HOME": str(self.home), "TMPDIR": str(self.temporary), "HOST_MARK": self._mark}
        with log.open("ab") as file:
            launched = subprocess.Popen(
                [*entry, *command],
                env={**os.environ, **own, **environment},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                cwd=self.home,
                start_new_session=True,
            )
        return Job(launched, inside=self._init is not None)

    def processes(self) -> list[psutil.Process]:
        """Every living process of this host except the first of its namespaces."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error, OSError):  # it ended meanwhile, or is a zombie
                if self._owns(process):
                    found.append(process)
        return found

    def _owns(self, process: psutil.Process) -> bool:
        if self._init is not None:
            here = os.readlink(f"/proc/{process.pid}/ns/pid") == self._namespace
            return here and process.pid != self._init
        return process.environ().get("HOST_MARK") == self._mark

    def open_listeners(self) -> set[str]:
        """The addresses, other than loopback, at which a process of this host listens."""
        if self._init is not None:
            return _listeners(self._init)
        found = set()
        for process in self.processes():
            with suppress(psutil.Error):
                for each in process.net_connections("tcp"):
                    listens = each.status == psutil.CONN_LISTEN
                    if listens and each.laddr and not is_loopback(each.laddr.ip):
                        found.add(f"{each.laddr.ip}:{each.laddr.port}")
        return found

    def kill_all(self) -> None:
        for process in self.processes():
            with suppress(psutil.Error):
                process.kill()


@contextmanager
def open_hosts(root: Path, names: list[str], namespaces: bool) -> Iterator[dict[str, Host]]:
    """Make a host for each name; end all of them at the end."""
    with ExitStack() as stack:
        hosts: dict[str, Host] = {}
        inits: list[int] = []
        for name in names:
            init = stack.enter_context(_namespace(name)) if namespaces else None
            hosts[name] = Host(name, root, init)
            stack.callback(hosts[name].kill_all)
            inits += [init] if init is not None else []
        if namespaces:
            _connect(inits)
        yield hosts


def has_namespaces() -> bool:
    """Whether this user may make network namespaces and connect them."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return False
    tools = ("unshare", "nsenter", "setpriv", "ip")
    if not all(map(shutil.which, tools)):
        return False
    bridge, pair = "ip link add name hub type bridge", "ip link add name one type veth peer two"
    command = ["unshare", *_NAMESPACES, "--fork", "sh", "-c", f"{bridge} && {pair}"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


@contextmanager
def _namespace(name: str) -> Iterator[int]:
    """Yield the first process of new namespaces, which end with it."""
    command = ["setpriv", "--pdeathsig", "KILL", "unshare", *_NAMESPACES, "--fork"]
    command += ["--mount-proc", "--kill-child=KILL", sys.executable, "-c", _INIT, name]
    launched = subprocess.Popen(command, stdout=subprocess.PIPE)
    try:
        assert launched.stdout is not None
        if launched.stdout.readline() != b"ready\n":
            raise RuntimeError(f"no namespace for {name}")
        init = psutil.Process(launched.pid).children()[0].pid
        _inside(init, "link", "set", "lo", "up")
        yield init
    finally:
        launched.kill()
        launched.communicate()


def _connect(inits: list[int]) -> None:
    """Connect namespaces by a bridge in the first one."""
    first = inits[0]
    _inside(first, "link", "add", _BRIDGE, "type", "bridge")
    _inside(first, "addr", "add", f"{_SUBNET}.1/24", "dev", _BRIDGE)
    _inside(first, "link", "set", _BRIDGE, "up")
    for number, init in enumerate(inits[1:], start=2):
        pair = ["type", "veth", "peer", "name", "eth0", "netns", str(init)]
        _inside(first, "link", "add", f"to{number}", *pair)
        _inside(first, "link", "set", f"to{number}", "master", _BRIDGE, "up")
        _inside(init, "addr", "add", f"{_SUBNET}.{number}/24", "dev", "eth0")
        _inside(init, "link", "set", "eth0", "up")


def _inside(init: int, *words: str) -> None:
    subprocess.run(["nsenter", "--target", str(init), "--net", "ip", *words], check=True)


def _listeners(init: int) -> set[str]:
    """Read the kernel's tables of a network namespace."""
    found = set()
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path(f"/proc/{init}/net/{table}").read_text().splitlines()[1:]:
            local, state = line.split()[1], line.split()[3]
            words, port = local.split(":")
            # Words of 32 bits in the byte order of the machine.
            parts = [int(words[i : i + 8], 16) for i in range(0, len(words), 8)]
            raw = b"".join(part.to_bytes(4, sys.byteorder) for part in parts)
            address = socket.inet_ntop(family, raw)
            if state == _LISTENS and not is_loopback(address):
                found.add(f"{address}:{int(port, 16)}")
    return found


def is_loopback(address: str) -> bool:
    return address.startswith(("127.", "::ffff:127.")) or address == "::1"


def wait_until_gone(host: Host, seconds: float) -> list[str]:
    """Wait for the end of all processes of a host; return the command lines of the others."""
    until = time.monotonic() + seconds
    while left := host.processes():
        if time.monotonic() >= until:
            return [" ".join(_command(process)) for process in left]
        time.sleep(0.1)
    return []


def _command(process: psutil.Process) -> list[str]:
    try:
        return [str(process.pid), *process.cmdline()[:8]]
    except psutil.Error:
        return [str(process.pid)]
