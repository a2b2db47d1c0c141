"""The queue of a grid: the cells that have not ended, which several supervisors share.

A supervisor holds a lock in the folder of a cell's run, its claim, from the start of an attempt to
its end. The kernel releases it when the process dies, so that a lost supervisor's cells are free at
once, and those of a suspended one are not. The folders of the runs are the only record: the Optuna
study of the grid (`study`) follows them.
"""

import json
from bisect import insort
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Self

from filelock import FileLock, Timeout

from lightning_app.core.files import write_whole, writing_in
from lightning_app.grids.plan import Grid, lacking_lines, score_of
from lightning_app.grids.storages import StorageSpec
from lightning_app.grids.study import Study
from lightning_app.runs.folder import RunFolder
from lightning_app.runs.locks import if_free, is_held
from lightning_app.runs.records import Cell
from lightning_app.runs.run import RunState


@dataclass(frozen=True)
class Retries:
    """What `queue.json` in the folder of an unfinished run says about its attempts.

    Attributes:
        deaths: The number of attempts that ended early since the last crash.
        alone: Whether the cell needs a device to itself.
        retried: The attempt whose crash does not end the cell.
    """

    deaths: int = 0
    alone: bool = False
    retried: int = 0


def _retries(folder: RunFolder) -> Retries:
    try:
        return Retries(**json.loads(folder.queue.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return Retries()


def _is_runnable(run: RunState, retries: Retries) -> bool:
    if run.state == "failed":
        return retries.retried == (run.short["attempt"] if run.short else run.attempts)
    return run.state == "missing"


@dataclass
class Claim:
    """A cell that this supervisor has claimed; `attempt` is 0 before the start of one."""

    cell: Cell
    folder: RunFolder
    lock: FileLock
    retries: Retries
    attempt: int = 0


class Queue:
    """The remaining cells, in plan order.

    A grid that is stopped and continued thus has the cells of its first seeds first. A cell whose
    attempt has died, or that needs a device to itself, comes after the others.
    The process that creates a queue holds the grid's start lock. Raises `UserError` as `Study`.
    """

    def __init__(
        self, grid: Grid, spec: StorageSpec, *, retry_failed: bool = False, alone: bool = True
    ) -> None:
        self._grid = grid
        self._place = {cell.id: place for place, cell in enumerate(grid.cells)}
        self._claims: list[Claim] = []
        runs = {cell.id: grid.state(cell) for cell in grid.cells}
        if retry_failed:
            for cell in (cell for cell in grid.cells if runs[cell.id].state == "failed"):
                self._retry(cell, runs[cell.id])
        self._left = [
            cell for cell in grid.cells if _is_runnable(runs[cell.id], _retries(grid.run(cell)))
        ]
        self._left.sort(key=self._turn)
        # All cells to be run by this supervisor or others.
        self.total = len(self._left)
        self.study = Study(grid, spec, runs, alone)
        self.notes = [*self.study.notes, *lacking_lines(grid.lacking(runs), grid.name)]
        """The repair of the study's journal, and what finished runs lack."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for claim in list(self._claims):
            self._release(claim)
        self.study.close()

    def _retry(self, cell: Cell, run: RunState) -> None:
        """Let a crashed cell run again, unless another supervisor runs it now."""
        folder = self._grid.run(cell)
        with if_free(folder.claim) as free:
            if free:
                crashed = run.short["attempt"] if run.short else run.attempts
                write_whole(folder.queue, json.dumps(asdict(Retries(retried=crashed))))

    def _turn(self, cell: Cell) -> tuple[int, bool, int]:
        retries = _retries(self._grid.run(cell))
        return retries.deaths, retries.alone, self._place[cell.id]

    @property
    def waiting(self) -> int:
        """The number of cells that may not have ended, without the claims of this supervisor."""
        return len(self._left)

    def elsewhere(self) -> int:
        """The number of cells that other supervisors run, for this grid or another."""
        folders = map(self._grid.run, self._left)
        return sum(is_held(folder.claim) or is_held(folder.lock) for folder in folders)

    def pop(self, wanted: Callable[[Cell], bool] = lambda cell: True) -> Claim | None:
        """Claim the next cell to run that is `wanted`; None if no such cell is free."""
        claims = map(self._claim, filter(wanted, list(self._left)))
        return next((claim for claim in claims if claim is not None), None)

    def _claim(self, cell: Cell) -> Claim | None:
        """Claim a cell unless it has ended or another process runs it."""
        folder = self._grid.place(cell)
        lock = FileLock(folder.claim)
        try:
            with writing_in(folder.path):
                lock.acquire(timeout=0)
        except Timeout:
            run = self._grid.state(cell)
            if run.state in ("done", "pruned"):  # and its supervisor is about to say so, or hangs
                self._left.remove(cell)
                self.study.enter(cell, run)
            return None
        run, retries = self._grid.state(cell), _retries(folder)
        claim = Claim(cell, folder, lock, retries)
        self._claims.append(claim)
        if _is_runnable(run, retries):
            if not is_held(folder.lock):
                self._left.remove(cell)
                return claim
        else:  # another supervisor, or `ablate fit` in its folder, has ended it
            self._left.remove(cell)
            self.study.enter(cell, run)
        self._release(claim)
        return None

    def started(self, claim: Claim, attempt: int) -> None:
        """Record the start of an attempt."""
        claim.attempt = attempt
        self.study.begin(claim.cell, claim.folder, attempt)

    def ended(self, claim: Claim, run: RunState) -> None:
        """Record a result, which must have the metric of the grid, or the end by the pruner."""
        if run.result is not None:
            score_of(self._grid.plan, run.result)
        claim.folder.queue.unlink(missing_ok=True)
        self.study.enter(claim.cell, run)
        self._release(claim)

    def failed(self, claim: Claim, error: str) -> None:
        """Record a crash. The cell is not queued again."""
        self.study.fail(claim.cell, claim.attempt, error)
        self._release(claim)

    def put_back(self, claim: Claim, why: str, *, death: bool = False, alone: bool = False) -> None:
        """Record an attempt that was interrupted, and queue the cell again.

        `death` counts the attempt as one of the few that may end early; with `alone` the cell runs
        without others on its device.
        """
        if death:
            retries = Retries(
                claim.retries.deaths + 1, claim.retries.alone or alone, claim.retries.retried
            )
            write_whole(claim.folder.queue, json.dumps(asdict(retries)))
        self.study.fail(claim.cell, claim.attempt, why)
        self._release(claim)
        insort(self._left, claim.cell, key=self._turn)

    def _release(self, claim: Claim) -> None:
        self._claims.remove(claim)
        claim.lock.release()
