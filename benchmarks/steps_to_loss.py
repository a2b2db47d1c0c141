"""Steps to a target loss of each arm of a finished grid, as speedruns quote them.

    python benchmarks/steps_to_loss.py experiments/optimizers --target 3.0

For each variant and each warm-up: the rate with the smallest mean loss over the seeds at the end,
and the step at which each seed of that rate first has a validation loss of at most the target,
linear between validations, then their mean and their standard deviation. A seed that never gets
there, or a failed run, is "never", and the arm has no mean. The best rate is chosen on the seeds
that are shown, so an arm with more rates has had more chances; `steps_at_best_rates` of the report
compares arms without that advantage and with intervals, and this table does neither.
"""

import argparse
import sys
from pathlib import Path
from statistics import stdev

from lightning_app.commands.options import EXPERIMENTS
from lightning_app.config.tree import label
from lightning_app.report.packed import found_results
from lightning_app.report.pairs import Arm, arms, first_step
from lightning_app.report.results import CellResult, GridResults
from lightning_app.report.statistics import mean


def reached(run: CellResult, target: float) -> float | None:
    """The step at which a run first reaches `target`, linear between validations."""
    curve = run.run.curve(run.monitored.loss)
    if run.failed or not any(loss <= target for loss in curve.values()):
        return None
    return first_step(curve, target)[0]


def at_best_rate(arm: Arm, warmup: int) -> tuple[float, list[CellResult]] | None:
    """The rate with the smallest mean loss at the end, of those with all seeds, and its runs."""
    found = []
    for lr in arm.rates_at(warmup):
        pairs = arm.at([(warmup, lr)])
        if pairs.seeds and len(pairs.seeds) == pairs.planned:
            runs = [pairs.runs[(warmup, lr), seed] for seed in pairs.seeds]
            found.append((mean([run.loss for run in runs]), lr, runs))
    if not found:
        return None
    _, lr, runs = min(found, key=lambda each: each[0])
    return lr, runs


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("grid", type=Path, help="the folder of a grid, or a published one")
    parser.add_argument("--target", type=float, required=True, help="nats per token")
    args = parser.parse_args()
    with found_results(args.grid, EXPERIMENTS) as found:
        show(found.grid, args.target)
    return 0


def show(grid: GridResults, target: float) -> None:
    for arm in arms(grid):
        for warmup in arm.warmups:
            name = " ".join(filter(None, (arm.group, arm.variant, f"warm-up {warmup}")))
            if (best := at_best_rate(arm, warmup)) is None:
                print(f"{name}: no rate at which all seeds have finished")
                continue
            lr, runs = best
            steps = [reached(run, target) for run in runs]
            shown = ", ".join("never" if at is None else f"{at:.0f}" for at in steps)
            known = [at for at in steps if at is not None]
            if len(known) == len(steps):
                shown += f"; mean {mean(known):.0f}"
                shown += f", standard deviation {stdev(known):.0f}" if len(known) > 1 else ""
            print(f"{name}, rate {label(lr)}: {shown}")


if __name__ == "__main__":
    sys.exit(main())
