"""The storage of a grid's study: read its URL, open it, and recognize outages of its database.

A URL that is shown, logged or passed on never contains a password.
"""

import math
import os
import random
import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import optuna
from optuna.storages import BaseStorage, JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend
from sqlalchemy import event, exc
from sqlalchemy.engine import URL, make_url

from lightning_app.errors import UserError

Kind = Literal["journal", "sqlite", "postgresql"]

VARIABLE = "ABLATE_STORAGE"
LOST_AFTER = 120.0  # seconds without a heartbeat

_SCHEMES: dict[str, Kind] = {
    "postgresql": "postgresql",
    "postgres": "postgresql",
    "postgresql+psycopg": "postgresql",
    "sqlite": "sqlite",
}
_SECRETS = ("password", "sslpassword")  # parameters of libpq
_WHERE_PASSWORDS_GO = (
    f"give it in a file named by ?passfile=, in ~/.pgpass, or in PGPASSWORD or {VARIABLE}"
)
# How long to wait for a server that does not answer before the connection counts as lost.
_LINK = {
    "connect_timeout": 10,  # seconds
    "keepalives_idle": 30,  # seconds
    "keepalives_interval": 10,  # seconds
    "keepalives_count": 3,
    "tcp_user_timeout": 60_000,  # milliseconds
}
# Optuna's heartbeats have no time zone and use that of the session. The timeout releases the locks
# of a process that has stopped.
_SESSION = "SET TIME ZONE 'UTC'; SET idle_in_transaction_session_timeout = '60s'"
_FIRST_USE_TRIES = 12


@dataclass(frozen=True)
class StorageSpec:
    """A storage of Optuna.

    Attributes:
        kind: Its kind.
        url: Its address, or the path of a journal; without a password.
        shown: Its name in messages; without a password.
        parameters: Further parameters of libpq, perhaps a password; not in the printed form.
    """

    kind: Kind
    url: str
    shown: str
    parameters: Mapping[str, str] = field(default_factory=dict, repr=False)

    @property
    def several(self) -> bool:
        """Whether several supervisors may use it at once."""
        return self.kind == "postgresql"


def storage_spec(
    text: str | None, journal: Path, environment: Mapping[str, str] = os.environ
) -> StorageSpec:
    """Read the storage from `--storage`, else from ABLATE_STORAGE; by default the `journal`.

    Raises:
        UserError: for a URL that is malformed or of an unknown kind, for a password on the command
            line, and for a password file that libpq would not read.
    """
    source = "--storage" if text is not None else VARIABLE
    given = environment.get(VARIABLE, "") if text is None else text
    if given in ("", "journal"):
        if text == "":
            raise UserError("--storage: expected a URL or 'journal', found nothing")
        return StorageSpec("journal", str(journal), str(journal))
    scheme = given.partition("://")[0]
    if "://" not in given or scheme not in _SCHEMES:
        word = scheme if "://" in given or "@" not in given else "something else"
        raise UserError(
            f"{source}: expected journal, postgresql://user@host:port/database or "
            f"sqlite:///FILE, found '{word}'"
        )
    kind = _SCHEMES[scheme]
    url = _parse(source, kind, given)
    if kind == "sqlite":
        return _sqlite(source, url)
    spec = _postgresql(source, url, on_command_line=text is not None)
    if "PGPASSWORD" not in environment or "password" in spec.parameters:
        return spec
    # Kept in the spec, so that no process of a cell has it in its environment.
    return replace(spec, parameters={**spec.parameters, "password": environment["PGPASSWORD"]})


def open_storage(spec: StorageSpec, lost_after: float = LOST_AFTER) -> BaseStorage:
    """Open a storage, making the tables of an empty database.

    Args:
        spec: The storage.
        lost_after: Seconds without a heartbeat after which the supervisor of a trial is lost.

    Raises:
        UserError: if it cannot be reached or refuses access, and if a package is missing.
    """
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        if spec.kind == "journal":
            return JournalStorage(JournalFileBackend(spec.url))
        return _open_database(spec, lost_after)


def close_storage(storage: BaseStorage) -> None:
    """Close the connections of a storage; the next call would open them again."""
    if isinstance(storage, RDBStorage):
        storage.remove_session()
        storage.engine.dispose()


def is_outage(error: BaseException) -> bool:
    """Whether `error` is a short outage of the storage, so that a retry may succeed."""
    if isinstance(error, UserError):  # it could not be opened: probably a wrong address
        return False
    return any(_is_lost_link(each) for each in _causes(error))


