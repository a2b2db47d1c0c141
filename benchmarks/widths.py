"""Print the best rate of each arm of the study `widths`, and how it moves with the width.

    python -m benchmarks.widths [STUDY ...]

The best rate of an arm is the least point, within the range tried, of the cubic in log2 of the rate
that fits its trials by least squares: those of all seeds that trained and are within `NEAR` nats of
the arm's least. A shift, in octaves, is that of the widest arm less that of the narrowest. Its
interval is the jackknife's over seeds, with Student's t. STUDY is a folder with `results.parquet`;
the arms of several are taken together.
"""

import math
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

STUDY = Path(__file__).parents[1] / "ablations" / "results" / "widths"
WIDTH, KIND = "model.architecture.model_dim", "model.architecture.parametrization"
NEAR = 1.0
POINTS = 4096  # of the range, at which the cubic is compared


def best(trials: Any) -> float:
    """Return log2 of the best rate of an arm; nan for fewer than five usable trials."""
    trained = trials[trials["outcome"] == "trained"]
    near = trained[trained["loss"] <= trained["loss"].min() + NEAR]
    if len(near) < 5:
        return math.nan
    x = np.log2(near["lr"].to_numpy())
    grid = np.linspace(x.min(), x.max(), POINTS)
    fitted = np.polynomial.Polynomial.fit(x, near["loss"].to_numpy(), 3)
    return float(grid[np.argmin(fitted(grid))])


def shift(narrow: Any, wide: Any) -> tuple[float, float, float]:
    """Return the shift of the best rate in octaves, and the ends of its interval."""
    seeds = sorted(set(narrow["seed"]))

    def without(left: Iterable[int]) -> float:
        kept = [arm[~arm["seed"].isin([*left])] for arm in (wide, narrow)]
        return best(kept[0]) - best(kept[1])

    whole, n = without([]), len(seeds)
    values = n * whole - (n - 1) * np.array([without([seed]) for seed in seeds])
    half = stats.t.ppf(0.975, n - 1) * values.std(ddof=1) / math.sqrt(n)
    return whole, values.mean() - half, values.mean() + half


def main() -> None:
    studies = [Path(word) for word in sys.argv[1:]] or [STUDY]
    runs: Any = pd.concat([pd.read_parquet(study / "results.parquet") for study in studies])
    keys = zip(*(runs[name].tolist() for name in (KIND, "variant", "warmup")), strict=True)
    for kind, variant, warmup in sorted(set(keys)):
        same = (runs[KIND] == kind) & (runs["variant"] == variant) & (runs["warmup"] == warmup)
        arm = runs[same].assign(width=runs[same][WIDTH].astype(int))
        arms = {width: arm[arm["width"] == width] for width in sorted(set(arm["width"].tolist()))}
        rates = ", ".join(f"{width}: {2 ** best(each):.2e}" for width, each in arms.items())
        moved, low, high = shift(arms[min(arms)], arms[max(arms)])
        print(f"{kind} {variant} warm-up {warmup}: best rate at width {rates}")
        print(f"  moves by {moved:.2f} octaves [{low:.2f}, {high:.2f}]")


if __name__ == "__main__":
    main()
