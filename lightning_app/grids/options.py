"""The options of a supervisor, which `ablate run` and `ablate submit` set."""

import re
from collections.abc import Iterable, Mapping
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
    `lost_after`: seconds without a heartbeat after which a supervisor counts as lost; `hang_limit`:
    seconds without progress after which a cell is killed. `rerun_stale`: whether cells from other
    code, data or libraries are rerun. `wait`: whether to wait while other supervisors run cells.
    `results`: folders that may contain finished cells.
    """

    workers: int | None = None
    devices_per_cell: int | None = None
    slots_per_device: int | None = None
    storage: str | None = None
    lost_after: float = 120.0
    hang_limit: float = 1800.0
    seconds: float = inf
    retry_failed: bool = False
    rerun_stale: bool = False
    wait: bool = True
    results: tuple[Path, ...] = ()

    @classmethod
    def of(cls, words: Mapping[str, Any], results: Iterable[Path] = ()) -> "Options":
        """Read the options of a command line, by their names there.

        Raises:
            UserError: naming the option, the value, and what would be right.
        """
        given = {name: value for name, value in words.items() if value is not None}
        for name in ("workers", "devices_per_cell", "slots_per_device", "lost_after"):
            if name in given:
                check_count(f"--{name.replace('_', '-')}", given[name])
        for name, field in (("hang_limit", "hang_limit"), ("max_time", "seconds")):
            if name in given:
                given[field] = parse_time(f"--{name.replace('_', '-')}", given.pop(name))
        return cls(**given, results=tuple(results))


def check_count(option: str, value: float) -> None:
    """Refuse a value that is not a finite number of at least 1."""
    if not 1 <= value < inf:
        raise UserError(f"{option}: expected 1 or more, found {value}")


def parse_time(option: str, text: str) -> float:
    """HH:MM or HH:MM:SS in seconds."""
    match = re.fullmatch(r"(\d+):([0-5]\d)(?::([0-5]\d))?", text)
    if match is None or not any(int(part or 0) for part in match.groups()):
        raise UserError(f"{option}: expected HH:MM or HH:MM:SS such as 01:30, found '{text}'")
    return 3600.0 * int(match[1]) + 60.0 * int(match[2]) + int(match[3] or 0)