def reason(error: BaseException) -> str:
    """The message of the database in `error`: one line without statements or passwords."""
    for each in _causes(error):
        if isinstance(each, exc.DBAPIError):
            return _first_line(each.orig).removeprefix("connection failed: ")
    return _first_line(error)


def _parse(source: str, kind: Kind, text: str) -> URL:
    """Read a URL. Error messages do not quote it, since any part may be a password."""
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
        raise UserError(f"{source}: expected sqlite:///FILE and nothing else")
    if not Path(url.database).parent.is_dir():
        raise UserError(f"{source}: {Path(url.database).parent}: no such folder")
    shown = URL.create("sqlite", database=url.database).render_as_string()
    return StorageSpec("sqlite", shown, shown)


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
    """The absolute path of a password file; libpq ignores a file that other users can read."""
    path = path.expanduser().absolute()
    try:
        mode = path.stat().st_mode
    except OSError as error:
        raise UserError(f"{source}: passfile {path}: {error.strerror}") from error
    if not path.is_file() or not os.access(path, os.R_OK):
        raise UserError(f"{source}: passfile {path}: not a file that can be read")
    if mode & 0o077:
        raise UserError(
            f"{source}: passfile {path}: other users can access it; run chmod 600 on it"
        )
    return path


def _open_database(spec: StorageSpec, lost_after: float) -> RDBStorage:
    """Open a database, even while other processes create its tables."""
    for attempt in range(_FIRST_USE_TRIES):
        try:
            return _connect(spec, lost_after)
        except UserError:
            raise
        except ImportError as error:
            raise _extra_missing(spec) from error
        except (exc.SQLAlchemyError, optuna.exceptions.StorageInternalError) as error:
            if not _may_pass(error) or attempt == _FIRST_USE_TRIES - 1:
                raise UserError(f"{spec.shown}: cannot be used: {reason(error)}") from error
            # Wait a random time, to not collide with the same process again.
            time.sleep(random.uniform(0.1, 0.2) * (attempt + 1))
        except RuntimeError as error:  # tables of another version of Optuna
            raise UserError(f"{spec.shown}: {_first_line(error)}") from error
    raise AssertionError("the loop returns or raises")


def _connect(spec: StorageSpec, lost_after: float) -> RDBStorage:
    url = spec.url.replace("{", "{{").replace("}", "}}")  # Optuna treats URLs as templates
    if spec.kind == "sqlite":
        return _made(url, {"connect_args": {"timeout": 30}})
    storage = _made(
        url.replace("postgresql:", "postgresql+psycopg:", 1),
        {
            "connect_args": {**_LINK, **spec.parameters},
            "pool_pre_ping": True,
            "pool_size": 1,
            "max_overflow": 2,
        },
        heartbeat_interval=max(1, int(lost_after / 4)),
        grace_period=max(1, math.ceil(lost_after)),
    )
    event.listen(storage.engine, "connect", _set_up_session)
    close_storage(storage)  # what was opened without it
    return storage


def _made(url: str, engine: dict[str, Any], **options: Any) -> RDBStorage:
    """Make a database's tables and the object for it, which keeps no connection if that fails."""
    storage = RDBStorage.__new__(RDBStorage)
    try:
        storage.__init__(url, engine, **options)
    except Exception:
        if hasattr(storage, "scoped_session"):
            close_storage(storage)
        raise
    return storage


def _set_up_session(connection: Any, _: object) -> None:
    # As statements, since a client's PGTZ overrides the options of the connection.
    connection.execute(_SESSION)
    connection.commit()


def _extra_missing(spec: StorageSpec) -> UserError:
    return UserError(
        f"{spec.shown}: needs more packages: pip install 'transformer-ablations[postgres]'"
    )


def _may_pass(error: BaseException) -> bool:
    """Whether a retry may open it: its tables are being created, or its server is starting."""
    for each in _causes(error):
        if isinstance(each, exc.IntegrityError):
            return True
        if isinstance(each, exc.DBAPIError):
            state = getattr(each.orig, "sqlstate", None)
            # Another process made the table, object or row first, or there was a deadlock with it.
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
    return False


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


def _first_line(message: object) -> str:
    lines = str(message).strip().splitlines()
    return lines[0] if lines else type(message).__name__


def bracketed(host: str) -> str:
    """A host in the form that URLs use."""
    return f"[{host}]" if ":" in host else host
