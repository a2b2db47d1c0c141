"""The time that a callback adds to a training step: `SignalProbe`, or `UpdateProbe` by group.

    python benchmarks/probe_overhead.py
    python benchmarks/probe_overhead.py --updates
    python benchmarks/probe_overhead.py --config ablations/base/iwslt14.yaml --steps 200

Each time is from one run, whose trainer has the callback in every second pair of steps only, so
that drift of the machine affects both equally; a probing is at the second step of a pair, since
`UpdateProbe` also keeps the gradients of the step before. The ratio is that of the two medians; its
range is that of the same ratio in each tenth of the run. With --processor, seconds are those of the
processor, for a machine that also does other work.
"""

import argparse
import logging
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import yaml

from lightning_app.config.classes import made_fields
from lightning_app.config.config import data_module, resolve, transformer_module
from lightning_app.training.callbacks.probes import Probing, SignalProbe, UpdateProbe

WARM = 10  # first steps, which are not measured
NEVER = 10**9
PARTS = 10


class Switch(pl.Callback):
    """Give the trainer `probe` in every second pair of steps; record the seconds of both kinds."""

    def __init__(self, probe: Probing, clock: Callable[[], float]) -> None:
        self.probe, self.clock = probe, clock
        self.seconds: dict[bool, list[float]] = {False: [], True: []}
        self._pair = self._end = 0.0

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._pair += self.clock() - self._end
        step = trainer.global_step
        if step % 2 == 0:
            if step > WARM:
                self.seconds[step % 4 == 0].append(self._pair)
            self._pair = 0.0
        # A new list, since the trainer iterates over the old one.
        others = [c for c in trainer.callbacks if c not in (self, self.probe)]  # pyright: ignore[reportAttributeAccessIssue]
        probe = [self.probe] if step // 2 % 2 else []
        trainer.callbacks = [*others, *probe, self]  # pyright: ignore[reportAttributeAccessIssue]
        self._end = self.clock()


def step_seconds(
    config: dict[str, Any], steps: int, probe: Probing, clock: Callable[[], float]
) -> dict[bool, list[float]]:
    """Train `steps` steps; return the seconds of pairs without and of pairs with `probe`."""
    switch = Switch(probe, clock)
    with tempfile.TemporaryDirectory() as folder:
        trainer = dict(config["trainer"]) | {
            "max_steps": steps,
            "limit_val_batches": 0,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "default_root_dir": folder,
        }
        for library in ("lightning.pytorch", "lightning.fabric"):
            logging.getLogger(library).setLevel(logging.ERROR)
        pl.seed_everything(config["seed_everything"], workers=True)
        made = made_fields(trainer, imports=False)
        # The clock comes last, so that a step includes its probing.
        made["callbacks"] = [*(made["callbacks"] or []), probe, switch]
        module, data = transformer_module(config["model"]), data_module(config["data"])
        pl.Trainer(**made).fit(module, datamodule=data)
    return switch.seconds


def ratio(seconds: dict[bool, list[float]], part: slice = slice(None)) -> float:
    """Return the ratio of the median pairs with and without the callback."""
    return statistics.median(seconds[True][part]) / statistics.median(seconds[False][part])


def main() -> None:
    """Print the step with and without the callback, their ratio, and the time of one probing."""
    parser = argparse.ArgumentParser(description="The time that a callback adds to a step.")
    parser.add_argument("--config", type=Path, default=Path("ablations/base/synthetic.yaml"))
    parser.add_argument("--steps", type=int, default=600, help="steps of the run (default: 600)")
    parser.add_argument("--threads", type=int, default=1, help="torch threads (default: 1)")
    parser.add_argument("--updates", action="store_true", help="UpdateProbe, not SignalProbe")
    parser.add_argument(
        "--processor", action="store_true", help="processor seconds, not wall clock"
    )
    args = parser.parse_args()
    if args.steps < WARM + 4 * PARTS:
        parser.error(f"--steps: at least {WARM + 4 * PARTS}")
    torch.set_num_threads(args.threads)
    config: Any = resolve(yaml.safe_load(args.config.read_text(encoding="utf-8")), str(args.config))
    config["model"]["schedule"]["warmup_steps"] = 0  # some runs are shorter than a warm-up
    clock = time.process_time if args.processor else time.perf_counter
    never: Probing = UpdateProbe([NEVER]) if args.updates else SignalProbe([NEVER])
    idle = step_seconds(config, args.steps, never, clock)
    size = len(idle[True]) // PARTS
    parts = [ratio(idle, slice(i * size, (i + 1) * size)) for i in range(PARTS)]
    plain = statistics.median(idle[False]) / 2
    print(f"{args.config}, {args.steps} steps, {args.threads} thread(s)")
    print(f"step without the callback: {1e3 * plain:.2f} ms")
    print(f"step with the callback, no probing: {500 * statistics.median(idle[True]):.2f} ms")
    print(f"ratio: {ratio(idle):.3f}, in tenths of the run {min(parts):.3f} to {max(parts):.3f}")
    print(f"goal: at most {1.01 if args.updates else 1.05}")
    every, few = list(range(4, WARM + 401, 4)), WARM + 30
    kinds: dict[str, tuple[Probing, int]] = {"probing": (SignalProbe(every), few)}
    if args.updates:
        kinds = {
            "step": (UpdateProbe(every), max(few, min(WARM + 400, args.steps))),
            "passes": (UpdateProbe([NEVER], pass_steps=every), few),
            "curvature": (UpdateProbe([NEVER], curvature_steps=every), few),
        }
    for name, (probe, steps) in kinds.items():
        firing = step_seconds(config, steps, probe, clock)
        base = statistics.median(firing[False]) / 2
        extra = statistics.median(firing[True]) - 2 * base
        print(f"one {name}: {1e3 * extra:.1f} ms, {extra / base:.2f} steps")


if __name__ == "__main__":
    main()
