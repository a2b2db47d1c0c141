"""Measuring time and memory.

Time, memory and calls of workloads are measured with little effect of other load on the machine.
Compared workloads run in rounds: each round runs every workload once, every second round in reverse
order, so that drift of the machine affects all equally. Results are ratios within a round. Peak
resident memory of a workload is measured in a separate process.
"""

import gc
import resource
import statistics
import time
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Run = Callable[[], object]


class Work(NamedTuple):
    """A workload and the number of trained parameters of its model."""

    run: Run
    parameters: int = 0


class Spread(NamedTuple):
    """The median of a sample and its quartiles."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, sample: Sequence[float]) -> "Spread":
        if len(sample) < 2:
            return cls(sample[0], sample[0], sample[0])
        low, median, high = statistics.quantiles(sample, n=4, method="inclusive")
        return cls(median, low, high)


class Clock:
    """Seconds of one call on `device`.

    On a CPU with one thread this is processor time, which other load hardly affects; otherwise
    wall-clock time, on a GPU until it has finished.
    """

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        alone = not self.cuda and torch.get_num_threads() == 1
        self.kind = "processor" if alone else "wall"
        self._now = time.process_time if alone else time.perf_counter

    def seconds(self, run: Run) -> float:
        if self.cuda:
            torch.cuda.synchronize()
        start = self._now()
        run()
        if self.cuda:
            torch.cuda.synchronize()
        return self._now() - start


def rounds(runs: Sequence[Run], count: int, clock: Clock, warm: int = 2) -> list[list[float]]:
    """Return the seconds of each of `runs` in `count` interleaved rounds, after `warm` others."""
    seconds: list[list[float]] = [[] for _ in runs]
    gc.collect()
    for number in range(-warm, count):
        order = range(len(runs)) if number % 2 else reversed(range(len(runs)))
        for place in order:
            took = clock.seconds(runs[place])
            if number >= 0:
                seconds[place].append(took)
    return seconds


def ratios(numerator: Sequence[float], denominator: Sequence[float]) -> Spread:
    """Return the ratio within each round."""
    return Spread.of([a / b for a, b in zip(numerator, denominator, strict=True)])


MOVE_NOTHING = (torch.ops.aten._unsafe_view.default, torch.ops.aten.promote_types.default)


class CallCounter(TorchDispatchMode):
    """Count calls of operators, including those of the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[Any] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        self.calls[func] += 1
        return func(*args, **(kwargs or {}))

    @property
    def total(self) -> int:
        """Calls of ATen operators that compute, without views and profiler marks."""
        return sum(
            number
            for func, number in self.calls.items()
            if func.namespace == "aten" and not func.is_view and func not in MOVE_NOTHING
        )


def count_calls(run: Run) -> CallCounter:
    """Return the calls of one `run`, which must already have run once."""
    with CallCounter() as counter:
        run()
    return counter


class LiveMemory(TorchDispatchMode):
    """Track the bytes of storages created in this context until each is freed.

    `peak` is the largest sum. Temporary memory inside an operator is not included; `resident`
    includes it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = 0
        self.peak = 0
        self._known: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        kwargs = kwargs or {}
        before = {_key(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        result = func(*args, **kwargs)
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and _key(leaf) not in before:
                self._follow(leaf.untyped_storage())
        return result

    def _follow(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._known or not storage.nbytes():
            return
        self._known[key] = weakref.ref(storage, partial(self._freed, key, storage.nbytes()))
        self.live += storage.nbytes()
        self.peak = max(self.peak, self.live)

    def _freed(self, key: int, size: int, _: object) -> None:
        del self._known[key]
        self.live -= size


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def peak_memory(run: Run, device: torch.device) -> int:
    """Return the peak memory of `run` in bytes, beyond the memory in use before it.

    On a GPU this is counted by the allocator, on a CPU from live tensors.
    """
    run()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    with LiveMemory() as memory:
        run()
    return memory.peak


PAGE = resource.getpagesize()


def resident(build: Callable[[], Work], threads: int) -> int:
    """Return by how many bytes two runs of the work from `build` raise a new process's peak memory.

    The peak includes temporary memory of operators and memory that the allocator keeps. `build` is
    pickled. CPU only; Linux counts in kilobytes.
    """
    context = get_context("forkserver")
    context.set_forkserver_preload([__name__, "lightning_app.lab.bench.learners"])
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
