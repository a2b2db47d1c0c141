"""Where a grid's study lies: a storage named by a URL, opened, and what may befall it meanwhile.

A password never becomes part of a URL that is shown, logged or handed on.
"""

import math
import os
import random
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import optuna
from optuna.storages import BaseStorage, GrpcStorageProxy, JournalStorage, RDBStorage, get_storage
from optuna.storages.journal import JournalFileBackend
from sqlalchemy import event, exc
from sqlalchemy.engine import URL, make_url

from lightning_app.errors import UserError

Kind = Literal["journal", "sqlite", "postgresql", "grpc"]

VARIABLE = "ABLATE_STORAGE"
JOURNAL = "optuna.journal"
LOST_AFTER = 120.0  # seconds without a heartbeat

_SCHEMES: dict[str, Kind] = {
    "postgresql": "postgresql",
    "postgres": "postgresql",
    "postgresql+psycopg": "postgresql",
    "sqlite": "sqlite",
    "grpc": "grpc",
}
_SECRETS = ("password", "sslpassword")  # parameters of libpq
_WHERE_PASSWORDS_GO = (
    f"give it in a file named by ?passfile=, in ~/.pgpass, or in PGPASSWORD or {VARIABLE}"
)
# How long a silent server is waited for before the connection counts as lost.
_LINK = {
    "connect_timeout": 10,  # seconds
    "keepalives_idle": 30,  # seconds
    "keepalives_interval": 10,  # seconds
    "keepalives_count": 3,
    "tcp_user_timeout": 60_000,  # milliseconds
}
# Heartbeats are naive times of the session's zone; a stopped holder of a lock loses it.
_SESSION = "SET TIME ZONE 'UTC'; SET idle_in_transaction_session_timeout = '60s'"
_FIRST_USE_TRIES = 12
_READY = 10.0  # seconds that a proxy or a starting server is waited for


@dataclass(frozen=True)
class StorageSpec:
    """A storage: of which kind, where for Optuna, and how it is named to people.

    `url` (of a journal: its path) and `shown` hold no password, nor does the printed form of
    the specification. `parameters` are what libpq needs besides, and may hold one.
    """

    kind: Kind
    url: str
    shown: str
    parameters: Mapping[str, str] = field(default_factory=dict, repr=False)

    @property
    def several(self) -> bool:
        """Whether several supervisors may use it at once."""
        return self.kind in ("postgresql", "grpc")


def storage_spec(
    text: str | None, directory: Path, environment: Mapping[str, str] = os.environ
) -> StorageSpec:
    """Read the storage of `--storage`, else of ABLATE_STORAGE, else the journal in `directory`.

    Raises:
        UserError: for a URL of no known kind, a malformed one, one with a password on the
            command line, and for a password file that libpq would not read.
    """
    source = "--storage" if text is not None else VARIABLE
    given = environment.get(VARIABLE, "") if text is None else text
    if given in ("", "journal"):
        if text == "":
            raise UserError("--storage: expected a URL or 'journal', found nothing")
        journal = str(directory / JOURNAL)
        return StorageSpec("journal", journal, journal)
    scheme = given.partition("://")[0]
    if "://" not in given or scheme not in _SCHEMES:
        word = scheme if "://" in given or "@" not in given else "something else"
        raise UserError(
            f"{source}: expected journal, postgresql://user@host:port/database, "
            f"grpc://host:port or sqlite:///FILE, found '{word}'"
        )
    kind = _SCHEMES[scheme]
    url = _parse(source, kind, given)
    if kind == "sqlite":
        return _sqlite(source, url)
    if kind == "grpc":
        return _grpc(source, url)
    spec = _postgresql(source, url, on_command_line=text is not None)
    if "PGPASSWORD" not in environment or "password" in spec.parameters:
        return spec
    # Kept here, so that no process of a cell has it in its environment.
    return replace(spec, parameters={**spec.parameters, "password": environment["PGPASSWORD"]})


def open_storage(
    spec: StorageSpec,
    lost_after: float | None = None,
    connections: int = 1,
    wrap: Callable[[RDBStorage], BaseStorage] = get_storage,
) -> BaseStorage:
    """Open a storage, making the tables of an empty database.

    Args:
        spec: Which one.
        lost_after: Seconds without a heartbeat after which a trial's supervisor counts as lost,
            by default as the proxy says, or `LOST_AFTER`.
        connections: How many are kept open to a database.
        wrap: What is put around a database, by default Optuna's cache.

    Raises:
        UserError: where it cannot be reached or refuses us, and where the extra is missing.
    """
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        if spec.kind == "journal":
            return JournalStorage(JournalFileBackend(spec.url))
        if spec.kind == "grpc":
            return _open_proxy(spec, lost_after)
        return wrap(_open_database(spec, lost_after or LOST_AFTER, connections))


