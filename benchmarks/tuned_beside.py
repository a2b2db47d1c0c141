"""Draw T after five trials of the study `tuned` beside T and N of `joint_fine`, by wiring.

    python -m benchmarks.tuned_beside

T of `joint_fine` is the best of nine rates; N, the saving at the best rates between them, comes
from `docs/recompute_study.py --former`. Writes `beside-light.svg` and `beside-dark.svg` into the
folder of `tuned`.
"""

import re
import subprocess
import sys
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from lightning_app.report.figures.sheet import COLOURS, darken, save, styled

RESULTS = Path(__file__).parents[1] / "ablations" / "results"
FORMER = re.compile(r"need\s+(\S+) \((\S+) to (\S+)\) .*  (\S+) in all")


def tuned(study: str) -> dict[str, tuple[float, float, float]]:
    """Return the estimate and the plain 95 % interval of T by wiring."""
    table = pd.read_csv(RESULTS / study / "sensitivity.csv")
    rows = table[table["score"] == "tuned"]
    columns = (rows[name].tolist() for name in ("variant", "estimate", "low", "high"))
    return {name: (mean, low, high) for name, mean, low, high in zip(*columns, strict=True)}


def former() -> dict[str, tuple[float, float, float]]:
    call = [sys.executable, "docs/recompute_study.py", "--former", RESULTS / "joint_fine"]
    text = subprocess.run(call, cwd=RESULTS.parents[1], capture_output=True, text=True, check=True)
    found = FORMER.findall(text.stdout)
    return {name: (float(mean), float(low), float(high)) for mean, low, high, name in found}


def main() -> None:
    shown = {
        "T, best of five trials": tuned("tuned"),
        "T, best of nine rates": tuned("joint_fine"),
        "N, between nine rates": former(),
    }
    names = list(shown["N, between nine rates"])
    for look in ("light", "dark"):
        with styled():
            figure = Figure(figsize=(7.5, 4.2), layout="constrained")
            axes = figure.subplots()
            for place, (label, values) in enumerate(shown.items()):
                rows = [values[name] for name in names]
                heights = [row + 0.25 * (1 - place) for row in range(len(names))]
                estimates = [estimate for estimate, _, _ in rows]
                below = [estimate - low for estimate, low, _ in rows]
                above = [high - estimate for estimate, _, high in rows]
                spans, colour = [below, above], COLOURS[place]
                axes.errorbar(estimates, heights, xerr=spans, fmt="o", color=colour, label=label)
            axes.axvline(0.0, color="grey", linewidth=0.8)
            axes.set_yticks(range(len(names)), names)
            axes.set_xlabel("nats that warm-up saves (95 % intervals)")
            axes.legend(loc="lower right")
            if look == "dark":
                darken(figure)
            save(figure, RESULTS / "tuned" / f"beside-{look}.svg")


if __name__ == "__main__":
    main()
