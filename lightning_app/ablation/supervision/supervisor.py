"""The loop that runs cells of a grid on a host, and records how each of them ended."""

import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from optuna.trial import Trial

from lightning_app.ablation.display import Display, clock
from lightning_app.ablation.grid import Grid
from lightning_app.ablation.queue.pruning import Reports
from lightning_app.ablation.queue.queue import Claim, Queue
from lightning_app.ablation.queue.retry import StorageLost
from lightning_app.ablation.supervision.locks import if_free
from lightning_app.ablation.supervision.options import Options
from lightning_app.ablation.supervision.process import (
    DISK_FULL,
    FAILED,
    HELD,
    OUT_OF_MEMORY,
    Job,
    run_rank,
)
from lightning_app.ablation.supervision.process_cleanup import end_marked
from lightning_app.ablation.supervision.slots import Slot, Slots
from lightning_app.ablation.supervision.stopping import Interrupted, Stop
from lightning_app.ablation.supervision.workers import kill, start
from lightning_app.atomic_write import disk_full, has_no_room, move, write_whole, writing_in
from lightning_app.errors import UserError
from lightning_app.plugins import given
from lightning_app.provenance import command_line
from lightning_app.run_state import RunState, read_progress
from lightning_app.task_facts import LOSS

MOST_DEATHS = 3  # attempts of a cell that may be killed, run out of memory or hang
SERVER_ENDED = 255  # multiprocessing's exit code of children whose fork server has ended

_TICK = 0.2  # seconds
_INDEX_EVERY = 20.0  # seconds
_ASK_EVERY = 5.0  # seconds between queries about other supervisors
_STRAGGLERS = 15.0  # seconds that ranks may take to end after the first of them, or the result
_LOOKS = 1.6  # times `lost_after`: a lost supervisor is found within 1.5 times
_GRACE = 120.0  # seconds that a cell may take to save its state


@dataclass
class Running:
    """A running cell: its claim, its processes (one for each rank), and the time of progress."""

    claim: Claim
    job: Job
    ranks: list[ForkServerProcess]
    trial: Trial | None  # what a pruner needs
    since: float = field(default_factory=time.monotonic)
    moved: float = field(default_factory=time.monotonic)
    mark: int = 0  # modification time of its progress file, by the clock of that file system
    first_end: float | None = None
    hung: bool = False

    @property
    def left(self) -> list[ForkServerProcess]:
        return [rank for rank in self.ranks if rank.exitcode is None]

    def look(self) -> None:
        """Record progress. Clocks of file systems differ, so only a change of the time counts."""
        try:
            mark = self.job.record.progress.stat().st_mtime_ns
        except FileNotFoundError:
            return
        if mark != self.mark:
            self.mark, self.moved = mark, time.monotonic()


class Supervisor:
    """Start cells in free slots until the queue is empty, a signal arrives or the time is over.

    Args:
        grid: The grid.
        queue: Its cells that are to run.
        slots: The slots for the cells.
        options: The time limits for cells without progress and for supervisors without heartbeat,
            and whether to wait while others run cells, which may be lost. Without waiting, this
            supervisor ends once it knows the cells that are lost by now.
        stop: The signals that have arrived.
        program: The module that trains a cell.
        index: Called with the grid's folder from time to time.
        until: When the last cell may start (monotonic seconds).
    """

    def __init__(
        self,
        grid: Grid,
        queue: Queue,
        slots: Slots,
        options: Options,
        stop: Stop,
        program: str,
        index: Callable[[Path], object],
        until: float,
    ) -> None:
        self._grid = grid
        self._queue = queue
        self._slots = slots
        self._stop = stop
        self._program = program
        self._index_with = index
        self._until = until
        self._hang_limit = options.hang_limit
        self._patience = inf if options.wait else _LOOKS * options.lost_after
        self._idle = 0.0
        self._reports = Reports() if grid.prunes else None
        self._running: list[Running] = []
        self._pending: Claim | None = None  # a claim that needs a device for itself
        self._indexed = time.monotonic()
        self._empty = -inf  # when the queue was last found empty
        self._looked = -inf  # when others were last found at work

    def run(self, total: int) -> None:
        """Run cells; `total` is their present number. Raises `Interrupted`."""
        self._display = Display(self._grid.name, total)
        try:
            while not self._over():
                self._drop(self._queue.tend())
                self._fill()
                if not self._running and not self._others_may_lose():
                    break
                self._wait()
            self._put_back()
        except (FileNotFoundError, StorageLost) as error:
            if self._grid.folder.plan.is_file():
                raise
            raise UserError(
                f"{self._grid.folder}: was removed while cells ran; give the same command again"
            ) from error
        finally:
            self._save()  # also if the storage is lost
            for each in self._running:
                self._end(each)
            self._display.close()
        self._index(every=0.0)
        if self._stop.requested:
            raise Interrupted

    def _over(self) -> bool:
        return self._stop.requested or time.monotonic() >= self._until

    # Starting.

    def _fill(self) -> None:
        while not self._over():
            claim, self._pending = self._pending, None
            if claim is None:
                if self._slots.are_full or not self._may_ask():
                    return
                claim = self._queue.pop()
                if claim is None:
                    self._empty = time.monotonic()
                    return
            slot = self._slots.take(alone=claim.alone)
            if slot is None:
                self._pending = claim  # until a device has no other cell
                return
            self._start(claim, slot)

    def _may_ask(self) -> bool:
        """Whether to ask the queue: always if it may have cells, else every few seconds."""
        return self._queue.has_candidates or time.monotonic() - self._empty >= _ASK_EVERY

    def _start(self, claim: Claim, slot: Slot) -> None:
        folder = self._grid.run(claim.cell)
        with writing_in(folder.path):
            if self._grid.state(claim.cell, with_metric=False).short:
                move(folder.result, folder.result.with_name(f"{folder.result.name}.short"))
            attempt = folder.last_attempt() + 1
            while folder.attempt(attempt).path.exists():  # another supervisor has just begun it
                attempt += 1
            folder.attempt(attempt).path.mkdir(parents=True)
        end_marked(folder.attempt(number).path for number in range(1, attempt))
        job = self._job(claim, attempt, slot)
        self._looked = -inf
        each = Running(claim, job, [], None if self._reports is None else self._queue.trial(claim))
        self._running.append(each)
        for rank in range(slot.devices):
            each.ranks.append(start(run_rank, job, rank))

    def _job(self, claim: Claim, attempt: int, slot: Slot) -> Job:
        spec = self._grid.spec
        return Job(
            program=self._program,
            folder=self._grid.run(claim.cell),
            attempt=attempt,
            tree=self._grid.tree(claim.cell),
            identity=claim.cell.id,
            slot=slot,
            metric=spec.metric if self._grid.prunes else None,
            keep=spec.checkpoints,
            command=tuple(command_line()),
            plugins=given(),
        )

    def _others_may_lose(self) -> bool:
        """Whether this supervisor waits for cells that may come back to the queue."""
        if self._pending is not None or time.monotonic() - self._looked < _ASK_EVERY:
            return True
        others = self._queue.elsewhere()
        if not others:
            self._empty = -inf
            return self._queue.settle() > 0
        now = time.monotonic()
        if self._looked == -inf:
            self._display.say(f"{others} cells run elsewhere; waiting to take over lost ones")
            self._idle = now
        self._looked = now
        return now - self._idle < self._patience

    # Watching.

    def _wait(self) -> None:
        sentinels = [rank.sentinel for each in self._running for rank in each.left]
        if sentinels:
            wait(sentinels, timeout=_TICK)
        else:
            time.sleep(_TICK)
        for each in list(self._running):
            if self._has_ended(each):
                self._conclude(each)
                self._forget(each)
                self._index(every=_INDEX_EVERY)
            elif self._reports is not None and each.trial is not None:
                self._queue.patiently(
                    self._reports.look, each.trial, each.job.folder, each.job.attempt
                )
        self._display.update(lambda: [self._look(each) for each in self._running])

    def _has_ended(self, each: Running) -> bool:
        """Whether all ranks have ended, or must be killed: they hang, or outlive the result."""
        now = time.monotonic()
        if not each.left:
            return True
        if len(each.left) < len(each.ranks) or each.job.is_over:
            each.first_end = each.first_end or now
            return now - each.first_end > _STRAGGLERS
        each.look()
        each.hung = now - each.moved > self._hang_limit
        return each.hung

    def _look(self, each: Running) -> tuple[str, Mapping[str, Any] | None]:
        return each.claim.cell.name, read_progress(each.job.folder, each.job.attempt)

    def _drop(self, taken: Sequence[Claim]) -> None:
        """End cells that another supervisor has taken over; it continues from what they saved."""
        trials = {claim.trial for claim in taken}
        if self._pending is not None and self._pending.trial in trials:
            self._pending = None
        for each in [each for each in self._running if each.claim.trial in trials]:
            self._display.say(f"{each.claim.cell.name}: taken over by another supervisor")
            self._end(each)
            self._forget(each)

    # Ending.

    def _conclude(self, each: Running) -> None:
        """Record the results on disk of processes that have ended."""
        codes = [rank.exitcode for rank in each.ranks]  # None: killed by us
        self._end(each)
        run = self._grid.state(each.claim.cell, with_metric=False)
        if run.result is not None or run.pruned is not None:
            self._enter(each, run)
        elif DISK_FULL in codes or has_no_room(self._grid.folder.path):
            each.job.error(0).unlink(missing_ok=True)
            raise disk_full(self._grid.folder.path)
        elif each.hung:
            self._died(each, f"no progress for {clock(self._hang_limit)}")
        elif killed := [code for code in codes if code is not None and _is_kill(code)]:
            self._died(each, f"killed ({_name(killed[0])})")
        elif OUT_OF_MEMORY in codes:
            self._died(each, "out of memory", alone=each.job.slot.sharing > 1)
        elif HELD in codes:
            self._queue.put_back(each.claim, "another process held the run")
            self._display.say(f"{each.claim.cell.name}: another process holds the run, put back")
        elif FAILED in codes:
            self._fail(each, self._first_error(each))
        else:
            self._fail(each, f"ended with exit code {codes[0]} and without a result\n")

    def _enter(self, each: Running, run: RunState) -> None:
        if run.pruned is not None:
            self._queue.pruned(each.claim, run.pruned)
            self._say(each, "pruned", f"at step {run.pruned['step']}")
        elif run.result is not None:
            self._queue.done(each.claim, run.result)
            loss = run.result["metrics"].get(LOSS)
            self._say(each, run.word, f"{LOSS} {'-' if loss is None else f'{loss:.4f}'}")

    def _died(self, each: Running, why: str, alone: bool = False) -> None:
        """Queue a cell again that did not end by its own error, unless this happened too often."""
        name, deaths = each.claim.cell.name, each.claim.deaths + 1
        if self._stop.requested:  # the cells received the signal, too
            self._queue.put_back(each.claim, "interrupted")
        elif deaths < MOST_DEATHS:
            self._queue.put_back(each.claim, why, death=True, alone=alone)
            self._display.say(f"{name}: {why}, put back")
        else:
            self._fail(each, f"{MOST_DEATHS} attempts ended early, the last: {why}\n")

    def _fail(self, each: Running, error: str) -> None:
        """Write the error into the folder of the attempt, and record it in the queue."""
        write_whole(each.job.record.error, error)
        line = error.rstrip().rpartition("\n")[2]
        self._queue.failed(each.claim, line)
        self._say(each, "failed", line)

    def _first_error(self, each: Running) -> str:
        """The error of the rank that failed first; the errors of the others follow from it."""
        paths = [each.job.error(rank) for rank in range(len(each.ranks))]
        found = sorted((path for path in paths if path.is_file()), key=lambda p: p.stat().st_mtime)
        text = found[0].read_text(encoding="utf-8", errors="replace") if found else ""
        return text or "no message\n"

    def _say(self, each: Running, status: str, detail: str) -> None:
        seconds = time.monotonic() - each.since
        self._display.finished(each.claim.cell.name, status, detail, seconds)

    def _end(self, each: Running) -> None:
        """Kill the remaining processes of an attempt and all that it started."""
        kill(*each.ranks)
        end_marked([each.job.record.path])
        each.job.record.meeting.unlink(missing_ok=True)

    def _forget(self, each: Running) -> None:
        self._running.remove(each)
        self._empty = -inf  # the cell may wait in the queue again
        self._slots.give_back(each.job.slot)
        if self._reports is not None and each.trial is not None:
            self._reports.forget(each.trial)

    def _save(self, tend: Callable[[], object] = lambda: None) -> None:
        """Make the running cells save their state, and wait for them to end, up to a limit."""
        running = [each for each in self._running if each.left]
        if running:
            self._display.say(
                f"{len(running)} cells save their state (a second signal ends them at once)"
            )
        for each in running:
            for rank in each.left:
                rank.terminate()  # a suspended process receives it once it continues
        until = time.monotonic() + _GRACE
        while any(each.left for each in running) and self._stop.count < 2:
            if time.monotonic() > until:
                break
            tend()
            time.sleep(_TICK)

    def _put_back(self) -> None:
        """Kill the running cells and queue them again; results that are complete count."""
        self._save(self._queue.tend)
        while self._running:
            each = self._running[-1]
            self._end(each)
            run = self._grid.state(each.claim.cell, with_metric=False)
            if run.result is not None or run.pruned is not None:
                self._enter(each, run)
            else:
                self._queue.put_back(each.claim, "interrupted")
            self._forget(each)
        if self._pending is not None:
            self._queue.put_back(self._pending, "interrupted")

    def _index(self, every: float) -> None:
        """Write the index of the runs. One supervisor at a time writes it."""
        if time.monotonic() - self._indexed >= every:
            with if_free(self._grid.folder.report_lock) as free:
                if free:
                    self._index_with(self._grid.folder.path)
            self._indexed = time.monotonic()


def _is_kill(code: int) -> bool:
    return code < 0 or code == SERVER_ENDED


def _name(code: int) -> str:
    return "the fork server ended" if code > 0 else signal.Signals(-code).name
