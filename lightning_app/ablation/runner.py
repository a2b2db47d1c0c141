"""`ablate run`: one supervisor that runs the missing cells of a grid, each in its own process."""

import os
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from math import inf
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from optuna.trial import Trial

from lightning_app.ablation.display import Display
from lightning_app.ablation.grid import Grid
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
from lightning_app.ablation.runs import last_attempt, read_progress, read_run, run_folder
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
from lightning_app.files import disk_full, has_no_room, write_whole, writing_in

PROGRAM = "lightning_app.ablation.program"
MOST_DEATHS = 3  # attempts of a cell that may be killed in one run of the supervisor
SERVER_ENDED = 255  # what multiprocessing reports where nobody could wait for the child

_TICK = 0.2  # seconds
_INDEX_EVERY = 20.0  # seconds


@dataclass(frozen=True)
class Running:
    cell: Cell
    trial: Trial
    attempt: int
    process: ForkServerProcess
    since: float = field(default_factory=time.monotonic)


@dataclass(frozen=True)
class Ending:
    """How a run of the supervisor ended: whether it had cells to run, whether some are left."""

    ran: bool
    late: bool


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


@contextmanager
def clean_refusal(directory: Path) -> Iterator[None]:
    """Take a grid's folder away again where a mistake ends the command that made it."""
    new = not directory.exists()
    try:
        yield
    except UserError:
        if new:
            shutil.rmtree(directory, ignore_errors=True)
        raise


def default_workers() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def current_plan(grid: Grid, directory: Path, make: Callable[[], Plan]) -> Plan:
    """The saved plan of a grid where it still holds, else a new one, saved. Under the lock."""
    plan = load_plan(directory)
    if plan is None or plan.made_from != made_from(grid):
        plan = make()
        check_folder(directory, grid, plan)
        with writing_in(directory):
            save_plan(directory, grid, plan)
    return plan


