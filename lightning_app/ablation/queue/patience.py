"""A database that restarts is waited for; one that stays away is given up."""

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

    def __call__(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Return what `call` returns, whenever that is.

        It may be made twice, as an answer can be lost on its way.

        Raises:
            StorageLost: where the database stays away.
            Interrupted: where it does, and the supervisor has been told to stop.
        """
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
                raise
            if self._stopping():
                raise Interrupted from error
            raise StorageLost(f"{self._spec.shown}: {reason(error)}") from error
        if self._out:
            print(f"{self._spec.shown}: answers again", flush=True)
            self._out = False
            self._returned()
        return answer

    def _note(self, state: RetryCallState) -> None:
        error = state.outcome and state.outcome.exception()
        if error is not None and not self._out:
            print(f"{self._spec.shown}: {reason(error)}; waiting for it", flush=True)
            self._out = True
