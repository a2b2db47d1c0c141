"""`ablate run`: one supervisor that runs the missing cells of a grid, each in its own process."""

import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import inf
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import yaml
from filelock import FileLock, Timeout
from optuna.trial import Trial

from lightning_app.ablation.display import Display
from lightning_app.ablation.files import disk_full, has_no_room, write_whole, writing_in
from lightning_app.ablation.grid import Grid, read_grid
from lightning_app.ablation.plan import (
    Cell,
    Plan,
    cell_tree,
    check_folder,
    combinations,
    load_plan,
    made_from,
    save_plan,
)
from lightning_app.ablation.process import (
    DISK_FULL,
    FAILED,
    make_plan,
    prepare_data,
    run_attempt,
)
from lightning_app.ablation.runs import Run, last_attempt, read_progress, read_run, run_folder
from lightning_app.ablation.study import Queue
from lightning_app.ablation.workers import (
    Interrupted,
    Stop,
    ask,
    cell_environment,
    kill,
    preload,
    start,
)
from lightning_app.errors import UserError

PROGRAM = "lightning_app.ablation.program"
MOST_DEATHS = 3  # attempts of a cell that may be killed in one run of the supervisor
INTERRUPTED = 130

_TICK = 0.2  # seconds
_INDEX_EVERY = 20.0  # seconds


@dataclass(frozen=True)
class Running:
    cell: Cell
    trial: Trial
    attempt: int
    process: ForkServerProcess
    since: float = field(default_factory=time.monotonic)


@contextmanager
def supervisor_lock(directory: Path) -> Iterator[None]:
    """Hold a grid's folder, which is made if need be.

    Raises `UserError` where another supervisor holds it, or where it cannot be written.
    """
    holder = directory / ".supervisor.pid"
    lock = FileLock(directory / ".supervisor.lock", timeout=0)
    with writing_in(directory):
        directory.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire()
        except Timeout as error:
            pid = holder.read_text().strip() if holder.is_file() else "unknown"
            raise UserError(f"{directory}: process {pid} is already running this grid") from error
    try:
        with writing_in(directory):
            write_whole(holder, f"{os.getpid()}\n")
        yield
    finally:
        lock.release()


def run_grid(
    grid: Grid,
    directory: Path,
    *,
    workers: int | None = None,
    seconds: float = inf,
    retry_failed: bool = False,
    program: str = PROGRAM,
    index: Callable[[Path], object] = lambda directory: None,
) -> int:
    """Run what is missing of a grid and return the exit code: 0, 1 with failed cells, or 130.

    `workers` cells run at a time, by default one for each core. After `seconds` no cell starts
    and those that run are put back. `program` is the module that resolves, prepares and trains;
    `index` is called with the grid's folder now and then, and at the end.
    Raises `UserError`, and `OSError` (ENOSPC) when the disk is full; what is done stays done.
    """
    until = time.monotonic() + seconds
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    workers = min(workers or cores or 1, sum(1 for _ in combinations(grid)) or 1)
    threads = max(1, (cores or 1) // workers)
    preload(program)
    with supervisor_lock(directory), cell_environment(threads), Stop().listening() as stop:
        try:
            plan = current_plan(grid, directory, lambda: ask(stop, make_plan, program, grid))
            queue = Queue(directory, plan, retry_failed)
            if queue.note:
                print(queue.note, flush=True)
            supervisor = Supervisor(
                directory, grid, plan, queue, workers, threads, program, stop, until, index
            )
            if queue.waiting and time.monotonic() < until:
                ask(stop, prepare_data, program, plan.data)
                supervisor.run()
        except Interrupted:
            pass
        return summary(plan, directory, stop.requested)
