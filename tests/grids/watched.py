"""The real program, where each rank writes down what every step of its optimizer left behind.

Run as a script it is the supervisor of cells of two ranks: `watched.py GRID FOLDER [hang_limit=N]`.
"""

import hashlib
import os
import sys
from pathlib import Path
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook

from lightning_app.config.grid import read_spec
from lightning_app.grids import program
from lightning_app.grids.program import count_devices, here, identify, prepare, resolve
from lightning_app.grids.slots import Options
from lightning_app.grids.supervisor import run_grid
from lightning_app.grids.workers import Job
from lightning_app.runs.folder import GridFolder

__all__ = ["count_devices", "here", "identify", "prepare", "resolve", "run_cell"]


def run_cell(job: Job, rank: int) -> None:
    """Train as the program does. `steps-rank<r>.txt`: pid, learning rate and weights, a step each.

    The hook is torch's, for every optimizer of the process.
    """
    ledger = job.record.path / f"steps-rank{rank}.txt"

    def note(optimizer: Any, *_: Any) -> None:
        digest = hashlib.sha256()
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                digest.update(parameter.detach().numpy().tobytes())
        rate = optimizer.param_groups[0]["lr"]
        with ledger.open("a") as file:
            file.write(f"{os.getpid()} {rate!r} {digest.hexdigest()}\n")

    register_optimizer_step_post_hook(note)
    program.run_cell(job, rank)


def main() -> int:
    grid, folder, *rest = sys.argv[1:]
    words = dict(word.split("=", 1) for word in rest)
    limit = float(words.get("hang_limit", 1800))
    options = Options(workers=1, devices_per_cell=2, hang_limit=limit)
    ending = run_grid(read_spec(grid), GridFolder(Path(folder)), options, program="watched")
    return 130 if ending.cut else 0


if __name__ == "__main__":
    sys.exit(main())
