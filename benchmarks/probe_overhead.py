"""The time that `SignalProbe` adds to a training step without and with a probing.

    python benchmarks/probe_overhead.py
    python benchmarks/probe_overhead.py --config ablations/base/iwslt14.yaml --steps 200

One run, whose trainer has the callback at every second step only, so that drift of the machine
affects both equally. The ratio is that of the two medians; its range is that of the same ratio in
each tenth of the run.
"""

import argparse
import logging
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import yaml

from lightning_app.config.classes import made_fields
from lightning_app.config.config import data_module, resolve, transformer_module
from lightning_app.training.callbacks.probes import SignalProbe

WARM = 10  # first steps, which are not measured
NEVER = 10**9
PARTS = 10


class Switch(pl.Callback):
    """Give the trainer `probe` for every second step; record the seconds of both kinds of steps."""

    def __init__(self, probe: SignalProbe) -> None:
        self.probe = probe
        self.seconds: dict[bool, list[float]] = {False: [], True: []}
        self._end: float | None = None
        self._with = True

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        now = time.perf_counter()
        if self._end is not None and trainer.global_step > WARM:
            self.seconds[self._with].append(now - self._end)
        self._with = not self._with
        # A new list, since the trainer iterates over the old one.
        others = [c for c in trainer.callbacks if c not in (self, self.probe)]  # pyright: ignore[reportAttributeAccessIssue]
        probe = [self.probe] if self._with else []
        trainer.callbacks = [*others, *probe, self]  # pyright: ignore[reportAttributeAccessIssue]
        self._end = time.perf_counter()


def step_seconds(config: dict[str, Any], steps: int, probe: SignalProbe) -> dict[bool, list[float]]:
    """Train `steps` steps; return the seconds of those without and of those with `probe`."""
    switch = Switch(probe)
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
    """Return the ratio of the median steps with and without the callback."""
    return statistics.median(seconds[True][part]) / statistics.median(seconds[False][part])


def main() -> None:
    """Print the step with and without the callback, their ratio, and the time of one probing."""
    parser = argparse.ArgumentParser(description="The time that SignalProbe adds to a step.")
    parser.add_argument("--config", type=Path, default=Path("ablations/base/synthetic.yaml"))
    parser.add_argument("--steps", type=int, default=600, help="steps of the run (default: 600)")
    parser.add_argument("--threads", type=int, default=1, help="torch threads (default: 1)")
    args = parser.parse_args()
    if args.steps < WARM + 4 * PARTS:
        parser.error(f"--steps: at least {WARM + 4 * PARTS}")
    torch.set_num_threads(args.threads)
    config = resolve(yaml.safe_load(args.config.read_text(encoding="utf-8")), str(args.config))
    idle = step_seconds(config, args.steps, SignalProbe(steps=[NEVER]))
    size = len(idle[True]) // PARTS
    parts = [ratio(idle, slice(i * size, (i + 1) * size)) for i in range(PARTS)]
    plain = statistics.median(idle[False])
    # It probes at every step that has it.
    firing = step_seconds(config, WARM + 20, SignalProbe(steps=list(range(1, WARM + 21))))
    extra = statistics.median(firing[True]) - statistics.median(firing[False])
    print(f"{args.config}, {args.steps} steps, {args.threads} thread(s)")
    print(f"step without probes: {1e3 * plain:.2f} ms")
    print(f"step with the callback, no probing: {1e3 * statistics.median(idle[True]):.2f} ms")
    print(f"ratio: {ratio(idle):.3f}, in tenths of the run {min(parts):.3f} to {max(parts):.3f}")
    print("goal: at most 1.05")
    print(f"one probing: {1e3 * extra:.0f} ms, {extra / plain:.1f} steps")


if __name__ == "__main__":
    main()
