"""`ablate run`: a supervisor starts the missing cells of a grid and records how each of them ends.

No run is lost or done twice."""

import errno
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from math import inf
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from shutil import disk_usage
from typing import Any

from lightning_app.config.grid import GridSpec
from lightning_app.config.identity import hinting
from lightning_app.core.errors import UserError
from lightning_app.core.files import write_whole, writing_in
from lightning_app.data.sources import corpus_of
from lightning_app.grids.display import Display, clock
from lightning_app.grids.plan import (
    Corpus,
    Grid,
    combinations,
    is_valid,
    load_plan,
    other_versions,
    reopened,
    runs_with_plugins,
)
from lightning_app.grids.plan_checks import devices_of
from lightning_app.grids.queue import Claim, Queue
from lightning_app.grids.slots import (
    Options,
    Slot,
    Slots,
    default_workers,
    slots_of,
    visible_devices,
)
from lightning_app.grids.storages import storage_spec
from lightning_app.grids.workers import (
    DISK_FULL,
    FAILED,
    HELD,
    OUT_OF_MEMORY,
    Job,
    ask,
    cell_environment,
    count_devices,
    end_marked,
    kill,
    look_here,
    make_plan,
    most_threads,
    preload,
    prepare_data,
    run_rank,
    share_cores,
    start,
)
from lightning_app.plugins import edited, loaded
from lightning_app.runs.folder import STORE, GridFolder, RunFolder
from lightning_app.runs.locks import Interrupted, Stop, if_free, supervisor_lock, turn
from lightning_app.runs.mixtures import STALE, counted, others
from lightning_app.runs.provenance import command_line
from lightning_app.runs.records import Cell, DamagedPlan, Plan, Unsound, read_json
from lightning_app.runs.run import RunState, read_progress
from lightning_app.runs.store import drop_links, link_run, put_aside
from lightning_app.scores.task_facts import LOSS

MOST_DEATHS = 3  # attempts of a cell that may be killed, run out of memory or hang
SERVER_ENDED = 255  # multiprocessing's exit code of children whose fork server has ended

_TICK = 0.2  # seconds
_INDEX_EVERY = 20.0  # seconds
_INDEX_SHARE = 0.05  # of the time of a supervisor, at most: a large grid takes seconds
_ASK_EVERY = 5.0  # seconds between queries about other supervisors
_STRAGGLERS = 15.0  # seconds for ranks to end after the first of them
_GRACE = 120.0  # seconds that a cell may take to save its state, or to end after its result
_ROOM = 1 << 16  # bytes: with fewer free, a disk is full


@dataclass(eq=False)  # each is one process or a part of it, and refers to itself
class Running:
    """A running cell: its claim, its processes (one per rank), and the time of progress.

    The cells of a pack have their list of processes in common, and in `pack` each other.
    """

    claim: Claim
    job: Job
    ranks: list[ForkServerProcess]
    pack: "list[Running]"
    since: float = field(default_factory=time.monotonic)
    moved: float = field(default_factory=time.monotonic)
    mark: int = 0  # modification time of its progress file, by the clock of that file system
    first_end: float | None = None
    hung: bool = False

    @property
    def left(self) -> list[ForkServerProcess]:
        return [rank for rank in self.ranks if rank.exitcode is None]

    @property
    def is_over(self) -> bool:
        """Whether all cells of its processes have ended."""
        return all(each.job.is_over for each in self.pack)

    def look(self) -> None:
        """Record progress, that of the whole pack.

        Clocks of file systems differ, so only a change of the time counts.
        """
        if self is not self.pack[0]:
            self.moved = self.pack[0].moved
            return
        mark = 0
        for each in self.pack:
            with suppress(FileNotFoundError):
                mark = max(mark, each.job.record.progress.stat().st_mtime_ns)
        if mark not in (0, self.mark):
            self.mark, self.moved = mark, time.monotonic()


