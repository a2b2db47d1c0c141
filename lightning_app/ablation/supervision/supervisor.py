"""The loop that keeps a host busy with cells of a grid, and enters how each of them ended."""

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
from lightning_app.ablation.queue.patience import StorageLost
from lightning_app.ablation.queue.pruning import Reports
from lightning_app.ablation.queue.queue import Claim, Queue
from lightning_app.ablation.runs import (
    Run,
    is_over,
    last_attempt,
    read_progress,
    read_run,
    run_folder,
)
from lightning_app.ablation.supervision.guard import REPORT, Interrupted, if_free
from lightning_app.ablation.supervision.leftovers import end_marked
from lightning_app.ablation.supervision.process import (
    DISK_FULL,
    FAILED,
    HELD,
    OUT_OF_MEMORY,
    Job,
    run_rank,
)
from lightning_app.ablation.supervision.slots import Slots
from lightning_app.ablation.supervision.workers import Stop, kill, start
from lightning_app.errors import UserError
from lightning_app.files import disk_full, has_no_room, write_whole, writing_in

MOST_DEATHS = 3  # attempts of a cell that may be killed, run out of memory or hang
SERVER_ENDED = 255  # what multiprocessing reports where nobody could wait for the child

_TICK = 0.2  # seconds
_INDEX_EVERY = 20.0  # seconds
_ASK_EVERY = 5.0  # seconds between looks at what other supervisors do
_STRAGGLERS = 15.0  # seconds that ranks may take to end after the first of them, or the result
_LOOKS = 1.6  # a supervisor that is lost is found within one and a half times that
_GRACE = 120.0  # seconds that a cell may take to save its state


@dataclass
class Running:
    """A cell at work: its claim, its processes, one a rank, and when it last showed progress."""

    claim: Claim
    job: Job
    ranks: list[ForkServerProcess]
    trial: Trial | None  # what a pruner needs
    since: float = field(default_factory=time.monotonic)
    moved: float = field(default_factory=time.monotonic)
    mark: int = 0  # when the file of its progress was last written, by the file's own clock
    first_end: float | None = None
    hung: bool = False

    @property
    def left(self) -> list[ForkServerProcess]:
        return [rank for rank in self.ranks if rank.exitcode is None]

    def look(self) -> None:
        """Note progress. Clocks of file systems differ; that a time changes is all that counts."""
        try:
            mark = (self.job.record / "progress.json").stat().st_mtime_ns
        except FileNotFoundError:
            return
        if mark != self.mark:
            self.mark, self.moved = mark, time.monotonic()


class Supervisor:
    """Keeps the slots filled until the queue is empty, a signal comes or time is over.

    Args:
        directory: The grid's folder.
        queue: Its cells.
        slots: Where they run.
        job: Makes a job of a claim, the number of an attempt, and a slot.
        index: Called with the grid's folder now and then.
        stop: Whether a signal came.
        until: When no more cell starts (monotonic seconds).
        hang_limit: Seconds without progress after which a cell is ended.
        wait: Whether to stay as long as others run cells, which they may lose; if not, only until
            those that have been lost by now are known.
        lost_after: Seconds after which a silent supervisor's cells are lost.
        prune: Whether the grid has a pruner.
    """

    def __init__(
        self,
        directory: Path,
        queue: Queue,
        slots: Slots,
        job: Callable[[Claim, int, Any], Job],
        index: Callable[[Path], object],
        stop: Stop,
        *,
        until: float,
        hang_limit: float,
        wait: bool,
        lost_after: float,
        prune: bool,
    ) -> None:
        self._directory = directory
        self._queue = queue
        self._slots = slots
        self._job = job
        self._index_with = index
        self._stop = stop
        self._until = until
        self._hang_limit = hang_limit
        self._patience = inf if wait else _LOOKS * lost_after
        self._idle = 0.0
        self._reports = Reports() if prune else None
        self._running: list[Running] = []
        self._pending: Claim | None = None  # needs a device for itself
        self._indexed = time.monotonic()
        self._empty = -inf  # when the queue was last found empty
        self._looked = -inf  # when others were last found at work

    def run(self, name: str, total: int) -> None:
        self._display = Display(name, total)
        try:
            while not self._over():
                self._drop(self._queue.tend())
                self._fill()
                if not self._running and not self._others_may_lose():
                    break
                self._wait()
            self._put_back()
        except (FileNotFoundError, StorageLost) as error:
            if (self._directory / "plan.json").is_file():
                raise
            raise UserError(
                f"{self._directory}: was removed while cells ran; the same command begins again"
            ) from error
        finally:
            self._save()  # also where the storage is lost
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
        """Whether to ask the queue: at once where it may have cells, else not at every tick."""
        return self._queue.has_candidates or time.monotonic() - self._empty >= _ASK_EVERY

    def _start(self, claim: Claim, slot: Any) -> None:
        folder = run_folder(self._directory, claim.cell)
        with writing_in(folder):
            attempt = last_attempt(folder) + 1
            job = self._job(claim, attempt, slot)
            while job.record.exists():  # of another supervisor that has just begun
                attempt += 1
                job = self._job(claim, attempt, slot)
            job.record.mkdir(parents=True)
        end_marked(folder / "attempts" / str(k) for k in range(1, attempt))
        self._looked = -inf
        each = Running(claim, job, [], None if self._reports is None else self._queue.trial(claim))
        self._running.append(each)
        for rank in range(slot.devices):
            each.ranks.append(start(run_rank, job, rank))

    def _others_may_lose(self) -> bool:
        """Whether cells may come back to the queue, for which this supervisor stays."""
        if self._pending is not None or time.monotonic() - self._looked < _ASK_EVERY:
            return True
        others = self._queue.elsewhere()
        if not others:
            self._empty = -inf
            return self._queue.settle() > 0
        now = time.monotonic()
        if self._looked == -inf:
            self._display.say(f"{others} cells run elsewhere; waiting to take over what is lost")
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
        """Whether all ranks are over, or must be: they hang, or outlive what they work for."""
        now = time.monotonic()
        if not each.left:
            return True
        prunes = self._reports is not None
        if len(each.left) < len(each.ranks) or is_over(each.job.folder, prunes):
            each.first_end = each.first_end or now
            return now - each.first_end > _STRAGGLERS
        each.look()
        each.hung = now - each.moved > self._hang_limit
        return each.hung

    def _look(self, each: Running) -> tuple[str, Mapping[str, Any] | None]:
        return each.claim.cell.name, read_progress(each.job.folder, each.job.attempt)

    def _drop(self, taken: Sequence[Claim]) -> None:
        """End cells that another supervisor has taken over; what they saved is there for it."""
        trials = {claim.trial for claim in taken}
        if self._pending is not None and self._pending.trial in trials:
            self._pending = None
        for each in [each for each in self._running if each.claim.trial in trials]:
            self._display.say(f"{each.claim.cell.name}: taken over by another supervisor")
            self._end(each)
            self._forget(each)

    # Ending.

    def _conclude(self, each: Running) -> None:
        """Enter what processes that have ended left on disk."""
        codes = [rank.exitcode for rank in each.ranks]  # None: ended by us
        self._end(each)
        run = read_run(self._directory, each.claim.cell)
        if run.result is not None or run.pruned is not None:
            self._enter(each, run)
        elif DISK_FULL in codes or has_no_room(self._directory):
            each.job.error(0).unlink(missing_ok=True)
            raise disk_full(self._directory)
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

    def _enter(self, each: Running, run: Run) -> None:
        if run.pruned is not None:
            self._queue.pruned(each.claim, run.pruned)
            self._say(each, "pruned", f"at step {run.pruned['step']}")
        elif run.result is not None:
            self._queue.done(each.claim, run.result)
            nll = run.result["metrics"].get("val/nll")
            self._say(each, run.word, f"val/nll {'-' if nll is None else f'{nll:.4f}'}")

    def _died(self, each: Running, why: str, alone: bool = False) -> None:
        """Put a cell back whose end says nothing about it, unless that came too often."""
        name, deaths = each.claim.cell.name, each.claim.deaths + 1
        if self._stop.requested:  # the signal was for the cells, too
            self._queue.put_back(each.claim, "interrupted")
        elif deaths < MOST_DEATHS:
            self._queue.put_back(each.claim, why, death=True, alone=alone)
            self._display.say(f"{name}: {why}, put back")
        else:
            self._fail(each, f"{MOST_DEATHS} attempts ended early, at last: {why}\n")

    def _fail(self, each: Running, error: str) -> None:
        """Leave the error with the attempt, from where it is read, and enter it."""
        write_whole(each.job.record / "error.txt", error)
        line = error.rstrip().rpartition("\n")[2]
        self._queue.failed(each.claim, line)
        self._say(each, "failed", line)

    def _first_error(self, each: Running) -> str:
        """The error of the rank that was first; that it was gone is what the others complain of."""
        paths = [each.job.error(rank) for rank in range(len(each.ranks))]
        found = sorted((path for path in paths if path.is_file()), key=lambda p: p.stat().st_mtime)
        text = found[0].read_text(encoding="utf-8", errors="replace") if found else ""
        return text or "no message\n"

    def _say(self, each: Running, status: str, detail: str) -> None:
        seconds = time.monotonic() - each.since
        self._display.finished(each.claim.cell.name, status, detail, seconds)

    def _end(self, each: Running) -> None:
        """Kill what is left of an attempt, with all that it started."""
        kill(*each.ranks)
        end_marked([each.job.record])
        each.job.meeting.unlink(missing_ok=True)

    def _forget(self, each: Running) -> None:
        self._running.remove(each)
        self._empty = -inf  # it may wait again
        self._slots.give_back(each.job.slot)
        if self._reports is not None and each.trial is not None:
            self._reports.forget(each.trial)

    def _save(self, tend: Callable[[], object] = lambda: None) -> None:
        """Have the cells that still run save their state, and wait for their end, not for ever."""
        running = [each for each in self._running if each.left]
        if running:
            self._display.say(
                f"{len(running)} cells save their state (a second signal ends them at once)"
            )
        for each in running:
            for rank in each.left:
                rank.terminate()  # one that is stopped hears it once it goes on
        until = time.monotonic() + _GRACE
        while any(each.left for each in running) and self._stop.count < 2:
            if time.monotonic() > until:
                break
            tend()
            time.sleep(_TICK)

    def _put_back(self) -> None:
        """Stop the cells that still run; what they have finished meanwhile counts."""
        self._save(self._queue.tend)
        while self._running:
            each = self._running[-1]
            self._end(each)
            run = read_run(self._directory, each.claim.cell)
            if run.result is not None or run.pruned is not None:
                self._enter(each, run)
            else:
                self._queue.put_back(each.claim, "interrupted")
            self._forget(each)
        if self._pending is not None:
            self._queue.put_back(self._pending, "interrupted")

    def _index(self, every: float) -> None:
        """Have the index of the grid written, by one supervisor at a time."""
        if time.monotonic() - self._indexed >= every:
            with if_free(self._directory / REPORT) as free:
                if free:
                    self._index_with(self._directory)
            self._indexed = time.monotonic()


def _is_kill(code: int) -> bool:
    return code < 0 or code == SERVER_ENDED


def _name(code: int) -> str:
    return "the fork server ended" if code > 0 else signal.Signals(-code).name
