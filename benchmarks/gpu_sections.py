"""The sections of `gpu_campaign.py`: each measures one question on one GPU.

A section yields named results as soon as it has them, so that what it measured before an error or
its limit is kept. With `dry` the sizes are tiny and the device is the CPU.
"""

import multiprocessing
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks import bench as comparisons
from benchmarks.bench import Maps, attention_work, in_form
from benchmarks.measure import (
    Clock,
    Contender,
    How,
    Spread,
    Work,
    compare,
    matmul_rates,
    peak_memory,
    rate_in_force,
    rounds,
)
from benchmarks.peers import Setting, batch_of, learner, preset_work, work
from lightning_app.blocks.config import BlockConfig
from lightning_app.blocks.kernels import tiled
from lightning_app.blocks.presets import PRESETS

ROOT = Path(__file__).parents[1]
TINY = Setting(depth=1, width=16, ff_dim=32, heads=2, vocabulary=50, length=8, tokens=32)
STEPPED = ("post_ln", "pre_ln", "realformer", "sas")
TOKENS = (4096, 32768)
Found = Iterator[tuple[str, Any]]


@dataclass(frozen=True)
class Where:
    """The device, and whether only the program is tried."""

    device: str
    dry: bool

    @property
    def how(self) -> How:
        return How(rounds=1 if self.dry else 20, warm=1 if self.dry else 5, device=self.device)

    def setting(self, **sizes: Any) -> Setting:
        """Return the 6+6 model of width 512 in bfloat16 with `sizes`, or a tiny one."""
        base = TINY if self.dry else replace(Setting(), **sizes)
        return replace(base, device=self.device, precision="bf16")

    def rates(self) -> dict[str, float]:
        return matmul_rates(torch.device(self.device), (64, 64, 64) if self.dry else None)


def gpu_tests(where: Where) -> Found:
    """The tests that need a GPU (`pytest -m gpu`); a dry run only collects them."""
    words = ["-q", "-n0", "-m", "gpu", "-p", "no:cacheprovider"]
    words += ["tests/test_gpu.py", "tests/test_out_of_memory.py"]
    words += ["--collect-only"] if where.dry else []
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *words],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    yield "exit_code", done.returncode
    yield "output", done.stdout.splitlines()[-60:]
    if done.returncode:
        raise RuntimeError(f"pytest -m gpu ended with exit code {done.returncode}")


def steps(where: Where) -> Found:
    """The bf16 training step of the 6+6 model: share of the card's matmul rate, and its profile."""
    rates = where.rates()
    yield "rates", rates
    rate = rate_in_force(rates, where.device, bf16=True)
    for tokens in TOKENS[: 1 if where.dry else None]:
        setting = where.setting(tokens=tokens)
        contenders = [Contender(name, partial(preset_work, setting, name)) for name in STEPPED]
        found = compare(f"{tokens} tokens", contenders, replace(where.how, rate=rate))
        yield f"{tokens} tokens", found
        yield f"{tokens} tokens, profile", profiled(preset_work(setting, STEPPED[0]), where)


def profiled(stepped: Work, where: Where) -> dict[str, Any]:
    """Return the longest kernels of a step, their number, and the share of time with a kernel."""
    clock, count = Clock(torch.device(where.device)), 1 if where.dry else 5
    for _ in range(count):
        stepped.run()
    cuda = where.device == "cuda"
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    with profile(activities=kinds) as recorded:
        seconds = [clock.seconds(stepped.run) for _ in range(count)]
    kind = where.device.upper()
    rows = [row for row in recorded.key_averages() if row.device_type.name == kind]
    times = {
        row.key: (row.self_device_time_total if cuda else row.self_cpu_time_total) / count * 1e-6
        for row in rows
    }
    longest = sorted(times, key=lambda key: -times[key])[:25]
    return {
        "seconds_while_profiled": Spread.of(seconds),
        "seconds_in_kernels": sum(times.values()),
        "busy": sum(times.values()) / Spread.of(seconds).median,
        "kernels": sum(row.count for row in rows) / count,
        "longest": {key: times[key] for key in longest},
    }


def attention(where: Where) -> Found:
    """Shaped attention over SDPA, and residual attention in every form, by length and type."""
    for length in (8,) if where.dry else (128, 512, 1024, 2048, 8192):
        for precision in ("bf16",) if where.dry else ("bf16", "32"):
            maps = Maps(
                length=length,
                tokens=length if where.dry else max(4096, length),
                head_dim=8 if where.dry else 64,
                depth=2 if where.dry else 12,
                device=where.device,
                precision=precision,
            )
            found = list(comparisons.attention(maps, where.how))
            yield f"T={length}, {precision}", found


def presets(where: Where) -> Found:
    """The training step of every preset over that of `pre_ln`."""
    how = replace(where.how, rounds=5)
    for name in ("sas",) if where.dry else reversed([*PRESETS]):  # the newest first
        yield name, list(comparisons.presets(where.setting(), ("pre_ln", name), how))


def compiled(where: Where) -> Found:
    """`compile: blocks` against eager; a dry run compiles with a backend that changes nothing."""
    how = {"backend": "eager"} if where.dry else {}
    for name in STEPPED[:1] if where.dry else STEPPED:
        for tokens in TOKENS[: 1 if where.dry else None]:
            yield f"{name}, {tokens} tokens", against_eager(where, name, tokens, how)