@dataclass(eq=False)
class Supervisor:
    """Start cells in free slots until the queue is empty, a signal arrives or the time is up.

    The module `program` trains a cell; none starts after `until` (monotonic seconds). `index` is
    called with the grid's folder at intervals.
    """

    grid: Grid
    queue: Queue
    slots: Slots
    options: Options
    stop: Stop
    program: str
    index: Callable[[Path], object]
    until: float

    def __post_init__(self) -> None:
        self._running: list[Running] = []
        self._pending: Claim | None = None  # a claim that needs a device for itself
        self._said_copies = False
        self._edited: list[str] = []  # the files of plug-ins whose edit was said
        self._to_index = False  # whether a cell has ended since the index was written
        self._next_index = time.monotonic() + _INDEX_EVERY
        self._empty = -inf  # when the queue was last empty
        self._looked = -inf  # when others were last seen at work

    def run(self, total: int) -> None:
        """Run cells; `total` is their current number. Raises `Interrupted`."""
        self._display = Display(self.grid.name, total)
        try:
            while not self._over():
                self.grid.folder.plan.stat()
                self._fill()
                if self._to_index and time.monotonic() >= self._next_index:
                    self._index()  # after the start of cells, which would wait for it
                if not self._running and not self._others_may_lose():
                    break
                self._wait()
            self._put_back()
        except FileNotFoundError as error:
            if self.grid.folder.plan.is_file():
                raise
            raise UserError(
                f"{self.grid.folder}: was removed while cells ran; give the same command again"
            ) from error
        finally:
            self._save()
            for each in self._running:
                self._end(each)
            self._display.close()
        self._index()
        if self.stop.requested:
            raise Interrupted

    def _over(self) -> bool:
        return self.stop.requested or time.monotonic() >= self.until

    # Starting.

    def _fill(self) -> None:
        while not self._over():
            claim, self._pending = self._pending, None
            if claim is None:
                if self.slots.are_full or time.monotonic() - self._empty < _ASK_EVERY:
                    return
                claim = self.queue.pop()
                if claim is None:
                    self._empty = time.monotonic()
                    return
            slot = self.slots.take(alone=claim.retries.alone)
            if slot is None:
                self._pending = claim  # until a device has no other cell
                return
            self._start(self._pack(claim), slot)

    def _pack(self, first: Claim) -> list[Claim]:
        """Return a claim with those of other cells for its pack, as many as are free."""
        pack = self.grid.pack(first.cell)
        claims = [first]
        while len(claims) < pack[0]:
            claim = self.queue.pop(lambda cell: self.grid.pack(cell) == pack)
            if claim is None:
                break
            claims.append(claim)
        if len(claims) < pack[0] and not self._said_copies:
            self._said_copies = True
            self._display.say(
                f"model.pack: {pack[0]} places and {len(claims)} cells that go together; the other "
                "places train copies"
            )
        return claims

    def _start(self, claims: Sequence[Claim], slot: Slot) -> None:
        """Start a cell, or several of a pack in one process."""
        started: list[Running] = []
        ranks: list[ForkServerProcess] = []
        for claim in claims:
            folder = claim.folder
            attempt = folder.last_attempt() + 1
            with writing_in(folder.path):
                folder.attempt(attempt).path.mkdir(parents=True)
            self.queue.started(claim, attempt)
            end_marked(folder.attempt(number).path for number in range(1, attempt))
            job = Job(
                program=self.program,
                folder=folder,
                attempt=attempt,
                tree=self.grid.tree(claim.cell),
                identity=claim.cell.id,
                slot=slot,
                metric=self.grid.spec.metric if self.grid.prunes else None,
                keep=self.grid.spec.checkpoints,
                command=tuple(command_line()),
                plugins=tuple(loaded().values()),
            )
            started.append(Running(claim, job, ranks, started))
        self._looked = -inf
        self._running += started
        jobs = [each.job for each in started]
        for rank in range(slot.devices):
            ranks.append(start(run_rank, jobs[0], rank, *jobs[1:]))

    def _others_may_lose(self) -> bool:
        """Whether this supervisor waits for cells that may return to the queue."""
        if self._pending is not None or time.monotonic() - self._looked < _ASK_EVERY:
            return True
        others = self.queue.elsewhere()
        if not others:
            self._empty = -inf
            return self.queue.waiting > 0
        if self.options.wait and self._looked == -inf:
            self._display.say(f"{others} cells run elsewhere; waiting in case one is lost")
        self._looked = time.monotonic()
        return self.options.wait

    # Watching.

    def _wait(self) -> None:
        sentinels = {rank.sentinel for each in self._running for rank in each.left}
        if sentinels:
            wait(sentinels, timeout=_TICK)
        else:
            time.sleep(_TICK)
        for each in list(self._running):
            if self._has_ended(each):
                self._conclude(each)
                self._forget(each)
                self._to_index = True
        self._display.update(lambda: [self._look(each) for each in self._running])

    def _has_ended(self, each: Running) -> bool:
        """Whether all ranks have ended or must be killed, as they hang or outlive the result."""
        now = time.monotonic()
        if not each.left:
            return True
        over = each.is_over
        if over or len(each.left) < len(each.ranks):
            each.first_end = each.first_end or now
            # After its result a cell closes its loggers, which may upload, and trims checkpoints.
            limit = _GRACE if over else _STRAGGLERS
            return now - each.first_end > limit
        each.look()
        each.hung = now - each.moved > self.options.hang_limit
        return each.hung

    def _look(self, each: Running) -> tuple[str, Mapping[str, Any] | None]:
        return each.claim.cell.name, read_progress(each.job.folder, each.job.attempt)

    # Ending.

    def _conclude(self, each: Running) -> None:
        """Record the results on disk of processes that have ended."""
        codes = [rank.exitcode for rank in each.ranks]  # None: killed by us
        self._end(each)
        for file in (name for name in edited() if name not in self._edited):
            self._edited.append(file)
            does = "was edited; this grid runs the copy from its start, and the next start the edit"
            self._display.say(f"{file}: {does}")
        run = self.grid.state(each.claim.cell, with_metric=False)
        if run.result is not None or run.pruned is not None:
            self._enter(each, run)
        elif DISK_FULL in codes or disk_usage(self.grid.folder.path).free < _ROOM:
            each.job.error(0).unlink(missing_ok=True)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.grid.folder.path))
        elif each.hung:
            self._died(each, f"no progress for {clock(self.options.hang_limit)}")
        elif killed := [code for code in filter(None, codes) if code < 0 or code == SERVER_ENDED]:
            self._died(each, f"killed ({_name(killed[0])})")
        elif OUT_OF_MEMORY in codes:
            self._died(each, "out of memory", alone=each.job.slot.sharing > 1)
        elif HELD in codes:
            self.queue.put_back(each.claim, "another process held the run")
            self._display.say(f"{each.claim.cell.name}: another process holds the run, put back")
        elif FAILED in codes:
            self._fail(each, self._first_error(each))
        else:
            self._fail(each, f"ended with exit code {codes[0]} and without a result\n")

    def _enter(self, each: Running, run: RunState) -> None:
        self.queue.ended(each.claim, run)
        if run.pruned is not None:
            self._say(each, "pruned", f"at step {run.pruned['step']}")
        elif run.result is not None:
            loss = run.result["metrics"].get(LOSS)
            self._say(each, run.word, f"{LOSS} {'-' if loss is None else f'{loss:.4f}'}")

    def _died(self, each: Running, why: str, alone: bool = False) -> None:
        """Requeue a cell that did not end by its own error, unless this happened too often."""
        name, deaths = each.claim.cell.name, each.claim.retries.deaths + 1
        if self.stop.requested:  # the cells also received the signal
            self.queue.put_back(each.claim, "interrupted")
        elif deaths < MOST_DEATHS:
            self.queue.put_back(each.claim, why, death=True, alone=alone)
            self._display.say(f"{name}: {why}, put back")
        else:
            self._fail(each, f"{MOST_DEATHS} attempts ended early, the last: {why}\n")

    def _fail(self, each: Running, error: str) -> None:
        """Write the error into the folder of the attempt, and record it in the queue."""
        write_whole(each.job.record.error, error)
        line = error.rstrip().rpartition("\n")[2]
        self.queue.failed(each.claim, line)
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
        """Kill the remaining processes of an attempt and everything it started."""
        kill(*each.ranks)
        end_marked([each.job.record.path])
        each.job.record.meeting.unlink(missing_ok=True)

    def _forget(self, each: Running) -> None:
        self._running.remove(each)
        self._empty = -inf  # the cell may wait in the queue again
        if all(other.ranks is not each.ranks for other in self._running):
            self.slots.give_back(each.job.slot)

    def _save(self) -> None:
        """Make the running cells save their state, and wait a limited time for them to end."""
        running = [each for each in self._running if each.left]
        if running:
            self._display.say(
                f"{len(running)} cells save their state (a second signal ends them at once)"
            )
        for each in running:
            for rank in each.left:
                rank.terminate()  # a suspended process receives it once it resumes
        until = time.monotonic() + _GRACE
        while any(each.left for each in running) and self.stop.count < 2:
            if time.monotonic() > until:
                break
            time.sleep(_TICK)

    def _put_back(self) -> None:
        """Kill the running cells and requeue them; complete results count."""
        self._save()
        while self._running:
            each = self._running[-1]
            self._end(each)
            run = self.grid.state(each.claim.cell, with_metric=False)
            if run.result is not None or run.pruned is not None:
                self._enter(each, run)
            else:
                self.queue.put_back(each.claim, "interrupted")
            self._forget(each)
        if self._pending is not None:
            self.queue.put_back(self._pending, "interrupted")

    def _index(self) -> None:
        """Write the index of the runs. One supervisor at a time writes it."""
        began, self._to_index = time.monotonic(), False
        with if_free(self.grid.folder.report_lock) as free:
            if free:
                self.index(self.grid.folder.path)
        ended = time.monotonic()
        self._next_index = ended + max(_INDEX_EVERY, (ended - began) / _INDEX_SHARE)


