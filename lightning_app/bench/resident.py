"""Peak resident memory of a workload, measured in a separate process."""

import resource
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch

from lightning_app.bench.measure import Work

PAGE = resource.getpagesize()


def resident(build: Callable[[], Work], threads: int) -> int:
    """Return by how many bytes two runs of the work of `build` raise the peak of a new process.

    The peak includes temporary memory of operators and memory that the allocator keeps. `build` is
    pickled. Only for a CPU; Linux counts in kilobytes.
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
