"""The fork server and its children, seen from the supervisor, which stays light.

The fork server imports torch and Lightning once; a cell's process then starts in milliseconds.
"""

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.context import ForkServerProcess
from typing import Any

from lightning_app.ablation.process import answer

_CONTEXT = multiprocessing.get_context("forkserver")

# What a launcher or scheduler left in the environment would reach into every cell: another rank,
# another seed, a port that is taken, automatic requeueing.
_FOREIGN = ("MASTER_", "TORCHELASTIC_", "SLURM_", "PMI_", "OMPI_")
_FOREIGN_NAMES = ("RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "WORLD_SIZE", "PL_GLOBAL_SEED")


class Interrupted(Exception):
    """The user, or the machine, asked the supervisor to stop."""


class Stop:
    """Whether a signal asked for the end; handlers only take a note, so no write is cut short."""

    requested = False

    @contextmanager
    def listening(self) -> Iterator["Stop"]:
        def note(number: int, frame: object) -> None:
            self.requested = True

        before = {each: signal.signal(each, note) for each in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield self
        finally:
            for each, handler in before.items():
                signal.signal(each, handler)


# glibc maps large blocks afresh for each tensor and gives them back at once; keeping them takes a
# sixth off a training step of the demo's size on a CPU.
_ALLOCATOR = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_")
_KEPT_BYTES = str(1 << 30)


@contextmanager
def cell_environment(threads: int) -> Iterator[None]:
    """The environment of the fork server and of every cell, for as long as either may start.

    A clean one, with as many threads a process as its share of the cores.
    """
    before = dict(os.environ)
    for name in before:
        if name.startswith(_FOREIGN) or name in _FOREIGN_NAMES:
            del os.environ[name]
    for library in ("OMP", "MKL", "OPENBLAS"):
        os.environ[f"{library}_NUM_THREADS"] = str(threads)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def preload(program: str) -> None:
    """Choose what the fork server imports before its first child."""
    _CONTEXT.set_forkserver_preload(
        ["lightning_app.ablation.fork_server", "lightning_app.ablation.process", program]
    )


def start(function: Callable[..., None], *arguments: Any) -> ForkServerProcess:
    """Call `function` in a new child, of a new fork server if the old one has been killed."""
    for _ in range(3):
        process = _CONTEXT.Process(target=function, args=arguments)
        try:
            process.start()
            return process
        except (EOFError, ConnectionError):
            time.sleep(0.1)  # until it can be waited for
    raise RuntimeError("the fork server ends as soon as it has started")


def kill(process: ForkServerProcess) -> None:
    """Kill a child with everything that it started, and wait for its end."""
    assert process.pid is not None
    with suppress(ProcessLookupError):  # it has ended, or is too young to have a group
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.join()


def ask(stop: Stop, function: Callable[..., Any], *arguments: Any) -> Any:
    """Call `function` in a child and return its answer, or raise its `UserError` or `OSError`.

    Raises `Interrupted` when a signal arrives first.
    """
    receiver, sender = _CONTEXT.Pipe(duplex=False)
    process = start(answer, sender, function, *arguments)
    sender.close()
    try:
        while not receiver.poll(0.1):
            if stop.requested:
                raise Interrupted
        reply = receiver.recv()
    except EOFError as error:
        process.join()
        raise RuntimeError(f"{function.__name__} ended with code {process.exitcode}") from error
    finally:
        kill(process)
        receiver.close()
    if isinstance(reply, Exception):
        raise reply
    return reply