def _name(code: int) -> str:
    return "the fork server ended" if code > 0 else signal.Signals(-code).name


PROGRAM = "lightning_app.grids.program"

_NVIDIA = Path("/proc/driver/nvidia/version")  # without this file there is no CUDA device


@dataclass(frozen=True, kw_only=True)
class Ending:
    """How a supervisor ended: `cut` says why it stopped early; other ones run `elsewhere` cells.

    `grid` is None if the supervisor was stopped before it was planned.
    """

    grid: Grid | None
    elsewhere: int = 0
    cut: str = ""


def run_grid(
    spec: GridSpec,
    folder: GridFolder,
    options: Options | None = None,
    *,
    program: str = PROGRAM,
    corpus: Corpus = corpus_of,
    index: Callable[[Path], object] = lambda folder: None,
) -> Ending:
    """Run the missing cells of a grid until all are done or a signal or the time stops it.

    In every case finished cells are kept and no process remains. The module `program` resolves,
    prepares and trains, `corpus` returns the digest of the content of a corpus, and `index` is
    called with the grid's folder at intervals, to index the runs.

    Raises:
        UserError: for a mistake in the grid or the options, and for damaged results.
        OSError: ENOSPC, if the disk is full.
    """
    options = options or Options()
    until = time.monotonic() + options.seconds
    storage = storage_spec(options.storage, folder.journal)
    preload(program)
    grid = None
    try:
        with ExitStack() as held:
            held.enter_context(cell_environment())
            stop = held.enter_context(Stop().listening())
            slots = _slots(spec, options, program, stop)
            fresh = None
            if not folder.path.exists():  # plan first: a mistake in the grid creates no folder
                fresh = ask(stop, make_plan, program, spec, folder.path.parent)
                ask(stop, prepare_data, program, Grid(spec, folder, fresh))

            def planned() -> Plan:
                return fresh or ask(stop, make_plan, program, spec, folder.path.parent)

            why = f"{folder}: another supervisor is starting; waiting for it"
            rounds = 0
            while True:
                with turn(folder.start_lock, lambda: stop.requested, why):
                    # Others may have come since the first round.
                    alone = not rounds and held.enter_context(supervisor_lock(folder, several=True))
                    held_plan = None
                    with suppress(DamagedPlan):
                        held_plan = load_plan(folder.plan) if spec.adapts else None
                    if held_plan is not None:  # its results choose the cells
                        put_damaged_aside(Grid(spec, folder, held_plan), options.retry_damaged)
                    with hinting(runs_with_plugins(folder)):
                        grid = current_grid(spec, folder, planned, alone, corpus)
                    put_damaged_aside(grid, options.retry_damaged)
                    if options.rerun_stale and not rounds:
                        _rerun_stale(grid, program, stop, alone)
                    if alone:
                        grid = reopened(grid)
                    again = options.retry_failed and not rounds
                    queue = Queue(grid, storage, retry_failed=again, alone=alone)
                with queue:
                    queue.study.record_search()
                    if not rounds:
                        warned = (f"warning: {line}" for line in grid.plan.warnings)
                        for note in (*queue.notes, *warned, *other_versions(grid)):
                            print(note, flush=True)
                    elsewhere = queue.elsewhere()
                    total = max(0, queue.total - elsewhere)
                    if (total or elsewhere) and time.monotonic() < until:
                        more = f" (up to {grid.plan.more} more follow)" * bool(grid.plan.more)
                        of = f"{total} of {len(grid.cells)} cells to run{more}"
                        print(f"{grid.name}: {of}; preparing their data", flush=True)
                        if grid.plan is not fresh:
                            ask(stop, prepare_data, program, grid)
                        supervisor = Supervisor(
                            grid, queue, slots, options, stop, program, index, until
                        )
                        supervisor.run(total)
                    elsewhere = queue.elsewhere()
                    if not grid.plan.more:
                        queue.study.record_search()
                rounds, fresh = rounds + 1, None
                if not grid.awaits_round:
                    return Ending(grid=grid, elsewhere=elsewhere)
                if stop.requested or time.monotonic() >= until:
                    return Ending(grid=grid, elsewhere=elsewhere, cut="stopped between two rounds")
    except Interrupted:
        return Ending(grid=grid, cut="interrupted")