def close_storage(storage: BaseStorage) -> None:
    """Close the connections of a storage, which the next call would open again."""
    backend = getattr(storage, "_backend", None)
    if isinstance(backend, RDBStorage):
        _disconnect(backend)
    elif isinstance(storage, GrpcStorageProxy):
        storage.close()


def is_outage(error: BaseException) -> bool:
    """Whether `error` says that the storage went away for a moment, so that asking again helps."""
    if isinstance(error, UserError):  # it could not be opened: a mistake in its address, rather
        return False
    return any(_is_lost_link(each) for each in _causes(error))


def reason(error: BaseException) -> str:
    """What a database or a proxy says in `error`, in one line without statements or passwords."""
    for each in _causes(error):
        if isinstance(each, exc.DBAPIError):
            return _first_line(each.orig).removeprefix("connection failed: ")
        details = getattr(each, "details", None)  # of a grpc.RpcError
        if callable(details):
            return _first_line(details())
    return _first_line(error)


def _parse(source: str, kind: Kind, text: str) -> URL:
    """Read a URL. What it says is not repeated: any part may turn out to be a password."""
    try:
        url = make_url(text)
    except (ValueError, exc.ArgumentError) as error:
        raise UserError(
            f"{source}: a {kind} URL that cannot be read; "
            "expected the form kind://user@host:port/database"
        ) from error
    if "@" in (url.host or ""):
        raise UserError(f"{source}: an '@' in a user name or password must be written %40")
    return url


def _sqlite(source: str, url: URL) -> StorageSpec:
    if not url.database or url.database == ":memory:" or url.host or url.query:
        raise UserError(f"{source}: expected sqlite:///FILE and no more")
    if not Path(url.database).parent.is_dir():
        raise UserError(f"{source}: {Path(url.database).parent}: no such folder")
    shown = URL.create("sqlite", database=url.database).render_as_string()
    return StorageSpec("sqlite", shown, shown)


def _grpc(source: str, url: URL) -> StorageSpec:
    if not url.host or url.port is None or url.username or url.database or url.query:
        raise UserError(f"{source}: expected grpc://host:port and no more")
    shown = f"grpc://{bracketed(url.host)}:{url.port}"
    return StorageSpec("grpc", shown, shown)


def _postgresql(source: str, url: URL, on_command_line: bool) -> StorageSpec:
    parameters: dict[str, str] = {}
    for key, value in url.query.items():
        if not isinstance(value, str):
            raise UserError(f"{source}: '{key}' is given twice")
        parameters[key] = value
    if url.password is not None:
        parameters["password"] = str(url.password)
    if on_command_line and any(key in parameters for key in _SECRETS):
        raise UserError(
            f"{source}: holds a password, which every user of this machine can read in the "
            f"list of processes; {_WHERE_PASSWORDS_GO}"
        )
    if "passfile" in parameters:
        parameters["passfile"] = str(_password_file(source, Path(parameters["passfile"])))
    bare = URL.create(
        "postgresql", username=url.username, host=url.host, port=url.port, database=url.database
    )
    shown = bare.render_as_string()
    return StorageSpec("postgresql", shown, shown, parameters)


def _password_file(source: str, path: Path) -> Path:
    """The absolute path of a file that libpq will read; it skips what others may read."""
    path = path.expanduser().absolute()
    try:
        mode = path.stat().st_mode
    except OSError as error:
        raise UserError(f"{source}: passfile {path}: {error.strerror}") from error
    if not path.is_file() or not os.access(path, os.R_OK):
        raise UserError(f"{source}: passfile {path}: not a file that can be read")
    if mode & 0o077:
        raise UserError(f"{source}: passfile {path}: open to others; run chmod 600 on it")
    return path


def _open_database(spec: StorageSpec, lost_after: float, connections: int) -> RDBStorage:
    """Open a database, also where other processes make its tables at this moment."""
    for attempt in range(_FIRST_USE_TRIES):
        try:
            return _connect(spec, lost_after, connections)
        except UserError:
            raise
        except ImportError as error:
            raise extra_missing(spec) from error
        except (exc.SQLAlchemyError, optuna.exceptions.StorageInternalError) as error:
            if not _may_pass(error) or attempt == _FIRST_USE_TRIES - 1:
                raise UserError(f"{spec.shown}: cannot be used: {reason(error)}") from error
            # Not in step with whoever got in the way.
            time.sleep(random.uniform(0.1, 0.2) * (attempt + 1))
        except RuntimeError as error:  # tables of another version of Optuna
            raise UserError(f"{spec.shown}: {_first_line(error)}") from error
    raise AssertionError("the loop returns or raises")


