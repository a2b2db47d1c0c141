"""What a cell of the demo costs besides its steps, in CPU seconds and per cent of the cell.

    python benchmarks/cell_costs.py --cells 0 10 20 30
    python benchmarks/cell_costs.py --profile 10  # where the time of one cell goes, by cProfile

    python benchmarks/cell_costs.py --grid  # runs all 20 cells, for the supervisor's part

Cells run as in `ablate run`: each in a child of a process that has imported the program, with one
thread. The time of a part does not include that of another part inside it. "Steps" are forward
and backward passes, updates and the hooks of callbacks in between. The last rows are costs of the
grid, divided by the number of its cells: the start of the fork server; with `--grid` also the
supervisor and the report.
"""

import argparse
import cProfile
import functools
import json
import multiprocessing
import os
import pstats
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_app.config.grid import GridSpec, read_spec
from lightning_app.grids import program
from lightning_app.grids.plan import cell_tree, combinations
from lightning_app.grids.slots import Slot
from lightning_app.grids.workers import Job, cell_environment, run_rank, share_cores
from lightning_app.runs.folder import RunFolder
from lightning_app.tasks.translation import TranslationRows
from lightning_app.training import run
from lightning_app.training.callbacks.loggers import Curves, Events, Pictures
from lightning_app.training.datamodule import TextDataModule
from lightning_app.training.module import TransformerModule
from lightning_app.training.run import TrainingRun

FORK = multiprocessing.get_context("fork")
SERVER = "import lightning_app.grids.program, lightning_app.grids.workers"
GRID = """
import json, time
from pathlib import Path
from lightning_app.commands import grid
report, spent = grid._report, []
def timed(grid):
    start = time.process_time()
    tree = report(grid)
    spent.append(time.process_time() - start)
    return tree
grid._report = timed
code = grid.run_command("demo", Path({folder!r}))
assert not code
whole = time.process_time()
print()
print(json.dumps({{"supervisor / cells": whole - spent[0], "report / cells": spent[0]}}))
"""
STEPS, VALIDATION, REST = "steps", "validation", "everything else"


class Clock:
    """CPU seconds of this process by part; a part inside another one is counted once."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._parts = [REST]
        self._since = 0.0  # the process was forked: its time began with it

    def _turn(self) -> None:
        now = time.process_time()
        self.seconds[self._parts[-1]] += now - self._since
        self._since = now

    def enter(self, part: str) -> None:
        self._turn()
        self._parts.append(part)

    def leave(self) -> None:
        self._turn()
        self._parts.pop()

    @contextmanager
    def during(self, part: str) -> Iterator[None]:
        self.enter(part)
        try:
            yield
        finally:
            self.leave()

    def watch(self, part: str, owner: Any, *names: str) -> None:
        """Count calls of these functions of a module or class as `part`."""
        for name in names:
            function: Callable[..., Any] = getattr(owner, name)

            def timed(*args: Any, _of: Callable[..., Any] = function, **kwargs: Any) -> Any:
                with self.during(part):
                    return _of(*args, **kwargs)

            setattr(owner, name, functools.wraps(function)(timed))


class Marks(pl.Callback):
    """The last callback: steps and validations as parts of a `Clock`."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def on_train_batch_start(self, *_: Any, **__: Any) -> None:
        self._clock.enter(STEPS)

    def on_train_batch_end(self, *_: Any, **__: Any) -> None:
        self._clock.leave()

    def on_validation_start(self, *_: Any, **__: Any) -> None:
        self._clock.enter(VALIDATION)

    def on_validation_end(self, *_: Any, **__: Any) -> None:
        self._clock.leave()


def instrument(clock: Clock) -> None:
    """Count what a cell does in this process by part."""
    clock.watch("config and identity", program, "resolve", "identify")
    clock.watch("trainer, model and callbacks made", TrainingRun, "_make_trainer")
    clock.watch(
        "trainer, model and callbacks made", TransformerModule, "setup", "configure_optimizers"
    )
    clock.watch("data", TextDataModule, "setup", "train_dataloader", "val_dataloader")
    clock.watch("data", run, "data_module")
    clock.watch("data", TranslationRows, "__getitem__", "sampler", "targets")
    clock.watch("checkpoints", ModelCheckpoint, "on_validation_end", "on_train_epoch_end")
    clock.watch("logging", Events, "log_metrics", "save", "finalize")
    clock.watch("logging", Curves, "log_metrics", "save", "finalize")
    clock.watch("pictures", Pictures, "on_train_start", "on_train_end")
    clock.watch("result and files", run, "write_result")
    clock.watch("result and files", TrainingRun, "_join_logs", "_prepare_folder")
    clock.watch("Lightning's loop and callbacks", pl.Trainer, "fit")
    made = TrainingRun._make_trainer

    def with_marks(self: TrainingRun) -> pl.Trainer:
        trainer = made(self)
        trainer.callbacks.append(Marks(clock))  # pyright: ignore[reportAttributeAccessIssue]
        return trainer

    TrainingRun._make_trainer = with_marks


