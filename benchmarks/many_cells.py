"""The time and memory of commands and of a supervisor on a grid of 5,000 cells.

    python benchmarks/many_cells.py
    python benchmarks/many_cells.py --seeds 1 --storage sqlite:////tmp/queue.db

Trains one cell, writes similar files with other numbers for every other cell (checkpoints are
sparse files of the real size), and times the real commands as whole processes: on a grid that is
half done and on one that is finished, there also beside many runs of other grids in the store. Then
a supervisor starts on the same grid with nothing done and is killed after its first cells. Peaks of
memory are from the kernel (VmHWM). Other load on the machine affects wall-clock seconds much more
than CPU seconds.
Linux only. Prints a table, and everything as JSON with --json FILE.
"""

import argparse
import csv
import fcntl
import json
import os
import platform
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import reduce
from importlib.metadata import version
from pathlib import Path
from typing import IO, Any

import yaml

from lightning_app.blocks.presets import PRESETS
from lightning_app.grids.plan import load_plan
from lightning_app.runs.folder import GridFolder
from lightning_app.runs.records import Cell, Plan, sealed
from lightning_app.runs.store import place_run

BASE = Path(__file__).parents[1] / "ablations" / "base" / "synthetic.yaml"
WARMUPS = [0, 20, 60]
RATES = [1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 4e-3, 8e-3]
PRESET, WARMUP = "model.block.preset", "model.schedule.warmup_steps"
RATE, SEED = "model.optimizer.lr", "seed_everything"
RUNNING, CUT_SHORT, FAILED_EVERY = 4, 20, 100
LONGEST = 600.0  # seconds that any command may take
_POLL = 0.02  # seconds


@dataclass(frozen=True)
class Taken:
    """One command with its wall-clock seconds, CPU seconds and peak memory."""

    what: str
    seconds: float
    cpu_seconds: float
    megabytes: float
    code: int


def write_grid(folder: Path, name: str, axes: Mapping[str, list[Any]]) -> Path:
    """Write a grid file over the synthetic corpus into `folder`."""
    tree = {
        "name": name,
        "question": "What do thousands of cells cost?",
        "base": str(BASE),
        "axes": dict(axes),
        "sensitivity": {"reference_warmup": WARMUPS[-1], "baseline": "pre_ln"},
    }
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(tree, sort_keys=False), encoding="utf-8")
    return path


class Commands:
    """Runs `ablate` on one grid and records time and memory of each call."""

    def __init__(self, grid: Path, experiments: Path) -> None:
        self.grid = grid
        self.folder = experiments / grid.stem
        self.taken: list[Taken] = []
        self._log = experiments.parent / "log.txt"

    def time(self, what: str, command: str, *options: str) -> None:
        """Run a command to its end."""
        with self._started(command, *options) as process:
            self._end(what, process, lambda: False)

    def first_cells(self, what: str, wanted: int, *options: str) -> float:
        """Kill a supervisor after its first `wanted` results; return seconds to the first start."""
        before, start = set(self._attempts()), time.perf_counter()
        seconds = float("nan")

        def enough() -> bool:
            nonlocal seconds
            new = [path for path in self._attempts() if path not in before]
            if new and seconds != seconds:
                seconds = time.perf_counter() - start
            return sum((path.parents[1] / "result.json").is_file() for path in new) >= wanted

        with self._started("run", *options) as process:
            self._end(what, process, enough)
        return seconds

    def _attempts(self) -> list[Path]:
        return list(self.folder.glob("runs/*/attempts/[0-9]*"))

    @contextmanager
    def _started(self, command: str, *options: str) -> Iterator[subprocess.Popen[bytes]]:
        words = [sys.executable, "-m", "lightning_app", command, str(self.grid)]
        words += ["--experiments", str(self.folder.parent), *options]
        with self._log.open("ab") as log:
            process = subprocess.Popen(words, stdout=log, stderr=log, start_new_session=True)
            try:
                yield process
            finally:
                process.kill()
                process.wait()

    def _end(self, what: str, process: subprocess.Popen[bytes], enough: Callable[[], bool]) -> None:
        start, before, peak = time.perf_counter(), _cpu(), 0.0
        while process.poll() is None and not enough():
            if time.perf_counter() - start > LONGEST:
                raise TimeoutError(f"{what}: not over after {LONGEST:.0f} s; see {self._log}")
            peak = max(peak, _peak(process.pid))
            time.sleep(_POLL)
        seconds = time.perf_counter() - start
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
        code = process.wait()
        taken = Taken(what, seconds, _cpu() - before, peak, code)
        self.taken.append(taken)
        print(
            f"{what:<36}{seconds:8.2f} s{taken.cpu_seconds:8.2f} s on cores{peak:7.0f} MB"
            f"   exit {code}",
            flush=True,
        )
        if code > 0:
            raise RuntimeError(f"{what}: ended with exit code {code}; see {self._log}")