def against_eager(where: Where, name: str, tokens: int, how: dict[str, Any]) -> dict[str, Any]:
    from lightning_app.training.module import (
        compile_blocks,  # Lightning, which no other section needs
    )

    torch.compiler.reset()  # a block that was compiled for another preset counts as a recompilation
    setting = where.setting(tokens=tokens)
    torch.manual_seed(1)
    batch = batch_of(setting)
    eager, fast = (learner(setting, BlockConfig(preset=name), batch) for _ in range(2))
    fast.model.load_state_dict(eager.model.state_dict())
    compile_blocks(fast.model, **how)
    pair = [work(each, setting).run for each in (eager, fast)]
    device = torch.device(where.device)
    clock = Clock(device)
    cold = clock.seconds(pair[1])  # it changes the weights, so the losses come from a new copy
    fast.model.load_state_dict(eager.model.state_dict())
    with torch.autocast(where.device, torch.bfloat16):
        losses = [each.loss().item() for each in (eager, fast)]
    if abs(losses[1] - losses[0]) > 0.01 * losses[0]:
        raise RuntimeError(f"{name}: loss {losses[1]} compiled and {losses[0]} eager")
    times = rounds(pair, where.how.rounds, clock, where.how.warm)
    return {
        "first_step_seconds": cold,
        "losses": losses,
        "eager_seconds": Spread.of(times[0]),
        "compiled_seconds": Spread.of(times[1]),
        "speed": Spread.of([a / b for a, b in zip(*times, strict=True)]),
        "eager_bytes": peak_memory(pair[0], device),
        "compiled_bytes": peak_memory(pair[1], device),
    }


def tile_sizes(where: Where) -> Found:
    """Residual attention by the size of its tiles (`GPU_TILE` in blocks/kernels/tiled.py)."""
    name = "GPU_TILE" if where.device == "cuda" else "TILE"
    for length in (8,) if where.dry else (128, 1024, 4096):
        maps = Maps(
            length=length, tokens=length if where.dry else 8192, depth=2 if where.dry else 12
        )
        maps = replace(maps, device=where.device, precision="bf16", causal=False)
        powers = (4, 6) if where.dry else (18, 20, 22, 24, 26, 28)
        for form in ("reversible", "blocked"):
            same = attention_work(maps, in_form(form))
            runs = [partial(with_tile, name, 2**power, same) for power in powers]
            clock = Clock(torch.device(where.device))
            times = rounds(runs, where.how.rounds, clock, where.how.warm)
            named = zip(powers, times, strict=True)
            yield f"T={length}, {form}", {f"2^{power}": Spread.of(each) for power, each in named}


def with_tile(name: str, size: int, work: Work) -> None:
    before = getattr(tiled, name)
    setattr(tiled, name, size)
    try:
        work.run()
    finally:
        setattr(tiled, name, before)


def slots(where: Where) -> Found:
    """Steps a second of several processes on one device, all together."""
    sizes: dict[str, dict[str, Any]] = {
        "3+3 of 64, 1024 tokens": {"depth": 3, "width": 64, "ff_dim": 128, "tokens": 1024},
        "6+6 of 256, 4096 tokens": {"width": 256, "ff_dim": 512},
        "6+6 of 512, 4096 tokens": {},
    }
    for name, changes in list(sizes.items())[: 1 if where.dry else 3]:
        setting = where.setting(**changes, length=32)
        for processes in (1, 2) if where.dry else (1, 2, 4):
            yield f"{name}, {processes} processes", together(setting, processes, where.dry)


def together(setting: Setting, processes: int, dry: bool) -> dict[str, Any]:
    """Run the same step in several processes at the same time."""
    context = multiprocessing.get_context("forkserver")
    start, done = context.Barrier(processes), context.Queue()
    seconds = 0.2 if dry else 4.0
    children = [
        context.Process(target=one_of, args=(setting, seconds, start, done), daemon=True)
        for _ in range(processes)
    ]
    for child in children:
        child.start()
    rates = [done.get(timeout=60.0) for _ in children]
    for child in children:
        child.join()
    failed = [rate for rate in rates if isinstance(rate, str)]
    if failed:
        raise RuntimeError(failed[0])
    return {"steps_per_second": sum(rates), "each": rates}


def one_of(setting: Setting, seconds: float, start: Any, done: Any) -> None:
    """Put the steps a second of this process into `done`, or its error as text."""
    try:
        torch.set_num_threads(1)
        run = preset_work(setting, "post_ln").run
        clock = Clock(torch.device(setting.device))
        for _ in range(3):
            clock.seconds(run)
        start.wait(timeout=50.0)
        count, began = 0, time.perf_counter()
        while time.perf_counter() - began < seconds:
            clock.seconds(run)
            count += 1
        done.put(count / (time.perf_counter() - began))
    except Exception as error:
        start.abort()
        done.put(f"{type(error).__name__}: {error}")
        raise


def peers(where: Where) -> Found:
    """The training step against the same models of other libraries."""
    found = comparisons.peers(where.setting(), where.how, where.rates())
    for number, each in enumerate(found):
        yield f"{number}: {each.title}", each


@dataclass(frozen=True)
class Section:
    """A section, and the seconds after which it is stopped."""

    measure: Callable[[Where], Found]
    limit: float

    @property
    def title(self) -> str:
        return (self.measure.__doc__ or "").partition("\n")[0]


# In order of worth: where the time is over, the last ones are left out.
SECTIONS: dict[str, Section] = {
    "tests": Section(gpu_tests, 90.0),
    "steps": Section(steps, 70.0),
    "attention": Section(attention, 100.0),
    "compile": Section(compiled, 150.0),
    "slots": Section(slots, 110.0),
    "tiles": Section(tile_sizes, 60.0),
    "presets": Section(presets, 100.0),
    "peers": Section(peers, 60.0),
}
