"""Test BLEU of the tuned runs of a grid of translation: the best trial of each seed.

    python -m benchmarks.tuned_bleu tuned_iwslt14 --experiments experiments --csv bleu.csv

`ablate test` evaluates each run with a beam of 4. Prints, for each wiring, what warm-up adds, and
with warm-up what the wiring adds to the baseline: means over seeds, with Student's t intervals.
Rows of the CSV file are kept, so that a call that was stopped goes on.
"""

import argparse
import csv
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from lightning_app.report.packed import found_results
from lightning_app.report.results import best_trials
from lightning_app.report.statistics import t_interval

COLUMNS = ("variant", "warmup", "seed", "run", "bleu")


def bleu(run: Path) -> float:
    call = [sys.executable, "-m", "lightning_app", "test", "--run", run, "--checkpoint", "last"]
    call += ["--model.objective.beam=4", "--threads", "1"]
    done = subprocess.run(call, capture_output=True, text=True, check=True)
    found = re.search(r"test/bleu\W+([\d.]+)", done.stdout)
    assert found is not None, done.stdout
    return float(found[1])


def show(name: str, first: dict[int, float], second: dict[int, float]) -> None:
    seeds = sorted(first.keys() & second.keys())
    differences = [first[seed] - second[seed] for seed in seeds]
    low, high, _ = t_interval(differences)
    mean = sum(differences) / len(seeds)
    print(f"{name}: {mean:.2f} ({low:.2f} to {high:.2f}), {len(seeds)} seeds")


def main() -> None:
    parser = argparse.ArgumentParser(description="Test BLEU of the tuned runs of a grid.")
    parser.add_argument("grid")
    parser.add_argument("--experiments", type=Path, default=Path("experiments"))
    parser.add_argument("--csv", type=Path, required=True)
    parser.add_argument("--workers", type=int, default=2)
    given = parser.parse_args()
    with found_results(given.grid, given.experiments) as found:
        grid = found.grid
    best = {cell.name: cell for cell in best_trials(grid).cells if cell.finished}
    rows: dict[str, list[str]] = {}
    if given.csv.exists():
        with given.csv.open(newline="") as file:  # a run that is no longer the best one goes
            rows = {row[3]: row for row in csv.reader(file) if row[3] in best}
    cells = [cell for name, cell in best.items() if name not in rows]
    with ThreadPoolExecutor(given.workers) as pool:
        runs = [grid.folder / "runs" / cell.name for cell in cells]
        for cell, value in zip(cells, pool.map(bleu, runs), strict=True):
            kept = (cell.variant, cell.warmup, cell.seed, cell.name, f"{value:.4f}")
            rows[cell.name] = [str(each) for each in kept]
            with given.csv.open("w", newline="") as file:
                csv.writer(file).writerows([COLUMNS, *sorted(rows.values())])
    arms: dict[tuple[str, int], dict[int, float]] = {}
    for variant, warmup, seed, _, value in rows.values():
        arms.setdefault((variant, int(warmup)), {})[int(seed)] = float(value)
    reference, baseline = grid.reference_warmup or 0, grid.baseline or ""
    for variant in dict.fromkeys(name for name, _ in arms):
        warm, bare = arms[variant, reference], arms[variant, 0]
        print(f"{variant}: {sum(bare.values()) / len(bare):.2f} without warm-up", end=", ")
        print(f"{sum(warm.values()) / len(warm):.2f} with it")
        show("  gained by warm-up", warm, bare)
        if variant != baseline:
            show(f"  minus {baseline}, with warm-up", warm, arms[baseline, reference])


if __name__ == "__main__":
    main()
