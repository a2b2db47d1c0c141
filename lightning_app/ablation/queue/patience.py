"""A database that restarts is waited for; one that stays away is given up."""

import os
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from tenacity import RetryCallState, Retrying, retry_if_exception, stop_after_delay, wait_fixed

from lightning_app.ablation.queue.storages import StorageSpec, is_outage, reason
from lightning_app.ablation.supervision.guard import Interrupted

_PATIENCE = 600.0  # seconds that a database may be away
_HURRY = 20.0  # seconds of that for a supervisor that has been told to stop
_RETRY = 1.0  # seconds

P = ParamSpec("P")
T = TypeVar("T")


class StorageLost(Exception):
    """The database did not come back. What is done is on disk, and the next supervisor goes on."""


class Patience:
    """Asks a storage again while its database is away.

    Args:
        spec: The storage, to name it.
        stopping: Whether the supervisor has been told to stop.
        returned: Called when the database answers after a silence.
    """

    def __init__(
        self, spec: StorageSpec, stopping: Callable[[], bool], returned: Callable[[], None]
    ) -> None:
        self._spec = spec
        self._stopping = stopping
        self._returned = returned
        self._out = False
        self._journal: tuple[int, int] | None = None  # which file it is, once it has been opened

    def __call__(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Return what `call` returns, whenever that is.

        It may be made twice, as an answer can be lost on its way.

        Raises:
            StorageLost: where the database stays away, or somebody has removed the journal.
            Interrupted: where it does, and the supervisor has been told to stop.
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
        if self._out:
            print(f"{self._spec.shown}: answers again", flush=True)
            self._out = False
            self._returned()
        if self._journal is None and self._spec.kind == "journal":
            self._journal = _file_of(self._spec)
        return answer

    def _check_journal(self, cause: BaseException | None = None) -> None:
        """Raise `StorageLost` where another journal is in the place of ours, or none.

        Optuna would make a new one, in which nothing that we know is found again.
        """
        if self._journal is not None and _file_of(self._spec) != self._journal:
            raise StorageLost(f"{self._spec.shown}: was removed or replaced") from cause

    def _note(self, state: RetryCallState) -> None:
        error = state.outcome and state.outcome.exception()
        if error is not None and not self._out:
            print(f"{self._spec.shown}: {reason(error)}; waiting for it", flush=True)
            self._out = True


def _file_of(spec: StorageSpec) -> tuple[int, int] | None:
    """Which file the journal is, whatever its name."""
    try:
        status = os.stat(spec.url)
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino
