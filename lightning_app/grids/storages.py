"""The storage of a grid's study: a journal in the grid's folder, or any storage that Optuna opens.

A URL is handed to Optuna unread. Neither it nor a password in it is printed or written.
"""

import os
import random
import re
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote

import optuna
from filelock import FileLock
from optuna.storages import JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock
from sqlalchemy import exc

from lightning_app.core.errors import UserError, causes
from lightning_app.core.files import writing_in

VARIABLE = "ABLATE_STORAGE"

_EXPECTED = "expected 'journal', a path, or a URL such as postgresql+psycopg://user@host/database"
_TRIES = 3  # to open a database, whose tables another grid may be creating
_LOCK_TIMEOUT = 10.0  # seconds


@dataclass(frozen=True)
class StorageSpec:
    """A storage of Optuna.

    Attributes:
        shown: Its name in messages: the path of a journal, or the option that gave the URL.
        journal: The path of a journal; None for a database.
        url: The URL of a database, perhaps with a password; not in the printed form.
    """

    shown: str
    journal: Path | None = None
    url: str = field(default="", repr=False)


def storage_spec(
    text: str | None, journal: Path, environment: Mapping[str, str] = os.environ
) -> StorageSpec:
    """Read the storage from `--storage` or ABLATE_STORAGE; by default the `journal`."""
    source = "--storage" if text is not None else VARIABLE
    given = environment.get(VARIABLE, "") if text is None else text
    if text == "":
        raise UserError(f"--storage: {_EXPECTED}, found nothing")
    if given in ("", "journal"):
        return StorageSpec(str(journal), journal)
    if "://" in given:
        return StorageSpec(source, url=given)
    if ":" in given.partition("@")[0] and "@" in given:
        raise UserError(f"{source}: {_EXPECTED}, found none of them")  # perhaps with a password
    path = Path(given).absolute()
    if not path.parent.is_dir() or path.is_dir():
        problem = "is a folder" if path.is_dir() else f"there is no folder {path.parent}"
        raise UserError(f"{source}: {_EXPECTED}, found '{given}', but {problem}")
    return StorageSpec(str(path), path)


class _JournalLock(JournalFileOpenLock):
    """A lock that the kernel releases when its process is killed, unlike Optuna's.

    The next holder removes the last line of a writer killed while writing it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._held = FileLock(path.with_name(f".{path.name}.lock"), timeout=_LOCK_TIMEOUT)

    def acquire(self) -> bool:
        self._held.acquire(poll_interval=0.01)
        try:
            if _cut_torn_line(self._path):
                print(f"{self._path}: a torn last line was removed", flush=True)
        except OSError:  # the journal was removed
            self._held.release()
            raise
        return True

    def release(self) -> None:
        self._held.release()


def open_storage(spec: StorageSpec) -> JournalStorage | RDBStorage:
    """Open a storage, creating the tables of an empty database.

    Raises `UserError` if it cannot be reached or refuses access, and if a package is missing.
    """
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
    if spec.journal is not None:
        with writing_in(spec.journal.parent):
            return JournalStorage(JournalFileBackend(str(spec.journal), _JournalLock(spec.journal)))
    for last in (attempt == _TRIES - 1 for attempt in range(_TRIES)):
        try:
            return RDBStorage(spec.url, {"pool_pre_ping": True})
        except ImportError as error:
            raise UserError(
                f"{spec.shown}: the driver of this database is not installed: "
                f"{reason(error, spec)} (PostgreSQL: pip install 'transformer-ablations[postgres]')"
            ) from error
        except Exception as error:  # SQLAlchemy, the driver and Optuna raise errors of many kinds
            passes = isinstance(error, exc.DBAPIError | optuna.exceptions.StorageInternalError)
            if last or not passes:
                raise UserError(f"{spec.shown}: cannot be used: {reason(error, spec)}") from error
            time.sleep(random.uniform(0.2, 0.5))
    raise AssertionError("the loop returns or raises")


def close_storage(storage: JournalStorage | RDBStorage) -> None:
    """Close the connections of a storage; the next call would open them again."""
    if isinstance(storage, RDBStorage):
        storage.remove_session()
        storage.engine.dispose()


def reason(error: BaseException, spec: StorageSpec) -> str:
    """The message of the database in `error`: one line without statements or passwords."""
    links = list(causes(error))
    found: object = next((each.orig for each in links if isinstance(each, exc.DBAPIError)), error)
    if isinstance(error, ImportError):
        found = next(each for each in links if each.__cause__ is None)
    lines = str(found).strip().splitlines()
    line = lines[0].removeprefix("connection failed: ") if lines else type(found).__name__
    user, _, rest = spec.url.partition("://")[2].rpartition("@")[0].partition(":")
    secrets = [*re.split("[:@]", rest), *re.findall(r"password=([^&]*)", spec.url)]
    secrets += ["@".join(user.split("@")[1:]), *map(unquote, secrets)]
    return type(found).__name__ if any(word and word in line for word in secrets) else line


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