def run_grid(
    grid: Grid,
    directory: Path,
    *,
    workers: int | None = None,
    seconds: float = inf,
    retry_failed: bool = False,
    program: str = PROGRAM,
    index: Callable[[Path], object] = lambda directory: None,
) -> tuple[Plan, Ending]:
    """Run what is missing of a grid, `workers` cells at a time, by default one for each core.

    After `seconds` no cell starts and those that run are put back. `program` is the module that
    resolves, prepares and trains; `index` is called with the grid's folder now and then.
    Raises `UserError`, `Interrupted` when a signal came, and `OSError` (ENOSPC) when the disk is
    full. Whatever happens, what is done stays done and no process is left.
    """
    until = time.monotonic() + seconds
    cores = default_workers()
    workers = max(1, min(workers or cores, sum(1 for _ in combinations(grid))))
    threads = max(1, cores // workers)
    preload(program)
    with (
        clean_refusal(directory),
        supervisor_lock(directory),
        cell_environment(threads),
        Stop().listening() as stop,
    ):
        plan = current_plan(grid, directory, lambda: ask(stop, make_plan, program, grid))
        queue = Queue(directory, plan, retry_failed)
        for note in queue.notes:
            print(note, flush=True)
        total = queue.waiting
        if total and time.monotonic() < until:
            print(f"{grid.name}: {total} cells to run; preparing their data", flush=True)
            ask(stop, prepare_data, program, plan.data)
            launch = partial(_launch, directory, grid, program, threads)
            Supervisor(directory, queue, launch, workers, index, stop, until).run(grid.name, total)
        return plan, Ending(ran=total > 0, late=queue.waiting > 0)


def _launch(
    directory: Path, grid: Grid, program: str, threads: int, cell: Cell, attempt: int
) -> ForkServerProcess:
    folder, tree = run_folder(directory, cell), cell_tree(grid.base_config, cell.axes)
    return start(run_attempt, program, folder, attempt, tree, cell.id, threads)


class Supervisor:
    """Keeps `workers` cells running until the queue is empty, a signal comes or time is over."""

    def __init__(
        self,
        directory: Path,
        queue: Queue,
        launch: Callable[[Cell, int], ForkServerProcess],
        workers: int,
        index: Callable[[Path], object],
        stop: Stop,
        until: float,
    ) -> None:
        self._directory = directory
        self._queue = queue
        self._launch = launch
        self._workers = workers
        self._index = index
        self._stop = stop
        self._until = until
        self._running: list[Running] = []
        self._deaths: Counter[str] = Counter()
        self._indexed = time.monotonic()

    def run(self, name: str, total: int) -> None:
        self._display = Display(name, total)
        try:
            while not self._over():
                self._fill()
                if not self._running:
                    break
                self._wait()
            self._put_back()
        finally:
            for each in self._running:
                kill(each.process)
            self._display.close()
        self._index(self._directory)
        if self._stop.requested:
            raise Interrupted

    def _over(self) -> bool:
        return self._stop.requested or time.monotonic() >= self._until

    def _fill(self) -> None:
        while len(self._running) < self._workers and not self._over():
            popped = self._queue.pop()
            if popped is None:
                return
            cell, trial = popped
            folder = run_folder(self._directory, cell)
            with writing_in(folder):
                attempt = last_attempt(folder) + 1
                (folder / "attempts" / str(attempt)).mkdir(parents=True)
            self._running.append(Running(cell, trial, attempt, self._launch(cell, attempt)))

    def _wait(self) -> None:
        ended = wait([each.process.sentinel for each in self._running], timeout=_TICK)
        for each in [each for each in self._running if each.process.sentinel in ended]:
            self._conclude(each)
            self._running.remove(each)
            if time.monotonic() - self._indexed > _INDEX_EVERY:
                self._index(self._directory)
                self._indexed = time.monotonic()
        self._display.update(lambda: [self._look(each) for each in self._running])

    def _look(self, each: Running) -> tuple[str, Mapping[str, Any] | None]:
        folder = run_folder(self._directory, each.cell)
        return each.cell.name, read_progress(folder, each.attempt)

    def _conclude(self, each: Running) -> None:
        """Enter what a process that has ended left on disk."""
        kill(each.process)  # with whatever it started
        run, code = read_run(self._directory, each.cell), each.process.exitcode or 0
        error = run_folder(self._directory, each.cell) / f"attempts/{each.attempt}/error.txt"
        if run.result is not None:
            self._queue.done(each.trial, run.result)
            nll = run.result["metrics"].get("val/nll")
            self._say(each, run.result["status"], f"val/nll {'-' if nll is None else f'{nll:.4f}'}")
        elif code == DISK_FULL or has_no_room(self._directory):
            error.unlink(missing_ok=True)
            raise disk_full(self._directory)
        elif code == FAILED:
            self._fail(each, run.error or "no message")
        elif 0 <= code != SERVER_ENDED:
            write_whole(error, f"ended with exit code {code} and without a result\n")
            self._fail(each, f"ended with exit code {code} and without a result")
        else:
            reason = "the fork server ended" if code > 0 else signal.Signals(-code).name
            self._deaths[each.cell.id] += 1
            if self._deaths[each.cell.id] < MOST_DEATHS:
                self._queue.put_back(each.cell, each.trial, f"killed: {reason}")
                self._display.say(f"{each.cell.name}: killed ({reason}), put back")
            else:
                write_whole(error, f"killed {MOST_DEATHS} times, at last by {reason}\n")
                self._fail(each, f"killed {MOST_DEATHS} times, at last by {reason}")

    def _fail(self, each: Running, error: str) -> None:
        self._queue.failed(each.trial, error)
        self._say(each, "failed", error)

    def _say(self, each: Running, status: str, detail: str) -> None:
        self._display.finished(each.cell.name, status, detail, time.monotonic() - each.since)

    def _put_back(self) -> None:
        """Stop the cells that still run; what they have finished meanwhile counts."""
        while self._running:
            each = self._running[-1]
            kill(each.process)
            run = read_run(self._directory, each.cell)
            if run.result is not None:
                self._queue.done(each.trial, run.result)
            else:
                self._queue.put_back(each.cell, each.trial, "interrupted")
            self._running.pop()
