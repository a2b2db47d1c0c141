"""The storage of a grid's study: a journal in a shared folder, or any database supported by Optuna.

A URL that is shown or logged never contains a password.
"""

import math
import os
import random
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import optuna
from filelock import FileLock, Timeout
from optuna.exceptions import UpdateFinishedTrialError
from optuna.storages import JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock
from optuna.trial import TrialState
from sqlalchemy import exc
from sqlalchemy.engine import make_url

from lightning_app.core.errors import UserError
from lightning_app.core.files import writing_in

VARIABLE = "ABLATE_STORAGE"
LOST_AFTER = 120.0  # seconds without a heartbeat

_EXPECTED = "expected 'journal', a path, or a URL such as postgresql://user@host:port/database"
_WHERE_PASSWORDS_GO = (
    f"give it in a file named by ?passfile=, in ~/.pgpass, or in PGPASSWORD or {VARIABLE}"
)
_TRIES = 3  # to open a database, whose tables another grid may be creating
_LOCK_TIMEOUT = 10.0  # seconds


@dataclass(frozen=True)
class StorageSpec:
    """A storage of Optuna.

    Attributes:
        shown: Its name in messages, without a password.
        journal: The path of a journal; None for a database.
        url: The URL of a database, perhaps with a password; not in the printed form.
    """

    shown: str
    journal: Path | None = None
    url: str = field(default="", repr=False)


def storage_spec(
    text: str | None, journal: Path, environment: Mapping[str, str] = os.environ
) -> StorageSpec:
    """Read the storage from `--storage` or ABLATE_STORAGE; by default the `journal`.

    Raises:
        UserError: for a URL that cannot be read, for a password on the command line, and for a
            journal in a folder that does not exist.
    """
    source = "--storage" if text is not None else VARIABLE
    given = environment.get(VARIABLE, "") if text is None else text
    if text == "":
        raise UserError(f"--storage: {_EXPECTED}, found nothing")
    if given in ("", "journal"):
        return StorageSpec(str(journal), journal)
    if "://" in given:
        return _database(source, given, environment, on_command_line=text is not None)
    if ":" in given.partition("@")[0] and "@" in given:
        raise UserError(f"{source}: {_EXPECTED}, found none of them")  # perhaps with a password
    path = Path(given).absolute()
    if not path.parent.is_dir() or path.is_dir():
        problem = "is a folder" if path.is_dir() else f"there is no folder {path.parent}"
        raise UserError(f"{source}: {_EXPECTED}, found '{given}', but {problem}")
    return StorageSpec(str(path), path)


def _database(
    source: str, text: str, environment: Mapping[str, str], on_command_line: bool
) -> StorageSpec:
    """Read a URL. Error messages do not quote it, since any part may be a password."""
    try:
        url = make_url(text)
    except (ValueError, exc.ArgumentError) as error:
        raise UserError(
            f"{source}: a URL that cannot be read; expected the form kind://user@host:port/database"
        ) from error
    if "@" in (url.host or ""):
        raise UserError(f"{source}: an '@' in a user name or password must be written %40")
    if on_command_line and (url.password or any("password" in key for key in url.query)):
        raise UserError(
            f"{source}: holds a password, which every user of this machine can read in the "
            f"list of processes; {_WHERE_PASSWORDS_GO}"
        )
    shown = url._replace(password=None, query={}).render_as_string()
    if url.drivername in ("postgresql", "postgres"):
        url = url.set(drivername="postgresql+psycopg")  # SQLAlchemy's default is psycopg2
        # Kept here because the processes of cells do not have it in their environment.
        if url.password is None and "PGPASSWORD" in environment:
            url = url.set(password=environment["PGPASSWORD"])
    return StorageSpec(shown, url=url.render_as_string(hide_password=False))


class Journal(JournalStorage):
    """Optuna's journal in a folder that several hosts may share, with heartbeats.

    A heartbeat sets the time of a file next to the journal, and is compared with that of another
    file there: only the clock of the file system counts.
    """

    def __init__(self, path: Path, lost_after: float) -> None:
        self._lost_after = lost_after
        self._beats = path.with_name(f".{path.name}.beats")
        with writing_in(path.parent):
            self._beats.mkdir(exist_ok=True)
            super().__init__(JournalFileBackend(str(path), _JournalLock(path)))

    def record_heartbeat(self, trial_id: int) -> None:
        (self._beats / str(trial_id)).touch()

    def is_silent(self, trial_id: int) -> bool:
        """Whether a running trial has had no heartbeat for too long."""
        now = self._beats / "now"
        now.touch()
        try:
            return _time_of(now) - _time_of(self._beats / str(trial_id)) > self._lost_after
        except FileNotFoundError:
            return True

    def set_trial_state_values(
        self, trial_id: int, state: TrialState, values: Sequence[float] | None = None
    ) -> bool:
        changed = super().set_trial_state_values(trial_id, state, values)
        if state.is_finished():
            (self._beats / str(trial_id)).unlink(missing_ok=True)
        return changed


