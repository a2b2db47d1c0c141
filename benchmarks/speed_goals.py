"""Measure the goals for speed and memory that need only a CPU, and show whether they are met.

    python benchmarks/speed_goals.py
    python benchmarks/speed_goals.py --rows calls step_256 --repeat 3 --json goals.json

A comparison runs in interleaved rounds on one thread, in processor time; its figure is the median
of the ratios within the rounds. Each row has a separate process, since earlier allocations change
the time of large blocks. Peers have the weights of our model, the same batch and optimizer, and
flash attention or SDPA; `pip install -e '.[bench]'` installs them. `--repeat` prints every
repetition. Rows without a peer have the allocator of a fit, which keeps the memory of freed
tensors; rows with one have that of a plain program, and with `--kept-blocks` both sides have that
of a fit. IWSLT14, RTE and CoLA are searched for in the same places as by `ablate prepare`.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.fine_tuning_rows import OWN_FINE_TUNING, PEER_FINE_TUNING
from benchmarks.measure import Missing, machine
from benchmarks.peer_rows import PEER_ROWS
from benchmarks.speed_rows import OWN_ROWS, Figure
from lightning_app.training.hardware import keep_freed_blocks

ROWS_OF_OURS = OWN_ROWS | OWN_FINE_TUNING
ROWS = PEER_ROWS | PEER_FINE_TUNING | ROWS_OF_OURS


def titles(names: Sequence[str]) -> dict[str, str]:
    """Return what each row measures, by name."""
    return {name: (ROWS[name].__doc__ or "").partition("\n")[0] for name in names}


def line(figure: Figure) -> str:
    """Return goal and figure as one line of the table."""
    sign = "at least" if figure.least else "at most"
    low, high = figure.reached.low, figure.reached.high
    spread = f"{low:.3g} to {high:.3g}" if low != high else ""
    verdict = "met" if figure.met else "missed"
    reached = f"{figure.reached.median:.4g}"
    return f"  {figure.name:<40} {sign:>8} {figure.goal:<6g} {reached:>8}  {spread:<18} {verdict}"


def measure(name: str, *, kept_blocks: bool) -> list[dict[str, Any]]:
    """Print one row, and return its figures."""
    found = []
    if kept_blocks or name in ROWS_OF_OURS:
        keep_freed_blocks()
    try:
        for figure in ROWS[name]():
            print(line(figure), flush=True)
            goal = {"goal": figure.goal, "least": figure.least, "met": figure.met}
            reached = figure.reached._asdict()
            found.append({"row": name, "figure": figure.name, **goal, "reached": reached})
    except Missing as why:
        print(f"  not measured: {why}", flush=True)
    return found


def measure_apart(name: str, *, kept_blocks: bool) -> list[dict[str, Any]]:
    """Measure one row in a separate process."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "row.json"
        command = [sys.executable, __file__, "--only", name, "--json", str(path)]
        command += ["--kept-blocks"] * kept_blocks
        subprocess.run(command, check=True)
        return json.loads(path.read_text(encoding="utf-8"))["figures"]


def main() -> None:
    """Print the rows as they are measured, and write them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS), metavar="NAME")
    parser.add_argument("--only", choices=ROWS, metavar="NAME", help="one row, in this process")
    parser.add_argument("--repeat", type=int, default=1, help="times each row (default: 1)")
    parser.add_argument("--kept-blocks", action="store_true", help="also for rows with a peer")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    args = parser.parse_args()
    torch.set_num_threads(1)
    found = []
    if args.only is not None:
        found = measure(args.only, kept_blocks=args.kept_blocks)
    else:
        for name, title in titles(args.rows).items():
            print(f"{name}: {title}", flush=True)
            for number in range(1, args.repeat + 1):
                rows = measure_apart(name, kept_blocks=args.kept_blocks)
                found += [{"repetition": number, **row} for row in rows]
        missed = sorted({f"{row['row']}: {row['figure']}" for row in found if not row["met"]})
        print(f"{sum(row['met'] for row in found)} of {len(found)} figures meet their goal")
        for what in missed:
            print(f"missed at least once: {what}")
    if args.json is not None:
        content = {"machine": machine("cpu"), "figures": found}
        args.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