def _connect(spec: StorageSpec, lost_after: float, connections: int) -> RDBStorage:
    url = spec.url.replace("{", "{{").replace("}", "}}")  # Optuna fills URLs in like templates
    if spec.kind == "sqlite":
        return _made(url, {"connect_args": {"timeout": 30}})
    storage = _made(
        url.replace("postgresql:", "postgresql+psycopg:", 1),
        {
            "connect_args": {**_LINK, **spec.parameters},
            "pool_pre_ping": True,
            "pool_size": connections,
            "max_overflow": 2,
        },
        heartbeat_interval=max(1, int(lost_after / 4)),
        grace_period=_grace_period(lost_after),
    )
    event.listen(storage.engine, "connect", _set_up_session)
    _disconnect(storage)  # what was opened without it
    return storage


def _made(url: str, engine: dict[str, Any], **options: Any) -> RDBStorage:
    """Make a database's tables and the object for it, which keeps no connection if that fails."""
    storage = RDBStorage.__new__(RDBStorage)
    try:
        storage.__init__(url, engine, **options)
    except Exception:
        if hasattr(storage, "scoped_session"):
            _disconnect(storage)
        raise
    return storage


def _disconnect(database: RDBStorage) -> None:
    database.remove_session()
    database.engine.dispose()


def _set_up_session(connection: Any, _: object) -> None:
    # By statements: a client's PGTZ would overrule what is asked for while connecting.
    connection.execute(_SESSION)
    connection.commit()


def _open_proxy(spec: StorageSpec, lost_after: float | None) -> BaseStorage:
    try:
        from lightning_app.ablation.queue.proxy import HeartbeatProxy
    except ImportError as error:
        raise extra_missing(spec) from error
    host, _, port = spec.url.removeprefix("grpc://").rpartition(":")
    proxy = HeartbeatProxy(host, int(port))
    try:
        proxy.wait_server_ready(timeout=_READY)
        proxy.lost_after = proxy.ask_lost_after()
        if lost_after is not None and proxy.lost_after != _grace_period(lost_after):
            raise UserError(
                f"--lost-after: {lost_after:g} s here, but the proxy at {spec.shown} gives "
                f"trials up after {proxy.lost_after} s"
            )
    except Exception as error:
        proxy.close()
        if isinstance(error, ConnectionError):
            raise UserError(f"{spec.shown}: no proxy answers there") from error
        if isinstance(error, KeyError):
            raise UserError(f"{spec.shown}: not a proxy of `ablate storage proxy`") from error
        if is_outage(error):
            raise UserError(f"{spec.shown}: cannot be used: {reason(error)}") from error
        raise
    return proxy


def _grace_period(lost_after: float) -> int:
    return max(1, math.ceil(lost_after))


def extra_missing(spec: StorageSpec) -> UserError:
    """What to say where the packages for databases are not installed."""
    return UserError(
        f"{spec.shown}: needs more packages: pip install 'transformer-ablations[postgres]'"
    )


def _may_pass(error: BaseException) -> bool:
    """Whether opening may succeed a moment later: tables being made, a server coming up."""
    for each in _causes(error):
        if isinstance(each, exc.IntegrityError):
            return True
        if isinstance(each, exc.DBAPIError):
            state = getattr(each.orig, "sqlstate", None)
            # A table, an object or a row that another process made first; a deadlock with it.
            if state in ("42P07", "42710", "23505", "40P01", "57P03"):
                return True
            return "starting up" in str(each.orig) or "shutting down" in str(each.orig)
    return False


def _is_lost_link(error: BaseException) -> bool:
    if isinstance(error, exc.PendingRollbackError):  # the link broke inside a transaction
        return True
    if isinstance(error, exc.DBAPIError):
        if type(error.orig).__module__.startswith("sqlite3"):
            return "locked" in str(error.orig)
        lost = isinstance(error, exc.OperationalError | exc.InterfaceError)
        return lost or error.connection_invalidated
    code = getattr(error, "code", None)
    if callable(code) and type(error).__module__.startswith("grpc"):
        return getattr(code(), "name", "") in ("UNAVAILABLE", "DEADLINE_EXCEEDED")
    return False


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


def _first_line(message: object) -> str:
    lines = str(message).strip().splitlines()
    return lines[0] if lines else type(message).__name__


def bracketed(host: str) -> str:
    """A host as it stands in a URL."""
    return f"[{host}]" if ":" in host else host
