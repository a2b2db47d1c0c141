"""Repeat calls of a storage while its database restarts, for a limited time."""

from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec, TypeVar

from tenacity import RetryCallState, Retrying, retry_if_exception, stop_after_delay, wait_fixed

from lightning_app.ablation.queue.storages import StorageSpec, is_outage, reason
from lightning_app.ablation.supervision.stopping import Interrupted

_PATIENCE = 600.0  # seconds that a database may be unavailable
_HURRY = 20.0  # the same if the supervisor is to stop
_RETRY = 1.0  # seconds

P = ParamSpec("P")
T = TypeVar("T")


class StorageLost(Exception):
    """The database did not come back. Results are on disk, and the next supervisor continues."""


class Patience:
    """Repeat the calls of a storage while its database is not available.

    Args:
        spec: The storage, for messages.
        stopping: Whether the supervisor is to stop.
        returned: Called when the database answers again after an outage.
    """

    def __init__(
        self, spec: StorageSpec, stopping: Callable[[], bool], returned: Callable[[], None]
    ) -> None:
        self._spec = spec
        self._stopping = stopping
        self._returned = returned
        self._away = False
        self._journal: tuple[int, int] | None = None  # the identity of its file once it is open

    def __call__(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Return the result of `call` when it succeeds.

        The call may be repeated, since its answer can be lost.

        Raises:
            StorageLost: if the database stays unavailable, or the journal was removed.
            Interrupted: if the database is unavailable while the supervisor is to stop.
        """
        self._check_journal()
        retrying = Retrying(
            retry=retry_if_exception(is_outage),
            wait=wait_fixed(_RETRY),
            stop=lambda state: stop_after_delay(_HURRY if self._stopping() else _PATIENCE)(state),
            before_sleep=self._note,
            reraise=True,
        )
        try:
            answer = retrying(call, *args, **kwargs)
        except Exception as error:
            if not is_outage(error):
                self._check_journal(error)
                raise
            if self._stopping():
                raise Interrupted from error
            raise StorageLost(f"{self._spec.shown}: {reason(error)}") from error
        if self._away:
            print(f"{self._spec.shown}: answers again", flush=True)
            self._away = False
            self._returned()
        if self._journal is None:
            self._journal = _file_of(self._spec.journal)
        return answer

    def _check_journal(self, cause: BaseException | None = None) -> None:
        """Raise `StorageLost` if the journal was removed or replaced by another one.

        Optuna would make a new one, without the trials that this supervisor holds.
        """
        if self._journal is not None and _file_of(self._spec.journal) != self._journal:
            raise StorageLost(f"{self._spec.shown}: was removed or replaced") from cause

    def _note(self, state: RetryCallState) -> None:
        error = state.outcome and state.outcome.exception()
        if error is not None and not self._away:
            print(f"{self._spec.shown}: {reason(error)}; waiting for it", flush=True)
            self._away = True


def _file_of(journal: Path | None) -> tuple[int, int] | None:
    """The identity of the journal's file: device and inode."""
    if journal is None:
        return None
    try:
        status = journal.stat()
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino
