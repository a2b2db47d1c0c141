"""Stopping a supervisor: by SIGINT, SIGTERM, or SIGUSR1 from a scheduler."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager

# SLURM sends SIGUSR1 before the time limit of a job.
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


class Interrupted(Exception):
    """A signal from the user or the machine stopped the supervisor."""


class Stop:
    """The number of received signals. Handlers only count, so that no write is interrupted."""

    count = 0

    @property
    def requested(self) -> bool:
        return self.count > 0

    @contextmanager
    def listening(self) -> Iterator["Stop"]:
        """Count the signals that arrive."""

        def note(number: int, frame: object) -> None:
            self.count += 1

        before = {each: signal.signal(each, note) for each in _SIGNALS}
        try:
            yield self
        finally:
            for each, handler in before.items():
                signal.signal(each, handler)