def current_grid(
    spec: GridSpec,
    folder: GridFolder,
    make: Callable[[], Plan],
    alone: bool,
    corpus: Corpus = corpus_of,
) -> Grid:
    """The grid with its saved plan if valid, otherwise with a new one, which is saved.

    The caller holds the start lock. A supervisor that is `alone` also links exactly the stored runs
    named in the plan.
    """
    try:
        plan = load_plan(folder.plan)
    except DamagedPlan as error:
        print(error, flush=True)
        plan = None
    valid = plan is not None and is_valid(plan, spec, corpus, folder.path.parent)
    if not valid and not alone:
        raise UserError(
            f"{folder}: {spec.source}, its corpus or this program has changed while supervisors "
            "run this grid; run it again once they have ended"
        )
    # Parents may have finished since. While other supervisors work, the set of cells stays
    # unchanged, except when all have ended and a search asks for its next round.
    due = plan is not None and valid and Grid(spec, folder, plan).awaits_round
    valid = valid and not (alone and plan is not None and plan.waiting) and not due
    grid = Grid(spec, folder, plan if plan is not None and valid else make())
    if plan is not None and not valid:
        _refuse_lost_parents(grid, plan)
    if plan is not None and due and (lost := [c for c in plan.cells if c.id not in grid.by_id]):
        raise UserError(
            f"{folder.plan}: the search asks for other cells than in its earlier rounds, without "
            f"{lost[0].name}: results, Optuna or the processor have changed; remove this file to "
            "search again, with the finished runs"
        )
    if alone:
        drop_links(folder, {cell.name for cell in grid.cells})
    for cell in grid.cells if alone or due else ():
        link_run(folder, cell.name, cell.id)
    if not valid or (alone and not grid.is_saved()):
        grid.save()
    return grid


