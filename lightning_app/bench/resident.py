"""Peak resident memory of a piece of work, in a process that does nothing else."""

import resource
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch

from lightning_app.bench.measure import Work

PAGE = resource.getpagesize()


def resident(build: Callable[[], Work], threads: int) -> int:
    """Return the bytes by which two calls of what `build` makes raise a fresh process's peak.

    The peak is that of the whole work: what operators use inside themselves and what the allocator
    keeps back are in it. `build` is pickled. On a CPU alone; Linux counts in kilobytes.
    """
    context = get_context("forkserver")
    context.set_forkserver_preload([__name__, "lightning_app.bench.learners"])
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(_growth, build, threads).result()


def _growth(build: Callable[[], Work], threads: int) -> int:
    torch.set_num_threads(threads)
    run = build().run
    before = int(Path("/proc/self/statm").read_text().split()[1]) * PAGE
    run()
    run()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return max(0, peak - before)
