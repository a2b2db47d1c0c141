"""The faults of `chaos.py`: when they happen, to which process, and how."""

import os
import random
import re
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
from chaos_hosts import Host, Job
from filelock import FileLock

MOST_DEATHS = 2  # a cell fails when it is killed a third time, which is correct

_LOG = re.compile(r"/\.?runs/([^/]+)/attempts/(\d+)/log(?:-rank(\d+))?\.txt$")


@dataclass(frozen=True)
class Worker:
    """A training process: its cell, attempt and rank, from the name of its log."""

    process: psutil.Process
    cell: str
    attempt: int
    rank: int


def workers_of(host: Host) -> list[Worker]:
    found = []
    for process in host.processes():
        with suppress(OSError, psutil.Error):
            match = _LOG.search(os.readlink(f"/proc/{process.pid}/fd/1"))
            if match is not None:
                found.append(Worker(process, match[1], int(match[2]), int(match[3] or 0)))
    return found


def draw(kinds: dict[str, int], cells: int, chance: random.Random) -> list[tuple[int, str]]:
    """Return when faults are due, counted in finished cells, in that order.

    There are none in the last quarter, so that each finds a target.
    """
    last = max(1, cells * 3 // 4)
    return sorted(
        (chance.randrange(last), kind) for kind, count in kinds.items() for _ in range(count)
    )


class Faults:
    """Injects the faults of a grid as its cells finish.

    Args:
        due: Kinds of faults, and how many finished cells each waits for.
        place: The hosts with a supervisor, by name.
        job: Returns the supervisor that runs on a host, or None.
        chance: The random generator of all decisions.
    """

    def __init__(
        self,
        due: list[tuple[int, str]],
        place: dict[str, Host],
        job: Callable[[str], Job | None],
        chance: random.Random,
    ) -> None:
        self.counts: Counter[str] = Counter()
        self._due = due
        self._place = place
        self._job = job
        self._chance = chance
        self._deaths: Counter[str] = Counter()
        self._later: list[tuple[float, Job, signal.Signals]] = []

    @property
    def left(self) -> Counter[str]:
        """The faults that found no target before the grid was finished."""
        return Counter(kind for _, kind in self._due)

    def tick(self, finished: int, over: bool) -> None:
        """Inject the faults that are due; one that finds no target is tried again at the next call.

        Stopped processes are continued or killed, also when all cells are finished (`over`).
        """
        now = time.monotonic()
        for entry in [entry for entry in self._later if entry[0] <= now]:
            self._later.remove(entry)
            entry[1].send(entry[2])
        for entry in [] if over else [entry for entry in self._due if entry[0] <= finished]:
            if self._inject(entry[1]):
                self._due.remove(entry)
                self.counts[entry[1]] += 1
                return

    def settle(self) -> None:
        """Do all delayed actions now."""
        for _, job, number in self._later:
            job.send(number)
        self._later.clear()

    def _inject(self, kind: str) -> bool:
        what, _, how = kind.partition(" ")
        for name in self._chance.sample(sorted(self._place), len(self._place)):
            workers = workers_of(self._place[name])
            job = self._job(name)
            if job is None or job.pid is None or not workers:
                continue
            if what in ("worker", "rank"):
                return self._hit_worker(self._chance.choice(workers), how)
            if any(self._deaths[worker.cell] >= MOST_DEATHS for worker in workers):
                continue
            time.sleep(self._chance.uniform(0.0, 0.5))
            try:
                if what == "supervisor":
                    self._hit_supervisor(job, how)
                else:
                    psutil.Process(workers[0].process.ppid()).kill()
            except psutil.NoSuchProcess:
                continue
            self._deaths.update({worker.cell for worker in workers})
            return True
        return False

    def _hit_worker(self, worker: Worker, how: str) -> bool:
        if self._deaths[worker.cell] >= MOST_DEATHS:
            return False
        time.sleep(self._chance.uniform(0.0, 0.5))
        try:
            worker.process.send_signal(signal.SIGKILL if how == "killed" else signal.SIGSTOP)
        except psutil.NoSuchProcess:
            return False  # it had ended
        self._deaths[worker.cell] += 1
        return True

    def _hit_supervisor(self, job: Job, how: str) -> None:
        if how == "killed":
            job.send(signal.SIGKILL)
        elif how.startswith("SIG"):
            job.send(signal.Signals[how])
        else:
            job.send(signal.SIGSTOP)
            number = signal.SIGCONT if how == "stopped and continued" else signal.SIGKILL
            self._later.append((time.monotonic() + self._chance.uniform(2.0, 20.0), job, number))


def tear(journal: Path, chance: random.Random, alone: bool) -> bool:
    """Damage a journal like a power cut: keep half of its last line, or append half a line.

    A host that is cut off holds the lock meanwhile. Only where no other works (`alone`), the line
    may be one that is complete now: others would have read it.
    """
    if not journal.is_file():
        return False
    with FileLock(journal.with_name(f".{journal.name}.lock")), journal.open("rb+") as file:
        lines = file.read().splitlines(keepends=True)
        if not lines or len(lines[-1]) < 2:
            return False
        part = lines[-1][: chance.randrange(1, len(lines[-1]))]
        if alone and chance.random() < 0.5:
            file.seek(-len(lines[-1]), os.SEEK_END)
            file.truncate()
        file.write(part)
    return True


def kinds_for(cells: int, devices: int, short: bool) -> dict[str, int]:
    """How many faults of each kind a grid of so many cells meets."""
    who = "worker" if devices == 1 else "rank"
    kinds = {
        f"{who} killed": max(1, cells // (8 if devices == 1 else 4)),
        "supervisor killed": max(1, cells // (40 if devices == 1 else 20)),
    }
    if not short:
        kinds |= {
            "forkserver killed": 1,
            "supervisor SIGTERM": 1,
            "supervisor SIGUSR1": 1,
            "supervisor stopped and continued": 2,
            "supervisor stopped and killed": 1,
            f"{who} stopped": 1,
        }
    return kinds


def sample_listeners(hosts: dict[str, Host]) -> Iterator[str]:
    for host in hosts.values():
        for address in host.open_listeners():
            yield f"{host.name}: listens at {address}"
