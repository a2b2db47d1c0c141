"""N, O and steps saved with rates left out, with those that `refine` would ask for, or cut short.

    python benchmarks/left_out.py experiments/joint_fine
    python benchmarks/left_out.py experiments/ladder --steps 200 400 800

For each variant of a finished grid over many rates: the scores by all rates, by every second one
(both halves), and by `refine` started from either half, which finds the cells that it asks for
among those of the grid (`finest` is the grid's own spacing; a rate beyond the grid ends it). The
last line counts the intervals that do not overlap with those of all rates; an open interval
overlaps with everything on its open side. The exit code is 1 if there is one.

With `--steps`: the scores of runs cut at each of these steps, and by seed N and the share of the
steps that warm-up saves. The loss of a run is then that of its validation at the step, which is
what a shorter run would have had, so a grid whose schedule knows its end is refused. A run that
failed in the end has failed at every step.
"""

import argparse
import itertools
import math
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from lightning_app.config.search import Refine
from lightning_app.grids.search import TrialScore, further
from lightning_app.models.optim import SCHEDULES
from lightning_app.report.pairs import Arm, Score, arms
from lightning_app.report.results import read_results
from lightning_app.report.statistics import mean
from lightning_app.report.warmup import need_at_best_rates, octaves, steps_at_best_rates
from lightning_app.runs.records import Curve
from lightning_app.runs.run import Run

Rates = Mapping[int, Collection[float]]  # by warm-up


def at(arm: Arm, rates: Rates) -> Arm:
    """The arm without cells at other rates."""
    kept = {key for key in arm.planned if key[1] in rates.get(key[0], ())}
    cells = {key: cell for key, cell in arm.cells.items() if key in kept}
    return replace(arm, planned=frozenset(kept), cells=cells)


def refined(arm: Arm, warmup: int, start: Collection[float], until: float) -> list[float]:
    """The rates of a warm-up that a refinement has tried at its end."""
    there = arm.rates_at(warmup)
    spacing = min(math.log2(b / a) for a, b in itertools.pairwise(there))
    refine, tried = Refine(budget=1000, until=until, finest=spacing * (1 - 1e-3)), sorted(start)
    while True:
        runs = [[c for k, c in arm.cells.items() if k[:2] == (warmup, rate)] for rate in tried]
        scores = [
            TrialScore(mean([c.loss for c in of]), not any(c.failed for c in of)) for of in runs
        ]
        asked = [nearest(rate, there) for rate in further(tried, scores, refine, "min")]
        new = {rate for rate in asked if rate is not None} - {*tried}
        if not new:
            return tried
        tried = sorted([*tried, *new])


def nearest(rate: float, there: Collection[float]) -> float | None:
    """The rate of the grid that is meant, which has other digits."""
    return next((each for each in there if abs(math.log2(each / rate)) < 0.02), None)


class CutRun(Run):
    """A run without what it logged after a step."""

    def __init__(self, run: Run, last: int) -> None:
        super().__init__(run.folder)
        self._last = last

    def curve(self, tag: str) -> Curve:
        return {step: value for step, value in super().curve(tag).items() if step <= self._last}


def cut(arm: Arm, last: int) -> Arm:
    """The arm with runs that end at a step; one that was not validated there has not finished."""
    cells = {}
    for key, cell in arm.cells.items():
        run = CutRun(cell.run, last)
        found = run.curve(cell.monitored.loss).get(last)
        if cell.failed or found is not None:
            metrics = {**cell.metrics, cell.monitored.loss: found}
            cells[key] = replace(cell, run=run, result={**cell.record, "metrics": metrics})
    return replace(arm, cells=cells)


def scores_of(arm: Arm, reference: int) -> tuple[Score, Score, Score]:
    need = need_at_best_rates(arm, reference)
    return need, octaves(arm, reference), steps_at_best_rates(arm, reference, need)


def shown(scores: Sequence[Score]) -> str:
    return "  ".join(
        f"{label} {score.bound}{score.estimate:.3g} [{score.low:.3g}, {score.high:.3g}]"
        for label, score in zip(("N", "O", "steps"), scores, strict=True)
    )


def overlap(one: Score, other: Score) -> bool:
    """Whether two intervals overlap; a missing end is open."""
    (low, high), (other_low, other_high) = (
        (
            -math.inf if math.isnan(score.low) else score.low,
            math.inf if math.isnan(score.high) else score.high,
        )
        for score in (one, other)
    )
    return low <= other_high and other_low <= high


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("grid", type=Path, help="the folder of a finished grid")
    parser.add_argument("--until", type=float, default=0.03, help="of the refinement, nats")
    parser.add_argument("--steps", type=int, nargs="*", default=[], help="where runs are cut")
    args = parser.parse_args()
    grid = read_results(args.grid)
    reference = grid.reference_warmup
    if reference is None:
        raise SystemExit(f"{args.grid}: no arm with a reference warm-up")
    if args.steps:
        kinds = {cell.setting("model.schedule.kind") for cell in grid.cells}
        if ending := sorted(kind for kind in kinds if SCHEDULES[kind].ends):
            raise SystemExit(f"{args.grid}: --steps: {', '.join(ending)} schedules know the end")
        for arm in arms(grid):
            for last in args.steps:
                scores = scores_of(cut(arm, last), reference)
                print(f"{arm.group} {arm.variant}, {last} steps: {shown(scores)}")
                for name, score, unit in (
                    ("N", scores[0], 1.0),
                    ("saved, %", scores[2], last / 100),
                ):
                    values = "  ".join(
                        f"{seed}: {value / unit:.3g}" for seed, value in score.values
                    )
                    print(f"    {name}, by seed: {values}")
        return 0
    apart = count = 0
    for arm in arms(grid):
        rates = {warmup: arm.rates_at(warmup) for warmup in (0, reference)}
        halves = [{w: of[first::2] for w, of in rates.items()} for first in (0, 1)]
        ways: dict[str, Rates] = {"all rates": rates}
        for name, half in zip(("first half", "second half"), halves, strict=True):
            ways[name] = half
            ways[f"{name}, refined"] = {
                w: refined(arm, w, of, args.until) for w, of in half.items()
            }
        found = {name: scores_of(at(arm, of), reference) for name, of in ways.items()}
        for name, scores in found.items():
            tried = " and ".join(str(len(of)) for of in ways[name].values())
            pairs = list(zip(scores, found["all rates"], strict=True))
            agree = [overlap(one, other) for one, other in pairs]
            apart, count = apart + agree.count(False), count + len(agree)
            print(f"{arm.group} {arm.variant}, {name} ({tried} rates): {shown(scores)}")
    print(f"{apart} of {count} intervals do not overlap with those of all rates")
    return int(apart > 0)


if __name__ == "__main__":
    sys.exit(main())
