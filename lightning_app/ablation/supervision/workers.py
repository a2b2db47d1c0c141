"""Start and end the fork server and its children from the supervisor, which imports no torch.

The fork server imports torch and Lightning once; a cell's process then starts in milliseconds.
"""

import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.context import ForkServerProcess
from typing import Any

from lightning_app.ablation.supervision.process import answer
from lightning_app.ablation.supervision.process_cleanup import end_tree
from lightning_app.ablation.supervision.stopping import Interrupted, Stop
from lightning_app.errors import UserError
from lightning_app.plugins import given

_CONTEXT = multiprocessing.get_context("forkserver")

# Only the supervisor opens the storage.
_SECRETS = ("ABLATE_STORAGE", "PGPASSWORD")

# Variables of a launcher or scheduler would change every cell: another rank,
# another seed, a port that is taken, automatic requeueing.
_FOREIGN = ("MASTER_", "TORCHELASTIC_", "SLURM_", "SRUN_", "PMI_", "PMIX_", "OMPI_")
_FOREIGN_NAMES = ("RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "WORLD_SIZE", "PL_GLOBAL_SEED")


@contextmanager
def cell_environment() -> Iterator[None]:
    """Clean the environment while the fork server and cells may start."""
    before = dict(os.environ)
    for name in before:
        if name.startswith(_FOREIGN) or name in (*_FOREIGN_NAMES, *_SECRETS):
            del os.environ[name]
    # The usual way to count GPUs initialises CUDA, after which no process may be forked.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    # The fork server would look for modules in the current folder first, unlike this process.
    os.environ |= {"PYTHONSAFEPATH": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def most_threads(environment: Mapping[str, str]) -> int | None:
    """Return the number of threads that the user allows a process, or None.

    OMP_NUM_THREADS may have a number for each level of nested loops; the first one counts.
    """
    first = environment.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return int(first) if first.isdecimal() and int(first) > 0 else None


def share_cores(threads: int) -> None:
    """Limit the threads of libraries in new processes to their share of the cores."""
    for library in ("OMP", "MKL", "OPENBLAS"):
        os.environ[f"{library}_NUM_THREADS"] = str(threads)


def preload(program: str) -> None:
    """Set the modules that the fork server imports before its first child."""
    _CONTEXT.set_forkserver_preload(
        [
            "lightning_app.ablation.supervision.fork_server",
            "lightning_app.ablation.supervision.process",
            program,
        ]
    )


def start(function: Callable[..., None], *arguments: Any) -> ForkServerProcess:
    """Call `function` in a new child, of a new fork server if the old one has been killed."""
    for _ in range(3):
        process = _CONTEXT.Process(target=function, args=arguments)
        try:
            process.start()
            return process
        except (EOFError, ConnectionError):
            time.sleep(0.1)  # until waitpid reports the end of the old fork server
        except OSError as error:
            if "AF_UNIX" not in str(error):
                raise
            raise UserError(
                f"TMPDIR: {tempfile.gettempdir()} is too long for the socket of a process; "
                "set it to a shorter path"
            ) from error
    raise RuntimeError("the fork server ends right after its start")


def kill(*processes: ForkServerProcess) -> None:
    """Kill children with all processes that they started, and wait until they have ended."""
    end_tree(process.pid for process in processes if process.pid is not None)
    for process in processes:
        process.kill()
        process.join()


def ask(stop: Stop, function: Callable[..., Any], *arguments: Any) -> Any:
    """Call `function` in a child and return its answer, or raise its `UserError` or `OSError`.

    Raises `Interrupted` when a signal arrives first.
    """
    receiver, sender = _CONTEXT.Pipe(duplex=False)
    process = start(answer, sender, given(), function, *arguments)
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
