"""Imported before all else by the process that `tests.warm` forks, so that `leave` runs last."""

import atexit
import os
import sys

code: int | None = None
"""The exit code of a program that has come to its end; None while it runs, or after an error."""


@atexit.register
def leave() -> None:
    """Exit without finalizing the interpreter, which takes as long as many tests. Threads have
    ended, and all other exit functions have run."""
    if code is not None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