def _refuse_lost_parents(grid: Grid, former: Plan) -> None:
    """Refuse a new plan without finished cells whose parents are gone: their ids need them."""
    waiting = {cell.parent for cell in grid.plan.waiting}
    lost = [
        cell
        for cell in former.cells
        if cell.parent in waiting and grid.run(cell).result.is_file()
        if not (grid.folder.path.parent / cell.parent).exists()
    ]
    if lost:
        raise UserError(
            f"{grid.folder}: {len(lost)} finished cells started from runs that are gone, such as "
            f"{lost[0].parent}; put these back, or move the folder of this grid away"
        )


def _rerun_stale(grid: Grid, program: str, stop: Stop, alone: bool) -> None:
    if not alone:
        raise UserError(f"--rerun-stale: other supervisors run {grid.name}; let them end first")
    ask(stop, prepare_data, program, grid)
    print(rerun_stale(grid, ask(stop, look_here, program, grid.data)), flush=True)


def rerun_stale(grid: Grid, here: Mapping[str, Any]) -> str:
    """Put aside runs from other data or libraries, and those lacking files to keep.

    Their cells then run again. Interrupted runs are put aside too; otherwise two versions would
    train the same weights. A run that another process is training stays. Returns a line with their
    number. Raises `UserError` if a folder cannot be written.
    """
    states = {cell.id: grid.state(cell, with_metric=False) for cell in grid.cells}
    records = {
        cell.name: record
        for cell in grid.cells
        if (record := _record(grid.run(cell), states[cell.id]))
    }
    stale = {kind: of for kind, of in others(records, here).items() if kind in STALE}
    why = [f"{kind}: {counted(of)}" for kind, of in stale.items()]
    names = dict.fromkeys(name for of in stale.values() for each in of.values() for name in each)
    for file, lack in grid.lacking(states).items():
        why.append(f"without {file}: {len(lack)}")
        names |= dict.fromkeys(lack)
    chosen = [cell for cell in grid.cells if cell.name in names]
    moved = sum(_put_aside(grid, cell) is not None for cell in chosen)
    if not names:
        return f"{grid.name}: no cell is of other data or libraries than now"
    kept = len(names) - moved
    held = f"; {kept} others are being trained now and stay" if kept else ""
    place = grid.folder.experiments / STORE / "ID@superseded-N"
    return f"{moved} runs moved to {place}; their cells run again ({'; '.join(why)}){held}"


