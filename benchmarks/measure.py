"""Measuring time and memory.

Time, memory and calls of workloads are measured with little effect of other load on the machine.
Compared workloads run in rounds: each round runs every workload once, every second round in reverse
order, so that drift of the machine affects all equally. Results are ratios within a round.
"""

import gc
import math
import os
import platform
import statistics
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, fields, replace
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from lightning_app.blocks import linear as linear_maps
from lightning_app.blocks.linear import (
    float32_library,
    linear,
    prefers_onednn,
    takes_onednn,
)

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

    `peak` is the largest sum. Temporary memory inside an operator is not included.
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


@contextmanager
def onednn_everywhere() -> Iterator[None]:
    """Make the linear maps of the peers choose the library as ours do.

    They call `torch.nn.functional.linear`, and in GPT-2 `torch.addmm` with a transposed matrix.
    """
    theirs, added = torch.nn.functional.linear, torch.addmm

    def chosen(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        # Our map calls theirs if it does not use oneDNN.
        return (linear if takes_onednn(input, weight) else theirs)(input, weight, bias)

    def chosen_added(bias: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        if takes_onednn(x, weight.t()):
            return linear(x, weight.t(), bias)
        return added(bias, x, weight)

    with (
        mock.patch.object(torch.nn.functional, "linear", chosen),
        mock.patch.object(torch, "addmm", chosen_added),
    ):
        yield


def _never() -> bool:  # a mock's call would take time
    return False


def mkl_products() -> AbstractContextManager[Any]:
    """Leave all products to PyTorch in this context, so that two models use one matrix library."""
    return mock.patch.object(linear_maps, "prefers_onednn", _never)


def same_library() -> dict[str, Callable[[], AbstractContextManager[Any]]]:
    """Return a context per library that can compute the linear maps of both models, by name.

    It is empty if our models use the library of the peers.
    """
    if not prefers_onednn():
        return {}
    with mkl_products():
        other = float32_library()
    return {other: mkl_products, float32_library(): onednn_everywhere}


Sizes = tuple[int, int, int]
"""Rows, inner size and columns of a product."""

LINEAR_MAP: Sizes = (1024, 512, 1024)
"""As large as the linear maps of a 6+6 model of width 512."""
LARGE: Sizes = (8192, 8192, 8192)
"""Large enough to occupy a whole GPU."""
ROUNDS = 9
FLOAT32, BFLOAT16 = "float32", "bfloat16"

Rates = dict[str, float]


def matmul_rates(device: torch.device, sizes: Sizes | None = None) -> Rates:
    """Return the median rate of a large product (FLOP/s) per type and library of `device`.

    On a CPU the keys are ``float32 LIBRARY`` for every library that our models may use here, and
    ``bfloat16``; on a GPU ``float32`` and ``bfloat16``. The product has the sizes `sizes`: by
    default those of a linear map on a CPU, and large ones on a GPU.
    """
    sizes = sizes or (LINEAR_MAP if device.type == "cpu" else LARGE)
    rates = {BFLOAT16: _rate(device, torch.bfloat16, sizes)}
    if device.type != "cpu":
        return {FLOAT32: _rate(device, torch.float32, sizes), **rates}
    rates[f"{FLOAT32} {float32_library()}"] = _rate(device, torch.float32, sizes)
    if prefers_onednn():
        with mkl_products():
            rates[f"{FLOAT32} {float32_library()}"] = _rate(device, torch.float32, sizes)
    return dict(sorted(rates.items()))


def _rate(device: torch.device, dtype: torch.dtype, sizes: Sizes) -> float:
    rows, inner, columns = sizes
    x = torch.randn(rows, inner, device=device, dtype=dtype)
    weight = torch.randn(columns, inner, device=device, dtype=dtype)
    clock = Clock(device)
    with torch.no_grad():
        seconds = [clock.seconds(lambda: linear(x, weight)) for _ in range(ROUNDS + 2)][2:]
    return 2 * rows * inner * columns / Spread.of(seconds).median


def rate_in_force(rates: Rates, device: str, *, bf16: bool) -> float:
    """Return the rate of the products that our models compute now on `device`."""
    if bf16:
        return rates[BFLOAT16]
    return rates[f"{FLOAT32} {float32_library()}" if device == "cpu" else FLOAT32]


def product_flops(run: Run) -> int:
    """Return the floating-point operations of all matrix products in one `run`.

    A product of m x k by k x n matrices counts 2 m k n. Attention counts whole maps, even if it
    is causal, as PyTorch's own counter does, and products that a backward pass recomputes count
    again.
    """
    with FlopCounterMode(display=False, custom_mapping=_MORE) as counter:
        run()
    return counter.get_total_flops()


Shape = Sequence[int]


def _linear(x: Shape, weight: Shape, *others: Any, **named: Any) -> int:
    return 2 * math.prod(x) * weight[0]


def _added_product(total: Shape, a: Shape, b: Shape, **named: Any) -> int:
    return 2 * math.prod(a) * b[1]


def _attention(query: Shape, key: Shape, value: Shape, *others: Any, **named: Any) -> int:
    """``Q K^T`` and the product of the map with V."""
    return 2 * math.prod(query[:-1]) * key[-2] * (query[-1] + value[-1])


def _attention_backward(
    gradient: Shape, query: Shape, key: Shape, value: Shape, *others: Any, **named: Any
) -> int:
    """``Q K^T`` again, the gradients of Q and K; those of the map and of V."""
    return 2 * math.prod(query[:-1]) * key[-2] * (3 * query[-1] + 2 * value[-1])


# The operators unknown to PyTorch's counter.
_MORE: dict[Any, Callable[..., int]] = {
    torch.ops.aten.addmm_: _added_product,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}
if hasattr(torch.ops.mkldnn, "_linear_pointwise"):
    _MORE[torch.ops.mkldnn._linear_pointwise] = _linear


class Missing(Exception):
    """A package that a contender needs is missing; the message says how to install it."""


@dataclass(frozen=True)
class Contender:
    """A name and a function that builds the work.

    A build may raise `Missing`: the contender is then skipped, and the table gives the reason.
    """

    name: str
    build: Callable[[], Work]


@dataclass(frozen=True, kw_only=True)
class How:
    """The extent of the measurement.

    `rate` is the rate of products (FLOP/s) to which shares refer; without it no share is computed.
    """

    rounds: int = 5
    warm: int = 1
    device: str = "cpu"
    rate: float | None = None


@dataclass(frozen=True, kw_only=True)
class Result:
    """The measurements of one contender; `time` and `memory` are ratios to the first contender.

    `peak_bytes` is its peak memory beyond its model: see `measure.peak_memory`. `flops` counts the
    operations of its matrix products; they would take `share` of its time at the measured rate.
    """

    name: str
    seconds: Spread | None = None
    time: Spread | None = None
    peak_bytes: int | None = None
    memory: float | None = None
    calls: int | None = None
    parameters: int = 0
    flops: int | None = None
    share: float | None = None
    missing: str | None = None


@dataclass(frozen=True)
class Comparison:
    """Contenders that did the same work; `clock` names the clock of the seconds."""

    title: str
    clock: str
    results: tuple[Result, ...]


def compare(title: str, contenders: Sequence[Contender], how: How) -> Comparison:
    """Measure each contender in rounds together with the first one, two models at a time."""
    device = torch.device(how.device)
    clock = Clock(device)
    first, *others = contenders
    base = first.build()
    alone = rounds([base.run], how.rounds, clock, how.warm)[0]
    results = [_result(first, base, alone, alone, how)]
    for contender in others:
        try:
            work = contender.build()
        except Missing as why:
            results.append(Result(name=contender.name, missing=str(why)))
            continue
        against, seconds = rounds([base.run, work.run], how.rounds, clock, how.warm)
        results.append(_result(contender, work, seconds, against, how))
        del work  # before the next is built
    peak = results[0].peak_bytes
    assert peak is not None
    results = [
        result if result.peak_bytes is None else replace(result, memory=result.peak_bytes / peak)
        for result in results
    ]
    return Comparison(title, clock.kind, tuple(results))


def _result(
    contender: Contender, work: Work, seconds: list[float], against: list[float], how: How
) -> Result:
    """Measure everything except the ratio of memory."""
    spread, flops = Spread.of(seconds), product_flops(work.run)
    return Result(
        name=contender.name,
        seconds=spread,
        flops=flops,
        share=None if how.rate is None else flops / spread.median / how.rate,
        time=ratios(seconds, against),
        peak_bytes=peak_memory(work.run, torch.device(how.device)),
        calls=count_calls(work.run).total,
        parameters=work.parameters,
    )


PACKAGES = ("torch", "x-transformers", "transformers")


def machine(device: str) -> dict[str, Any]:
    """Return the machine and libraries that the numbers depend on."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = None
    return {
        "python": platform.python_version(),
        "system": platform.platform(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "versions": versions,
    }


def _processor() -> str:
    """Return the processor's name on Linux."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor())


def as_mappings(value: Any) -> Any:
    """Return results as mappings, lists and numbers; JSON would make lists of named tuples."""
    if isinstance(value, Spread):
        return value._asdict()
    if isinstance(value, Comparison | Result):
        return as_mappings({field.name: getattr(value, field.name) for field in fields(value)})
    if isinstance(value, dict):
        return {key: as_mappings(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [as_mappings(part) for part in value]
    return value