def _cpu() -> float:
    """CPU seconds of finished commands, including their own children."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _peak(pid: int) -> float:
    """The peak resident memory of a process in MB; 0 if it has just ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    return next((int(line.split()[1]) / 1e3 for line in lines if line.startswith("VmHWM")), 0.0)


class Template:
    """A run that was trained, from which similar ones are made."""

    def __init__(self, run: Path) -> None:
        self.files = {
            path.relative_to(run): path.read_bytes()
            for path in run.rglob("*")
            if path.is_file() and path.suffix not in (".ckpt", ".index")
        }
        self.checkpoints = {
            path.relative_to(run): path.stat().st_size for path in run.rglob("*.ckpt")
        }
        self.config = yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))
        self.result = json.loads((run / "result.json").read_text(encoding="utf-8"))
        with (run / "metrics.csv").open(encoding="utf-8", newline="") as file:
            self.rows = list(csv.DictReader(file))

    def leave(self, run: Path, cell: Cell) -> None:
        """Write the files of a finished run of `cell`."""
        chance = random.Random(cell.id)
        learned = 2.4 - 0.4 * (cell.axes[WARMUP] == 0) + chance.gauss(0, 0.05)
        diverged = chance.random() < 0.04
        learned = 0.0 if diverged else learned - 0.02 * RATES.index(cell.axes[RATE])
        final = self.result["unigram_entropy"] - learned
        for path, content in self.files.items():
            (run / path).parent.mkdir(parents=True, exist_ok=True)
            (run / path).write_bytes(content)
        for path, size in self.checkpoints.items():
            (run / path).parent.mkdir(parents=True, exist_ok=True)
            with (run / path).open("wb") as file:
                file.truncate(size)
        self._config(run, cell)
        self._metrics(run, final - self.result["metrics"]["val/nll"])
        metrics = {**self.result["metrics"], "val/nll": final, "val/perplexity": 2.718**final}
        rule = {"step": 200, "rule": "stall", "last_finite_loss": final}
        result = {
            **self.result,
            "id": cell.id,
            "name": cell.name,
            "status": "diverged" if diverged else "ok",
            "outcome": "stalled" if diverged else "trained",
            "diverged": rule if diverged else None,
            "metrics": metrics,
            "seconds": chance.uniform(14, 16),
        }
        text = json.dumps(sealed(result, run), indent=1)
        (run / "result.json").write_text(text, encoding="utf-8")

    def _config(self, run: Path, cell: Cell) -> None:
        config = json.loads(json.dumps(self.config))
        for key, value in cell.axes.items():
            *path, last = key.split(".")
            reduce(lambda tree, part: tree[part], path, config)[last] = value
        config["data"]["seed"] = cell.axes[SEED]
        with (run / "config.yaml").open("w", encoding="utf-8") as file:
            yaml.dump(config, file, Dumper=_Dumper, sort_keys=False)

    def _metrics(self, run: Path, shift: float) -> None:
        steps = int(self.result["steps"])
        with (run / "metrics.csv").open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, list(self.rows[0]))
            writer.writeheader()
            for row in self.rows:
                moved = shift * int(row["step"]) / steps
                changed = {
                    key: repr(float(row[key]) + moved)
                    for key in ("train/loss", "train/nll", "val/nll")
                    if row[key]
                }
                writer.writerow({**row, **changed})


_Dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)


def half(template: Template, folder: Path, plan: Plan) -> list[IO[bytes]]:
    """Make a grid that is half done; return the locks of the cells that seem to run."""
    middle, locks = len(plan.cells) // 2, []
    for number, cell in enumerate(plan.cells[: middle + RUNNING + CUT_SHORT]):
        run = place_run(GridFolder(folder), cell.name, cell.id).path
        attempt = run / "attempts" / "1"
        if number < middle and number % FAILED_EVERY:
            template.leave(run, cell)
            continue
        attempt.mkdir(parents=True)
        (run / ".lock").touch()
        if number < middle:
            text = "Traceback (most recent call last):\n  ...\nRuntimeError: it went wrong\n"
            (attempt / "error.txt").write_text(text, encoding="utf-8")
        elif number < middle + RUNNING:
            progress = {"step": 50, "max_steps": 200, "rate": 14.0, "loss": 4.5}
            (attempt / "progress.json").write_text(json.dumps(progress), encoding="utf-8")
            locks.append((run / ".lock").open("r+b"))
            fcntl.flock(locks[-1], fcntl.LOCK_EX)
    return locks


