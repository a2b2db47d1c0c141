"""The checks of `chaos.py`: compare a disturbed grid with an undisturbed one."""

import csv
import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

_RATE = "train/tokens_per_second"
_TIMES = (_RATE, "train/data_wait_share", "train/seconds")  # differ even between equal runs
_FINISHED = re.compile(r": (?:ok|diverged), ")  # the last line of a cell in its log
_COMPARED = ("id", "name", "status", "diverged", "tokens", "steps", "parameters")


def planned(folder: Path) -> list[dict[str, Any]]:
    """The cells that the plan in a grid's folder names."""
    return json.loads((folder / "plan.json").read_text())["cells"]


def attempts_of(run: Path) -> list[Path]:
    return sorted((run / "attempts").glob("*"), key=lambda path: int(path.name))


def grid_problems(whole: Path, broken: Path, trials: list[list[str]]) -> Iterator[str]:
    """Compare two folders of a grid; `trials` holds state and cell of every trial of the second."""
    cells = planned(whole)
    if planned(broken) != cells:
        yield f"{broken}: another plan than that of {whole}"
        return
    names = {cell["name"] for cell in cells}
    results = sorted(path.parent for path in (broken / "runs").glob("*/result.json"))
    for path in results:
        if path.name not in names:
            yield f"{path}: a result of no cell"
    plans = broken.parent.glob("*/plan.json")
    known = {cell["id"] for path in plans for cell in planned(path.parent)}
    for path in sorted((broken.parent / ".runs").glob("*/result.json")):
        if path.parent.name not in known:
            yield f"{path.parent}: a result of no cell"
    complete = Counter(cell for state, cell in trials if state == "COMPLETE")
    for cell in cells:
        run = broken / "runs" / cell["name"]
        if run not in results:
            yield f"{run}: no result"
            continue
        if complete[cell["id"]] != 1:
            yield f"{run}: {complete[cell['id']]} complete trials"
        yield from _finish_problems(run)
        yield from run_problems(whole / "runs" / cell["name"], run)
    open_trials = Counter(state for state, _ in trials if state in ("RUNNING", "WAITING"))
    if open_trials:
        yield f"{broken}: trials left: {dict(open_trials)}"
    if extra := complete.keys() - {cell["id"] for cell in cells}:
        yield f"{broken}: complete trials of unknown cells: {sorted(extra)}"


def _finish_problems(run: Path) -> Iterator[str]:
    """Check that only one attempt of each cell finished, and that it wrote the result."""
    logs = {path.name: path / "log.txt" for path in attempts_of(run)}
    finished = [
        name
        for name, log in logs.items()
        if log.is_file() and _FINISHED.search(log.read_text(errors="replace"))
    ]
    attempt = str(json.loads((run / "result.json").read_text())["attempt"])
    # An attempt that was killed between its result and its last line has no such line.
    if finished not in ([], [attempt]):
        yield f"{run}: finished by attempts {finished}, the result is of {attempt}"


def run_problems(whole: Path, broken: Path) -> Iterator[str]:
    """Weights and optimizer to the last bit, the same scores, the same curve at every step."""
    for name in ("last", "best"):
        paths = [run / "checkpoints" / f"{name}.ckpt" for run in (whole, broken)]
        first, second = (torch.load(path, weights_only=True) for path in paths)
        for part in ("state_dict", "optimizer_states", "lr_schedulers", "global_step", "epoch"):
            if not same(first[part], second[part]):
                yield f"{broken}: {name}.ckpt: another {part}"
    results = [json.loads((run / "result.json").read_text()) for run in (whole, broken)]
    metrics = [{**result["metrics"], _RATE: None} for result in results]
    if metrics[0] != metrics[1]:
        yield f"{broken}: metrics {metrics[1]}, undisturbed {metrics[0]}"
    for field in _COMPARED:
        if results[0][field] != results[1][field]:
            yield f"{broken}: {field} {results[1][field]}, undisturbed {results[0][field]}"
    if curve(whole) != curve(broken):
        yield f"{broken}: another curve in metrics.csv"


def curve(run: Path) -> list[dict[str, str]]:
    """The rows of a run's `metrics.csv` without times."""
    with (run / "metrics.csv").open(newline="") as file:
        return [{k: v for k, v in row.items() if k not in _TIMES} for row in csv.DictReader(file)]


def same(left: Any, right: Any) -> bool:
    """Whether two trees of tensors and values are equal, tensors to the last bit."""
    if isinstance(left, torch.Tensor):
        return isinstance(right, torch.Tensor) and torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    return left == right
