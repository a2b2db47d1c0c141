"""End child processes when their supervisor ends."""

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
from multiprocessing.connection import wait

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Let the kernel kill this process when its parent thread ends. Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def bind_to_supervisor() -> None:
    """End this child of the fork server when the fork server or the supervisor ends.

    The kernel watches the fork server, which `fork_server` binds to the supervisor. On systems
    other than Linux a thread watches the supervisor.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)  # the fork server ignores both signals
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    parent = multiprocessing.parent_process()
    assert parent is not None
    sentinel = parent.sentinel

    def watch() -> None:
        wait([sentinel])
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True, name="lifeline").start()
    die_with_parent()
    server = sys.modules.get("lightning_app.grids.fork_server")
    if server is not None and os.getppid() != server.PID:  # it ended before the call above
        os.kill(os.getpid(), signal.SIGKILL)