def cell(job: Job, sender: Any, profile: bool) -> None:
    """Run a cell in this process, and send the seconds of its parts."""
    clock, profiler = Clock(), cProfile.Profile(time.process_time)
    if profile:
        profiler.enable()
    else:
        instrument(clock)
    run_rank(job, 0)
    profiler.disable()
    clock.enter(REST)
    sender.send(dict(clock.seconds))
    if profile:
        profiler.dump_stats(str(job.folder.path.parent / "profile"))


def in_child(function: Callable[..., Any], *arguments: Any) -> tuple[Any, float]:
    """Call `function` with a pipe in a child; return what it sent, and the child's CPU seconds."""
    receiver, sender = FORK.Pipe(duplex=False)
    before = children()
    child = FORK.Process(target=function, args=(*arguments[:1], sender, *arguments[1:]))
    child.start()
    sender.close()
    try:
        sent = receiver.recv()
    except EOFError:
        sys.exit("a cell failed; its error is above")
    child.join()
    return sent, children() - before


def children() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def planned(tree: dict[str, Any], sender: Any) -> None:
    """Prepare the corpus of a cell, and send its id."""
    config = program.resolve(tree, "demo")
    program.prepare(config["data"])
    sender.send(program.identify(config).id)


def measure(spec: GridSpec, number: int, profile: bool = False) -> dict[str, float]:
    """Return the CPU seconds of the parts of a cell; with `profile`, print a profile instead."""
    tree = cell_tree(spec.base_config, list(combinations(spec))[number])
    identity, _ = in_child(planned, tree)
    slot = Slot(group=0, visible=None, devices=1, threads=1, sharing=1, workers=2)
    with tempfile.TemporaryDirectory() as folder:
        job = Job(
            program=program.__name__,
            folder=RunFolder(Path(folder) / "cell"),
            attempt=1,
            tree=tree,
            identity=identity,
            slot=slot,
            metric=None,
            keep="all",
        )
        seconds, whole = in_child(cell, job, profile)
        if profile:
            shown = pstats.Stats(str(Path(folder) / "profile"))
            shown.strip_dirs().sort_stats("cumulative").print_stats(100)
    seconds["start and end of the process"] = whole - sum(seconds.values())
    return seconds


def used(code: str) -> dict[str, float]:
    """Run `code` in a new Python and return the JSON of its last line, or its CPU seconds."""
    before = children()
    done = subprocess.run(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True
    )
    last = done.stdout.splitlines()[-1:]
    return json.loads(last[0]) if last else {"seconds": children() - before}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--cells", type=int, nargs="+", default=[0, 10, 20, 30])
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--profile", type=int, metavar="CELL", help="profile this cell instead")
    parser.add_argument("--grid", action="store_true", help="also run the whole demo")
    options = parser.parse_args()
    spec = read_spec("demo")
    if options.profile is not None:
        measure(spec, options.profile, profile=True)
        return
    seen = [measure(spec, cell) for cell in options.cells for _ in range(options.rounds)]
    names = sorted({name for each in seen for name in each})
    table = {name: statistics.fmean(each.get(name, 0.0) for each in seen) for name in names}
    cells = len(list(combinations(spec)))
    table["start of the fork server / cells"] = used(SERVER)["seconds"] / cells
    if options.grid:
        with tempfile.TemporaryDirectory() as folder:
            code = GRID.format(folder=folder)
            table |= {name: seconds / cells for name, seconds in used(code).items()}
    show(table)


def show(table: dict[str, float]) -> None:
    """Print the table, the largest part first, and what is neither steps nor validation."""
    whole = sum(table.values())
    besides = whole - table[STEPS] - table[VALIDATION]
    rows = sorted(table.items(), key=lambda row: -row[1])
    rows += [("besides steps and validation", besides), ("whole", whole)]
    print("| part | CPU s | % |\n|---|---|---|")
    for name, seconds in rows:
        print(f"| {name} | {seconds:.3f} | {100 * seconds / whole:.1f} |")


if __name__ == "__main__":
    # As the supervisor sets it, before any library is loaded.
    if "OMP_NUM_THREADS" not in os.environ:
        with cell_environment():
            share_cores(1)
            os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
    main()