class _JournalLock(JournalFileOpenLock):
    """A lock that the kernel releases when its process is killed, unlike Optuna's.

    The next holder removes the last line of a writer killed while writing it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._held = FileLock(path.with_name(f".{path.name}.lock"), timeout=_LOCK_TIMEOUT)

    def acquire(self) -> bool:
        self._held.acquire(poll_interval=0.01)
        if _cut_torn_line(self._path):
            print(f"{self._path}: a torn last line was removed", flush=True)
        return True

    def release(self) -> None:
        self._held.release()


def open_storage(spec: StorageSpec, lost_after: float = LOST_AFTER) -> Journal | RDBStorage:
    """Open a storage, creating the tables of an empty database.

    Args:
        spec: The storage.
        lost_after: Seconds without a heartbeat after which the supervisor of a trial is lost.

    Raises:
        UserError: if it cannot be reached or refuses access, and if a package is missing.
    """
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        if spec.journal is not None:
            return Journal(spec.journal, lost_after)
        for last in (attempt == _TRIES - 1 for attempt in range(_TRIES)):
            try:
                return RDBStorage(
                    spec.url,
                    {"pool_pre_ping": True},
                    heartbeat_interval=max(1, int(lost_after / 4)),
                    grace_period=max(1, math.ceil(lost_after)),
                )
            except ImportError as error:
                missing = f": {error.__cause__}" if error.__cause__ else ""
                raise UserError(
                    f"{spec.shown}: the driver of this database is not installed{missing} "
                    "(PostgreSQL: pip install 'transformer-ablations[postgres]')"
                ) from error
            except (exc.SQLAlchemyError, optuna.exceptions.StorageInternalError) as error:
                if last:
                    raise UserError(f"{spec.shown}: cannot be used: {reason(error)}") from error
                time.sleep(random.uniform(0.2, 0.5))
            except (RuntimeError, LookupError, ValueError, TypeError) as error:
                # Tables of another version of Optuna, or options unknown to the driver.
                raise UserError(f"{spec.shown}: cannot be used: {_first_line(error)}") from error
    raise AssertionError("the loop returns or raises")


def close_storage(storage: Journal | RDBStorage) -> None:
    """Close the connections of a storage; the next call would open them again."""
    if isinstance(storage, RDBStorage):
        storage.remove_session()
        storage.engine.dispose()


def fail_lost(study: optuna.Study, storage: Journal | RDBStorage) -> None:
    """End the trials whose supervisors have sent no heartbeat for too long."""
    if isinstance(storage, RDBStorage):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            optuna.storages.fail_stale_trials(study)
        return
    known = storage.get_study_id_from_name(study.study_name)
    for trial in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
        identity = storage.get_trial_id_from_study_id_trial_number(known, trial.number)
        if storage.is_silent(identity):
            with suppress(UpdateFinishedTrialError):  # the trial has just ended
                storage.set_trial_state_values(identity, TrialState.FAIL)


def is_outage(error: BaseException) -> bool:
    """Whether `error` is a short outage of the storage, so that a retry may succeed."""
    if isinstance(error, UserError):  # it could not be opened, probably because of a wrong address
        return False
    return any(_is_lost_link(each) for each in _causes(error))


def reason(error: BaseException) -> str:
    """The message of the database in `error`: one line without statements or passwords."""
    for each in _causes(error):
        if isinstance(each, exc.DBAPIError):
            return _first_line(each.orig).removeprefix("connection failed: ")
    return _first_line(error)


def _is_lost_link(error: BaseException) -> bool:
    if isinstance(error, exc.PendingRollbackError | Timeout):
        return True  # the connection broke inside a transaction; another process holds the journal
    if isinstance(error, exc.DBAPIError):
        lost = isinstance(error, exc.OperationalError | exc.InterfaceError)
        return lost or error.connection_invalidated
    return False


def _cut_torn_line(journal: Path) -> bool:
    """Remove an unterminated last line, which the next line would continue."""
    with journal.open("rb+") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 1))
        if file.read(1) in (b"", b"\n"):
            return False
        file.seek(0)
        file.truncate(file.read().rfind(b"\n") + 1)
    return True


def _time_of(path: Path) -> float:
    """The time of a file, in seconds; opening it makes a network file system ask its server."""
    with path.open("rb") as file:
        return os.fstat(file.fileno()).st_mtime


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


def _first_line(message: object) -> str:
    lines = str(message).strip().splitlines()
    return lines[0] if lines else type(message).__name__
