"""Slots for cells on this host: each is a group of devices, which several cells may share."""

import os
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

from lightning_app.core.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Options:
    """How a supervisor works. None selects a value that fits the host and the grid.

    `workers` cells run at the same time, each on `devices_per_cell` devices; `slots_per_device`
    cells share a device. After `seconds` the running cells are stopped and queued again.
    `hang_limit`: seconds without progress after which a cell is killed. `rerun_stale`: whether
    cells from other data or libraries are rerun. `retry_damaged`: whether many damaged runs may be
    moved aside. `wait`: whether to wait while other supervisors
    run cells.
    """

    workers: int | None = None
    devices_per_cell: int | None = None
    slots_per_device: int | None = None
    storage: str | None = None
    hang_limit: float = 1800.0
    seconds: float = inf
    retry_failed: bool = False
    rerun_stale: bool = False
    retry_damaged: bool = False
    wait: bool = True

    @classmethod
    def of(cls, words: Mapping[str, Any]) -> "Options":
        """Read the options of a command line, by their names there. Raises `UserError`."""
        given = {name: value for name, value in words.items() if value is not None}
        for name in ("workers", "devices_per_cell", "slots_per_device"):
            if given.get(name, 1) < 1:
                option = name.replace("_", "-")
                raise UserError(f"--{option}: expected 1 or more, found {given[name]}")
        for name, field in (("hang_limit", "hang_limit"), ("max_time", "seconds")):
            if name in given:
                given[field] = parse_time(f"--{name.replace('_', '-')}", given.pop(name))
        return cls(**given)


def parse_time(option: str, text: str) -> float:
    """HH:MM or HH:MM:SS in seconds."""
    match = re.fullmatch(r"(\d+):([0-5]\d)(?::([0-5]\d))?", text)
    if match is None or not any(int(part or 0) for part in match.groups()):
        raise UserError(f"{option}: expected HH:MM or HH:MM:SS such as 01:30, found '{text}'")
    return 3600.0 * int(match[1]) + 60.0 * int(match[2]) + int(match[3] or 0)


def default_workers() -> int:
    """The number of cores that this process may use."""
    if sys.platform != "linux":
        return os.cpu_count() or 1
    return max(1, int(min(len(os.sched_getaffinity(0)), cpu_quota())))