_MOST_DAMAGED = 3  # runs that are put aside unasked


def put_damaged_aside(grid: Grid, retry: bool) -> None:
    """Put aside the finished runs that are torn, or unlike their seal or id; their cells run again.

    Raises `UserError`, unless `retry`, if there are many, and for one that is being trained.
    """
    found = [(cell, damage) for cell in grid.cells if (damage := grid.damage(cell))]
    if not found:
        return
    runs = map(grid.run, grid.cells)
    finished = sum(run.result.exists() or run.pruned.exists() for run in runs)
    if not retry and (len(found) > _MOST_DAMAGED or 2 * len(found) >= finished):
        first = found[0][1]
        raise UserError(
            f"{grid.folder}: {len(found)} of {finished} finished runs are damaged, such as "
            f"{first.path}: {first}; look at the disk first; --retry-damaged moves them all aside, "
            "and their cells run again"
        )
    for cell, damage in found:
        target = _put_aside(grid, cell, "damaged")
        if target is not None:
            print(f"{damage.path}: {damage}; moved to {target}, the cell runs again", flush=True)
        elif grid.damage(cell):
            raise UserError(f"{damage.path}: {damage}; another process is training this run")


def _put_aside(grid: Grid, cell: Cell, word: str = "superseded") -> Path | None:
    """Put a run aside, unless a process is training it or it is not damaged at a second look."""
    folder = grid.run(cell)
    with if_free(folder.claim) as free, if_free(folder.lock) as unused:
        if not free or not unused or (word == "damaged" and not grid.damage(cell)):
            return None
        own = None if folder.path.resolve().parent.name == STORE else folder.path
        return put_aside(grid.folder.experiments, cell.id, own, word)


def _record(folder: RunFolder, state: RunState) -> Mapping[str, Any] | None:
    """The provenance of a run, None if it left nothing that the next attempt would use."""
    if state.result is not None or state.pruned is not None:
        return state.result or state.pruned
    if not folder.checkpoint("last").is_file():
        return None
    path = folder.attempt(state.attempts).provenance
    try:
        return {"provenance": read_json(path)}
    except FileNotFoundError:
        return {"provenance": {}}
    except Unsound as error:
        raise UserError(f"{path}: {error}; remove the file") from error


def _slots(spec: GridSpec, options: Options, program: str, stop: Stop) -> Slots:
    """Divide this host among cells, and set the threads that each process of a cell may use."""
    accelerator = spec.base_config.get("trainer", {}).get("accelerator", "auto")
    if (options.devices_per_cell or 1) > 1 and spec.packs:
        raise UserError(
            f"--devices-per-cell: {options.devices_per_cell} with model.pack, whose models are on "
            "one device; leave it out"
        )
    count = 0
    if accelerator != "cpu" and _NVIDIA.exists():
        count = ask(stop, count_devices, program)
    slots = slots_of(
        cores=default_workers(),
        visible=visible_devices(count, os.environ),
        devices=options.devices_per_cell or devices_of(spec),
        sharing=options.slots_per_device,
        workers=options.workers,
        cells=sum(1 for _ in combinations(spec)) * (spec.search.first if spec.search else 1),
        most_threads=most_threads(os.environ),
    )
    share_cores(slots.threads)
    return slots
