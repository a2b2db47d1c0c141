"""The real program, where each rank writes down what every step of its optimizer left behind."""

import hashlib
import os
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook

from lightning_app.grids import program
from lightning_app.grids.program import count_devices, here, identify, prepare, resolve
from lightning_app.grids.workers import Job

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