def cpu_quota(proc: Path = Path("/proc"), mounted: Path = Path("/sys/fs/cgroup")) -> float:
    """The number of cores that this process's control groups may use; inf without a limit.

    A container or a batch system limits the total time of all cores, which the affinity does
    not show. A group is also limited by every group above it.
    """
    found = inf
    with suppress(OSError):
        for line in (proc / "self" / "cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and "cpu" not in controllers.split(","):
                continue
            top = mounted / "cpu" if controllers else mounted  # versions 1 and 2
            # In a container the path may be the host's; then the visible root is the top group.
            for group in ((own := top / path.strip("/")), *own.parents):
                if group.is_relative_to(top):
                    found = min(found, _quota_of(group))
    return found


def _quota_of(group: Path) -> float:
    for names in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
        with suppress(OSError, ValueError):  # no such file; "max" and -1 are no limit
            words = " ".join((group / name).read_text() for name in names).split()
            quota, period = map(int, words)
            if quota > 0 and period > 0:
                return quota / period
    return inf


@dataclass(frozen=True)
class Slot:
    """A place for one cell.

    `group` is the number of its group of devices; `visible` names the devices for CUDA and is None
    on a CPU. `devices` processes train the cell, with `threads` each.
    """

    group: int
    visible: tuple[str, ...] | None
    devices: int
    threads: int
    sharing: int
    workers: int

    def record(self) -> dict[str, Any]:
        """The description for results: the devices and the number of cells that share them."""
        return {
            "devices": list(self.visible or ["cpu"] * self.devices),
            "cells_per_device": self.sharing,
            "cells_on_host": self.workers,
            "threads": self.threads,
        }


class Slots:
    """The slots of a host, which cells take and return."""

    def __init__(self, slots: Sequence[Slot]) -> None:
        self._free = list(slots)
        self._taken: list[Slot] = []
        self._exclusive: set[int] = set()

    def __len__(self) -> int:
        return len(self._free) + len(self._taken)

    @property
    def threads(self) -> int:
        """Threads per process of a cell."""
        return (*self._free, *self._taken)[0].threads

    @property
    def are_full(self) -> bool:
        """Whether all slots are in use."""
        return all(slot.group in self._exclusive for slot in self._free)

    def take(self, alone: bool = False) -> Slot | None:
        """Take the slot whose devices have the fewest cells; None if no slot is free.

        With `alone`, take only a slot whose devices have no other cell.
        """
        load = {slot.group: 0 for slot in (*self._free, *self._taken)}
        for slot in self._taken:
            load[slot.group] += 1
        fit = [slot for slot in self._free if slot.group not in self._exclusive]
        if alone:
            fit = [slot for slot in fit if not load[slot.group]]
        if not fit:
            return None
        slot = min(fit, key=lambda slot: load[slot.group])
        self._free.remove(slot)
        self._taken.append(slot)
        if alone:
            self._exclusive.add(slot.group)
        return slot

    def give_back(self, slot: Slot) -> None:
        self._taken.remove(slot)
        self._free.append(slot)
        if slot.group not in {other.group for other in self._taken}:
            self._exclusive.discard(slot.group)


def slots_of(
    *,
    cores: int,
    visible: Sequence[str],
    devices: int = 1,
    sharing: int | None = None,
    workers: int | None = None,
    cells: int,
    most_threads: int | None = None,
) -> Slots:
    """Divide a host into slots for cells.

    Args:
        cores: The number of cores that this process may use.
        visible: CUDA's names of the accelerators; without any, cells run on the CPU.
        devices: The number of devices, and so of processes, that train one cell.
        sharing: The number of cells that share a device; by default one. On a CPU
            `workers` sets it.
        workers: The number of cells that run at the same time; by default as many as fit: on a CPU
            one process per core.
        cells: The number of cells, which limits the number of slots.
        most_threads: The largest number of threads of a process; by default its share of the cores.
    """

    def threads(processes: int) -> int:
        return max(1, min(cores // processes, most_threads or cores))

    if not visible:
        if sharing is not None:
            raise UserError(
                "--slots-per-device: this host has no accelerator; --workers sets how many "
                "cells share the CPU"
            )
        count = max(1, min(workers or cores // devices, cells))
        return Slots([Slot(0, None, devices, threads(count * devices), count, count)] * count)
    if devices > len(visible):
        raise UserError(
            f"--devices-per-cell: expected at most {len(visible)}, the number of devices of this "
            f"host, found {devices}"
        )
    groups = [tuple(visible[k : k + devices]) for k in range(0, len(visible), devices)]
    groups = [group for group in groups if len(group) == devices]
    sharing = sharing or 1
    places = [(number, group) for _ in range(sharing) for number, group in enumerate(groups)]
    if workers is not None and workers > len(places):
        raise UserError(
            f"--workers: expected at most {len(places)}, {sharing} for each group of {devices} "
            f"devices, found {workers}; --slots-per-device lets more cells share a device"
        )
    places = places[: max(1, min(workers or len(places), cells))]
    each = threads(len(places) * devices)
    load = [sum(number == other for other, _ in places) for number, _ in places]
    return Slots(
        [
            Slot(number, group, devices, each, share, len(places))
            for (number, group), share in zip(places, load, strict=True)
        ]
    )


def visible_devices(count: int, environment: Mapping[str, str]) -> tuple[str, ...]:
    """The names with which CUDA_VISIBLE_DEVICES selects among `count` visible devices."""
    named = [name for name in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    return tuple(named[:count]) if len(named) >= count else tuple(map(str, range(count)))
