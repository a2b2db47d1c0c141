"""The sections of `gpu_campaign.py`: each measures one question on one GPU.

A section yields named results as soon as it has them, so that what it measured before an error or
its limit is kept. With `dry` the sizes are tiny and the device is the CPU.
"""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks import bench as comparisons
from benchmarks.bench import Maps
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
from benchmarks.peers import Setting, batch_of, causal, learner, preset_work, work
from lightning_app.blocks.config import BlockConfig
from lightning_app.models.loss import ObjectiveConfig

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
    words += ["tests/test_gpu.py", "tests/test_out_of_memory.py", "tests/training/test_packs.py"]
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


def packed(where: Where) -> Found:
    """The training step of one model, compiled and in a pack: a causal LM in float32."""
    rates = where.rates()
    yield "rates", rates
    rate = rate_in_force(rates, where.device, bf16=False)
    how = replace(where.how, rounds=1 if where.dry else 7, rate=rate)
    backend = {"backend": "eager"} if where.dry else {}
    for width in (16,) if where.dry else (64, 256, 512):
        sizes = {"width": width, "ff_dim": 4 * width, "heads": max(2, width // 16)}
        sizes |= {} if where.dry else {"vocabulary": 2000, "length": 64, "tokens": 1024}
        setting = replace(causal(where.setting(**sizes)), precision="32")
        contenders = [Contender("one model", partial(preset_work, setting, "pre_ln"))]
        build = partial(compiled_work, setting, "pre_ln", backend)
        contenders.append(Contender("one model, compiled", build))
        for models in (2,) if where.dry else (8, 32):
            build = partial(packed_work, setting, "pre_ln", models)
            contenders.append(Contender(f"pack of {models}", build))
        yield f"width {width}", compare(f"width {width}", contenders, how)


def compiled_work(setting: Setting, preset: str, how: dict[str, Any]) -> Work:
    """Return one training step of a model whose blocks are compiled."""
    from lightning_app.training.module import compile_blocks

    torch.manual_seed(1)
    made = learner(setting, BlockConfig(preset=preset), batch_of(setting))
    compile_blocks(made.model, **how)
    return work(made, setting)


def packed_work(setting: Setting, preset: str, models: int) -> Work:
    """Return one training step of a pack of models."""
    from lightning_app.training.module import TransformerModule
    from lightning_app.training.packs import PackedModule

    torch.manual_seed(1)
    batch, block = batch_of(setting), BlockConfig(preset=preset)
    objective = ObjectiveConfig(kind=setting.task, label_smoothing=setting.label_smoothing)
    module = PackedModule([TransformerModule(block, setting.architecture(), objective)], models)
    module.build(setting.vocabulary)
    module.to(setting.device)
    optimizer = module.packed_optimizer()

    def run() -> None:
        losses, _ = module.sums(batch)
        (losses / batch.predicted_tokens).sum().backward()
        optimizer.step()
        module.weights.grad = None

    return Work(run, module.weights.numel())


@dataclass(frozen=True)
class Row:
    """A way to run many cells: `packs` of `width` cells by `processes` on the CPU or the GPU."""

    processes: int
    packs: int
    width: int = 1
    accelerator: str = "gpu"


ROWS = {
    "6 processes": Row(6, 12),
    "14 processes": Row(14, 28),
    "14 processes on the CPU": Row(14, 28, accelerator="cpu"),
    "1 process, packs of 32": Row(1, 1, 32),
    "6 processes, packs of 32": Row(6, 12, 32),
}
"""The first is what the project did before packs."""


def cells(where: Where) -> Found:
    """Cells per hour of `ablate run`, start included: a causal LM of 6 blocks of width 64.

    Each cell has 400 steps of 1,024 tokens and 4 validations.
    """
    for name, row in ROWS.items():
        if where.dry:
            row = replace(row, processes=1, packs=1, width=min(row.width, 2), accelerator="cpu")
        yield name, run_row(row, where.dry)


def run_row(row: Row, dry: bool) -> dict[str, Any]:
    """Run a grid as `row` says, and return its cells, seconds and cells per hour."""
    width, steps = (16, 4) if dry else (64, 400)
    sizes = {"kind": "decoder", "decoder_depth": 1 if dry else 6, "model_dim": width}
    sizes |= {"ff_dim": 4 * width, "num_heads": 4, "dropout": 0.0, "activation": "gelu"}
    of_seed = max(1, row.width // 2)
    seeds = row.packs if row.width > 1 else max(1, row.packs // 2)
    trainer = {"max_steps": steps, "val_check_interval": max(1, steps // 4)}
    trainer |= {"limit_val_batches": 1 if dry else 20, "accelerator": row.accelerator}
    data = {"name": "synthetic", "tokenizer": "word", "vocab_size": None}
    grid = {
        "name": "row",
        "base_config": {
            "trainer": {**trainer, "log_every_n_steps": 10},
            "model": {
                "architecture": sizes,
                "objective": {"kind": "causal_lm", "evaluate_test": False},
                "schedule": {"kind": "constant"},
            },
            "data": {**data, "window": 64, "tokens_per_batch": 1024},
        },
        "axes": {
            "model.pack": [row.width],
            "seed_everything": seeds,
            "model.optimizer.lr": [1e-4 * 1.25**number for number in range(of_seed)],
            "model.schedule.warmup_steps": [0, steps // 4],
        },
        "checkpoints": "none",
    }
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "row.json"  # which YAML reads
        path.write_text(json.dumps(grid))
        words = [sys.executable, "-m", "lightning_app", "run", str(path), "--workers"]
        words += [str(row.processes), "--experiments", folder]
        if row.accelerator == "gpu":
            words += ["--slots-per-device", str(row.processes)]
        began = time.time()
        said = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
        whole = time.time() - began
        ends = [each.stat().st_mtime for each in Path(folder).glob("row/runs/*/result.json")]
    if not ends:
        raise RuntimeError(f"no cell has a result: {said.stdout[-2000:]}{said.stderr[-2000:]}")
    seconds = max(ends) - began
    hourly = 3600.0 * len(ends) / seconds
    return {"cells": len(ends), "seconds": seconds, "with_report": whole, "cells_per_hour": hourly}


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
    "cells": Section(cells, 240.0),
    "packed": Section(packed, 120.0),
    "steps": Section(steps, 70.0),
    "attention": Section(attention, 100.0),
    "compile": Section(compiled, 150.0),
    "peers": Section(peers, 60.0),
}