def fill_store(experiments: Path, count: int) -> None:
    """Leave runs of another grid in the store, with links to them."""
    other = GridFolder(experiments / "other")
    for number in range(count):
        run = place_run(other, f"run-{number}", f"{number:016x}")
        run.result.write_text("{}", encoding="utf-8")


def measure(root: Path, seeds: int, storages: list[str], others: int) -> dict[str, Any]:
    """Make the grids in `root` and time every command; return all numbers."""
    presets = list(PRESETS)
    experiments = root / "experiments"
    axes: dict[str, list[Any]] = {PRESET: presets, WARMUP: WARMUPS, RATE: RATES}
    axes[SEED] = list(range(1, seeds + 1))
    one = {PRESET: ["pre_ln"], WARMUP: WARMUPS[-1:], RATE: RATES[-2:-1], SEED: [1]}
    experiments.mkdir()
    trial = Commands(write_grid(root, "one", one), experiments)
    trial.time("one cell, trained", "run")
    template = Template(next((trial.folder / "runs").iterdir()))

    many = Commands(write_grid(root, "many", axes), experiments)
    many.time("plan, nothing there yet", "plan")
    plan = load_plan(many.folder / "plan.json")
    assert plan is not None
    locks = half(template, many.folder, plan)
    for command in ("plan", "status", "report"):
        many.time(f"{command}, half done", command)
    for lock in locks:
        lock.close()
    for cell in plan.cells:
        run = place_run(GridFolder(many.folder), cell.name, cell.id).path
        if not (run / "result.json").is_file():
            template.leave(run, cell)
    for command in ("plan", "status", "report", "report"):
        many.time(f"{command}, finished", command)
    fill_store(experiments, others)
    many.time(f"plan, finished, beside {others} runs", "plan")
    (many.folder / "report.html").unlink()
    many.time("run, finished, no study, no report", "run")
    many.time("run, finished", "run")
    size = (many.folder / "report.html").stat().st_size / 1e6
    print(f"report.html: {size:.1f} MB")

    starts: dict[str, float] = {}
    for index, storage in enumerate(["", *storages]):
        name = storage.partition(":")[0] or "journal"
        options = ["--storage", storage] if storage else []
        # A database may know the grid of an earlier call, in another folder.
        # In other experiments: here the store has all its cells.
        apart = root / f"apart{index}"
        apart.mkdir()
        queue = Commands(write_grid(root, f"queue{index}_{os.getpid()}", axes), apart)
        for what in (f"run, all waiting, {name}", f"run, killed before, {name}"):
            starts[what] = queue.first_cells(what, 2, *options)
            print(f"{what}: first cell started after {starts[what]:.1f} s", flush=True)
        queue.time(f"status, queue, {name}", "status")
        many.taken += queue.taken
    return {
        "cells": len(plan.cells),
        "cores": len(os.sched_getaffinity(0)),
        "load": os.getloadavg(),
        "platform": platform.platform(),
        "versions": {name: version(name) for name in ("torch", "lightning", "optuna")},
        "taken": [asdict(each) for each in many.taken],
        "first_cell_after": starts,
        "report_megabytes": size,
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Time and memory with a grid of 5,000 cells.")
    parser.add_argument("--seeds", type=int, default=10, help="504 cells each (default: 10)")
    text = "runs of other grids in the store (default: 20000)"
    parser.add_argument("--others", type=int, default=20_000, help=text)
    parser.add_argument("--storage", action="append", default=[], metavar="URL", help="besides")
    parser.add_argument("--folder", type=Path, help="made, and kept (default: a temporary one)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers there")
    args = parser.parse_args()
    root = args.folder or Path(tempfile.mkdtemp(prefix="many_cells-"))
    root.mkdir(parents=True, exist_ok=True)
    try:
        found = measure(root.resolve(), args.seeds, args.storage, args.others)
    finally:
        if args.folder is None:
            shutil.rmtree(root)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
